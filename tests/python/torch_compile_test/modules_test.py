"""Tests modules in graphs of torch.compile."""

import copy
import gc
import os
import sys

import torch
import torch._dynamo
import torch._inductor.config
import torch.utils.checkpoint

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "examples", "pytorch"))  # to import quickstart
from common import Compiled, DELAYED, DEVICE, call, copy_state
from torch_cases import BF16, MODULES, RECIPES, make_input, scope
from torch_oracle import near, randn, randomise
import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling, Float8CurrentScaling
from te_fl.errors import FailedPrecondition
from te_fl.pytorch.fp8 import quantization


class Sink(torch.nn.Module):
    """Attention with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.core = te.DotProductAttention(4, 8, attention_dropout=0, qkv_format="sbhd", attn_mask_type="causal", softmax_type="learnable")

    def forward(self, x):
        q = x.view(*x.shape[:-1], 4, 8)
        return self.core(q, q * 2, q + 1)


class Modules(Compiled):
    def test_each(self):
        for backend, recipes in (("eager", (DELAYED,)), ("aot_eager", (None, DELAYED))):
            for name, make in MODULES.items():
                for recipe in recipes:
                    torch._dynamo.reset()
                    with self.subTest(module=name, backend=backend, recipe=type(recipe).__name__):
                        self.both(lambda: make(device=DEVICE), call, recipe, backend=backend)

    def test_gpt(self):
        from quickstart import Gpt
        text = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1)).to(DEVICE)
        for recipe in RECIPES:
            with self.subTest(recipe=type(recipe).__name__):
                self.both(lambda: Gpt(2, 32, 4, 16, torch.float32, torch.device(DEVICE)), call, recipe, 3, give=lambda d, seed: (text + seed) % 256)
        self.assertEqual(self.graphs(), 1, "a scope around a graph makes no other")

    def test_options(self):
        """Tests constructor arguments that change the called ops or the returned values."""
        for make, run in (
                (lambda: te.Linear(32, 24, bias=False, device=DEVICE), call),
                (lambda: te.Linear(32, 32, return_bias=True, device=DEVICE), lambda m, x: sum(m(x))),
                (lambda: te.LayerNormLinear(32, 24, return_layernorm_output=True, normalization="RMSNorm", device=DEVICE),
                 lambda m, x: torch.cat(m(x), -1)),
                (lambda: te.LayerNormMLP(32, 64, activation="swiglu", return_layernorm_output=True, device=DEVICE), lambda m, x: sum(m(x))),
                (lambda: te.LayerNorm((2, 32), device=DEVICE), call),
                (lambda: te.MultiheadAttention(32, 4, attention_dropout=0, qk_norm_type="L2Normalization", device=DEVICE), call),
                (lambda: te.MultiheadAttention(32, 4, attention_dropout=0, qk_norm_type="RMSNorm", fuse_qkv_params=True, device=DEVICE), call),
                (lambda: te.MultiheadAttention(32, 4, attention_dropout=0, attention_type="cross", device=DEVICE),
                 lambda m, x: m(x, encoder_output=x * 2)),
                (lambda: te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0, layer_type="decoder", device=DEVICE),
                 lambda m, x: m(x, encoder_output=x * 2)),
                (lambda: te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0, fuse_qkv_params=True, num_gqa_groups=2,
                                             output_layernorm=True, device=DEVICE), call)):
            torch._dynamo.reset()
            self.both(make, run, DELAYED)

    def test_parameters_in_other_states(self):
        def frozen():
            module = te.LayerNormLinear(32, 32, device=DEVICE)
            module.weight.requires_grad_(False)
            return module

        def half_frozen():
            module = te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0, device=DEVICE)
            module.self_attention.requires_grad_(False)
            return module

        for make in (frozen, half_frozen, lambda: te.Linear(32, 32, device=DEVICE).requires_grad_(False),
                     lambda: te.LayerNormMLP(32, 64, params_dtype=BF16, device=DEVICE)):
            for wanted in (True, False):
                torch._dynamo.reset()
                if wanted or any(p.requires_grad for p in make().parameters()):
                    self.both(make, call, DELAYED, give=lambda d, seed: make_input(d, seed).detach().requires_grad_(wanted))

    def test_parameters_that_are_frozen_and_thawed(self):
        """Freezes and thaws parameters after the graph was compiled: first all are frozen, then only one is trained."""
        from torch.nn.utils import parametrize

        class Doubled(torch.nn.Module):
            def forward(self, w):
                return 2 * w

        def step(called, x, wanted):
            x = x.detach().requires_grad_(wanted)
            y = called(x)
            if y.requires_grad:
                y.square().sum().backward()
            return x.grad

        makes = {**{name: (lambda make=MODULES[name]: make(device=DEVICE)) for name in ("Linear", "TransformerLayer")},
                 "a sink": lambda: Sink().to(DEVICE),
                 "operations": lambda: te.ops.Sequential(te.ops.LayerNorm(32, device=DEVICE), te.ops.Linear(32, 32, device=DEVICE)),
                 "a parametrised one": lambda: parametrize.register_parametrization(te.Linear(32, 32, device=DEVICE), "weight", Doubled())}
        for name, make in makes.items():
            for backend in {"Linear": ("eager", "aot_eager"), "TransformerLayer": ("aot_eager",)}.get(name, ("eager",)):
                with self.subTest(module=name, backend=backend):
                    torch._dynamo.reset()
                    module = randomise(make())
                    other, parameters = copy.deepcopy(module), list(module.parameters())
                    called, x = torch.compile(module, backend=backend), make_input(DEVICE)
                    none, every = [False] * len(parameters), [True] * len(parameters)
                    for trained, wanted in ((none, True), (every, True), ([True, *none[1:]], True), (none, False)):
                        for m in (module, other):
                            m.zero_grad()
                            for p, its in zip(m.parameters(), trained):
                                p.requires_grad_(its)
                        got, want = step(called, x, wanted), step(other, x, wanted)
                        for g, w in zip((got, *(p.grad for p in parameters)), (want, *(p.grad for p in other.parameters()))):
                            self.assertEqual(g is None, w is None, trained)
                            if w is not None:
                                near(self, g, w, 1e-5, f"gradient {trained}", 1e-4)

    def test_parametrisations(self):
        from torch.nn.utils import parametrize

        class Doubled(torch.nn.Module):
            def forward(self, w):
                return 2 * w

        found = []
        for wrap in (lambda m: m, lambda m: torch.compile(m, backend="aot_eager", fullgraph=True)):
            module = randomise(te.Linear(32, 32, device=DEVICE))
            called = wrap(parametrize.register_parametrization(module, "weight", Doubled()))
            x = make_input(DEVICE)
            with scope(DELAYED):
                called(x).square().sum().backward()
            module.eval()
            with torch.no_grad(), scope(DELAYED):
                for _ in range(3):
                    y = called(x)
                    module.parametrizations.weight.original.mul_(2)
            found.append((y, x.grad, module.parametrizations.weight.original.grad))
        for want, got in zip(*found):
            self.close(got, want, "value")
        torch._dynamo.reset()
        base = parametrize.register_parametrization(te.Linear(32, 32, device=DEVICE), "weight", Doubled())
        self.close(torch.compile(copy.deepcopy(base), backend="aot_eager")(x), base(x), "output of a copy")
        other, module = te.Linear.__new__(te.Linear), te.Linear(32, 32, device=DEVICE)
        other.__dict__ = copy.deepcopy(module.__dict__)
        with self.assertRaisesRegex(FailedPrecondition, "copied"):
            torch._dynamo.reset()
            torch.compile(other, backend="aot_eager")(x)

    def test_mixed_precision(self):
        def run(module, x):
            with torch.autocast(x.device.type, dtype=BF16):
                return module(x)
        for name in MODULES:
            torch._dynamo.reset()
            with self.subTest(module=name):
                self.both(lambda: MODULES[name](device=DEVICE), run)

    def test_hooks_on_a_part(self):
        """With a hook on a part the layer runs part by part, with the FP8 state of the fused layer."""
        def make():
            module = te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0, device=DEVICE)
            module.self_attention.proj.register_forward_hook(lambda m, i, o: o * 2)
            return module
        self.both(make, call, DELAYED)

    def test_hooks_that_come_later(self):
        base, found = randomise(MODULES["TransformerLayer"](device=DEVICE)), []
        for compiled in (False, True):
            module = copy.deepcopy(base)
            called = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
            for step in range(3):
                if step == 1:
                    handle = module.layernorm_mlp.register_forward_hook(lambda m, i, o: o * 2)
                    if compiled:
                        try:
                            called(make_input(DEVICE))  # newer PyTorch detects the hook and recompiles
                        except FailedPrecondition as error:
                            self.assertIn("torch._dynamo.reset", str(error))
                        torch._dynamo.reset()  # the graph of the autocast was traced without the hook too
                if step == 2:
                    handle.remove()
                    torch._dynamo.reset()
                with scope(DELAYED):
                    y = called(make_input(DEVICE))
                y.square().sum().backward()
            found.append({"output": y, **copy_state(module)})
        for name, want in found[0].items():
            self.close(found[1][name], want, name)


class Attention(Compiled):
    def attend(self, run, **arguments):
        def make():
            return te.DotProductAttention(4, 8, qkv_format="bshd", **{"attn_mask_type": "no_mask", **arguments}).to(DEVICE)
        torch._dynamo.reset()
        self.both(make, run, give=lambda d, seed: randn(2, 6, 4, 8, seed=seed, device=d).requires_grad_())

    def test_masks(self):
        hidden = randn(2, 1, 6, 6, seed=4, device=DEVICE) > 1
        padding = torch.zeros(2, 1, 1, 6, dtype=torch.bool, device=DEVICE)
        padding[0, ..., 4:] = True
        self.attend(lambda m, q: m(q, q * 2, q + 1))
        self.attend(lambda m, q: m(q, q * 2, q + 1), attn_mask_type="causal", window_size=(2, 0))
        self.attend(lambda m, q: m(q, q[:, :4], q[:, 2:], window_size=(2, 1)))
        self.attend(lambda m, q: m(q, q, q, attention_mask=hidden, attn_mask_type="arbitrary"))
        self.attend(lambda m, q: m(q, q, q, attention_mask=hidden | hidden.mT, attn_mask_type="arbitrary"), softmax_type="learnable")
        self.attend(lambda m, q: m(q, q, q, attention_mask=padding)[0, :4], attn_mask_type="padding_causal")
        self.attend(lambda m, q: m(q, q, q, core_attention_bias_type="alibi"), attn_mask_type="causal")

    def test_softcap(self):
        self.attend(lambda m, q: m(q, q * 2, q + 1), softcap=0.3)
        self.attend(lambda m, q: m(q, q * 2, q + 1, softcap=0.3))
        self.both(lambda: te.TransformerLayer(32, 48, 4, hidden_dropout=0, attention_dropout=0, softcap=0.1, device=DEVICE), call)

    def test_softcaps_by_call(self):
        module, q = te.DotProductAttention(4, 8, qkv_format="bshd").to(DEVICE), randn(2, 6, 4, 8, device=DEVICE)
        called = torch.compile(lambda q, cap: module(q, q, q, softcap=cap), backend="aot_eager", fullgraph=True)
        for cap in (0.3, 0.7, 0.0, 1.5):
            self.close(called(q, cap), module(q, q, q, softcap=cap), f"output under {cap}")

    def test_fp8_attention_and_values_of_another_size(self):
        def run(module, q):
            return module(q, q * 2, (q + 1)[..., :6])
        self.both(lambda: te.DotProductAttention(4, (8, 6), attn_mask_type="causal", qkv_format="bshd").to(DEVICE), run,
                  give=lambda d, seed: randn(2, 6, 4, 8, seed=seed, device=d).requires_grad_())
        self.both(lambda: te.MultiheadAttention(32, 4, attention_dropout=0, device=DEVICE), call, DelayedScaling(amax_history_len=4, fp8_dpa=True),
                  steps=3)

    def test_a_padding_mask_with_holes(self):
        module = te.DotProductAttention(4, 8, attn_mask_type="padding", qkv_format="bshd").to(DEVICE)
        mask = torch.zeros(2, 1, 1, 6, dtype=torch.bool, device=DEVICE)
        q = randn(2, 6, 4, 8, device=DEVICE)
        called = torch.compile(lambda q: module(q, q, q, attention_mask=mask), backend="aot_eager", fullgraph=True)
        called(q)
        mask[0, ..., 0] = True
        with self.assertRaisesRegex(ValueError, "not at the end"):
            called(q)

    def test_sequences_of_several_lengths(self):
        at = torch.tensor([0, 2, 6], dtype=torch.int32, device=DEVICE)

        def run(module, q):
            return module(q, q, q * 2, qkv_format="thd", cu_seqlens_q=at, cu_seqlens_kv=at, max_seqlen_q=4, max_seqlen_kv=4)
        self.both(lambda: te.DotProductAttention(4, 8, attn_mask_type="padding_causal").to(DEVICE), run,
                  give=lambda d, seed: randn(6, 4, 8, seed=seed, device=d).requires_grad_())

    def test_gradient_of_a_bias(self):
        bias, q = randn(1, 4, 6, 6, seed=3, device=DEVICE), randn(2, 6, 4, 8, device=DEVICE)

        def run(module, operands):
            return module(q, q, q, core_attention_bias_type="post_scale_bias", core_attention_bias=operands * 2)
        self.both(lambda: te.DotProductAttention(4, 8, attn_mask_type="no_mask", qkv_format="bshd").to(DEVICE), run,
                  give=lambda d, seed: (bias * seed).requires_grad_())

    def test_angles(self):
        angles = te.RotaryPositionEmbedding(8)(8).to(DEVICE)
        for name in ("MultiheadAttention", "TransformerLayer"):
            self.both(lambda: MODULES[name](device=DEVICE), lambda m, x: m(x, rotary_pos_emb=angles), DELAYED)


class Scopes(Compiled):
    """Tests FP8 scopes that begin inside the compiled function."""

    def test_inside(self):
        def run(recipe):
            def inside(module, x):
                with te.autocast(recipe=recipe):
                    y = torch.relu(module(torch.relu(module(x))))
                return y * 2
            return inside
        for backend in ("eager", "aot_eager"):
            for recipe in RECIPES[1:]:
                torch._dynamo.reset()
                with self.subTest(recipe=type(recipe).__name__, backend=backend):
                    self.both(lambda: te.LayerNormMLP(32, 64, device=DEVICE), run(recipe), steps=3, backend=backend)

    def test_nested(self):
        def run(module, x):
            with te.autocast(recipe=DelayedScaling(amax_history_len=3)):
                x = module(x)
                with te.autocast(enabled=False):
                    x = module(x)
                with te.autocast(recipe=DelayedScaling(margin=1, amax_history_len=3)):
                    x = module(x)
                x = module(x)
            with te.autocast():
                return module(x)
        for outer in (None, DELAYED):
            with self.subTest(outer=outer):
                self.both(lambda: te.Linear(32, 32, device=DEVICE), run, outer, steps=3)

    def test_decorator(self):
        @te.autocast(recipe=Float8CurrentScaling())
        def run(module, x):
            return module(x)
        self.both(lambda: te.Linear(32, 32, device=DEVICE), lambda m, x: run(m, x), fullgraph=False)

    def test_a_break_inside(self):
        def run(module, x):
            with te.autocast(recipe=DELAYED):
                x = module(x)
                torch._dynamo.graph_break()
                return module(x)
        self.both(lambda: te.Linear(32, 32, device=DEVICE), run, fullgraph=False, steps=3)

    def test_what_breaks_a_graph(self):
        made = te.autocast(recipe=DELAYED)

        def outside(module, x):
            with made:
                return module(x)

        def of_dataclass(module, x):
            with te.autocast(recipe=Float8CurrentScaling()):
                return module(x)
        for run in (outside, of_dataclass):
            module = te.Linear(32, 32, device=DEVICE)
            with self.assertRaises(torch._dynamo.exc.Unsupported):
                torch.compile(run, backend="aot_eager", fullgraph=True)(module, make_input(DEVICE))
            torch._dynamo.reset()
            self.both(lambda: te.Linear(32, 32, device=DEVICE), run, fullgraph=False)

    def test_an_exception_ends_them(self):
        def run(module, x):
            with te.autocast(recipe=DELAYED):
                with te.autocast(recipe=DelayedScaling()):
                    return module(x)
        module = randomise(te.Linear(32, 32, device=DEVICE))
        for backend in ("eager", "aot_eager"):
            with self.subTest(backend=backend):
                called = torch.compile(run, backend=backend, fullgraph=True)
                with self.assertRaisesRegex(Exception, "24"):
                    called(module, randn(4, 24, device=DEVICE))
                gc.collect()
                self.assertFalse(quantization._state.scopes)
                called(module, randn(4, 32, device=DEVICE))

    def test_refused_recipes(self):
        from te_fl.common.recipe import MXFP8BlockScaling
        recipe = MXFP8BlockScaling(fp8_dpa=True)

        def run(module, x):
            with te.autocast(recipe=recipe):
                return module(x)
        with self.assertRaisesRegex(Exception, "MXFP8BlockScaling"):
            torch.compile(run, backend="aot_eager", fullgraph=False)(te.Linear(32, 32, device=DEVICE), make_input(DEVICE))
