"""Tests te_fl.pytorch on another vendor's device: PyTorch's PrivateUse1 over te-fl's far device. Host code cannot read its memory, and its streams
execute work only when something waits for them. With FAR_ALONE no plugin of te-fl has the device, and te-fl makes it from PyTorch's."""

import contextlib
import copy
import gc
import os
import pathlib
import subprocess
import sys
import types
import unittest
import unittest.mock

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import far  # noqa: E402

import te_fl  # noqa: E402
import te_fl.pytorch as te  # noqa: E402
from te_fl.errors import InvalidArgument, Unsupported  # noqa: E402
from te_fl import torch_device  # noqa: E402
from torch_cases import MODULES, PRODUCTS, RECIPES, gradients, make_input, scope  # noqa: E402
from torch_oracle import randn, randomise  # noqa: E402

ALONE = "FAR_ALONE" in os.environ
BACKEND = far.start()
FAR = torch.device("far:0")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def wait():
    torch.accelerator.synchronize()


class Backend(unittest.TestCase):
    """Tests the backend itself, on which the other tests rely."""

    def test_copies_views_and_streams(self):
        x = torch.arange(24.0).reshape(4, 6)
        far_x = x.to(FAR)
        for view in (lambda t: t, lambda t: t.t(), lambda t: t[1:3, ::2], lambda t: t.view(2, 12)[1], lambda t: t + 1, lambda t: t.bfloat16()):
            self.assertTrue(torch.equal(view(far_x).cpu(), view(x)))
        far_x[:, ::2] = 7
        x[:, ::2] = 7
        self.assertTrue(torch.equal(far_x.cpu(), x))
        self.assertEqual([far_x.sum().item(), torch.zeros(3, device=FAR).sum().item()], [x.sum().item(), 0])

    def test_streams_are_late(self):
        stream = torch.Stream(device=FAR)
        x = torch.zeros(4, device=FAR)
        wait()
        with stream:
            x.copy_(torch.ones(4))
        self.assertEqual(x.sum().item(), 0)  # the default stream does not wait for the other stream
        stream.synchronize()
        self.assertEqual(x.sum().item(), 4)


class Far(unittest.TestCase):
    def near(self, got, want, dtype=F32):
        self.assertEqual(len(got), len(want))
        least = 0.05 * max(float(b.abs().max()) for b in want)  # some gradients, for example of a key's bias, are zero in exact arithmetic
        for i, (a, b) in enumerate(zip(got, want)):
            self.assertEqual((a.device.type, a.dtype), ("far", b.dtype))
            error = float((a.cpu().double() - b.double()).abs().max()) / max(float(b.abs().max()), least)
            self.assertLess(error, {F32: 1e-5, F16: 4e-3, BF16: 2e-2}[dtype], i)


class Modules(Far):
    def test_forward_and_backward_equal_the_cpu_s(self):
        for name, make in MODULES.items():
            for dtype in (F32, BF16, F16):
                with self.subTest(module=name, dtype=dtype):
                    here = randomise(make(device="cpu", params_dtype=dtype))
                    there = make(device=FAR, params_dtype=dtype)
                    there.load_state_dict(here.state_dict())
                    results = []
                    for module, device in ((there, FAR), (here, "cpu")):
                        x = make_input(dtype=dtype).detach().to(device).requires_grad_()
                        y = module(x)
                        y.square().sum().backward()
                        results.append([y.detach(), *gradients(module, x)])
                    self.near(*results, dtype)

    def test_attention(self):
        for mask in ("causal", "padding", "arbitrary"):
            with self.subTest(mask=mask):
                attention = te.DotProductAttention(4, 16, num_gqa_groups=2, attn_mask_type=mask, qkv_format="bshd")
                arguments = {"padding": torch.arange(6)[None, None, None] >= torch.tensor([4, 6])[:, None, None, None],
                         "arbitrary": torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(3)) > 0.8}.get(mask)
                if mask == "arbitrary":
                    arguments[..., 0] = False
                results = []
                for device in (FAR, "cpu"):
                    q, k, v = (randn(2, 6, heads, 16, seed=heads + i).to(device).requires_grad_() for i, heads in enumerate((4, 2, 2)))
                    y = attention(q, k, v, attention_mask=None if arguments is None else arguments.to(device))
                    y.square().sum().backward()
                    results.append([y.detach(), q.grad, k.grad, v.grad])
                self.near(*results)

    def test_training_in_fp8_with_adam(self):
        for name in PRODUCTS:
            for recipe in RECIPES:
                with self.subTest(module=name, recipe=type(recipe).__name__):
                    here = randomise(MODULES[name](device="cpu"))
                    there = MODULES[name](device=FAR)
                    there.load_state_dict(here.state_dict())
                    results = []
                    for module, device in ((there, FAR), (here, "cpu")):
                        optimizer = te.optimizers.FusedAdam(module.parameters(), lr=1e-3, eps=1e-4)  # above the noise of gradients that are zero in exact arithmetic
                        for step in range(3):
                            with scope(recipe):
                                loss = module(make_input(seed=step).detach().to(device)).square().mean()
                            optimizer.zero_grad()
                            loss.backward()
                            optimizer.step()
                        results.append([loss.detach(), *(p.detach() for p in module.parameters())])
                    self.near(*results)
                    states = [{k: v for k, v in m.state_dict().items() if k.endswith("_extra_state")} for m in (there, here)]
                    self.assertEqual(states[0].keys(), states[1].keys())

    def test_fp8_state_and_copies(self):
        layer = randomise(MODULES["LayerNormMLP"](device=FAR))
        x = make_input().detach().to(FAR)
        with scope(RECIPES[1]):
            layer(x).sum().backward()
        for other in (copy.deepcopy(layer), MODULES["LayerNormMLP"](device=FAR)):
            other.load_state_dict(layer.state_dict())
            with torch.no_grad(), scope(RECIPES[1]):
                self.assertTrue(torch.equal(other(x).cpu(), layer(x).cpu()))
        self.assertEqual({p.device for p in layer.to("cpu").parameters()}, {torch.device("cpu")})
        with torch.no_grad():
            want = layer(x.cpu())
            self.near([layer.to(FAR)(x)], [want])

    def test_amp_and_dropout(self):
        here = randomise(te.TransformerLayer(32, 64, 4, hidden_dropout=0.1, attention_dropout=0.1, device="cpu"))
        there = te.TransformerLayer(32, 64, 4, hidden_dropout=0.1, attention_dropout=0.1, device=FAR)
        there.load_state_dict(here.state_dict())
        results = []
        for module, device in ((there, FAR), (here, torch.device("cpu"))):
            torch.manual_seed(3)  # the backend uses the CPU's random numbers
            x = make_input().detach().to(device).requires_grad_()
            with torch.autocast(device.type, dtype=BF16):
                y = module(x)
            y.float().square().sum().backward()
            results.append([y.detach(), *gradients(module, x)])
        self.near(*results, BF16)

    def test_f16_with_a_gradient_scaler(self):
        """A step with infinite gradients is left out and halves the scale, by te-fl's optimizer as by PyTorch's."""
        optimizers = (lambda p: te.optimizers.FusedAdam(p, lr=1e-3, eps=1e-4),  # above the noise of gradients that are zero in exact arithmetic
                      lambda p: torch.optim.SGD(p, lr=1e-3))
        for make_optimizer in optimizers:
            results = []
            for device in (FAR, torch.device("cpu")):
                module = randomise(MODULES["TransformerLayer"](device="cpu")).to(device)
                optimizer, scaler = make_optimizer(module.parameters()), torch.amp.GradScaler(device.type, init_scale=2.0 ** 10)
                for step in range(3):
                    with torch.autocast(device.type, dtype=F16):
                        loss = module(make_input(seed=step).detach().to(device)).float().square().mean() * (float("inf") if step == 1 else 1)
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                self.assertEqual(scaler.get_scale(), 2.0 ** 9)
                results.append([p.detach() for p in module.parameters()])
            self.near(*results, F16)

    def test_recomputed(self):
        layer = randomise(te.TransformerLayer(32, 64, 4, hidden_dropout=0.1, attention_dropout=0.1, device=FAR))
        results = []
        for run in (layer, lambda x: te.checkpoint(layer, x)):
            torch.manual_seed(5)
            x = make_input().detach().to(FAR).requires_grad_()
            with scope(RECIPES[2]):
                y = run(x)
            y.square().sum().backward()
            results.append([t.cpu() for t in (y.detach(), *gradients(layer, x))])
            layer.zero_grad()
        for a, b in zip(*results):
            self.assertTrue(torch.equal(a, b))

    def test_compiled(self):
        """Inductor generates no code for the device, so te-fl's layers cause a graph break; other backends include them in the graph."""
        for name in ("Linear", "TransformerLayer"):
            layer, x = randomise(MODULES[name](device=FAR, params_dtype=F32)), make_input().detach().to(FAR)

            def results(function):
                own = x.clone().requires_grad_()
                layer.zero_grad()
                y = function(own)
                y.sum().backward()
                return [t.cpu() for t in (y, *gradients(layer, own))]
            want = results(layer)
            for backend in ("inductor", "aot_eager"):
                with self.subTest(module=name, backend=backend):
                    torch._dynamo.reset()
                    for a, b in zip(results(torch.compile(layer, backend=backend)), want):
                        self.assertTrue(torch.equal(a, b))
            torch._dynamo.reset()
            with self.assertRaisesRegex(Exception, "inductor generates no code for far"):
                torch.compile(layer, fullgraph=True)(x)

    def test_the_vendor_s_device_is_the_default_one(self):
        self.assertEqual(te.Linear(8, 8).weight.device, FAR)
        self.assertEqual(te.RotaryPositionEmbedding(8)(4).device, FAR)
        module = te.Linear(8, 8, device="meta")
        module.reset_parameters()
        self.assertEqual(module.weight.device, FAR)


class Queues(Far):
    """te-fl enqueues its work on PyTorch's current stream; on another stream it would read data that is not yet written."""

    def setUp(self):
        self.stream = torch.Stream(device=FAR)
        self.addCleanup(wait)

    def test_a_layer_on_a_stream_of_its_own(self):
        for name in ("Linear", "LayerNormMLP", "TransformerLayer"):
            with self.subTest(module=name):
                here = randomise(MODULES[name](device="cpu"))
                there = MODULES[name](device=FAR)
                there.load_state_dict(here.state_dict())
                wait()
                here_x, there_x = make_input(), torch.zeros(8, 2, 32, device=FAR)
                wait()
                with self.stream:
                    there_x.copy_(here_x.detach())  # executes only when this stream is waited for
                    there_x.requires_grad_()
                    y = there(there_x)
                    loss = y.square().sum()
                want = here(here_x)
                want.square().sum().backward()
                loss.backward()  # outside of the stream's block: PyTorch runs the backward on the forward's stream
                with self.stream:
                    self.near([y.detach()], [want.detach()])
                self.stream.synchronize()
                self.near(gradients(there, there_x), gradients(here, here_x))

    def test_fp8_training_on_a_stream_of_its_own(self):
        """The scale updates at the end of the autocast and of the backward run on the layer's stream too."""
        here = randomise(MODULES["TransformerLayer"](device="cpu"))
        there = MODULES["TransformerLayer"](device=FAR)
        there.load_state_dict(here.state_dict())
        wait()
        results = []
        for module, device, stream in ((there, FAR, self.stream), (here, "cpu", contextlib.nullcontext())):
            optimizer = te.optimizers.FusedAdam(module.parameters(), lr=1e-3, eps=1e-4)  # above the noise of gradients that are zero in exact arithmetic
            with stream:
                for step in range(3):
                    with scope(RECIPES[1]):
                        loss = module(make_input(seed=step).detach().to(device)).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                results.append([t.cpu() for t in (loss.detach(), *module.parameters())])
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    def test_ops_on_the_current_stream_or_a_given_one(self):
        for arguments in (False, True):
            x, y = torch.zeros(64, device=FAR), torch.empty(64, device=FAR)
            wait()
            with self.stream:
                x.copy_(torch.arange(64.0) - 32)
                if not arguments:
                    te_fl.ops.relu(input=x, output=y)
            if arguments:
                te_fl.ops.relu(input=x, output=y, stream=self.stream)
            with self.stream:
                self.assertTrue(torch.equal(y.cpu(), (torch.arange(64.0) - 32).relu()))

    def test_an_implementation_in_python_runs_on_the_call_s_stream(self):
        seen = []

        def fn(input, output):
            seen.append(torch.accelerator.current_stream(0).native_handle)
            output.copy_(input.relu())
        registry = te_fl.OpRegistry.instance()
        registry.register_impl(te_fl.OpImpl("relu", "vendor.far_python", te_fl.BackendImplKind.VENDOR, fn, "far", 1000, tensors="torch",
                                            devices=("ext:far",)))
        self.addCleanup(registry.unregister, "relu", "vendor.far_python")
        x = torch.randn(8, device=FAR)
        wait()
        with self.stream:  # the call makes the stream's handle known to te-fl
            te_fl.ops.relu(input=x, output=torch.empty_like(x))
        y = torch.empty_like(x)
        te_fl.ops.relu(input=x, output=y, stream=self.stream)
        self.assertEqual(seen, [self.stream.native_handle] * 2)
        with self.stream:
            self.assertTrue(torch.equal(y.cpu(), x.cpu().relu()))

    def test_the_second_device(self):
        here = randomise(MODULES["TransformerLayer"](device="cpu"))
        there = MODULES["TransformerLayer"](device="far:1")
        there.load_state_dict(here.state_dict())
        x = make_input()
        far_x = x.detach().to("far:1").requires_grad_()
        y, want = there(far_x), here(x)
        y.square().sum().backward()
        want.square().sum().backward()
        self.assertEqual({t.device for t in (y, far_x.grad)}, {torch.device("far:1")})
        self.near([y.detach(), *gradients(there, far_x)], [want.detach(), *gradients(here, x)])


class Memory(unittest.TestCase):
    def test_it_is_pytorch_s(self):
        module, x = te.Linear(64, 32, device=FAR), torch.randn(16, 64, device=FAR, requires_grad=True)
        module(x)
        gc.collect()
        alive, made = BACKEND.private_device_alive(), BACKEND.private_device_allocations()
        y = module(x)
        self.assertGreater(BACKEND.private_device_alive(), alive)
        self.assertGreater(BACKEND.private_device_allocations(), made)
        del y
        gc.collect()
        self.assertEqual(BACKEND.private_device_alive(), alive)

    def test_of_a_stream_that_pytorch_does_not_know(self):
        allocate, free, _ = torch_device.allocator(FAR)
        with self.assertRaisesRegex(Unsupported, "has not told te-fl of a stream 0x123450 of far:0.*with stream"):
            allocate(64, 0x123450)
        address = allocate(64, 0)
        self.assertEqual(address % 256, 0)
        free(address)


@unittest.skipUnless(ALONE, "a plugin has the device")
class Made(Far):
    """The device that te-fl makes from PyTorch's."""

    def test_it_is_listed_and_its_ops_are_pytorch_s(self):
        te_fl.reset_usage()
        x = torch.linspace(-2, 2, 64, device=FAR)
        y = torch.empty_like(x)
        te_fl.ops.relu(input=x, output=y)
        self.assertTrue(torch.equal(y.cpu(), x.cpu().relu()))
        self.assertEqual([(row["op"], row["impl_id"]) for row in te_fl.usage()], [("relu", "reference.torch")])
        self.assertIn("ext:far:0", te_fl.info()["devices"])
        told = te_fl.explain("relu", input=x, output=y)
        self.assertEqual([c["impl_id"] for c in told["candidates"] if c["accepted"]][0], "reference.torch")

    def test_a_call_that_pytorch_s_ops_refuse_runs_on_copies(self):
        bits = torch.zeros(8, dtype=torch.uint8, device=FAR)
        te_fl.ops.fill(output=bits.view(torch.float8_e8m0fnu), value=2.0)
        self.assertEqual(bits.cpu().tolist(), [128] * 8)

    def test_wrong_indices_fail_the_next_synchronisation(self):
        def call():
            out = torch.zeros(2, 2, device=FAR)
            te_fl.ops.embedding_fwd(indices=indices, weight=torch.ones(3, 2, device=FAR), output=out)
            return out.cpu().isnan().tolist()
        indices = torch.tensor([0, 7], device=FAR)
        self.addCleanup(te_fl.reload)
        with unittest.mock.patch.dict(os.environ, TE_FL_VALIDATE="1"):
            te_fl.reload()
            with self.assertRaisesRegex(InvalidArgument, r"indices\[1\] is 7"):
                call()
        with unittest.mock.patch.dict(os.environ, TE_FL_VALIDATE="0", TE_FL_SYNC="0"):
            te_fl.reload()
            self.assertEqual(call(), [[False, False], [True, True]])
        with unittest.mock.patch.dict(os.environ, TE_FL_VALIDATE="0", TE_FL_SYNC="1"):
            te_fl.reload()
            with self.assertRaisesRegex(InvalidArgument, "an element of indices is wrong; it must lie in"):
                te_fl.ops.relu(input=torch.ones(4, device=FAR), output=torch.empty(4, device=FAR))
            te_fl.ops.relu(input=torch.ones(4, device=FAR), output=torch.empty(4, device=FAR))

    def test_no_memory_is_left(self):
        with self.assertRaisesRegex((te_fl.errors.OutOfMemory, RuntimeError), "memory|full"):
            te.Linear(1 << 15, 1 << 16, device=FAR)(torch.zeros(1, 1 << 15, device=FAR))
        self.assertEqual(te.Linear(8, 8, device=FAR, bias=False)(torch.zeros(2, 8, device=FAR)).abs().sum().item(), 0)

    def test_a_plugin_that_comes_later_is_refused(self):
        torch_device.native_name(FAR)
        te_fl.ops.relu(input=torch.ones(4, device=FAR), output=torch.empty(4, device=FAR))
        with self.assertRaisesRegex(te_fl.Error, "ext:far:0"):
            te_fl.load_plugin(far.PLUGIN)


class Refused(unittest.TestCase):
    def test_devices_that_no_plugin_has(self):
        with self.assertRaisesRegex(Unsupported, "PyTorch has no far:5: it has 2 devices far"):
            torch_device.native_name(torch.device("far:5"))
        with self.assertRaisesRegex(Unsupported, "of xpu:0, .*PyTorch's accelerator is far"):
            torch_device.native_name(torch.device("xpu:0"))
        with self.assertRaisesRegex(Unsupported, "does not run on fpga:0; it runs on cpu, cuda, xpu, and the PrivateUse1 device"):
            torch_device.native_name(torch.device("fpga:0"))

    def test_devices_that_several_plugins_have(self):
        several = types.SimpleNamespace(info=lambda: {"devices": ["cpu", "ext:acme:0", "ext:far:0"]})
        with unittest.mock.patch.object(torch_device, "_native", several):
            with self.assertRaisesRegex(Unsupported, "which of ext:acme:0, ext:far:0 is far:0"):
                torch_device.native_name(FAR)
            self.assertEqual(te.Linear(4, 4).weight.device.type, "cuda" if torch.cuda.is_available() else "cpu")

    def test_named_random_states_without_the_vendor_s_generators(self):
        with self.assertRaisesRegex(Unsupported, "torch.far has no default_generators"):
            te.CudaRNGStatesTracker().add("model-parallel-rng", 1)

    def test_a_backend_that_reports_no_stream(self):
        code = ("import far, torch, te_fl\nfrom te_fl import torch_device\nfar.load()\ntry:\n"
                " torch_device.native_name(torch.device('far:0'))\nexcept te_fl.errors.Unsupported as e:\n print('Unsupported', e)")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(far.HERE), os.environ.get("PYTHONPATH", "")])}
        out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        self.assertRegex(out.stdout, "Unsupported UNSUPPORTED: PyTorch does not tell the current stream of far:0.*PrivateUse1HooksInterface", out.stderr)


if __name__ == "__main__":
    unittest.main()
