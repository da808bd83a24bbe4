"""Benchmarks attention with a bias, ALiBi, sinks, a mask tensor, soft-capped scores or dropout against cuDNN's plain attention on the same
tensors."""

import torch

import layer_cases
from te_fl_bench import OpCall, Tensor, plain

BF16, F32 = torch.bfloat16, torch.float32
ARBITRARY, LEARNABLE = 6, 2
SOFTCAP = 2.0  # scores are about as large as 1, so this cap has an effect
TERMS = ("dropout", "bias", "alibi", "sink", "mask", "softcap")  # terms() also adds "bias with its gradient"


def slopes(heads):
    return torch.tensor([2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)], device="cuda", dtype=F32)


def arguments(term, shape):
    """Returns (arguments of the forward and the backward for a term, additional arguments of the backward)."""
    s, h = shape.sequence, shape.heads
    if term == "dropout":
        return dict(dropout_p=0.1), {}
    if term.startswith("bias"):
        bias = plain(1, h, s, s)
        return dict(bias=bias), dict(dbias=plain(1, h, s, s)) if "gradient" in term else {}
    if term == "softcap":
        return dict(softcap=SOFTCAP), {}
    if term == "alibi":
        return dict(alibi_slopes=Tensor(slopes(h))), {}
    if term == "sink":
        return dict(softmax_type=LEARNABLE, softmax_sink=plain(h, dtype=F32)), dict(dsink=plain(h, dtype=F32))
    mask = (torch.rand(shape.batch, 1, s, s, device="cuda") < 0.1).to(torch.uint8)
    return dict(mask_type=ARBITRARY, attn_mask=Tensor(mask)), {}


def expected(shape, term, common, q, k, v, d_o, scale):
    """Computes o, dq, dk, dv of the first sequence's first head in FP32 from the definition of attention."""
    s = shape.sequence
    q, k, v = (t.torch[:, 0, 0].float().requires_grad_() for t in (q, k, v))
    scores = scale * q @ k.T
    at = torch.arange(s, device="cuda")
    if term == "softcap":
        scores = SOFTCAP * torch.tanh(scores / SOFTCAP)
    if term.startswith("bias"):
        scores = scores + common["bias"].torch[0, 0].float()
    if term == "alibi":
        scores = scores + common["alibi_slopes"].torch[0] * (at[None, :] - at[:, None])
    if term == "mask":
        scores = scores.masked_fill(common["attn_mask"].torch[0, 0] != 0, float("-inf"))
    if shape.causal and term != "mask":
        scores = scores.masked_fill(at[None, :] > at[:, None], float("-inf"))
    if term == "sink":
        sink = common["softmax_sink"].torch[0].expand(s, 1)
        p = torch.softmax(torch.cat([scores, sink], dim=1), dim=1)[:, :s]
    else:
        p = torch.softmax(scores, dim=1)
    o = p @ v
    o.backward(d_o.torch[:, 0, 0].float())
    return o.detach(), q.grad, k.grad, v.grad


def same_of_cudnn(term, common, operands, shape, scale):
    """Returns cuDNN's own attention with this term if PyTorch can request it: dropout, or a bias (a mask tensor can be passed as a bias)."""
    if term == "dropout":
        return layer_cases.cudnn_attention(*operands, shape.causal, scale, dropout=common["dropout_p"])
    if term == "bias":
        return layer_cases.cudnn_attention(*operands, shape.causal, scale, bias=common["bias"].torch)
    if term == "mask":
        hidden = torch.zeros(common["attn_mask"].torch.shape, device="cuda", dtype=BF16)
        hidden.masked_fill_(common["attn_mask"].torch != 0, float("-inf"))
        return layer_cases.cudnn_attention(*operands, shape.causal, scale, bias=hidden)
    return {}


def terms(library, shape):
    """Returns {"forward dropout": (te-fl's call, cuDNN's plain call, cuDNN's call with the same term or None, relative error or None, the forward),
    ...} and the number of operations of the forward."""
    s, b, h = shape.sequence, shape.batch, shape.heads
    d = shape.hidden // h
    q, k, v, o, d_o, dq, dk, dv = (plain(s, b, h, d) for _ in range(8))
    lse = plain(b, h, s, dtype=F32)
    tq, tk, tv, tdo = (t.torch.permute(1, 2, 0, 3) for t in (q, k, v, d_o))
    bare = layer_cases.cudnn_attention(tq, tk, tv, tdo, shape.causal, d ** -0.5)
    cases = {}
    for term in TERMS + ("bias with its gradient",):
        if term == "mask" and shape.causal:
            continue  # a mask tensor replaces the causal mask
        common, more = arguments(term, shape)
        both = dict(q=q, k=k, v=v, o=o, softmax_lse=lse, layout=0, mask_type=1 if shape.causal else 0, scale=d ** -0.5) | common
        calls = {"forward": OpCall(library, "fused_attn_fwd", **both),
                 "backward": OpCall(library, "fused_attn_bwd", d_o=d_o, dq=dq, dk=dk, dv=dv, **both, **more)}
        same = same_of_cudnn(term, common, (tq, tk, tv, tdo), shape, d ** -0.5)
        error = None
        if term != "dropout":
            calls["forward"]()
            calls["backward"]()
            pairs = zip((o, dq, dk, dv), expected(shape, term, common, q, k, v, d_o, d ** -0.5))
            error = max(((a.torch[:, 0, 0].float() - e).norm() / e.norm()).item() for a, e in pairs)
        for kind, call in calls.items():
            if kind == "backward" or "gradient" not in term:
                cases[f"{kind} {term}"] = (call, bare[kind], same.get(kind), error, calls["forward"])
    return cases, 4.0 * b * h * s * s * d / (2 if shape.causal else 1)
