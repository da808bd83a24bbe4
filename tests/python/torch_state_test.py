"""State of te_fl.pytorch's modules: copies, files, state_dict, devices and dtypes, and the FP8 state of checkpoints that others wrote."""

import concurrent.futures
import copy
import io
import os
import pickle
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from torch_oracle import DEVICES, near, randn, randomise  # noqa: E402

import te_fl.pytorch as te  # noqa: E402
from te_fl import errors  # noqa: E402
from te_fl.common import recipe  # noqa: E402
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling  # noqa: E402
from te_fl.pytorch.fp8 import extra_state  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
DELAYED = DelayedScaling(amax_history_len=4)
RECIPES = (None, DELAYED, Float8CurrentScaling(), Float8BlockScaling())
MODULES = {
    "Linear": lambda **k: te.Linear(32, 32, **k),
    "Linear in parts": lambda **k: te.Linear(32, 32, parameters_split=("a", "b"), **k),
    "LayerNorm": lambda **k: te.LayerNorm(32, **k),
    "RMSNorm": lambda **k: te.RMSNorm(32, **k),
    "LayerNormLinear": lambda **k: te.LayerNormLinear(32, 32, **k),
    "LayerNormMLP": lambda **k: te.LayerNormMLP(32, 64, **k),
    "MultiheadAttention": lambda **k: te.MultiheadAttention(32, 4, attention_dropout=0, input_layernorm=True, **k),
    "TransformerLayer": lambda **k: te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0, **k),
}
# The names of Transformer Engine 2.20.2's state_dict.
NORM, STATE = ["layer_norm_weight", "layer_norm_bias"], ["_extra_state"]
QKV = [f"{part}_{what}" for what in ("weight", "bias") for part in ("query", "key", "value")]
KEYS = {
    "Linear": ["weight", "bias"] + STATE,
    "Linear in parts": ["a_weight", "b_weight", "a_bias", "b_bias"] + STATE,
    "LayerNorm": ["weight", "bias"] + STATE,
    "RMSNorm": ["weight"] + STATE,
    "LayerNormLinear": NORM + ["weight", "bias"] + STATE,
    "LayerNormMLP": NORM + ["fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"] + STATE,
}
KEYS["MultiheadAttention"] = ([f"layernorm_qkv.{k}" for k in NORM + QKV + STATE] + ["core_attention._extra_state"]
                              + [f"proj.{k}" for k in KEYS["Linear"]])
KEYS["TransformerLayer"] = ([f"self_attention.{k}" for k in KEYS["MultiheadAttention"]]
                            + [f"layernorm_mlp.{k}" for k in KEYS["LayerNormMLP"]])


def scope(recipe):
    return te.autocast(enabled=recipe is not None, recipe=recipe)


def input_of(device="cpu", seed=1, dtype=F32):
    return randn(8, 2, 32, seed=seed, dtype=dtype, device=device).requires_grad_()


def step(module, device="cpu", recipe=None, seed=1, dtype=F32):
    """Output, gradients of the input and of the parameters."""
    module.zero_grad()
    x = input_of(device, seed, dtype)
    with scope(recipe):
        y = module(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def trained(name, device="cpu", recipe=None, steps=3, **arguments):
    module = randomise(MODULES[name](device=device, **arguments))
    for seed in range(steps):
        step(module, device, recipe, seed)
    return module


def each(names=MODULES, recipes=(None,)):
    """A test method runs for each module, device and recipe."""
    def decorate(test):
        def run(self):
            for device in DEVICES:
                for name in names:
                    for recipe in recipes:
                        with self.subTest(module=name, device=device, recipe=type(recipe).__name__):
                            test(self, name, device, recipe)
        run.__name__ = test.__name__
        return run
    return decorate


class State(unittest.TestCase):
    def same(self, got, want):
        self.assertEqual(len(got), len(want))
        for i, (a, b) in enumerate(zip(got, want)):
            self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
            self.assertTrue(torch.equal(a, b), f"{i}: {(a.float() - b.float()).abs().max()}")


class Copies(State):
    @each(recipes=RECIPES)
    def test_deepcopy(self, name, device, recipe):
        module = trained(name, device, recipe)
        other = copy.deepcopy(module)
        for p, q in zip(module.parameters(), other.parameters()):
            self.assertNotEqual(p.data_ptr(), q.data_ptr())
        want = step(module, device, recipe, 7)
        self.same(step(other, device, recipe, 7), want)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        self.same(step(copy.deepcopy(module), device, recipe, 8), step(module, device, recipe, 8))

    @each(recipes=RECIPES)
    def test_deepcopy_of_what_never_ran(self, name, device, recipe):
        module = randomise(MODULES[name](device=device))
        self.same(step(copy.deepcopy(module), device, recipe), step(module, device, recipe))

    @each(recipes=RECIPES)
    def test_pickle(self, name, device, recipe):
        module = trained(name, device, recipe)
        other = pickle.loads(pickle.dumps(module))
        self.same(step(other, device, recipe, 7), step(module, device, recipe, 7))

    @each(recipes=(None, DELAYED))
    def test_file_of_the_module(self, name, device, recipe):
        module, stream = trained(name, device, recipe), io.BytesIO()
        torch.save(module, stream)
        stream.seek(0)
        other = torch.load(stream, weights_only=False)
        self.same(step(other, device, recipe, 7), step(module, device, recipe, 7))

    def test_copy_keeps_the_mode_and_what_is_frozen(self):
        module = trained("TransformerLayer").eval()
        module.layernorm_mlp.fc1_weight.requires_grad_(False)
        other = copy.deepcopy(module)
        self.assertFalse(other.training)
        self.assertFalse(other.layernorm_mlp.fc1_weight.requires_grad)
        with torch.no_grad():
            self.assertTrue(torch.equal(other(input_of()), module(input_of())))


class Dicts(State):
    def test_names(self):
        for name, keys in KEYS.items():
            with self.subTest(module=name):
                self.assertEqual(sorted(MODULES[name](device="cpu").state_dict()), sorted(keys))

    @each(recipes=RECIPES)
    def test_state_dict(self, name, device, recipe):
        module = trained(name, device, recipe)
        stream = io.BytesIO()
        torch.save(module.state_dict(), stream)
        for weights_only in (True, False):
            stream.seek(0)
            other = MODULES[name](device=device)
            step(other, device, recipe)  # so that its layer and its scales are made
            result = other.load_state_dict(torch.load(stream, weights_only=weights_only), strict=True)
            self.assertEqual((result.missing_keys, result.unexpected_keys), ([], []))
            reference = copy.deepcopy(module)
            for seed in (7, 8):
                self.same(step(other, device, recipe, seed), step(reference, device, recipe, seed))

    @each(recipes=(DELAYED,))
    def test_a_new_module_serves_from_a_state(self, name, device, recipe):
        module = trained(name, device, recipe)
        other = MODULES[name](device=device)
        other.load_state_dict(module.state_dict())
        with torch.no_grad(), scope(recipe):
            self.same([other.eval()(input_of(device))], [module.eval()(input_of(device))])

    @each()
    def test_strict(self, name, device, _):
        module = MODULES[name](device=device)
        state = module.state_dict()
        first = next(iter(state))
        without = {k: v for k, v in state.items() if k != first}
        with self.assertRaisesRegex(RuntimeError, "Missing key.*" + first):
            module.load_state_dict(without)
        with self.assertRaisesRegex(RuntimeError, "Unexpected key.*xyzzy"):
            module.load_state_dict({**state, "xyzzy": torch.zeros(1)})
        self.assertEqual(module.load_state_dict({**without, "xyzzy": torch.zeros(1)}, strict=False).missing_keys, [first])
        with self.assertRaisesRegex(RuntimeError, "size mismatch.*" + first):
            module.load_state_dict({**state, first: torch.zeros(3, 5)})

    @each(["TransformerLayer", "Linear"])
    def test_of_plain_weights(self, name, device, _):
        """A checkpoint without extra state loads with strict=False."""
        module = trained(name, device)
        other = MODULES[name](device=device)
        result = other.load_state_dict({k: v for k, v in module.state_dict().items() if not k.endswith("_extra_state")}, strict=False)
        self.assertTrue(all(k.endswith("_extra_state") for k in result.missing_keys))
        self.same(step(other, device), step(module, device))

    @each()
    def test_assign(self, name, device, _):
        module, other = trained(name, device), MODULES[name](device=device)
        step(other, device)
        other.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
        self.same(step(other, device), step(module, device))

    @each(recipes=(DELAYED,))
    def test_training_goes_on_after_a_state_was_taken(self, name, device, recipe):
        """Taking a state_dict changes nothing, and the whole layer keeps its scales."""
        module, other = trained(name, device, recipe), trained(name, device, recipe)
        module.state_dict()
        self.same(step(module, device, recipe, 7), step(other, device, recipe, 7))

    @each(["TransformerLayer", "MultiheadAttention"], recipes=(DELAYED,))
    def test_whole_and_parts_have_one_state(self, name, device, recipe):
        """A state from the whole layer loads into one that runs part by part, and the other way round."""
        module = trained(name, device, recipe)
        state, other = copy.deepcopy(module.state_dict()), MODULES[name](device=device)
        if hasattr(other, "_fused"):
            other._fused = None
        other.load_state_dict(state)
        near(self, step(other, device, recipe, 7)[0], step(module, device, recipe, 7)[0], 1e-5 if device == "cpu" else 2e-2, "output")
        back = MODULES[name](device=device)
        back.load_state_dict(other.state_dict())
        near(self, step(back, device, recipe, 8)[0], step(module, device, recipe, 8)[0], 1e-5 if device == "cpu" else 2e-2, "output")

    @each(["TransformerLayer"], recipes=(DELAYED,))
    def test_a_hook_keeps_the_scales(self, name, device, recipe):
        """The layer runs part by part once a part has a hook, from the scales that the whole has collected."""
        module, other = trained(name, device, recipe), trained(name, device, recipe)
        other.layernorm_mlp.register_forward_hook(lambda *a: None)
        near(self, step(other, device, recipe, 7)[0], step(module, device, recipe, 7)[0], 1e-5 if device == "cpu" else 2e-2, "output")

    def test_reset_fp8_meta_tensors(self):
        for name in ("Linear", "LayerNormMLP", "TransformerLayer"):
            with self.subTest(module=name):
                module = trained(name, recipe=DELAYED)
                module.reset_fp8_meta_tensors()
                fresh = MODULES[name](device="cpu")
                fresh.load_state_dict({k: v for k, v in module.state_dict().items() if not k.endswith("_extra_state")}, strict=False)
                near(self, step(module, recipe=DELAYED, seed=9)[0], step(fresh, recipe=DELAYED, seed=9)[0], 1e-5, "output")


class Moves(State):
    @each()
    def test_meta_device(self, name, device, _):
        with torch.device("meta"):
            default = MODULES[name](device="meta")
        self.assertEqual({p.device.type for p in default.parameters()}, {"meta"})
        module = MODULES[name](device="meta")
        torch.manual_seed(1)
        for part in module.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        self.assertEqual({p.device.type for p in module.parameters()}, {DEVICES[-1]})
        self.assertTrue(all(torch.isfinite(t).all() for t in step(module, DEVICES[-1])))
        for n, p in module.named_parameters():
            if p.dim() == 2:
                self.assertAlmostEqual(p.std().item(), 0.023, delta=0.003)
            elif n.endswith("weight"):
                self.assertTrue((p == 1).all(), n)
            else:
                self.assertTrue((p == 0).all(), n)

    @each()
    def test_to_empty_then_load(self, name, device, _):
        module, other = trained(name, device), MODULES[name](device="meta").to_empty(device=device)
        other.load_state_dict(module.state_dict())
        self.same(step(other, device), step(module, device))

    @each()
    def test_other_dtypes(self, name, device, _):
        for dtype, to in ((BF16, lambda m: m.bfloat16()), (torch.float16, lambda m: m.half()), (BF16, lambda m: m.to(BF16)),
                          (F32, lambda m: m.float())):
            module = trained(name, device)
            want = to(MODULES[name](device=device))
            self.assertIs(to(module), module)
            want.load_state_dict(module.state_dict())
            self.assertEqual({p.dtype for p in module.parameters()}, {dtype})
            self.same(step(module, device, dtype=dtype), step(want, device, dtype=dtype))

    @each(recipes=(DELAYED,))
    def test_other_dtype_keeps_the_scales(self, name, device, recipe):
        module = trained(name, device, recipe)
        want = MODULES[name](device=device, params_dtype=BF16)
        want.load_state_dict(module.state_dict())
        module.to(BF16)
        self.same(step(module, device, recipe, dtype=BF16), step(want, device, recipe, dtype=BF16))

    @each(recipes=(None, DELAYED))
    def test_to_a_device(self, name, device, recipe):
        for to in DEVICES:
            module = trained(name, device, recipe)
            want = MODULES[name](device=to)
            want.load_state_dict(module.state_dict())
            self.same(step(module.to(to), to, recipe, 7), step(want, to, recipe, 7))

    def test_params_dtype(self):
        for name in MODULES:
            for dtype in (F32, BF16, torch.float16):
                with self.subTest(module=name, dtype=dtype):
                    self.assertEqual({p.dtype for p in MODULES[name](device="cpu", params_dtype=dtype).parameters()}, {dtype})
        torch.set_default_dtype(BF16)
        try:
            self.assertEqual(te.Linear(8, 8, device="cpu").weight.dtype, BF16)
        finally:
            torch.set_default_dtype(F32)

    def test_initial_values(self):
        torch.manual_seed(1)
        one = te.Linear(32, 32, device="cpu")
        torch.manual_seed(1)
        two = te.Linear(32, 32, device="cpu")
        self.assertTrue(torch.equal(one.weight, two.weight))
        self.assertEqual(one.bias.abs().max().item(), 0)
        three = te.Linear(32, 32, device="cpu", init_method=lambda w: torch.nn.init.constant_(w, 3))
        self.assertTrue((three.weight == 3).all())
        layer = te.TransformerLayer(32, 64, 4, device="cpu", init_method=lambda w: torch.nn.init.constant_(w, 3),
                                    output_layer_init_method=lambda w: torch.nn.init.constant_(w, 4))
        for path, value in (("self_attention.layernorm_qkv.key_weight", 3), ("self_attention.proj.weight", 4),
                            ("layernorm_mlp.fc1_weight", 3), ("layernorm_mlp.fc2_weight", 4)):
            self.assertTrue((layer.get_parameter(path) == value).all(), path)

    def test_default_device(self):
        self.assertEqual(te.Linear(8, 8).weight.device.type, DEVICES[-1])


def stand_in():
    """Modules named as Transformer Engine's, with recipes as it would pickle them."""
    names = ("transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe")
    package, common, recipe = (types.ModuleType(n) for n in names)
    code = '''
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float

class Format(Enum):
    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    E5M2 = _FormatHelper(max_fwd=57344, max_bwd=57344)
    HYBRID = _FormatHelper(max_fwd=448, max_bwd=57344)

@dataclass(frozen=True)
class MMParams:
    use_split_accumulator: bool = True

@dataclass(frozen=True)
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

@dataclass(repr=False)
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: object = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: object = None

@dataclass(repr=False)
class Float8CurrentScaling:
    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    def __post_init__(self):
        self.fp8_quant_fwd_inp = QParams()
'''
    exec(compile(code, "recipe", "exec"), recipe.__dict__)
    package.common, common.recipe = common, recipe
    return dict(zip(names, (package, common, recipe)))


def pickled(state, protocol=pickle.DEFAULT_PROTOCOL):
    return torch.frombuffer(bytearray(pickle.dumps(state, protocol)), dtype=torch.uint8)


class TheirState(State):
    """Extra state in the form of Transformer Engine: a pickled dict as bytes, three places forward and two backward for each product."""

    def delayed(self, products=1, protocol=pickle.DEFAULT_PROTOCOL, **more):
        modules = stand_in()
        with mock.patch.dict(sys.modules, modules):
            recipe = modules["transformer_engine.common.recipe"].DelayedScaling(amax_history_len=4)
            forward = torch.arange(4.0 * 3 * products).reshape(4, 3 * products)
            backward = torch.arange(4.0 * 2 * products).reshape(4, 2 * products) / 8
            state = {
                "recipe": recipe,
                "scale_fwd": torch.tensor([16.0, 128.0, 1.0] * products), "amax_history_fwd": forward,
                "scale_bwd": torch.tensor([64.0, 1.0] * products), "amax_history_bwd": backward,
                "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": products}, **more,
            }
            return pickled(state, protocol)

    def test_their_scales_are_used(self):
        import torch_oracle as oracle
        for device in DEVICES:
            for protocol in (3, 4, 5):
                with self.subTest(device=device, protocol=protocol):
                    module = randomise(te.Linear(32, 16, bias=False, device=device))
                    module.load_state_dict({"weight": module.weight.detach().clone(), "_extra_state": self.delayed(protocol=protocol)})
                    x = randn(16, 32, device=device)

                    def read(t, scale):
                        return torch.from_numpy(oracle.round_to(t.detach().cpu().numpy() * scale, "e4m3")) / scale
                    with torch.no_grad(), te.autocast(recipe=DELAYED):
                        y = module(x)
                    near(self, y.cpu(), read(x, 16.0) @ read(module.weight, 128.0).T, 1e-5 if device == "cpu" else 2e-2, "output")

    def test_each_product_has_its_own(self):
        module = te.LayerNormMLP(32, 64, device="cpu")
        module.load_state_dict({**module.state_dict(), "_extra_state": self.delayed(2)})
        with mock.patch.dict(sys.modules, stand_in()):
            state = pickle.loads(module.get_extra_state().numpy().tobytes())
        self.same([state["scale_fwd"][[0, 1, 3, 4]], state["scale_bwd"][[0, 2]]],
                  [torch.tensor([16.0, 128.0] * 2), torch.tensor([64.0] * 2)])
        self.same([state["amax_history_fwd"][:, [0, 1, 3, 4]]], [torch.arange(24.0).reshape(4, 6)[:, [0, 1, 3, 4]]])
        self.same([state["amax_history_bwd"][:, [0, 2]]], [(torch.arange(16.0).reshape(4, 4) / 8)[:, [0, 2]]])

    def test_they_can_read_ours(self):
        module = trained("Linear", recipe=DELAYED)
        data = module.state_dict()["_extra_state"]
        self.assertEqual(data.dtype, torch.uint8)
        modules = stand_in()
        with mock.patch.dict(sys.modules, modules):
            state = pickle.loads(data.numpy().tobytes())
        self.assertIsInstance(state["recipe"], modules["transformer_engine.common.recipe"].DelayedScaling)
        self.assertEqual(state["recipe"].amax_history_len, 4)
        shapes = {k: tuple(state[k].shape) for k in ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")}
        self.assertEqual(shapes, {"scale_fwd": (3,), "amax_history_fwd": (4, 3), "scale_bwd": (2,), "amax_history_bwd": (4, 2)})
        self.assertIn("extra_fp8_variables", state)

    def test_of_other_recipes(self):
        modules = stand_in()
        with mock.patch.dict(sys.modules, modules):
            data = pickled({"recipe": modules["transformer_engine.common.recipe"].Float8CurrentScaling(), "extra_fp8_variables": {}})
        module = trained("Linear", recipe=DELAYED)
        module.load_state_dict({**module.state_dict(), "_extra_state": data})
        self.assertTrue(torch.isfinite(step(module, recipe=Float8CurrentScaling())[0]).all())

    def test_recipes_without_state_save_none(self):
        for recipe in (None, Float8CurrentScaling(), Float8BlockScaling()):
            for name in MODULES:
                with self.subTest(module=name, recipe=type(recipe).__name__):
                    for key, data in trained(name, recipe=recipe).state_dict().items():
                        if key.endswith("_extra_state"):
                            self.assertEqual((data.dtype, data.numel()), (torch.uint8, 0), key)

    def test_of_attention(self):
        """Attention has state of its own there, for FP8 attention. A whole checkpoint with it loads."""
        module = trained("TransformerLayer", recipe=DELAYED)
        state = {**module.state_dict(), "self_attention.core_attention._extra_state": self.delayed(3)}
        other = MODULES["TransformerLayer"](device="cpu")
        other.load_state_dict(state)
        self.same(step(other, recipe=DELAYED, seed=7), step(module, recipe=DELAYED, seed=7))

    def test_empty(self):
        for data in (torch.empty(0, dtype=torch.uint8), None):
            module = trained("Linear", recipe=DELAYED)
            module.set_extra_state(data)
            step(module, recipe=DELAYED)

    def test_a_stream_of_bytes(self):
        """The form of older versions."""
        module = te.Linear(32, 16, device="cpu")
        module.set_extra_state(io.BytesIO(self.delayed().numpy().tobytes()))
        with mock.patch.dict(sys.modules, stand_in()):
            self.assertEqual(pickle.loads(module.get_extra_state().numpy().tobytes())["scale_fwd"][1].item(), 128)

    def test_formats_by_name(self):
        """As Python 3.11.0 to 3.11.3 pickle an enumeration's member."""
        module, read = randomise(te.Linear(32, 16, device="cpu")), te.Linear(32, 16, device="cpu")
        for _ in range(2):
            with te.autocast(recipe=DelayedScaling(fp8_format=recipe.Format.E4M3)):
                module(randn(4, 32)).sum().backward()
        with mock.patch.object(recipe.Format, "__reduce_ex__", lambda self, protocol: (getattr, (recipe.Format, self.name))):
            state = module.get_extra_state()
        self.assertIn(b"getattr", state.numpy().tobytes())
        read.set_extra_state(state)
        self.assertNotIn(b"getattr", module.get_extra_state().numpy().tobytes())
        self.assertIs(pickle.loads(pickle.dumps(recipe.Format.E4M3)), recipe.Format.E4M3)
        self.assertNotIn(b"getattr", pickle.dumps(recipe.Format.E4M3))
        want, found = (extra_state.read(m.get_extra_state(), "Linear") for m in (module, read))
        self.assertEqual((str(found["recipe"]), found["recipe"].fp8_format), (str(want["recipe"]), recipe.Format.E4M3))
        self.assertTrue(torch.equal(found["scale_fwd"], want["scale_fwd"]))

    def test_code_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            mark = os.path.join(folder, "ran")

            class System:
                def __reduce__(self):
                    return os.system, (f"touch {mark}",)

            class Eval:
                def __reduce__(self):
                    return eval, (f"open({mark!r}, 'w')",)

            class Attribute:
                def __reduce__(self):
                    return getattr, (io.BytesIO, "__init__")

            class Members:
                def __reduce__(self):
                    return getattr, (recipe.Format, "mro")

            class Others:
                def __reduce__(self):
                    return getattr, (recipe.DelayedScaling, "fp8_format")

            def dotted(name):
                words = [b"\x8c" + bytes([len(word)]) + word.encode() for word in ("te_fl.common.recipe", name, f"touch {mark}")]
                return b"\x80\x04" + words[0] + words[1] + b"\x93" + words[2] + b"\x85R."

            class Loads:
                def __reduce__(self):
                    return torch.storage._load_from_bytes, (pickle.dumps(System()),)

            class Nested:
                def __reduce__(self):
                    stream = io.BytesIO()
                    torch.save(System(), stream)
                    return torch.storage._load_from_bytes, (stream.getvalue(),)

            payloads = [pickle.dumps({"recipe": kind()}, protocol)
                        for kind in (System, Eval, Attribute, Members, Others, Loads, Nested) for protocol in (0, 2, 4)]
            payloads += [dotted("os.system"), dotted("_switched_on"), dotted("Callable"), dotted("os")]
            for i, payload in enumerate(payloads):
                with self.subTest(payload=i):
                    module = randomise(te.Linear(32, 16, device="cpu"))
                    with self.assertRaises(errors.DataLoss) as caught:
                        module.set_extra_state(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
                    self.assertTrue(str(caught.exception))
                    self.assertFalse(os.path.exists(mark))

    def test_damage_is_told(self):
        whole = self.delayed()
        wrong = [whole[:100], torch.zeros(10, dtype=torch.uint8), pickled([1, 2]),
                 pickled({"scale_fwd": torch.ones(2), "amax_history_fwd": torch.ones(4, 2)}),
                 self.delayed(2), pickled({"scale_fwd": 3, "amax_history_fwd": 4}),
                 pickled({"scale_fwd": torch.ones(3), "amax_history_fwd": torch.ones(4, 3), "scale_bwd": torch.ones(2),
                          "amax_history_bwd": torch.ones(3, 3)})]
        for i, data in enumerate(wrong):
            with self.subTest(data=i):
                module = randomise(te.Linear(32, 16, device="cpu"))
                with self.assertRaises(errors.DataLoss) as caught:
                    module.set_extra_state(data)
                self.assertIn("Linear", str(caught.exception))
                module(randn(4, 32))

    def test_not_bytes(self):
        with self.assertRaisesRegex(TypeError, "Linear.*str"):
            te.Linear(32, 16, device="cpu").set_extra_state("state")
        with self.assertRaises((TypeError, errors.DataLoss)):
            te.Linear(32, 16, device="cpu").set_extra_state(torch.ones(5))


class Distributed(State):
    def test_distributed_checkpoint(self):
        import torch.distributed.checkpoint as dcp
        for name in ("Linear", "TransformerLayer"):
            with self.subTest(module=name), tempfile.TemporaryDirectory() as folder:
                module = trained(name, recipe=DELAYED)
                dcp.save({"model": module.state_dict()}, checkpoint_id=folder, no_dist=True)
                other = MODULES[name](device="cpu")
                step(other, recipe=DELAYED)
                state = {"model": other.state_dict()}
                dcp.load(state, checkpoint_id=folder, no_dist=True)
                other.load_state_dict(state["model"])
                want = step(copy.deepcopy(module), recipe=DELAYED, seed=7)
                self.same(step(other, recipe=DELAYED, seed=7), want)

                fresh = MODULES[name](device="cpu")  # has no state of that size yet, except in the autocast
                with te.autocast(recipe=DELAYED):
                    state = {"model": fresh.state_dict()}
                dcp.load(state, checkpoint_id=folder, no_dist=True)
                fresh.load_state_dict(state["model"])
                self.same(step(fresh, recipe=DELAYED, seed=7), want)

    def test_state_before_the_first_forward(self):
        for recipe in (DELAYED, DelayedScaling(amax_history_len=3, fp8_dpa=True)):
            module = te.TransformerLayer(64, 64, 4, hidden_dropout=0, attention_dropout=0, device="cpu")
            with te.autocast(recipe=recipe):
                early = module.state_dict()
            with te.autocast(enabled=False, recipe=recipe):
                self.assertTrue(all(v.numel() == 0 for k, v in module.state_dict().items() if k.endswith("_extra_state")))
            with te.autocast(recipe=recipe):
                module(torch.ones(8, 2, 64)).sum().backward()
            for key, value in module.state_dict().items():
                self.assertEqual(early[key].shape, value.shape, key)
            module.load_state_dict(early)
            for key, value in module.state_dict().items():
                if key.endswith("_extra_state") and value.numel():
                    state = extra_state.read(value, key)
                    self.assertTrue((state["scale_fwd"] == 1).all() and (state["amax_history_bwd"] == 0).all(), key)


def on_device(*shape, **options):
    """A tensor on the device of te-fl's modules that are made without a device."""
    return randn(*shape, **options).to(DEVICES[-1])


class Recording(unittest.TestCase):
    """Amaxes set the scales of their module, whichever of its layers in C++ a call needed."""

    LATEST = DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")

    def of(self, module, name):
        return dict(module._fp8_state())[name]

    def each_twice(self, first, second, of_state):
        """Asserts what steps of two forwards and one backward make of_state(), whichever output has gradients of 100; the other's are 1."""
        for factors in ((1, 100), (100, 1)):
            for _ in range(2):
                with scope(self.LATEST):
                    a, b = first(), second()
                (factors[0] * a.float().sum() + factors[1] * b.float().sum()).backward()
            self.assertEqual(of_state().item(), torch.tensor(573.44).item(), factors)

    def test_a_layer_used_twice_in_one_backward(self):
        for recipe in (self.LATEST, DelayedScaling(amax_history_len=1), DelayedScaling(amax_history_len=3)):
            for order in (1, -1):
                module, exact = randomise(te.Linear(32, 32)), torch.nn.Linear(32, 32, device=DEVICES[-1])
                exact.load_state_dict({n: t for n, t in module.state_dict().items() if n != "_extra_state"})
                x, history = on_device(64, 32), []
                for step in range(3):
                    for m, chosen in ((module, recipe), (exact, None)):
                        m.zero_grad()
                        with scope(chosen):
                            parts = [m(x), m(x)][::order]
                        (parts[0].sum() + 1e4 * parts[1].sum()).backward()
                    history.append(self.of(module, "fp8.bwd.amax_history"))
                self.assertEqual(self.of(module, "fp8.bwd.scale").item(), torch.tensor(57344 / 1e4).item())
                near(self, module.weight.grad, exact.weight.grad, 0.05, "the weight's gradient")
                if recipe.amax_history_len == 3:  # one row for each step
                    self.assertEqual(history[1].flatten().tolist(), [0, 0, 1e4] if step == 0 else [0, 1e4, 1e4])

    def test_two_dtypes_in_one_step(self):
        x = on_device(64, 32)
        for first, second in ((F32, BF16), (BF16, F32)):
            module = randomise(te.Linear(32, 32))
            self.each_twice(lambda: module(x.to(first)), lambda: module(4 * x.to(second)), lambda: self.of(module, "fp8.bwd.scale"))
            self.assertAlmostEqual(self.of(module, "fp8.fwd.scale")[0].item(), 448 / (4 * x.to(second).abs().max().item()), 3)

    def test_two_masks_in_one_step(self):
        recipe = DelayedScaling(amax_history_len=1, fp8_dpa=True)
        for masks in (("causal", "no_mask"), ("no_mask", "causal")):
            module = te.DotProductAttention(2, 16)
            q, k, v = (on_device(16, 2, 2, 16, seed=i).requires_grad_() for i in range(3))
            for _ in range(2):
                with te.autocast(recipe=recipe):
                    a, b = (module(q * n, k, v, attn_mask_type=mask) for n, mask in zip((1, 3), masks))
                (a.sum() + 50 * b.sum()).backward()
            self.assertEqual(self.of(module, "fp8.bwd.scale")[0].item(), torch.tensor(57344 / 50).item())
            self.assertAlmostEqual(self.of(module, "fp8.fwd.scale")[0].item(), 448 / (3 * q.abs().max().item()), 3)
            layer = randomise(te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0))
            x = on_device(16, 2, 32).requires_grad_()
            self.each_twice(lambda: layer(x, self_attn_mask_type=masks[0]), lambda: layer(x, self_attn_mask_type=masks[1]),
                            lambda: self.of(layer.layernorm_mlp, "fc2_fp8.bwd.scale"))

    def test_an_evaluation_with_gradients_before_the_backward(self):
        layer = randomise(te.TransformerLayer(32, 64, 4, hidden_dropout=0.1, attention_dropout=0.1))
        x = on_device(16, 2, 32)
        for _ in range(2):
            with scope(self.LATEST):
                y = layer.train()(x)
                evaluated = layer.eval()(x)
            (evaluated.sum() + 100 * y.sum()).backward()
            self.assertIsNone(x.grad)
        self.assertLess(self.of(layer.layernorm_mlp, "fc2_fp8.bwd.scale").item(), 574)  # dropout's factor makes gradients larger

    def test_parts_and_the_whole_layer_in_one_step(self):
        layer = randomise(te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0))
        x = on_device(16, 2, 32)
        self.each_twice(lambda: layer(x), lambda: layer(x, checkpoint_core_attention=True),
                        lambda: self.of(layer.layernorm_mlp, "fc2_fp8.bwd.scale"))

    def test_several_threads(self):
        module, x = randomise(te.Linear(32, 32)), on_device(64, 32)

        def train(dtype, factor):
            for _ in range(20):
                with te.autocast(recipe=DelayedScaling(amax_history_len=64)):
                    y = module(x.to(dtype))
                torch.autograd.grad(factor * y.float().sum(), module.weight)

        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(train, dtype, n) for n, dtype in enumerate((F32, BF16, F32, BF16), 1)]:
                done.result()
        self.assertEqual(self.of(module, "fp8.bwd.scale").item(), 57344 / 4)
        self.assertAlmostEqual(self.of(module, "fp8.fwd.scale")[0].item(), 448 / max(x.abs().max(), x.to(BF16).abs().max()).item(), 3)

    def test_a_frozen_layer_follows_its_data(self):
        x = on_device(64, 32)
        for training in (True, False):
            module = randomise(te.Linear(32, 32))
            for _ in range(2):
                with scope(self.LATEST):
                    y = module(x)
                y.sum().backward()
            module.requires_grad_(False).train(training)
            want = torch.nn.functional.linear(100 * x, module.weight, module.bias)
            for _ in range(2):
                with scope(self.LATEST):
                    y = module(100 * x)
            near(self, y, want, 0.1, "the output")
            before = self.of(module, "fp8.fwd.scale")
            for _ in range(2):  # as in Transformer Engine: no gradients when the autocast ends, no update
                with torch.no_grad(), scope(self.LATEST):
                    module(x)
            self.assertEqual(self.of(module, "fp8.fwd.scale").tolist(), before.tolist())
            with scope(self.LATEST):
                module(x / 10)  # whose update sees what the evaluations saw
            self.assertAlmostEqual(self.of(module, "fp8.fwd.scale")[0].item(), 448 / x.abs().max().item(), 3)

    def test_an_evaluation_before_the_first_step(self):
        x, recipe = on_device(64, 32), DelayedScaling()
        module = randomise(te.Linear(32, 32))
        codes = lambda t: t.to(torch.float8_e4m3fn).float()  # with scale 1
        want = codes(x) @ codes(module.weight).T + module.bias
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), te.autocast(recipe=recipe):
                y = module.eval()(x)
            near(self, y, want, 1e-5 if DEVICES == ["cpu"] else 1e-4, "the output")
        self.assertEqual(self.of(module, "fp8.fwd.scale").tolist(), [1, 1])
        self.assertEqual(self.of(module, "fp8.fwd.amax_history")[0].tolist(), [x.abs().max().item(), module.weight.abs().max().item()])
        # A teacher whose own autocasts all end without gradients gets its scales at the end of the student's.
        student = randomise(te.Linear(32, 32))
        with te.autocast(recipe=recipe):
            student(x).sum().backward()
        self.assertAlmostEqual(self.of(module, "fp8.fwd.scale")[0].item(), 448 / x.abs().max().item(), 3)

    def test_saturation_is_said_once(self):
        big = torch.full((16, 32), 1000.0, device=DEVICES[-1])
        big[:, 8:] = 1.0
        outputs = []
        for module, inputs in ((te.Linear(32, 32), (big,)), (te.TransformerLayer(32, 64, 4, attn_input_format="bshd"), (on_device(2, 8, 32),)),
                               (te.DotProductAttention(2, 16), [big.view(16, 1, 2, 16)] * 3)):
            with tempfile.TemporaryFile() as file:
                kept = os.dup(2)
                os.dup2(file.fileno(), 2)
                try:
                    for _ in range(3):
                        with torch.no_grad(), te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
                            module.eval()(*inputs)
                finally:
                    os.dup2(kept, 2)
                    os.close(kept)
                file.seek(0)
                outputs.append(file.read().decode())
        self.assertEqual([text.count("saturate") for text in outputs], [1, 0, 1], outputs)
        self.assertIn("25 % of its inputs saturate", outputs[0])
        self.assertIn("[32,32]", outputs[0])
        self.assertIn("attention", outputs[2])


# Two ranks whose inputs differ: what they print are the scales, forward and backward, and how many collectives a step took.
RANK = r"""
import sys, datetime, torch, torch.distributed as dist
import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling
rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
gpus = torch.cuda.device_count() >= ranks
device = f"cuda:{rank}" if gpus else "cpu"
if gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpus else "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=60))
pair, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(ranks)][rank]
count, reduce = 0, dist.all_reduce
def counted(*args, **kwargs):
    global count
    count += 1
    return reduce(*args, **kwargs)
dist.all_reduce = counted
for group, reduces in ((None, True), (pair, True), (alone, True), (None, False)):
    torch.manual_seed(1)
    a, b = (te.Linear(32, 32, bias=False, device=device) for _ in range(2))
    drops = te.TransformerLayer(32, 32, 2, device=device)  # which draws random numbers
    for step in range(2):
        before = count
        x = torch.full((16, 32), float(rank + 1), device=device)
        scope = te.autocast(recipe=DelayedScaling(amax_history_len=2, reduce_amax=reduces), amax_reduction_group=group)
        for _ in range(2 - rank):  # no update, so no collective, though what drops in training counts as training in C++
            with torch.no_grad(), scope:
                drops(x[None])
        with scope:
            y = a(x)
            y = b(y) if step == 0 or rank == 0 else y  # a rank may leave out a layer
        ((rank + 1) * y.sum()).backward()
        print(count - before, end=" ")
    state = dict(a._fp8_state()), dict(b._fp8_state())
    print(*(f"{s[n].tolist()[0]:.6g}" for s in state for n in ("fp8.fwd.scale", "fp8.bwd.scale")), sep=" ")
dist.destroy_process_group()
"""


class Ranks(unittest.TestCase):
    def test_scales_are_those_of_the_largest_amax_of_the_group(self):
        with tempfile.TemporaryDirectory() as folder:
            ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), "2", os.path.join(folder, "store")], stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE, text=True) for rank in range(2)]
            outputs = [rank.communicate(timeout=300) for rank in ranks]
        for rank, (_, errors) in zip(ranks, outputs):
            self.assertEqual(rank.returncode, 0, errors)
        world, pair, alone, off = zip(*([line.split() for line in out.splitlines()] for out, _ in outputs))
        for each in (world, pair):
            self.assertEqual(each[0], each[1])
            self.assertEqual(each[0][:3], ["2", "2", "224"], "two collectives a step; the input's scale is 448 / 2")
            self.assertEqual(each[0][5], "28672", "that of the last gradients is 57344 / 2")
        for each in (alone, off):
            self.assertEqual([rank[:3] for rank in each], [["0", "0", "448"], ["0", "0", "224"]])
            self.assertNotEqual(each[0], each[1])


if __name__ == "__main__":
    unittest.main()
