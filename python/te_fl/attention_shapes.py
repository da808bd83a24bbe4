"""Shapes of the arguments of the attention ops, for implementations in Python. The op's schema does not check all of them."""

from __future__ import annotations

from typing import Optional, Union

from te_fl._native import LentTensor


def fit(q: LentTensor, k: LentTensor, v: LentTensor, layout: str, o: Optional[LentTensor] = None, d_o: Optional[LentTensor] = None,
        dq: Optional[LentTensor] = None, dk: Optional[LentTensor] = None, dv: Optional[LentTensor] = None, dbias: Optional[LentTensor] = None,
        dsink: Optional[LentTensor] = None, softmax_lse: Optional[LentTensor] = None, bias: Optional[LentTensor] = None,
        attn_mask: Optional[LentTensor] = None, alibi_slopes: Optional[LentTensor] = None, softmax_sink: Optional[LentTensor] = None,
        cu_seqlens_q: Optional[LentTensor] = None, cu_seqlens_kv: Optional[LentTensor] = None, cu_seqlens_q_padded: Optional[LentTensor] = None,
        cu_seqlens_kv_padded: Optional[LentTensor] = None) -> Union[bool, str]:
    """True if the shapes of an attention op's arguments fit together, else why an implementation in Python refuses them."""
    dense = layout != "thd"
    of_q, of_k, of_v = shapes = [tuple(t.shape) for t in (q, k, v)]
    if any(len(s) != (4 if dense else 3) for s in shapes):
        return f"q, k and v of another rank than that of {layout} are left to reference.host, which describes the error"
    rows = 1 if layout == "bshd" else 0
    batch = of_q[1 - rows] if dense else cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else 0
    heads, lengths = of_q[-2], (of_q[rows], of_k[rows])
    fits = (min(of_q[-1], heads, of_k[-2], of_v[-1]) > 0 and heads % of_k[-2] == 0 and of_k[-1] == of_q[-1] and of_k[:-1] == of_v[:-1]
            and (not dense or of_k[1 - rows] == batch))
    results, scores = [(*of_q[:-1], of_v[-1])], [(b, h, *lengths) for b in (1, batch) for h in (1, heads)]
    allowed = (((o, d_o), results), ((dq,), [of_q]), ((dk,), [of_k]), ((dv,), [of_v]), ((bias, attn_mask), scores),
          ((dbias,), [] if bias is None else [tuple(bias.shape)]), ((softmax_lse,), [(batch, heads, lengths[0]) if dense else of_q[:-1]]),
          ((alibi_slopes,), [(heads,), (batch, heads)]), ((softmax_sink, dsink), [(heads,)]),
          ((cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded), [(batch + 1,)]))
    if not fits or any(t is not None and tuple(t.shape) not in right for tensors, right in allowed for t in tensors):
        return "arguments whose shapes do not fit together are left to reference.host, which describes the error"
    return True
