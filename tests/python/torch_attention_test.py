"""Tests FP8 attention (a recipe with fp8_dpa) of te_fl.pytorch: values, and scales in copies and checkpoints."""

import copy
import io
import os
import pickle
import sys
import unittest

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch_oracle as oracle  # noqa: E402
from torch_oracle import DEVICES, allowed, near_by_norm, randn, randomise  # noqa: E402

import te_fl.pytorch as te  # noqa: E402
from te_fl.common.recipe import DelayedScaling  # noqa: E402
from te_fl.pytorch.fp8 import extra_state  # noqa: E402

FP8 = DelayedScaling(amax_history_len=4, fp8_dpa=True)
HEADS, CHANNELS = 2, 16
KEY = "core_attention._extra_state"


class Core(torch.nn.Module):
    """Attention whose q, k and v are slices of one input; the call passes a mask if the module takes one."""

    def __init__(self, device, values=CHANNELS, softcap=0.0):
        super().__init__()
        self.core_attention = te.DotProductAttention(HEADS, (CHANNELS, values), softcap=softcap)
        self.sizes, self.mask = (CHANNELS, CHANNELS, values), None

    def forward(self, x):
        q, k, v = x.view(*x.shape[:2], HEADS, -1).split(self.sizes, -1)
        return self.core_attention(q, k, v, attn_mask_type=self.mask)


MODULES = {
    "DotProductAttention": Core,
    "MultiheadAttention": lambda device: te.MultiheadAttention(96, 4, attention_dropout=0, device=device),
    "TransformerLayer": lambda device: te.TransformerLayer(96, 64, 4, hidden_dropout=0, attention_dropout=0, device=device),
}


def step(module, device, seed):
    module.zero_grad()
    x = randn(8, 2, 96, seed=seed, device=device).requires_grad_()
    with te.autocast(recipe=FP8):
        y = module(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def trained(name, device):
    module = randomise(MODULES[name](device=device))
    for seed in range(3):
        step(module, device, seed)
    return module


def each(test):
    """Runs the test method for each module and device, as test(self, name, device, module)."""
    def run(self):
        for device in DEVICES:
            for name in MODULES:
                with self.subTest(module=name, device=device):
                    test(self, name, device, trained(name, device))
    return run


class State(unittest.TestCase):
    def same(self, got, want):
        self.assertEqual([torch.equal(a, b) for a, b in zip(got, want, strict=True)], [True] * len(want))

    @each
    def test_a_checkpoint_resumes_bit_for_bit(self, name, device, module):
        stream = io.BytesIO()
        torch.save(module.state_dict(), stream)
        want = [step(module, device, seed) for seed in (7, 8)]
        for ran in (False, True):
            stream.seek(0)
            state = torch.load(stream)
            other = MODULES[name](device=device)
            if ran:  # creates the module's C++ layer and its scales
                step(other, device, 9)
            other.load_state_dict(state)
            self.same(step(other, device, 7), want[0])
            self.same(step(other, device, 8), want[1])
        without = MODULES[name](device=device)
        without.load_state_dict({k: v for k, v in state.items() if not k.endswith(KEY)}, strict=False)
        self.assertFalse(torch.equal(step(without, device, 7)[1], want[0][1]), "the scales of attention make no difference")

    def test_older_checkpoints(self):
        """Strict loading accepts a state without attention's, and one that stores it under the name of Transformer Engine 1.6 and 1.7."""
        for device in DEVICES:
            module = trained("MultiheadAttention", device)
            state = module.state_dict()
            without = {k: v for k, v in state.items() if not k.endswith(KEY)}
            MODULES["MultiheadAttention"](device=device).load_state_dict(without)
            other = MODULES["MultiheadAttention"](device=device)
            other.load_state_dict({**without, "core_attention.fused_attention._extra_state": state[KEY]})
            self.same(step(other, device, 7), step(module, device, 7))

    @each
    def test_copies_have_it(self, name, device, module):
        pickled = copy.deepcopy(module)
        if name == "DotProductAttention":  # Core is a class of this file, which cannot be imported by name
            pickled.core_attention = pickle.loads(pickle.dumps(module.core_attention))
        else:
            pickled = pickle.loads(pickle.dumps(module))
        copied = copy.deepcopy(module)
        want = step(module, device, 7)
        for other in (copied, pickled):
            self.same(step(other, device, 7), want)

    def test_it_goes_from_the_whole_layer_to_its_parts(self):
        for device in DEVICES:
            whole = trained("TransformerLayer", device)
            before = whole.self_attention.core_attention.get_extra_state()
            self.assertGreater(before.numel(), 0)
            whole.self_attention.proj.register_forward_hook(lambda *a: None)  # a hook makes the layer run part by part from now on
            apart = MODULES["TransformerLayer"](device=device)
            apart.self_attention.proj.register_forward_hook(lambda *a: None)
            apart.load_state_dict(whole.state_dict())
            self.same(step(whole, device, 7), step(apart, device, 7))

    def test_calls_with_several_masks_have_one_state(self):
        for device in DEVICES:
            module = Core(device)
            for seed, mask in enumerate(("causal", "no_mask", "causal", "no_mask")):
                other = Core(device)
                other.load_state_dict(module.state_dict())
                module.mask = other.mask = mask
                self.same(step(other, device, seed), step(module, device, seed))

    def test_reset(self):
        for device in DEVICES:
            module = trained("DotProductAttention", device)
            module.core_attention.reset_fp8_meta_tensors()
            self.same(step(module, device, 7), step(Core(device), device, 7))

    def test_without_fp8_attention_there_is_none(self):
        module = Core("cpu")
        with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
            module(randn(8, 2, 96))
        self.assertEqual(module.core_attention.get_extra_state().numel(), 0)


def theirs(recipe, forward=9, backward=6, **places):
    """Makes attention's state as Transformer Engine saves it: arrays of scales, and histories with one row each."""
    state = {"recipe": recipe, "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": 3}}
    for direction, n in (("fwd", forward), ("bwd", backward)):
        scale = torch.ones(n)
        for place, value in places.get(direction, {}).items():
            scale[place] = value
        state[f"scale_{direction}"], state[f"amax_history_{direction}"] = scale, 448 / scale.repeat(4, 1)
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


class TransformerEngine(unittest.TestCase):
    """Tests Transformer Engine's slots: 2, 8 and 3 of the nine forward ones for qkv, s and o; 3, 5 and 0 of the six backward ones for do, dp and
    dqkv."""

    def test_its_scales_are_used(self):
        """A query that sees only one key yields that key's value, quantised with V's scale and then with the output's; the gradient likewise. With
        these scales no value to be rounded is midway between two FP8 codes."""
        def quantised(t, scale, form):
            return torch.from_numpy(oracle.round_to(t.cpu().double().numpy() * scale, form)) / scale
        for device in DEVICES:
            module = te.DotProductAttention(1, CHANNELS, attn_mask_type="no_mask", qkv_format="bshd")
            module.set_extra_state(theirs(FP8, fwd={2: 48.0, 8: 256.0, 3: 77.0}, bwd={3: 24.0, 5: 32.0, 0: 43.0}))
            q = randn(2, 1, 1, CHANNELS, device=device)
            v = randn(2, 1, 1, CHANNELS, seed=2, device=device).requires_grad_()
            with te.autocast(recipe=FP8):
                y = module(q, q, v)
            dy = randn(2, 1, CHANNELS, seed=3, device=device)
            y.backward(dy)
            want = quantised(quantised(v.detach(), 48.0, "e4m3"), 77.0, "e4m3").flatten(-2)
            torch.testing.assert_close(y.detach().cpu().double(), want, rtol=1e-5, atol=1e-6)
            want = quantised(quantised(dy, 24.0, "e5m2"), 43.0, "e5m2").view(v.shape)
            torch.testing.assert_close(v.grad.cpu().double(), want, rtol=1e-5, atol=1e-6)

    def test_its_scales_come_back(self):
        module = te.DotProductAttention(HEADS, CHANNELS)
        forward, backward = {2: 48.0, 8: 256.0, 3: 77.0}, {3: 5.0, 5: 6.0, 0: 7.0}
        module.set_extra_state(theirs(FP8, fwd=forward, bwd=backward))
        for turn in range(2):
            if turn:  # a call moves the loaded state into the C++ layer
                with torch.no_grad(), te.autocast(recipe=FP8):
                    module(*(randn(4, 1, HEADS, CHANNELS) for _ in range(3)))
            state = extra_state.read(module.get_extra_state(), "attention")
            self.assertEqual([state["scale_fwd"].shape, state["amax_history_bwd"].shape], [(9,), (4, 6)])
            self.assertEqual([state["scale_fwd"][p].item() for p in forward], list(forward.values()))
            self.assertEqual([state["scale_bwd"][p].item() for p in backward], list(backward.values()))

    def test_what_is_no_scale_of_fp8_attention(self):
        module = te.DotProductAttention(HEADS, CHANNELS)
        module.set_extra_state(theirs(DelayedScaling(amax_history_len=4)))  # the state may come from any FP8 recipe
        self.assertEqual(module.get_extra_state().numel(), 0)
        with self.assertWarnsRegex(UserWarning, "DotProductAttention: the scales of FP8 attention.*start anew"):
            module.set_extra_state(theirs(FP8, forward=3, backward=2))
        self.assertEqual(module.get_extra_state().numel(), 0)


class Values(unittest.TestCase):
    def test_near_high_precision(self):
        for device in DEVICES:
            for values, cap in ((CHANNELS, 0.0), (8, 0.0), (CHANNELS, 0.5)):
                with self.subTest(device=device, values=values, cap=cap):
                    module = Core(device, values, cap)
                    x = randn(12, 2, HEADS * (2 * CHANNELS + values), seed=5, device=device)
                    for _ in range(2):  # the scales of the first step are 1
                        own = x.clone().requires_grad_()
                        with te.autocast(recipe=FP8):
                            y = module(own)
                        y.square().sum().backward()
                    exact = x.double().requires_grad_()
                    q, k, v = (t.transpose(0, 1) for t in exact.view(12, 2, HEADS, -1).split(module.sizes, -1))
                    want = oracle.attention(q, k, v, allowed(12, 12, True), cap=cap).transpose(0, 1)
                    want.square().sum().backward()
                    near_by_norm(self, y, want, 0.08, "output")
                    near_by_norm(self, own.grad, exact.grad, 0.15, "gradient")
                    high = module(x)
                    self.assertGreater((y - high).abs().max().item(), 1e-3, "it is not FP8")


class BiasOfKeysTest(unittest.TestCase):
    """A bias with one row for all queries, against PyTorch's attention in FP64."""

    def test_shapes(self):
        torch.manual_seed(2)
        for shape in ((2, 1, 1, 6), (1, 4, 1, 6), (2, 4, 1, 6), (1, 1, 1, 6)):
            for layout in ("bshd", "sbhd"):
                q, k, v = (torch.randn(2, n, 4, 8) for n in (5, 6, 6))
                bias = torch.randn(shape, requires_grad=True)
                tensors = [t.transpose(0, 1).contiguous() if layout == "sbhd" else t for t in (q, k, v)]
                core = te.DotProductAttention(4, 8, qkv_format=layout, attention_dropout=0.0, attention_type="cross")
                out = core(*tensors, attn_mask_type="no_mask", core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
                wide = bias.detach().double().requires_grad_()
                want = torch.nn.functional.scaled_dot_product_attention(*(t.double().transpose(1, 2) for t in (q, k, v)), attn_mask=wide.expand(2, 4, 5, 6))
                want = want.transpose(1, 2).reshape(2, 5, 32)
                want = want.transpose(0, 1) if layout == "sbhd" else want
                grad = torch.randn_like(out)
                out.backward(grad)
                want.backward(grad.double())
                torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(bias.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    unittest.main()
