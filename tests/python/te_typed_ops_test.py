"""Tests vendors' functions with Transformer Engine's arguments as implementations of typed ops: attention, the router, permutation, grouped products and
others. The vendor's functions here are written with PyTorch's operations, in the form of arguments that TransformerEngine-FL's packages have (Transformer
Engine 2.14), and compared with te-fl's implementations of the op."""

import functools
import math
import pathlib
import unittest

import torch

import te_fl
from te_fl import plugin_core, tex_form
from te_fl.plugin_core import BackendImplKind, OpImpl
from te_fl.transformer_engine_torch import older, typed_ops
from te_fl.transformer_engine_torch.typed_function import ADAPTERS

F32, BF16 = torch.float32, torch.bfloat16


def randn(*shape, seed=0, dtype=F32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- a vendor's functions

def attention_of(Q, K, V, scale, layout, causal, bottom_right, bias, sink, ends_q, ends_kv, starts_q, starts_kv):
    """Yields (output, log-sum-exp) of each sequence as [H, Sq, ..], in double precision with gradients; layout: 4 sbhd, 9 bshd, 14 thd."""
    heads, groups = Q.shape[-2], K.shape[-2]
    for i in range(ends_q.numel() - 1):
        if layout == 14:
            begin_q, begin_k = (int((starts if starts is not None else ends)[i]) for starts, ends in ((starts_q, ends_q), (starts_kv, ends_kv)))
            q, k, v = (x[b:b + int(n[i + 1] - n[i])] for x, b, n in ((Q, begin_q, ends_q), (K, begin_k, ends_kv), (V, begin_k, ends_kv)))
        else:
            q, k, v = (x[:, i] if layout == 4 else x[i] for x in (Q, K, V))
        q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(heads // groups, 0) for x in (k, v))
        scores = scale * q @ k.transpose(1, 2)
        if bias is not None:
            scores = scores + bias[i % bias.shape[0]].double()
        if causal:
            shift = k.shape[1] - q.shape[1] if bottom_right else 0
            scores = scores.masked_fill(torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(shift).logical_not(), -math.inf)
        if sink is not None:
            with_sink = torch.cat([scores, sink.double().view(-1, 1, 1).expand(-1, q.shape[1], 1)], 2)
        lse = torch.logsumexp(scores if sink is None else with_sink, 2)
        yield i, (scores - lse.unsqueeze(2)).exp() @ v, lse


def fused_attn_fwd(max_seqlen_q, max_seqlen_kv, is_training, attn_scale, p_dropout, set_zero, qkv_layout, bias_type, attn_mask_type, softmax_type,
                   window_size, bottom_right_diagonal, cu_seqlens_q, cu_seqlens_kv, Q, K, V, fake_dtype, cu_seqlens_q_padded, cu_seqlens_kv_padded,
                   page_table_k, page_table_v, s_quantizer, o_quantizer, Bias, SoftmaxOffset, rng_gen, rng_elts_per_thread, return_max_logit,
                   cuda_graph=False):
    assert (p_dropout, s_quantizer, page_table_k, return_max_logit, fake_dtype) == (0, None, None, False, Q.dtype) and Q.is_contiguous()
    assert window_size == [-1, 0 if int(attn_mask_type) in (2, 3, 4, 5) else -1], window_size
    layout, out = int(qkv_layout), torch.zeros(*Q.shape[:-1], V.shape[-1])
    lengths = [int(n) for n in cu_seqlens_q.diff()]
    assert (max_seqlen_q, Bias is None) == (max(lengths), int(bias_type) == 0)
    lse = torch.zeros(Q.shape[0], Q.shape[1], 1) if layout == 14 else torch.zeros(len(lengths), Q.shape[2], max_seqlen_q, 1)
    for i, o, each in attention_of(Q, K, V, attn_scale, layout, int(attn_mask_type) in (2, 3, 4), bottom_right_diagonal, Bias, SoftmaxOffset, cu_seqlens_q,
                                   cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded):
        o = o.transpose(0, 1)
        if layout == 14:
            begin = int((cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded)[i])
            out[begin:begin + o.shape[0]], lse[begin:begin + o.shape[0], :, 0] = o.float(), each.transpose(0, 1).float()
        else:
            (out[:, i] if layout == 4 else out[i]).copy_(o)
            lse[i, :, :, 0] = each.float()
    return [out.to(Q.dtype), lse, torch.zeros(2, dtype=torch.int64), *([Bias] if Bias is not None else []),
            *([SoftmaxOffset] if SoftmaxOffset is not None else [])]


def fused_attn_bwd(max_seqlen_q, max_seqlen_kv, attn_scale, p_dropout, set_zero, qkv_layout, bias_type, attn_mask_type, softmax_type, window_size,
                   bottom_right_diagonal, deterministic, cu_seqlens_q, cu_seqlens_kv, Q, K, V, O, dO, fake_dtype, dqkv_type, Aux_CTX_Tensors,
                   cu_seqlens_q_padded, cu_seqlens_kv_padded, s_quantizer, dp_quantizer, dqkv_quantizer, cuda_graph=False):
    lse, state, *rest = Aux_CTX_Tensors
    layout = int(qkv_layout)
    assert lse.dtype == F32 and lse.shape[-1] == 1 and state.shape == (2,) and len(rest) == (int(bias_type) == 2) + (int(softmax_type) != 0)
    inputs = [x.detach().double().requires_grad_() for x in (Q, K, V, *rest)]
    bias, sink = inputs[3] if int(bias_type) == 2 else None, inputs[-1] if int(softmax_type) else None
    with torch.enable_grad():
        total = 0
        for i, o, _ in attention_of(*inputs[:3], attn_scale, layout, int(attn_mask_type) in (2, 3, 4), bottom_right_diagonal, bias, sink, cu_seqlens_q,
                                    cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded):
            begin = int((cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded)[i])
            grad = dO[begin:begin + o.shape[1]] if layout == 14 else dO[:, i] if layout == 4 else dO[i]
            total = total + (o.transpose(0, 1) * grad.double()).sum()
    made = torch.autograd.grad(total, inputs)
    return [*(g.to(Q.dtype) for g in made[:3]), made[3].to(bias.dtype).float() if bias is not None else None, made[-1].float() if sink is not None else None]


def fused_topk_with_score_function_fwd(logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias):
    assert num_groups is None and group_topk is None
    scores = logits.float().sigmoid() if score_function == "sigmoid" else logits.float().softmax(-1)
    chosen = (scores if expert_bias is None else scores + expert_bias).topk(topk, 1).indices
    routing = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, chosen, True)
    probs = scores.masked_fill(~routing, 0)
    if score_function == "sigmoid" and topk > 1:
        probs = probs / (probs.sum(1, keepdim=True) + 1e-20)
    assert use_pre_softmax == (score_function == "softmax")
    return (probs * scaling_factor).to(logits.dtype), routing, scores


def fused_topk_with_score_function_bwd(num_tokens, num_experts, routing_map, intermediate_output, grad_probs, grad_logits, topk, use_pre_softmax,
                                       scaling_factor, score_function):
    assert (num_tokens, num_experts) == tuple(routing_map.shape) and routing_map.dtype == torch.bool
    logits = (intermediate_output.double().logit() if score_function == "sigmoid" else intermediate_output.double().log()).requires_grad_()
    with torch.enable_grad():
        scores = (logits.sigmoid() if score_function == "sigmoid" else logits.softmax(1)).masked_fill(~routing_map, 0)
        if score_function == "sigmoid" and topk > 1:
            scores = scores / (scores.sum(1, keepdim=True) + 1e-20)
        [made] = torch.autograd.grad((scores * scaling_factor * grad_probs.double()).sum(), logits)
    grad_logits.copy_(made)


def fused_score_for_moe_aux_loss_fwd(logits, topk, score_function):
    scores = logits.float().softmax(-1)
    return scores, torch.zeros_like(logits, dtype=torch.bool).scatter_(1, scores.topk(topk, 1).indices, True), scores.clone()


def fused_score_for_moe_aux_loss_bwd(num_tokens, num_experts, intermediate_output, grad_scores, grad_logits, topk, score_function):
    s = intermediate_output
    grad_logits.copy_(s * (grad_scores - (grad_scores * s).sum(1, keepdim=True)))


def fused_moe_aux_loss_fwd(probs, tokens_per_expert, total_num_tokens, num_experts, num_rows, num_cols, topk, coeff):
    factor = coeff * num_experts / topk / total_num_tokens ** 2
    return (factor * (probs.float().sum(0) * tokens_per_expert).sum()).to(probs.dtype), torch.tensor(factor)


def fused_moe_aux_loss_bwd(Const_buf, tokens_per_expert, num_rows, num_cols, grad_aux_loss):
    return (Const_buf * tokens_per_expert * grad_aux_loss.float()).to(grad_aux_loss.dtype).expand(num_rows, num_cols).contiguous()


def moe_permute_fwd(input, dtype, indices, num_out_tokens, workspace, max_expanded_token_num):
    assert indices.dtype == torch.int32 and workspace == []
    tokens, top_k = indices.shape
    order = indices.reshape(-1).argsort(stable=True)[:num_out_tokens]
    places = torch.full((tokens * top_k,), -1, dtype=torch.int32)
    places[order] = torch.arange(order.numel(), dtype=torch.int32)
    return input[order // top_k], places.view(tokens, top_k).t().reshape(-1), workspace


def moe_unpermute_bwd(input_bwd, input_fwd, dtype, row_id_map, prob):
    tokens, top_k = prob.shape
    grad, factors = torch.zeros_like(input_fwd), torch.zeros_like(prob)
    for s in range(top_k):
        for t in range(tokens):
            row = int(row_id_map[s * tokens + t])
            if row >= 0:
                grad[row], factors[t, s] = prob[t, s] * input_bwd[t], (input_bwd[t].float() * input_fwd[row].float()).sum()
    return grad, factors


def te_general_grouped_gemm(A, transa, B, transb, D, D_type, m_splits, bias, bias_type, single_output, pre_gelu_out, grad, workspace, workspaceSizes,
                            accumulate, use_split_accumulator, math_sm_count):
    assert not single_output and not grad and m_splits == [d.shape[0] for d in D] and len(workspace) == 4
    for a, b, d, c in zip(A, B, D, bias):
        made = (b.t() if transb else b) @ (a.t() if transa else a)
        made = made + c if c.numel() else made
        d.copy_(d + made if accumulate else made)
    return bias


def fused_multi_row_padding(input, output, input_row_list, padded_input_row_list):
    output.copy_(torch.cat([torch.nn.functional.pad(part, (0, 0, 0, to - part.shape[0]))
                            for part, to in zip(input.split(input_row_list), padded_input_row_list)]))


def fused_multi_row_unpadding(input, output, input_row_list, unpadded_input_row_list):
    output.copy_(torch.cat([part[:to] for part, to in zip(input.split(input_row_list), unpadded_input_row_list)]))


def fp8_transpose(input, dtype, *, out=None):
    return input.t().contiguous()


def compute_amax(input, amax):
    amax.copy_(torch.maximum(amax, input.abs().max().float()))


class Adapted(unittest.TestCase):
    def setUp(self):
        te_fl.reset_usage()
        self.addCleanup(plugin_core.reset_default_manager)
        self.calls = []

    def add(self, name, fn):
        plugin_core.get_registry().register_impl(OpImpl(name, "vendor.acme", BackendImplKind.VENDOR, fn, vendor="acme"))

    def reason(self, op, **arguments):
        with te_fl.policy(prefer="vendor"):
            return next(c["reason"] for c in te_fl.explain(op, **arguments)["candidates"] if c["impl_id"] == "vendor.acme")

    def equal(self, op, fn, tolerance=None, name=None, outputs=None, **arguments):
        """Compares the op by a vendor's function with the op by te-fl. outputs: a function that makes the arguments that the op writes."""
        near = {} if tolerance is None else {"rtol": tolerance, "atol": tolerance}
        results = []
        for vendor in (False, True):
            if vendor:
                self.add(name or op, fn)
            written = outputs() if outputs else {}
            with te_fl.policy(prefer="vendor" if vendor else "reference", strict=vendor):
                made = getattr(te_fl.ops, op)(**arguments, **written)
            results.append((made, written))
        self.assertIn(("vendor.acme", "typed"), {(u["impl_id"], u["form"]) for u in te_fl.usage() if u["op"] == op})
        torch.testing.assert_close(results[1], results[0], **near)
        plugin_core.reset_default_manager()
        te_fl.reset_usage()


class Attention(Adapted):
    CASES = {
        "sbhd": dict(layout="sbhd", shape=(6, 2)),
        "a causal mask": dict(layout="bshd", shape=(2, 6), mask_type="causal"),
        "the last queries": dict(layout="bshd", shape=(2, 3), keys=(2, 6), mask_type="causal_bottom_right"),
        "a bias": dict(layout="bshd", shape=(2, 5), bias=randn(1, 4, 5, 5, seed=9)),
        "a sink": dict(layout="sbhd", shape=(5, 2), mask_type="causal", softmax_type="learnable", softmax_sink=randn(4, seed=8)),
        "a sink of 0": dict(layout="sbhd", shape=(5, 2), softmax_type="off_by_one"),
        "sequences": dict(layout="thd", shape=(11,), mask_type="padding_causal", cu_seqlens_q=torch.tensor([0, 4, 11], dtype=torch.int32),
                          cu_seqlens_kv=torch.tensor([0, 4, 11], dtype=torch.int32)),
        "sequences with padding": dict(layout="thd", shape=(12,), cu_seqlens_q=torch.tensor([0, 4, 9], dtype=torch.int32), mask_type="padding",
                                       cu_seqlens_kv=torch.tensor([0, 4, 9], dtype=torch.int32), max_seqlen_q=5, max_seqlen_kv=5,
                                       cu_seqlens_q_padded=torch.tensor([0, 6, 12], dtype=torch.int32),
                                       cu_seqlens_kv_padded=torch.tensor([0, 6, 12], dtype=torch.int32)),
    }

    def test_forward_and_backward(self):
        for what, case in self.CASES.items():
            with self.subTest(what):
                options = dict(case)
                shape, keys = options.pop("shape"), options.pop("keys", case["shape"])
                q, k, v = randn(*shape, 4, 16, seed=1), randn(*keys, 2, 16, seed=2), randn(*keys, 2, 8, seed=3)
                arguments = dict(q=q, k=k, v=v, scale=0.3, **options)
                lse = [shape[0], 4] if options["layout"] == "thd" else [shape[options["layout"] == "sbhd"], 4, shape[options["layout"] == "bshd"]]
                written = lambda: dict(o=torch.zeros(*shape, 4, 8), softmax_lse=torch.zeros(lse))  # noqa: E731
                padded = "cu_seqlens_q_padded" in options
                if not padded:  # the log-sum-exp of padding differs, and nothing reads it
                    self.equal("fused_attn_fwd", fused_attn_fwd, 1e-5, outputs=written, **arguments)
                with te_fl.policy(prefer="reference"):
                    forward = written()
                    te_fl.ops.fused_attn_fwd(**arguments, **forward)
                if padded:
                    self.add("fused_attn_fwd", fused_attn_fwd)
                    by_vendor = written()
                    with te_fl.policy(prefer="vendor", strict=True):
                        te_fl.ops.fused_attn_fwd(**arguments, **by_vendor)
                    torch.testing.assert_close(by_vendor["o"], forward["o"], rtol=1e-5, atol=1e-5)
                gradients = lambda: dict(dq=torch.zeros_like(q), dk=torch.zeros_like(k), dv=torch.zeros_like(v),  # noqa: E731
                                         **({"dbias": torch.zeros_like(case["bias"])} if "bias" in case else {}),
                                         **({"dsink": torch.zeros(4)} if "softmax_sink" in case else {}))
                self.equal("fused_attn_bwd", fused_attn_bwd, 1e-5, outputs=gradients, d_o=randn(*shape, 4, 8, seed=5), o=forward["o"],
                           softmax_lse=forward["softmax_lse"], **arguments)

    def test_windows(self):
        """By te-fl's own functions in the form of Transformer Engine 2.14."""
        former = older.list_forms((2, 14))

        def lend(name):
            @functools.wraps(former[name])
            def fn(**arguments):
                with te_fl.policy(prefer="reference", strict=False):
                    return former[name](**arguments)
            return fn
        for mask, left, right, queries in (("none", 2, 1, 5), ("none", 2, 1, 3), ("causal", 2, -1, 5), ("causal", 2, -1, 3), ("causal", 1, 3, 5),
                                           ("causal_bottom_right", 2, -1, 3)):
            with self.subTest(mask=mask, left=left, right=right, queries=queries):
                q, k, v = randn(2, queries, 4, 16, seed=1), randn(2, 5, 4, 16, seed=2), randn(2, 5, 4, 16, seed=3)
                arguments = dict(q=q, k=k, v=v, layout="bshd", mask_type=mask, window_left=left, window_right=right, scale=0.25)
                written = lambda: dict(o=torch.zeros_like(q), softmax_lse=torch.zeros(2, 4, queries))  # noqa: E731
                self.equal("fused_attn_fwd", lend("fused_attn_fwd"), 1e-6, outputs=written, **arguments)
                forward = written()
                te_fl.ops.fused_attn_fwd(**arguments, **forward)
                self.equal("fused_attn_bwd", lend("fused_attn_bwd"), 1e-6, d_o=randn(2, queries, 4, 16, seed=5), **forward, **arguments,
                           outputs=lambda: dict(dq=torch.zeros_like(q), dk=torch.zeros_like(k), dv=torch.zeros_like(v)))

    def test_packed_inputs_and_inference(self):
        q, k, v = randn(5, 2, 4, 3, 16, seed=1).unbind(3)
        self.assertFalse(q.is_contiguous())
        self.equal("fused_attn_fwd", fused_attn_fwd, 1e-5, q=q, k=k, v=v, layout="sbhd", mask_type="causal", scale=0.25,
                   outputs=lambda: {"o": torch.empty(5, 2, 4, 16)})

    def test_calls_that_it_refuses(self):
        self.add("fused_attn_fwd", fused_attn_fwd)
        q = randn(2, 5, 4, 16)
        plain = dict(q=q, k=q, v=q, o=torch.empty_like(q), layout="bshd")
        self.assertIn("draws other random numbers", self.reason("fused_attn_fwd", dropout_p=0.1, **plain))
        for more in (dict(alibi_slopes=torch.ones(4), mask_type="causal"), dict(attn_mask=torch.zeros(1, 1, 5, 5, dtype=torch.bool), mask_type="arbitrary")):
            self.assertIn("no slopes of ALiBi and no mask as a tensor", self.reason("fused_attn_fwd", **plain, **more))
        self.assertIn("softcap", self.reason("fused_attn_fwd", softcap=5.0, **plain))
        plugin_core.reset_default_manager()
        self.add("fused_attn_fwd", lambda *arguments: None)
        self.assertIn("the names of its parameters cannot be read", self.reason("fused_attn_fwd", **plain))
        plugin_core.reset_default_manager()
        self.add("fused_attn_fwd", lambda Q, K, V, acme_mode: None)
        self.assertIn("it takes 'acme_mode', which te-fl does not know", self.reason("fused_attn_fwd", **plain))

    def test_statistics_of_another_form(self):
        """Some kernels return the probabilities in place of the log-sum-exp, which a backward would read as such."""
        q = randn(1, 5, 4, 16)

        def run(**policy):
            o, lse = torch.empty_like(q), torch.empty(1, 4, 5)
            with te_fl.policy(**policy):
                te_fl.ops.fused_attn_fwd(q=q, k=q, v=q, layout="bshd", o=o, softmax_lse=lse)
            return o, lse
        expected = run()

        def probabilities(Q, K, V):
            return [Q * 0, torch.zeros(1, 4, 5, 5)]
        self.add("fused_attn_fwd", probabilities)
        torch.testing.assert_close(run(prefer="vendor"), expected)
        with self.assertRaisesRegex(te_fl.Error, r"second result has shape \(1, 4, 5, 5\)"):
            run(prefer="vendor", strict=True)


class Experts(Adapted):
    def test_router(self):
        for score, options in (("sigmoid", {"expert_bias": randn(8, seed=3)}), ("sigmoid", {}), ("softmax", {"use_pre_softmax": True})):
            for shape in ((7, 8), (2, 3, 8)):
                with self.subTest(score=score, shape=shape, **options):
                    logits, common = randn(*shape, seed=4), dict(topk=2, scaling_factor=1.5, score_function=score)
                    arguments = dict(common, **options)
                    self.equal("fused_topk_with_score_function_fwd", fused_topk_with_score_function_fwd, 1e-5, logits=logits, routing_map=torch.bool, **arguments)
                    with te_fl.policy(prefer="reference"):
                        _, routing, kept = te_fl.ops.fused_topk_with_score_function_fwd(logits=logits, routing_map=torch.bool, **arguments)
                    backward = {name: value for name, value in arguments.items() if name != "expert_bias"}
                    for form in (routing, routing.view(torch.uint8)):
                        self.equal("fused_topk_with_score_function_bwd", fused_topk_with_score_function_bwd, 1e-5, routing_map=form, intermediate_output=kept,
                                   grad_probs=randn(*shape, seed=6), **backward)

    def test_a_function_that_returns_the_gradient(self):
        """As before Transformer Engine 2.10."""
        def bwd(num_tokens, num_experts, routing_map, intermediate_output, grad_probs, topk, use_pre_softmax, scaling_factor, score_function):
            made = torch.empty_like(grad_probs)
            fused_topk_with_score_function_bwd(num_tokens, num_experts, routing_map, intermediate_output, grad_probs, made, topk, use_pre_softmax, scaling_factor,
                                               score_function)
            return made
        routing = torch.tensor([[True, False, True]])
        self.equal("fused_topk_with_score_function_bwd", bwd, 1e-5, routing_map=routing, intermediate_output=torch.tensor([[0.2, 0.5, 0.7]]),
                   grad_probs=randn(1, 3), topk=2, score_function="sigmoid")

    def test_calls_that_a_router_refuses(self):
        self.add("fused_topk_with_score_function_fwd", fused_topk_with_score_function_fwd)
        logits = randn(4, 8)
        call = dict(logits=logits, topk=1, probs=torch.empty(4, 8), intermediate_output=torch.empty(4, 8))
        for more in ({"topk_indices": torch.empty(4, 1, dtype=torch.int32)}, {"routing_bits": torch.empty(4, 1, dtype=torch.uint8)}):
            self.assertIn("as a map of bytes", self.reason("fused_topk_with_score_function_fwd", **call, **more))
        self.assertIn("sqrtsoftplus is newer", self.reason("fused_topk_with_score_function_fwd", score_function="sqrtsoftplus", **call))

    def test_auxiliary_loss(self):
        logits = randn(6, 8)
        self.equal("fused_score_for_moe_aux_loss_fwd", fused_score_for_moe_aux_loss_fwd, 1e-6, logits=logits, topk=2, score_function="softmax",
                   routing_map=torch.bool)
        self.equal("fused_score_for_moe_aux_loss_bwd", fused_score_for_moe_aux_loss_bwd, 1e-6, intermediate_output=logits.softmax(-1),
                   grad_scores=randn(6, 8, seed=1), topk=2, score_function="softmax", outputs=lambda: {"grad_logits": torch.empty(6, 8)})
        probs, counts = logits.softmax(-1), torch.tensor([3, 1, 0, 2, 2, 1, 1, 2], dtype=torch.int32)
        self.equal("fused_moe_aux_loss_fwd", fused_moe_aux_loss_fwd, 1e-6, probs=probs, tokens_per_expert=counts, total_num_tokens=6, num_experts=8, topk=2,
                   coeff=0.1, outputs=lambda: {"aux_loss": torch.empty(())})
        self.equal("fused_moe_aux_loss_bwd", fused_moe_aux_loss_bwd, 1e-6, const_buf=torch.tensor([0.3]), tokens_per_expert=counts,
                   grad_aux_loss=torch.tensor(2.0), outputs=lambda: {"grad_probs": torch.empty(6, 8)})
        self.add("fused_moe_aux_loss_fwd", fused_moe_aux_loss_fwd)
        self.assertIn("takes total_num_tokens as a number", self.reason("fused_moe_aux_loss_fwd", probs=probs, tokens_per_expert=counts,
                                                                        total_num_tokens_tensor=torch.tensor([6]), aux_loss=torch.empty(()),
                                                                        const_buf=torch.empty(1)))

    def test_scores_in_another_precision(self):
        """A function that rounds the scores is not the op."""
        self.add("fused_score_for_moe_aux_loss_fwd", lambda logits, topk, score_function: tuple(
            x.to(logits.dtype) if x.is_floating_point() else x for x in fused_score_for_moe_aux_loss_fwd(logits, topk, score_function)))
        logits = randn(6, 8, dtype=BF16)
        with te_fl.policy(prefer="vendor"):
            scores = te_fl.ops.fused_score_for_moe_aux_loss_fwd(logits=logits, topk=2, score_function="softmax")[0]
        torch.testing.assert_close(scores, logits.float().softmax(-1))
        self.assertNotIn("vendor.acme", {u["impl_id"] for u in te_fl.usage()})

    def test_permutation(self):
        indices = torch.tensor([[1, 0], [2, 1], [0, 2], [1, 2]])
        for rows in (8, 6):
            self.equal("moe_permute_fwd", moe_permute_fwd, input=randn(4, 5), indices=indices,
                       outputs=lambda: {"output": torch.empty(rows, 5), "row_id_map": torch.empty(2, 4, dtype=torch.int32)})
        with te_fl.policy(prefer="reference"):
            places = torch.empty(2, 4, dtype=torch.int32)
            te_fl.ops.moe_permute_fwd(input=randn(4, 5), indices=indices, output=torch.empty(6, 5), row_id_map=places)
        for probs in (randn(4, 2, seed=7), None):
            self.equal("moe_unpermute_bwd", moe_unpermute_bwd, 1e-6, grad_output=randn(4, 5, seed=1), fwd_input=randn(6, 5, seed=2), row_id_map=places, probs=probs,
                       grad_probs=None if probs is None else True)
        self.add("moe_permute_fwd", moe_permute_fwd)
        more = dict(input=randn(4, 5), indices=indices, row_id_map=places)
        self.assertIn("does not check the indices", self.reason("moe_permute_fwd", num_experts=3, output=torch.empty(8, 5), **more))
        self.assertIn("makes 1 to 8 rows, and the output has 9", self.reason("moe_permute_fwd", output=torch.empty(9, 5), **more))

    def test_padding(self):
        self.equal("fused_multi_row_padding", fused_multi_row_padding, input=randn(5, 3), input_rows=[2, 3], padded_rows=[4, 4],
                   outputs=lambda: {"output": torch.ones(8, 3)})
        self.equal("fused_multi_row_unpadding", fused_multi_row_unpadding, input=randn(8, 3), input_rows=[4, 4], unpadded_rows=[2, 3],
                   outputs=lambda: {"output": torch.ones(5, 3)})


class Products(Adapted):
    def test_groups(self):
        rows = (3, 0, 2)
        x, w = [randn(n, 8, seed=n) for n in rows], [randn(4, 8, seed=i) for i in range(3)]
        bias = [randn(4, seed=i + 5) for i in range(3)]
        common = dict(op="grouped_gemm", fn=te_general_grouped_gemm, name="te_general_grouped_gemm", tolerance=1e-5)
        for more in ({}, {"bias": bias}, {"accumulate": True}):
            self.equal(**common, a=x, b=w, trans_b=True, **more, outputs=lambda: {"d": [torch.ones(n, 4) for n in rows]})
        # Gradients of the weights: a group without rows has no terms.
        grads = [randn(n, 4, seed=n + 9) for n in rows]
        for accumulate in (False, True):
            self.equal(**common, a=grads, b=x, trans_a=True, accumulate=accumulate,
                       outputs=lambda: {"d": [torch.ones(4, 8) for _ in rows], "bias_grad": [torch.ones(4) for _ in rows]})
        self.add("te_general_grouped_gemm", te_general_grouped_gemm)
        self.assertIn("it has no factors", self.reason("grouped_gemm", a=x, b=w, trans_b=True, alpha=2.0, d=[torch.ones(n, 4) for n in rows]))
        plugin_core.get_registry().unregister("te_general_grouped_gemm", "vendor.acme")
        self.assertNotIn("vendor.acme", {row["impl_id"] for row in te_fl.OpRegistry.instance().snapshot() if row["op_name"] == "grouped_gemm"})

    def test_gradients_of_biases(self):
        def gemm(A, transA, B, transB, D, quantizer, output_dtype, bias, bias_type, gelu, gelu_in, grad, workspace, workspace_size, accumulate,
                 use_split_accumulator, alpha=1.0, beta=None):
            D.copy_((B.t() if transB else B) @ (A.t() if transA else A) + (D if accumulate else 0))
            return [D, None, None, None]
        for more in ({}, {"accumulate": True, "accumulate_bias_grad": True}):
            self.equal("generic_gemm", gemm, 1e-5, a=randn(6, 4), b=randn(6, 8, seed=1), trans_a=True, **more,
                       outputs=lambda: {"d": torch.ones(4, 8), "bias_grad": torch.ones(4)})

    def test_activations_with_the_gradient_of_a_bias(self):
        for name, derivative in (("dbias_drelu", lambda g, x: g * (x > 0)), ("dbias_dsilu", lambda g, x: g * x.sigmoid() * (1 + x * (1 - x.sigmoid())))):
            for swapped in (False, True):
                def fn(grad, fwd_input, quantizer):
                    assert grad.dim() == 2
                    dx = derivative(grad, fwd_input)
                    return [dx, dx.sum(0)] if swapped else [dx.sum(0), dx]
                for shape in ((5, 3), (2, 2, 3), (1, 3), (3,)):
                    self.equal(name, fn, 1e-5, grad=randn(*shape), input=randn(*shape, seed=1))


class Others(Adapted):
    def test_codes_and_amaxes(self):
        codes = randn(6, 4).to(torch.float8_e4m3fn)
        self.equal("fp8_transpose", fp8_transpose, input=codes.view(torch.uint8))
        self.equal("compute_amax", compute_amax, input=randn(6, 4), outputs=lambda: {"amax": torch.full((1,), 100.0)})

    def test_by_te_fl_s_own_functions(self):
        def lend(name):
            own = tex_form.own_function(name)

            def fn(*arguments):
                with te_fl.policy(prefer="reference", strict=False):
                    return own(*arguments)
            return fn
        qkv, freqs = randn(3, 2, 2, 32), randn(3, 1, 1, 8, seed=1)
        dims = dict(q_dim=16, k_dim=8, v_dim=8, layout="sbhd")
        starts = torch.zeros(2, dtype=torch.int32)
        self.equal("fused_qkv_rope_forward", lend("fused_qkv_rope_forward"), qkv_input=qkv, q_freqs=freqs, k_freqs=freqs, start_positions=starts,
                   outputs=lambda: {"q_out": torch.empty(3, 2, 4, 8), "k_out": torch.empty(3, 2, 2, 8), "v_out": torch.empty(3, 2, 2, 8)}, **dims)
        grads = dict(q_grad=randn(3, 2, 4, 8), k_grad=randn(3, 2, 2, 8), v_grad=randn(3, 2, 2, 8), q_freqs=freqs, k_freqs=freqs)
        self.equal("fused_qkv_rope_backward", lend("fused_qkv_rope_backward"), outputs=lambda: {"qkv_grad": torch.empty(3, 2, 2, 32)}, **grads, **dims)
        self.add("fused_qkv_rope_backward", lend("fused_qkv_rope_backward"))
        self.assertIn("takes no start_positions", self.reason("fused_qkv_rope_backward", qkv_grad=torch.empty(3, 2, 2, 32), start_positions=starts, **grads, **dims))
        self.equal("dropout_bwd", lend("dropout_bwd"), grad_output=randn(4, 8), mask=torch.tensor([255, 0, 170, 1], dtype=torch.uint8), p=0.25)
        for reduced in (torch.tensor([3.0, 5.0]), None):
            self.equal("fused_amax_and_scale_update_after_reduction", lend("fused_amax_and_scale_update_after_reduction"), amax_reduction_buffer=reduced,
                       algo="max", fp8_dtype="e4m3",
                       outputs=lambda: {"amax_histories": [randn(4, 2).abs()], "scales": [torch.ones(2)]})

    def test_results_that_are_not_the_op_s(self):
        """A tensor of another dtype, shape or device is not copied to the output: the next implementation runs the call."""
        x = randn(4, 6)
        expected = te_fl.ops.dbias_drelu(grad=x, input=x)
        for wrong in (lambda g, x, q: [g.sum(0).double(), g], lambda g, x, q: [g.sum(0)[:5], g], lambda g, x, q: [g.sum(0), g.to("meta")],
                      lambda g, x, q: [g.sum(0)], lambda g, x, q: g, lambda g, x, q: 1 / 0):
            self.add("dbias_drelu", wrong)
            with te_fl.policy(prefer="vendor"):
                torch.testing.assert_close(te_fl.ops.dbias_drelu(grad=x, input=x), expected)
            self.assertNotIn("vendor.acme", {u["impl_id"] for u in te_fl.usage()})
            with te_fl.policy(prefer="vendor", strict=True), self.assertRaises(te_fl.Error):
                te_fl.ops.dbias_drelu(grad=x, input=x)
            plugin_core.reset_default_manager()

    def test_every_op_of_both_forms_is_decided(self):
        """Each typed op that has a form of Transformer Engine's has an adapter or a reason."""
        names = {name for name in dir(te_fl.ops) if tex_form.own_function(name) is not None}
        self.assertEqual(names - set(ADAPTERS) - set(typed_ops.WITHOUT), set())
        self.assertEqual(set(ADAPTERS) & set(typed_ops.WITHOUT), set())
        self.assertGreater(len(names), 80)
        self.assertNotIn("grouped_gemm", plugin_core.get_registry().list_operators())  # a module of te_fl.transformer_engine_torch has this name
        page = (pathlib.Path(__file__).resolve().parents[2] / "docs/transformer-engine-functions.md").read_text()
        self.assertEqual([name for name in typed_ops.WITHOUT if f"`{name}`" not in page], [])


if __name__ == "__main__":
    unittest.main()
