"""Tests copies, state_dicts, and moves to other devices and dtypes."""

import copy
import io
import pickle

import torch

from common import BF16, DELAYED, F32, MODULES, State, each, make_input, scope, step, trained
from torch_oracle import DEVICES, near, randomise
import te_fl
import te_fl.pytorch as te
from te_fl.common import recipe
from te_fl.common.recipe import Float8BlockScaling, Float8CurrentScaling

RECIPES = (None, DELAYED, Float8CurrentScaling(), Float8BlockScaling())
# Keys of Transformer Engine 2.20.2's state_dict.
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

    def test_copies_that_share_parts(self):
        """copy.copy() of a layer shares its submodules, and an attribute set on a shared submodule takes effect in both layers."""
        for device in DEVICES:
            layer = randomise(MODULES["TransformerLayer"](device=device))
            other, x = copy.copy(layer), make_input(device).detach()
            fresh = te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0, layernorm_epsilon=0.5, device=device)
            fresh.load_state_dict(layer.state_dict())
            self.assertTrue(torch.equal(layer(x), other(x)))
            for part in layer.modules():
                if hasattr(part, "eps"):
                    part.eps = 0.5
            for copied in (layer, other):
                self.assertTrue(torch.equal(copied(x), fresh(x)))

    @each(recipes=(None,))
    def test_replicas(self, name, device, _):
        """Replicas as torch.nn.DataParallel makes them, with tensors in place of parameters, compute with these tensors only."""
        module = randomise(MODULES[name](device=device))
        module(make_input(device))
        own = {n: (2 * p, p) for n, p in module.named_parameters()}
        made = {m: m._replicate_for_data_parallel() for m in module.modules()}
        for path, m in module.named_modules():
            for key, child in m._modules.items():
                made[m]._modules[key] = made.get(child)
            for key in m._parameters:
                if m._parameters[key] is None:
                    made[m]._parameters[key] = None
                else:
                    setattr(made[m], key, own[f"{path}.{key}".lstrip(".")][0])
        plain = copy.deepcopy(module)
        with torch.no_grad():
            for p in plain.parameters():
                p.mul_(2)
        if any(getattr(m, "_sites", ()) for m in module.modules()):
            with self.assertRaisesRegex(te_fl.errors.Unsupported, "DataParallel drops a replica"), scope(DELAYED):
                made[module](make_input(device))
        x, z = make_input(device), make_input(device)
        y, want = made[module](x), plain(z)
        near(self, y, want, 1e-5, "output")
        y.square().sum().backward()
        want.square().sum().backward()
        near(self, x.grad, z.grad, 1e-5, "the input's gradient")
        for (n, (_, p)), q in zip(own.items(), plain.parameters()):
            near(self, p.grad, 2 * q.grad, 1e-5, n, 1e-2)

    @each(recipes=RECIPES)
    def test_pickle(self, name, device, recipe):
        module = trained(name, device, recipe)
        other = pickle.loads(pickle.dumps(module))
        self.same(step(other, device, recipe, 7), step(module, device, recipe, 7))

    @each(names=[n for n in MODULES if "Norm" not in n or "Layer" in n and n != "LayerNorm"])
    def test_another_format_after_a_copy(self, name, device, _):
        """Gradient scales belong to the format of the recipe that set them, and every kind of copy preserves that: the copy's next steps equal the
        module's bit for bit, for all orders of formats, and after a forward with another recipe and without a backward."""
        formats = {kind: recipe.DelayedScaling(fp8_format=kind, amax_history_len=4) for kind in (recipe.Format.HYBRID, recipe.Format.E4M3)}

        def loaded(module):
            other = MODULES[name](device=device)
            other.load_state_dict(module.state_dict())
            return other
        ways = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "to": lambda m: copy.deepcopy(m).to(BF16).to(F32), "load": loaded,
                "twice": lambda m: copy.deepcopy(loaded(m))}
        for before in formats.values():
            for after in formats.values():
                for between in (None, *formats.values()):
                    module = trained(name, device, before)
                    with torch.no_grad():
                        for p in module.parameters():
                            p.copy_(p.to(BF16))
                        if between is not None:
                            with scope(between):
                                module(make_input(device))
                    copies = {way: make(module) for way, make in ways.items()}
                    want = [step(module, device, after, seed) for seed in (7, 8)]
                    for way, other in copies.items():
                        for seed, result in zip((7, 8), want):
                            with self.subTest(way, before=before.fp8_format.name, after=after.fp8_format.name, between=between is not None, step=seed):
                                self.same(step(other, device, after, seed), result)

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
            self.assertTrue(torch.equal(other(make_input()), module(make_input())))


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
            step(other, device, recipe)  # creates the C++ layer and its scales
            result = other.load_state_dict(torch.load(stream, weights_only=weights_only), strict=True)
            self.assertEqual((result.missing_keys, result.unexpected_keys), ([], []))
            reference = copy.deepcopy(module)
            for seed in (7, 8):
                self.same(step(other, device, recipe, seed), step(reference, device, recipe, seed))

    @each(recipes=(DELAYED,))
    def test_a_new_module_runs_from_a_state(self, name, device, recipe):
        module = trained(name, device, recipe)
        other = MODULES[name](device=device)
        other.load_state_dict(module.state_dict())
        with torch.no_grad(), scope(recipe):
            self.same([other.eval()(make_input(device))], [module.eval()(make_input(device))])

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

    @each()
    def test_of_plain_weights(self, name, device, _):
        """A checkpoint without extra state loads, strictly too, if there is no FP8 state yet; other missing keys are reported."""
        module = trained(name, device)
        plain = {k: v for k, v in module.state_dict().items() if not k.endswith("_extra_state")}
        for strict in (True, False):
            other = MODULES[name](device=device)
            self.assertEqual(other.load_state_dict(plain, strict=strict), ([], []))
            self.same(step(other, device), step(module, device))
        last = next(reversed(plain))
        with self.assertRaisesRegex(RuntimeError, f"Missing key\\(s\\) in state_dict: \"{last}\"\\. *$"):
            MODULES[name](device=device).load_state_dict({k: v for k, v in plain.items() if k != last})

    @each([name for name in MODULES if "Norm" not in name or "Linear" in name or "MLP" in name], recipes=(DELAYED,))
    def test_of_plain_weights_into_scales(self, name, device, recipe):
        """A module with scales keeps them, and a strict load reports that the checkpoint has none."""
        module = trained(name, device, recipe)
        plain = {k: v for k, v in module.state_dict().items() if not k.endswith("_extra_state")}
        with self.assertRaisesRegex(RuntimeError, "Missing key.*_extra_state"):
            module.load_state_dict(plain)
        missing = module.load_state_dict(plain, strict=False).missing_keys
        self.assertTrue(missing and all(k.endswith("_extra_state") for k in missing), missing)

    @each()
    def test_assign(self, name, device, _):
        module, other = trained(name, device), MODULES[name](device=device)
        step(other, device)
        other.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
        self.same(step(other, device), step(module, device))

    @each(recipes=(DELAYED,))
    def test_training_goes_on_after_a_state_was_taken(self, name, device, recipe):
        """Calling state_dict() changes nothing, and the fused layer keeps its scales."""
        module, other = trained(name, device, recipe), trained(name, device, recipe)
        module.state_dict()
        self.same(step(module, device, recipe, 7), step(other, device, recipe, 7))

    @each(["TransformerLayer", "MultiheadAttention"], recipes=(DELAYED,))
    def test_whole_and_parts_have_one_state(self, name, device, recipe):
        """A state from the fused layer loads into a layer that runs part by part, and vice versa."""
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
        """Once a part has a hook, the layer runs part by part, with the scales that the fused layer has collected."""
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
