"""Tests training with weights that exist only as FP8 codes, and their state."""

import contextlib
import copy
import ctypes
import enum
import importlib.util
import inspect
import io
import os
import pickle
import sys
import tempfile
import types
import unittest
import warnings
from unittest import mock

import torch

from common import BF16, BLOCK, CURRENT, F32, MODULES, RECIPES, WEIGHTS, codes, decoded, expected, make_input, made, step
from torch_oracle import DEVICES, near, near_by_norm, per_block, randn
import te_fl
import te_fl.pytorch as te
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor


class Training(unittest.TestCase):
    """Trains without an autocast, so that GEMMs run in high precision and the oracle need only reproduce the rounding of the weights."""

    def trained(self, optimizer, exact_step, recipe, steps=6, device="cpu", dtype=F32):
        module = made("Linear", recipe, device, preserve=True, params_dtype=dtype)
        stepper = optimizer(module.parameters())
        weight, bias = decoded(module.weight), module.bias.detach().double().cpu()
        exact = exact_step(weight, bias)
        x, wanted = randn(32, 160, seed=1), randn(32, 144, seed=2)
        for _ in range(steps):
            stepper.zero_grad()
            loss = (module(x.to(device, dtype)) - wanted.to(device)).square().mean()
            loss.backward()
            stepper.step()
            held = expected(exact.weight.float(), recipe).requires_grad_()
            own = exact.bias.clone().requires_grad_()
            want = (x.double() @ held.T + own - wanted.double()).square().mean()
            want.backward()
            near(self, loss.detach().cpu(), want.detach(), 1e-4, "loss")
            exact.step(held.grad, own.grad)
        self.assertIsInstance(module.weight, Float8Tensor)
        near_by_norm(self, decoded(module.weight), expected(exact.weight.float(), recipe), 2e-3, "codes")
        near(self, module.bias.detach().cpu(), exact.bias, 1e-4, "bias")
        return stepper, module, exact

    def test_a_transpose_that_has_no_values_yet(self):
        """The cached transpose of an FP8 weight becomes visible to other threads only when its values are written. If creating it fails, no transpose
        is cached."""
        real, seen = te_fl.ops.fp8_transpose, []
        for recipe in RECIPES:
            weight = made("Linear", recipe).weight

            def late(input, output, fails):
                seen.append(weight._transpose)  # noqa: B023
                if fails:
                    raise MemoryError
                real(input=input, output=output)
            for fails in (True, False):
                for old in (False, True):
                    weight._codes.columns_are_old = old and weight._codes.columns is not None
                    with mock.patch.object(te_fl.ops, "fp8_transpose", lambda input, output: late(input, output, fails)):  # noqa: B023
                        with self.assertRaises(MemoryError) if fails else contextlib.nullcontext():
                            weight._lent(True)
                    self.assertEqual(weight._transpose is None, fails)
            self.assertEqual(seen, [None] * len(seen))
            self.assertTrue(torch.equal(weight._transpose, weight._data.t()))

    def test_fused_adam_with_master_weights(self):
        for device in DEVICES:
            for recipe in RECIPES:
                with self.subTest(device=device, recipe=recipe):
                    def adam(parameters):
                        return te.optimizers.FusedAdam(parameters, lr=3e-3, weight_decay=0.01, master_weights=True)
                    stepper, module, exact = self.trained(adam, ExactAdam, recipe, device=device)
                    near_by_norm(self, stepper.state[module.weight]["master_param"].cpu(), exact.weight, 1e-3, "master weight")
                    self.assertEqual(stepper.state[module.bias]["master_param"].data_ptr(), module.bias.data_ptr())

    def test_torch_sgd(self):
        for device in DEVICES:
            for recipe in RECIPES:
                with self.subTest(device=device, recipe=recipe):
                    class Exact(ExactSGD):
                        def step(self, weight_grad, bias_grad):
                            super().step(weight_grad, bias_grad)
                            self.weight = expected(self.weight.float(), recipe)
                    self.trained(lambda parameters: torch.optim.SGD(parameters, lr=20.0), Exact, recipe, device=device)

    def test_torch_optimizers_train(self):
        """Covers every way in which PyTorch's optimizers step: per tensor (for-loop), foreach, and fused."""
        for options in (dict(foreach=False), dict(foreach=True), dict(fused=True)):
            with self.subTest(options):
                module = made("LayerNormMLP")
                optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, **options)
                losses = []
                for _ in range(20):
                    optimizer.zero_grad()
                    with te.autocast(recipe=CURRENT):
                        loss = (module(make_input()) - 1).square().mean()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                self.assertLess(losses[-1], 0.2 * losses[0])
                self.assertEqual(list(codes(module)), WEIGHTS["LayerNormMLP"])
                self.assertTrue(all(type(s) is torch.Tensor for p in codes(module).values() for s in optimizer.state[p].values()))

    def test_fp8_training_is_as_good_as_from_high_precision_weights(self):
        for recipe in RECIPES:
            final = []
            for quantised in (True, False):
                torch.manual_seed(0)
                with te.quantized_model_init(quantised, recipe):
                    module = te.TransformerLayer(64, 128, 4, hidden_dropout=0, attention_dropout=0, fuse_qkv_params=True, device="cpu")
                optimizer = te.optimizers.FusedAdam(module.parameters(), lr=3e-3, master_weights=True)
                x, wanted = randn(16, 4, 64, seed=1), randn(16, 4, 64, seed=2)
                for _ in range(30):
                    optimizer.zero_grad()
                    with te.autocast(recipe=recipe):
                        loss = (module(x) - wanted).square().mean()
                    loss.backward()
                    optimizer.step()
                final.append(loss.item())
            self.assertLess(final[1], 1.5)  # the loss starts at 2
            self.assertLess(abs(final[0] / final[1] - 1), 0.05, recipe)

    def test_master_weights_from_the_initial_values(self):
        module = made("Linear", preserve=True)
        high = module.weight.get_high_precision_init_val()
        optimizer = te.optimizers.FusedAdam([module.weight], lr=1e-3, master_weights=True)
        optimizer.initialize_state(module.weight)
        self.assertTrue(torch.equal(optimizer.state[module.weight]["master_param"], module.weight.detach().dequantize()))
        optimizer.set_scaled_state(module.weight, "master_param", high)
        self.assertTrue(torch.equal(optimizer.state[module.weight]["master_param"], high))
        module.weight.clear_high_precision_init_val()
        self.assertIsNone(module.weight.get_high_precision_init_val())

    def test_state_of_the_optimizers(self):
        def make():
            module = made("Linear")
            return module, te.optimizers.FusedAdam(module.parameters(), lr=1e-2, master_weights=True)
        (one, first), (other, second) = make(), make()
        for _ in range(2):
            step(one)
            first.step()
        other.load_state_dict(copy.deepcopy(one.state_dict()))
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for module, optimizer in ((one, first), (other, second)):
            step(module)
            optimizer.step()
        self.assertTrue(torch.equal(one.weight._data, other.weight._data))

    def test_capturable(self):
        """A capturable optimizer takes the same steps; a step that a grad scaler skips leaves the codes unchanged."""
        both = [made("Linear"), made("Linear")]
        steppers = [te.optimizers.FusedAdam(m.parameters(), lr=1e-2, master_weights=True, capturable=c) for m, c in zip(both, (True, False))]
        for _ in range(3):
            for module, stepper in zip(both, steppers):
                step(module)
                stepper.step()
        self.assertTrue(torch.equal(both[0].weight._data, both[1].weight._data))
        before, scaler = both[0].weight._data.clone(), torch.amp.GradScaler("cpu", init_scale=1.0)
        step(both[0])
        both[0].weight.grad[0, 0] = float("inf")
        scaler.scale(torch.zeros(1))
        steppers[0].step(grad_scaler=scaler)
        self.assertTrue(torch.equal(both[0].weight._data, before))

    def test_steps_without_master_weights(self):
        for make in (lambda p: te.optimizers.FusedAdam(p, lr=1e-2), lambda p: te.optimizers.FusedSGD(p, lr=1.0, momentum=0.5)):
            module = made("Linear", params_dtype=BF16)
            optimizer = make(module.parameters())
            before = decoded(module.weight)
            step(module, dtype=BF16)
            optimizer.step()
            self.assertFalse(torch.equal(decoded(module.weight), before))
            self.assertEqual({s.dtype for s in optimizer.state[module.weight].values()}, {F32})


class ExactSGD:
    lr = 20.0

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def step(self, weight_grad, bias_grad):
        self.weight, self.bias = self.weight - self.lr * weight_grad, self.bias - self.lr * bias_grad


class ExactAdam:
    """AdamW in FP64, from the formulas of the paper."""

    lr, decay, betas, eps = 3e-3, 0.01, (0.9, 0.999), 1e-8

    def __init__(self, weight, bias):
        self.weight, self.bias, self.steps = weight, bias, 0
        self.moments = {name: [torch.zeros_like(t), torch.zeros_like(t)] for name, t in (("weight", weight), ("bias", bias))}

    def step(self, weight_grad, bias_grad):
        self.steps += 1
        for name, grad in (("weight", weight_grad), ("bias", bias_grad)):
            first, second = self.moments[name]
            first.mul_(self.betas[0]).add_((1 - self.betas[0]) * grad)
            second.mul_(self.betas[1]).add_((1 - self.betas[1]) * grad * grad)
            mean, variance = first / (1 - self.betas[0] ** self.steps), second / (1 - self.betas[1] ** self.steps)
            old = getattr(self, name)
            setattr(self, name, old - self.lr * (mean / (variance.sqrt() + self.eps) + self.decay * old))


class State(unittest.TestCase):
    def same_codes(self, a, b):
        self.assertEqual(a._codes.rules, b._codes.rules)
        for part in ("data", "scale_inv", "amax"):
            x, y = getattr(a._codes, part), getattr(b._codes, part)
            self.assertTrue(x is y is None or torch.equal(x.float(), y.float()), part)

    def test_state_dict(self):
        for name in MODULES:
            for recipe in RECIPES:
                with self.subTest(name=name, recipe=recipe):
                    module, stream = made(name, recipe), io.BytesIO()
                    step(module, recipe)
                    state = module.state_dict()
                    plain = MODULES[name](device="cpu")
                    self.assertEqual(list(state), list(plain.state_dict()))
                    torch.save(state, stream)
                    stream.seek(0)
                    read = torch.load(stream, weights_only=True)
                    other = made(name, recipe)
                    with torch.no_grad():
                        for p in other.parameters():
                            p.zero_()
                    other.load_state_dict(read)
                    for n, p in codes(other).items():
                        self.same_codes(p, module.get_parameter(n))
                    self.assertTrue(all(torch.equal(a, b) for a, b in zip(step(other, recipe), step(module, recipe))))

    def cleared(self, name, recipe, **arguments):
        module = made(name, recipe, **arguments)
        with torch.no_grad():
            for p in module.parameters():
                p.zero_()
        return module

    def same_modules(self, got, want, recipe):
        for n, p in codes(got).items():
            self.same_codes(p, want.get_parameter(n))
        x = torch.randn(16, 160, generator=torch.Generator().manual_seed(5)).to(want.weight.dtype)
        with torch.no_grad(), te.autocast(recipe=recipe):
            self.assertTrue(torch.equal(got(x), want(x)))

    def test_memory_has_the_values(self):
        """Code that reads an FP8 weight's memory directly finds dequantised values in the tensor's nominal dtype, at data_ptr() and with the nominal
        size."""
        for recipe in RECIPES:
            for dtype in (F32, BF16, torch.float16):
                weight = made("Linear", recipe, params_dtype=dtype).weight
                for t in (weight, weight.detach(), weight.detach().clone()):
                    storage = t.untyped_storage()
                    self.assertEqual((t.data_ptr(), storage.nbytes()), (storage.data_ptr(), t.numel() * t.element_size()))
                    read = (ctypes.c_uint8 * storage.nbytes()).from_address(t.data_ptr())
                    self.assertTrue(torch.equal(torch.frombuffer(bytearray(read), dtype=dtype).view(t.shape), t.dequantize().detach()))
                with torch.no_grad():
                    weight.mul_(2)
                read = (ctypes.c_uint8 * weight.untyped_storage().nbytes()).from_address(weight.data_ptr())
                self.assertTrue(torch.equal(torch.frombuffer(bytearray(read), dtype=dtype).view(weight.shape), weight.detach().dequantize()))

    @unittest.skipIf(importlib.util.find_spec("safetensors") is None, "safetensors is not installed")
    def test_safetensors(self):
        from safetensors.torch import load_file, load_model, save_file, save_model
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.safetensors")
            for recipe in RECIPES:
                for dtype in (F32, BF16, torch.float16):
                    with self.subTest(recipe=recipe, dtype=dtype):
                        module = made("Linear", recipe, params_dtype=dtype)
                        save_file({"weight": module.weight.detach(), "twice": module.weight.detach()}, path)
                        read = load_file(path)
                        for name in ("weight", "twice"):
                            self.assertTrue(torch.equal(read[name], module.weight.detach().dequantize()))
                        save_model(module, path)
                        other = self.cleared("Linear", recipe, params_dtype=dtype)
                        load_model(other, path)
                        near(self, decoded(other.weight), decoded(module.weight), 1e-6 if dtype is F32 else 8e-3, "values")
                        with te.saving_codes():
                            save_model(module, path)
                        self.assertEqual(load_file(path)["weight"].dtype, torch.float8_e4m3fn)
                        other = self.cleared("Linear", recipe, params_dtype=dtype)
                        self.assertEqual(load_model(other, path), (set(), []))
                        self.same_modules(other, module, recipe)
                        plain = te.Linear(160, 144, device="cpu", params_dtype=dtype)
                        load_model(plain, path)
                        self.assertTrue(torch.equal(plain.weight.detach(), module.weight.detach().dequantize()))
            with te.saving_codes():
                state = made("Linear").state_dict()
            del state["weight_amax"]
            other = self.cleared("Linear", CURRENT)
            other.load_state_dict(state)
            near(self, other.weight._codes.amax, made("Linear").weight._codes.amax, 1e-6, "amax")
            with self.assertRaisesRegex(Exception, "weight: its weight_scale_inv is"):
                other.load_state_dict({**state, "weight_scale_inv": torch.ones(3)})

    def test_distributed_checkpoints(self):
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.staging import BlockingAsyncStager
        ways = {"save": dcp.save}
        if "async_stager" in inspect.signature(dcp.async_save).parameters:  # PyTorch 2.7 always stages plain tensors
            ways["async_save"] = lambda state, **k: dcp.async_save(state, **k).result()
        for recipe in RECIPES:
            for dtype in (F32, BF16):
                for way, save in ways.items():
                    with self.subTest(recipe=recipe, dtype=dtype, way=way), tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        module, other = made("Linear", recipe, params_dtype=dtype), self.cleared("Linear", recipe, params_dtype=dtype)
                        save({"model": module.state_dict()}, checkpoint_id=folder)
                        state = {"model": other.state_dict()}
                        dcp.load(state, checkpoint_id=folder)
                        other.load_state_dict(state["model"])
                        self.same_modules(other, module, recipe)
                        plain = te.Linear(160, 144, device="cpu", params_dtype=dtype)
                        state = {"model": plain.state_dict()}
                        dcp.load(state, checkpoint_id=folder)
                        self.assertTrue(torch.equal(plain.weight.detach(), module.weight.detach().dequantize()))
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():  # uses a stager that makes plain tensors
                warnings.simplefilter("ignore")
                module = made("Linear", recipe)
                dcp.async_save({"model": module.state_dict()}, checkpoint_id=folder, **({"async_stager": BlockingAsyncStager()} if len(ways) > 1 else {})).result()
                state = {"model": te.Linear(160, 144, device="cpu").state_dict()}
                dcp.load(state, checkpoint_id=folder)
                self.assertTrue(torch.equal(state["model"]["weight"], module.weight.detach().dequantize()))

    def test_into_high_precision_and_back(self):
        for recipe in RECIPES:
            module, back = made("LayerNormMLP", recipe), made("LayerNormMLP", recipe)
            plain = MODULES["LayerNormMLP"](device="cpu")
            plain.load_state_dict(module.state_dict())
            for n, p in plain.named_parameters():
                self.assertIs(type(p), torch.nn.Parameter)
                if n in WEIGHTS["LayerNormMLP"]:
                    self.assertTrue(torch.equal(p.detach(), decoded(module.get_parameter(n)).float()))
            with torch.no_grad():
                for p in back.parameters():
                    p.zero_()
            back.load_state_dict(plain.state_dict())
            for n, p in codes(back).items():
                near(self, decoded(p), decoded(module.get_parameter(n)), 1e-6, n)
                self.assertGreater(torch.count_nonzero(decoded(p)), 0)

    def test_transformer_engines_checkpoints(self):
        """Transformer Engine pickles a Float8Tensor as a function call with codes, dtypes, the inverse scale and, if it has only those, the
        transposed codes."""
        names = [f"transformer_engine{part}" for part in (".pytorch.tensor.float8_tensor", ".pytorch.constants", ".pytorch.tensor", ".pytorch", "")]
        where = {name: types.ModuleType(name) for name in names}

        def _make_float8_tensor_in_reduce_ex():
            raise AssertionError("called while writing")

        class DType(enum.IntEnum):
            kFloat8E4M3, kFloat8E5M2 = 7, 8

            def __reduce_ex__(self, protocol):
                return DType, (int(self),)  # Python 3.11.0 to 3.11.3 pickle a getattr() here, which PyTorch refuses to load from any file
        for (name, module), own in zip(where.items(), (_make_float8_tensor_in_reduce_ex, DType)):
            own.__module__, own.__qualname__ = name, own.__name__
            setattr(module, own.__name__, own)

        class Theirs:
            def __init__(self, *parts):
                self.parts = parts

            def __reduce_ex__(self, protocol):
                return _make_float8_tensor_in_reduce_ex, self.parts

        weight = made("Linear").weight.detach()
        data, scale_inv, shape = weight._data, weight._scale_inv, weight.shape
        for parts in ((data, DType.kFloat8E4M3, scale_inv, BF16, shape), (data, DType.kFloat8E4M3, scale_inv, BF16, shape, None),
                      (None, DType.kFloat8E4M3, scale_inv, BF16, shape, data.t().contiguous())):
            stream = io.BytesIO()
            with mock.patch.dict(sys.modules, where):
                torch.save({"weight": Theirs(*parts)}, stream)
            stream.seek(0)
            read = torch.load(stream, weights_only=True)["weight"]
            self.assertEqual((type(read), read.dtype), (Float8Tensor, BF16))
            module = MODULES["Linear"](device="cpu")
            for other in (made("Linear"), module):
                with torch.no_grad():
                    other.weight.zero_()
                other.load_state_dict({"weight": read}, strict=False)
                self.assertTrue(torch.equal(other.weight.detach().float(), decoded(weight).float()))
            near(self, read._codes.amax, weight._codes.amax, 1e-6, "amax")
        stream = io.BytesIO()
        with mock.patch.dict(sys.modules, where):
            torch.save(Theirs(data, DType.kFloat8E5M2, scale_inv, BF16, shape), stream)
        stream.seek(0)
        with self.assertRaisesRegex(Exception, "te-fl's parameters hold E4M3"):
            torch.load(stream, weights_only=True)

    def test_between_ways_of_scaling(self):
        module, other = made("Linear", CURRENT), made("Linear", BLOCK)
        with torch.no_grad():
            other.weight.zero_()
        other.load_state_dict(module.state_dict())
        near(self, decoded(other.weight), per_block(decoded(module.weight).float(), 128, 128), 1e-6, "blocks")

    def test_copies(self):
        for copied in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
            for name in MODULES:
                module = made(name)
                step(module)
                want = step(module)
                other = copied(module)
                for n, p in codes(other).items():
                    self.assertIsInstance(p, torch.nn.Parameter)
                    self.same_codes(p, module.get_parameter(n))
                    self.assertIsNot(p._codes, module.get_parameter(n)._codes)
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(step(other), want)))
                with torch.no_grad():
                    for p in other.parameters():
                        p.zero_()
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(step(module), want)))

    def test_deepcopy_keeps_initial_values(self):
        module = made("Linear", preserve=True)
        other = copy.deepcopy(module)
        other.weight.clear_high_precision_init_val()
        self.assertIsNone(other.weight.get_high_precision_init_val())
        self.assertEqual(module.weight.get_high_precision_init_val().shape, (144, 160))
        self.assertFalse(hasattr(made("Linear").weight, "get_high_precision_init_val"))

    def test_initial_values_follow_writes(self):
        """A program may initialise the weights after the module was made, as Megatron does on the host, and ask for the high-precision initial values
        then."""
        writes = {"copy_": lambda w, v: w.copy_(v), "data": lambda w, v: w.data.copy_(v), "quantize_": lambda w, v: w.quantize_(v),
                  "mul_": lambda w, v: w.fill_(1.0).mul_(v), "codes": lambda w, v: w.copy_(w.detach().clone().quantize_(v))}
        for recipe in RECIPES:
            for name, write in writes.items():
                with self.subTest(recipe=recipe, write=name):
                    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
                        weight = te.Linear(160, 144, device="cpu", init_method=lambda w: w.fill_(float("nan"))).weight
                    self.assertTrue(torch.isnan(weight.get_high_precision_init_val()).all())
                    with torch.no_grad():
                        write(weight, randn(144, 160))
                    for w in (weight, copy.deepcopy(weight)):
                        got = w.get_high_precision_init_val()
                        self.assertEqual((type(got), got.device.type), (torch.Tensor, "cpu"))
                        self.assertTrue(torch.equal(got, weight.detach().dequantize()))
                    weight.clear_high_precision_init_val()
                    self.assertIsNone(weight.get_high_precision_init_val())

    def test_dtypes_and_devices(self):
        for change in (lambda m: m.bfloat16(), lambda m: m.to(BF16), lambda m: m.half().bfloat16()):
            module, want = made("LayerNormMLP"), made("LayerNormMLP")
            weight = module.fc1_weight
            self.assertIs(change(module), module)
            self.assertIs(module.fc1_weight, weight)
            self.assertEqual((weight.dtype, module.fc1_bias.dtype, weight.requires_grad), (BF16, BF16, True))
            self.same_codes(weight, want.fc1_weight)
            self.assertEqual([g.dtype for g in step(module, dtype=BF16)], [BF16] * 8)
        for device in DEVICES:
            module = made("LayerNormMLP").to(device)
            self.assertEqual(module.fc1_weight.device.type, device)
            self.assertEqual(module.fc1_weight._data.device.type, device)
            self.same_codes(copy.deepcopy(module).cpu().fc1_weight, made("LayerNormMLP").fc1_weight)
            step(module, device=device)
