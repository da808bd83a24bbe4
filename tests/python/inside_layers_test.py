"""Tests NVIDIA's MultiheadAttention and TransformerLayer on te-fl: against te_fl.pytorch's modules with the same state_dict, against PyTorch in FP64,
token by token over KV caches against whole sequences, and under FP8 recipes against the same module without FP8."""

import unittest
from collections import OrderedDict

import inside_package  # noqa: F401
import torch

import te_fl.pytorch as fl
import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch.attention import InferenceParams
from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as dpa
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding

HIDDEN, HEADS = 32, 4


def used_backend():
    return "fused" if dpa._attention_backends["use_fused_attention"] else "unfused"


def wide(w):
    """Scales weights up, so that the layer's contribution is not small compared to the residual."""
    return torch.nn.init.normal_(w, std=0.2)


class Case(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(11)
        dpa._attention_backends["backend_selection_requires_update"] = True

    def near(self, got, want, tolerance, what=""):
        self.assertEqual(tuple(got.shape), tuple(want.shape), what)
        error = (got.double() - want.double()).norm().item()
        self.assertLessEqual(error, tolerance * max(want.double().norm().item(), 1e-3), what)


class BesideTeFl(Case):
    """Modules of both packages have the same state_dict, load each other's, and compute the same numbers."""

    def check(self, kind, inputs, call, **options):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            with self.subTest(kind=kind, dtype=dtype, **{k: str(v) for k, v in options.items()}):
                self.check_dtype(kind, [x.to(dtype) if x.is_floating_point() else x for x in inputs], call, dtype, tolerance, options)

    def check_dtype(self, kind, inputs, call, dtype, tolerance, options):
        sizes = (HIDDEN, HEADS) if kind == "MultiheadAttention" else (HIDDEN, 2 * HIDDEN, HEADS)
        settings = dict(attention_dropout=0.0, params_dtype=dtype, init_method=wide, output_layer_init_method=wide, **options)
        if kind == "TransformerLayer":
            settings["hidden_dropout"] = 0.0
        modules = [getattr(package, kind)(*sizes, device=device, **settings) for package, device in ((te, "cuda"), (fl, "cpu"))]
        with torch.no_grad():
            for p in modules[0].parameters():
                p.add_(torch.randn(p.shape).to(dtype) * 0.1)
        modules[1].load_state_dict(modules[0].state_dict())
        modules[0].load_state_dict(modules[1].state_dict())
        results = []
        for module in modules:
            tokens = [x.clone().requires_grad_() for x in inputs]
            out = call(module, *tokens)
            out = out[0] if isinstance(out, tuple) else out
            out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype))
            results.append((out, {**{f"input {i}": x.grad for i, x in enumerate(tokens)}, **{n: p.grad for n, p in module.named_parameters()}}))
        (ours, our_grads), (want, want_grads) = results
        self.near(ours, want, tolerance, "result")
        self.assertEqual(our_grads.keys(), want_grads.keys())
        largest = max(g.double().norm().item() for g in want_grads.values())
        for name, expected in want_grads.items():
            # The gradient of a key's bias is zero in exact arithmetic; what remains are the rounding errors of the sum.
            error = (our_grads[name].double() - expected.double()).norm().item()
            self.assertLessEqual(error, tolerance * max(expected.double().norm().item(), 0.05 * largest), name)

    def test_multihead_attention(self):
        x, other = torch.randn(9, 2, HIDDEN), torch.randn(7, 2, HIDDEN)
        causal = lambda m, x: m(x, attn_mask_type="causal")  # noqa: E731
        for options in ({}, {"num_gqa_groups": 2}, {"normalization": "RMSNorm", "input_layernorm": True}, {"qkv_weight_interleaved": False},
                        {"fuse_qkv_params": True}, {"bias": False}, {"window_size": (3, 0)}, {"softmax_type": "off-by-one"}):
            self.check("MultiheadAttention", [x], causal, **options)
        self.check("MultiheadAttention", [x, other], lambda m, x, e: m(x, encoder_output=e, attn_mask_type="no_mask"), attention_type="cross")
        padded = (torch.arange(9) >= torch.tensor([9, 5]).view(2, 1)).view(2, 1, 1, 9)
        self.check("MultiheadAttention", [x], lambda m, x: m(x, attention_mask=padded, attn_mask_type="padding"))
        freqs = RotaryPositionEmbedding(HIDDEN // HEADS)(9)
        self.check("MultiheadAttention", [x], lambda m, x: m(x, rotary_pos_emb=freqs, attn_mask_type="causal"))
        self.check("MultiheadAttention", [x.transpose(0, 1)], causal, qkv_format="bshd")

    def test_transformer_layer(self):
        x, other = torch.randn(9, 2, HIDDEN), torch.randn(7, 2, HIDDEN)
        for options in ({}, {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}, {"parallel_attention_mlp": True},
                        {"output_layernorm": True}, {"zero_centered_gamma": True, "num_gqa_groups": 2},
                        {"apply_residual_connection_post_layernorm": True}):
            self.check("TransformerLayer", [x], lambda m, x: m(x), **options)
        self.check("TransformerLayer", [x, other], lambda m, x, e: m(x, encoder_output=e, enc_dec_attn_mask_type="no_mask"), layer_type="decoder")

    def test_sequences_one_behind_the_other(self):
        x, cu = torch.randn(12, HIDDEN), torch.tensor([0, 5, 5, 12], dtype=torch.int32)
        call = lambda m, x: m(x, attn_mask_type="padding_causal", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=7, max_seqlen_kv=7)  # noqa: E731
        self.check_dtype("MultiheadAttention", [x.bfloat16()], call, torch.bfloat16, 2e-2, {"qkv_format": "thd"})
        self.assertEqual(used_backend(), "fused")


class AgainstFp64(Case):
    def test_a_layer(self):
        """Compares a causal pre-LayerNorm layer with GELU with the same layer in plain PyTorch."""
        layer = te.TransformerLayer(HIDDEN, 2 * HIDDEN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16,
                                    attn_input_format="bshd", init_method=wide, output_layer_init_method=wide, device="cuda")
        x = torch.randn(2, 9, HIDDEN).bfloat16().requires_grad_()
        grad = torch.randn(2, 9, HIDDEN).bfloat16()
        out = layer(x)
        self.assertEqual(used_backend(), "fused")
        out.backward(grad)
        p = {n: t.detach().double().requires_grad_() for n, t in layer.named_parameters()}
        z = x.detach().double().requires_grad_()
        norm, linear = torch.nn.functional.layer_norm, torch.nn.functional.linear
        first, second = "self_attention.layernorm_qkv", "layernorm_mlp"
        a = norm(z, (HIDDEN,), p[f"{first}.layer_norm_weight"], p[f"{first}.layer_norm_bias"])
        q, k, v = (linear(a, p[f"{first}.{of}_weight"], p[f"{first}.{of}_bias"]).view(2, 9, HEADS, -1).transpose(1, 2)
                   for of in ("query", "key", "value"))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 9, HIDDEN)
        h = z + linear(o, p["self_attention.proj.weight"], p["self_attention.proj.bias"])
        b = norm(h, (HIDDEN,), p[f"{second}.layer_norm_weight"], p[f"{second}.layer_norm_bias"])
        b = torch.nn.functional.gelu(linear(b, p[f"{second}.fc1_weight"], p[f"{second}.fc1_bias"]), approximate="tanh")
        want = h + linear(b, p[f"{second}.fc2_weight"], p[f"{second}.fc2_bias"])
        want.backward(grad.double())
        self.near(out, want, 1e-2)
        self.near(x.grad, z.grad, 2e-2)
        for name, parameter in layer.named_parameters():
            if not name.endswith("key_bias"):
                self.near(parameter.grad, p[name].grad, 2.5e-2, name)


class Recipes(Case):
    def norms(self, made, layer, x, grad):
        x = x.clone().requires_grad_()
        layer.zero_grad()
        with te.autocast(enabled=made is not None, recipe=made):
            out = layer(x)
        out.backward(grad)
        return out.detach(), x.grad, layer.self_attention.proj.weight.grad.clone()

    def test_recipes(self):
        x, grad = torch.randn(32, 2, 128).bfloat16(), torch.randn(32, 2, 128).bfloat16()
        for made, backend in ((recipe.DelayedScaling(), 1), (recipe.Float8CurrentScaling(), 1), (recipe.Float8BlockScaling(), 1),
                              (recipe.DelayedScaling(fp8_dpa=True), 2), (recipe.DelayedScaling(fp8_dpa=True, fp8_mha=True), 2)):
            with self.subTest(recipe=made):
                dpa._attention_backends["backend_selection_requires_update"] = True
                layer = te.TransformerLayer(128, 256, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, device="cuda",
                                            init_method=lambda w: torch.nn.init.normal_(w, std=0.1),
                                            output_layer_init_method=lambda w: torch.nn.init.normal_(w, std=0.1))
                for _ in range(3):  # the first scales of delayed scaling are 1
                    got = self.norms(made, layer, x, grad)
                self.assertTrue(dpa._attention_backends["use_fused_attention"])
                self.assertEqual(dpa._attention_backends["fused_attention_backend"], backend)
                for ours, want in zip(got, self.norms(None, layer, x, grad)):
                    self.near(ours, want, 0.15)
                    self.assertFalse(torch.equal(ours, want))

    def test_fp8_attention(self):
        """Compares the errors of NVIDIA's and of te_fl.pytorch's FP8 attention against FP64: the former is at most 1.05 times the latter."""
        made = {te: recipe.DelayedScaling(fp8_dpa=True, amax_history_len=4), fl: fl.DelayedScaling(fp8_dpa=True, amax_history_len=4)}
        errors = {}
        for package in (te, fl):
            torch.manual_seed(2)
            module = package.DotProductAttention(HEADS, 32, attention_dropout=0.0, qkv_format="bshd", attn_mask_type="causal")
            for _ in range(3):
                q, k, v = (torch.randn(2, 32, HEADS, 32).bfloat16().requires_grad_() for _ in range(3))
                grad = torch.randn(2, 32, HEADS, 32).bfloat16()
                with package.autocast(enabled=True, recipe=made[package]):
                    out = module(q, k, v).view(grad.shape)
                out.backward(grad)
            exact = [x.detach().double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
            want = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True)
            want.backward(grad.double().transpose(1, 2))
            errors[package] = [((got.double() - expected.transpose(1, 2)).norm() / expected.norm()).item()
                               for got, expected in zip((out, q.grad, k.grad, v.grad), (want, *(x.grad for x in exact)))]
        for ours, theirs in zip(errors[te], errors[fl]):
            self.assertLess(ours, 1.05 * theirs)
            self.assertGreater(ours, 1e-3)  # the error is large enough to prove that FP8 was used


class Caches(Case):
    """Token-by-token generation over a cache gives the results of the whole sequence at once and of te_fl.pytorch's module over its own cache."""

    def run_steps(self, paged, form, dtype, rope):
        options = dict(num_gqa_groups=2, attention_dropout=0.0, params_dtype=dtype, layer_number=1, device="cuda", init_method=wide,
                       output_layer_init_method=wide)
        stepwise = te.MultiheadAttention(HIDDEN, HEADS, qkv_format=form, **options).eval()
        whole = te.MultiheadAttention(HIDDEN, HEADS, qkv_format="bshd", **options).eval()
        whole.load_state_dict(stepwise.state_dict())
        ours = fl.MultiheadAttention(HIDDEN, HEADS, qkv_format=form, **{**options, "device": "cpu"}).eval()
        ours.load_state_dict(stepwise.state_dict())
        freqs = RotaryPositionEmbedding(HIDDEN // HEADS)(32) if rope else None
        x = torch.randn(2, 9, HIDDEN).to(dtype)
        want = whole(x, attn_mask_type="causal", rotary_pos_emb=freqs)
        pages = dict(page_size=4, total_num_pages=16) if paged else {}
        cache, own = (made(2, 32, num_heads_kv=2, head_dim_k=HIDDEN // HEADS, dtype=dtype, is_paged=paged, qkv_format=form, max_ctx_len=5, **pages)
                      for made in (InferenceParams, fl.InferenceParams))
        self.assertEqual(repr(own), repr(cache))
        cache.allocate_memory(1)
        done, backends = [0, 0], set()
        for steps in ([5, 3], [1, 1], [1, 1], [1, 1]):
            for each in (cache, own):
                each.pre_step(OrderedDict(enumerate(steps)))
            for name in ("cu_seqlens_q", "cu_seqlens_kv", "pre_step_seqlens", "batch_size", "sequences", "sequences_pre_step"):
                theirs = getattr(cache, name)
                same = torch.equal(theirs, getattr(own, name)) if isinstance(theirs, torch.Tensor) else theirs == getattr(own, name)
                self.assertTrue(same, name)
            parts = [x[b, done[b]:done[b] + n] for b, n in enumerate(steps)]
            if form == "thd":
                tokens, lengths = torch.cat(parts), dict(max_seqlen_q=max(steps), max_seqlen_kv=32)
            else:
                tokens, lengths = torch.nn.utils.rnn.pad_sequence(parts, batch_first=form == "bshd"), {}
            # RoPE gets the boundaries of the new tokens; attention reads its own boundaries from the cache.
            out = stepwise(tokens, attn_mask_type="padding_causal", rotary_pos_emb=freqs, inference_params=cache, cu_seqlens_q=cache.cu_seqlens_q,
                           cu_seqlens_kv=cache.cu_seqlens_q, **lengths)
            backends.add(used_backend())
            mine = ours(tokens, attn_mask_type="padding_causal", rotary_pos_emb=freqs, inference_params=own, cu_seqlens_q=own.cu_seqlens_q,
                        cu_seqlens_kv=own.cu_seqlens_q, **lengths)
            self.assertEqual(own.output_qkv_format, cache.output_qkv_format)
            for b, n in enumerate(steps):
                begin = sum(steps[:b])
                for result in (out, mine):
                    got = result[begin:begin + n] if form == "thd" else (result[b, :n] if form == "bshd" else result[:n, b])
                    self.near(got, want[b, done[b]:done[b] + n], 1e-5 if dtype == torch.float32 else 2e-2)
                done[b] += n
        for theirs, got in zip(cache.cache_manager.cache[1], own.cache_manager.cache[1]):
            self.near(got, theirs, 1e-5 if dtype == torch.float32 else 2e-2)
        self.assertEqual(backends, {"unfused" if dtype == torch.float32 else "fused"})

    def test_steps(self):
        for paged in (False, True):
            for form in ("bshd", "sbhd", "thd"):
                for dtype, rope in ((torch.float32, False), (torch.bfloat16, True)):
                    with self.subTest(paged=paged, form=form, dtype=dtype, rope=rope):
                        self.run_steps(paged, form, dtype, rope)


if __name__ == "__main__":
    unittest.main()
