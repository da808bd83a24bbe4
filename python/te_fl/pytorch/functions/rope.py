"""Rotary position embedding."""

from __future__ import annotations

import math
from typing import List, Optional, Union

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument, Unsupported
from te_fl.pytorch.functions.function import Op, differentiable, differentiable_op
from te_fl.pytorch.runtime import export
from te_fl.pytorch.runtime import refuse as rules
from te_fl.pytorch.runtime.device import default_device
from te_fl.pytorch.runtime.refuse import checks_keywords

__all__ = ["RotaryPositionEmbedding", "apply_fused_qkv_rotary_pos_emb", "apply_rotary_pos_emb"]


class RotaryPositionEmbedding(torch.nn.Module):
    """The rotation angles of positions 0, 1, ..: a tensor [max_seq_len, 1, 1, dim] in FP32.

    With seq_len_interpolation_factor and pretrained_max_position_embeddings, positions are divided by the factor; a longer sequence is interpolated
    into the pretrained length (arXiv 2306.15595).
    """

    @checks_keywords()
    def __init__(self, dim: int, rotary_percent: float = 1.0, seq_len_interpolation_factor: Optional[int] = None,
                 pretrained_max_position_embeddings: Optional[int] = None, rotary_base: float = 10000.0, interleaved: bool = False):
        super().__init__()
        where = "RotaryPositionEmbedding"
        rules.size(where, "dim", dim)
        rules.number(where, "rotary_percent", rotary_percent, "a share, 0 or more", lambda v: v >= 0.0)
        rules.number(where, "rotary_base", rotary_base, "finite and greater than 0", lambda v: 0.0 < v < math.inf)
        if rotary_percent < 1.0:
            dim = int(dim * rotary_percent)
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base, self.interleaved = rotary_base, interleaved
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=default_device()) / dim
        self.register_buffer("inv_freq", 1.0 / rotary_base**exponents)

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=self.inv_freq.device) + offset
        trained, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if trained is not None and factor is not None:
            positions = positions * (trained / max_seq_len if max_seq_len > trained * factor else 1 / factor)
        angles = positions[:, None] * self.inv_freq.float()
        pairs = torch.stack((angles, angles), dim=-1).flatten(1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        return pairs[:, None, None, :]


_apply = differentiable_op("fused_rope_forward", "rope_forward", "rope_backward")


def _angles(freqs: torch.Tensor, name: str) -> torch.Tensor:
    if freqs.requires_grad and torch.is_grad_enabled():
        raise Unsupported(f"rotary position embedding: {name} requires grad, and angles have none; give {name}.detach(), or call apply_rotary_pos_emb "
                          "with fused=False, sbhd or bshd, and no start_positions")
    return freqs.float().contiguous()


def _positions(start_positions: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return None if start_positions is None else start_positions.to(torch.int32).contiguous()


def _by_pytorch(t: torch.Tensor, angles: torch.Tensor, layout: str, interleaved: bool) -> torch.Tensor:
    """apply_rotary_pos_emb() for sbhd and bshd, computed by PyTorch's operations, which also give a gradient for the angles."""
    angles = angles[:t.shape[layout.index("s")]].float()
    angles = angles if layout == "sbhd" else angles.transpose(0, 1)
    turned, rest = t[..., :angles.shape[-1]].float(), t[..., angles.shape[-1]:]
    if interleaved:
        across = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        across = torch.cat((-second, first), -1)
    return torch.cat(((turned * angles.cos() + across * angles.sin()).to(t.dtype), rest), -1)


def apply_rotary_pos_emb(t: torch.Tensor, freqs: torch.Tensor, tensor_format: str = "sbhd",
                         start_positions: Union[torch.Tensor, None] = None, interleaved: bool = False, fused: bool = False,
                         cu_seqlens: Union[torch.Tensor, None] = None, cp_size: int = 1, cp_rank: int = 0) -> torch.Tensor:
    """Rotates t, [s, b, h, d], [b, s, h, d] or, with cu_seqlens, [tokens, h, d], by the angles freqs, [s2, 1, 1, d2] with s2 >= s, d2 <= d.

    start_positions: [b], the position of each sequence's first token. One te-fl op computes the rotation in FP32, whatever `fused` is, with one
    exception: if freqs needs a gradient, fused is False, the format is sbhd or bshd, cp_size is 1 and there are no start_positions, PyTorch's
    operations compute the rotation and the gradient.
    """
    if tensor_format not in ("sbhd", "bshd", "thd"):
        raise InvalidArgument(f"apply_rotary_pos_emb: tensor_format is {tensor_format!r}; it is 'sbhd', 'bshd' or 'thd'")
    if (tensor_format == "thd") != (cu_seqlens is not None):
        raise InvalidArgument("apply_rotary_pos_emb: cu_seqlens and tensor_format='thd' require each other")
    if export.state.exporting and torch.compiler.is_compiling():
        if tensor_format == "thd" or start_positions is not None:
            raise rules.refuse("onnx_export", "tensor_format", tensor_format, "packed sequences and start_positions are not exported; give sbhd or bshd")
        return _by_pytorch(t, _angles(freqs, "freqs"), tensor_format, interleaved)
    if freqs.requires_grad and torch.is_grad_enabled() and not fused and tensor_format != "thd" and start_positions is None and cp_size == 1:
        return _by_pytorch(t, freqs, tensor_format, interleaved)
    return _apply(t, _angles(freqs, "freqs"), _positions(start_positions), None if cu_seqlens is None else cu_seqlens.to(torch.int32),
                  tensor_format, interleaved, cp_size, cp_rank)


def _qkv_forward(qkv, q_freqs, k_freqs, start_positions, split: List[int], layout: str, interleaved: bool, cp_size: int, cp_rank: int):
    qkv = qkv.contiguous()
    outputs = _qkv_outputs(qkv, q_freqs, k_freqs, start_positions, split)
    ops.fused_qkv_rope_forward(qkv_input=qkv, q_freqs=q_freqs, k_freqs=k_freqs, q_out=outputs[0], k_out=outputs[1], v_out=outputs[2],
                               start_positions=start_positions, q_dim=split[0], k_dim=split[1], v_dim=split[2], layout=layout,
                               interleaved=interleaved, cp_size=cp_size, cp_rank=cp_rank)
    return outputs


def _qkv_outputs(qkv, q_freqs, k_freqs, start_positions, split, *rest):
    a, b, groups, _ = qkv.shape
    queries, keys, values = split
    return (qkv.new_empty(a, b, groups * queries // keys, keys), qkv.new_empty(a, b, groups, keys), qkv.new_empty(a, b, groups, values))


def _qkv_backward(dq, dk, dv, q_freqs, k_freqs, start_positions, split: List[int], layout: str, interleaved: bool, cp_size: int,
                  cp_rank: int):
    grad = _qkv_grad(dq, dk, dv, q_freqs, k_freqs, start_positions, split)
    ops.fused_qkv_rope_backward(q_grad=dq.contiguous(), k_grad=dk.contiguous(), v_grad=dv.contiguous(), q_freqs=q_freqs, k_freqs=k_freqs,
                                qkv_grad=grad, start_positions=start_positions, q_dim=split[0], k_dim=split[1], v_dim=split[2],
                                layout=layout, interleaved=interleaved, cp_size=cp_size, cp_rank=cp_rank)
    return grad


def _qkv_grad(dq, dk, dv, q_freqs, k_freqs, start_positions, split, *rest):
    return dk.new_empty(*dk.shape[:3], sum(split))


def _save_qkv(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:4])
    ctx.scalars = inputs[4:]


def _qkv_gradient(op, ctx, dq, dk, dv):
    return (op(dq, dk, dv, *ctx.saved_tensors, *ctx.scalars),) + (None,) * 8


_QKV = "Tensor q_freqs, Tensor k_freqs, Tensor? start_positions, int[] split, str layout, bool interleaved, int cp_size, int cp_rank"
_apply_qkv = differentiable(
    Op(f"qkv_rope_forward(Tensor qkv, {_QKV}) -> (Tensor, Tensor, Tensor)", _qkv_forward, _qkv_outputs),
    Op(f"qkv_rope_backward(Tensor dq, Tensor dk, Tensor dv, {_QKV}) -> Tensor", _qkv_backward, _qkv_grad), _save_qkv, _qkv_gradient)


def apply_fused_qkv_rotary_pos_emb(qkv: torch.Tensor, q_freqs: torch.Tensor, k_freqs: torch.Tensor, qkv_split_arg_list: List[int],
                                   tensor_format: str = "sbhd", start_positions: Union[torch.Tensor, None] = None,
                                   interleaved: bool = False, cu_seqlens: Union[torch.Tensor, None] = None, cp_size: int = 1,
                                   cp_rank: int = 0) -> torch.Tensor:
    """Splits qkv, [s, b, g, q + k + v] or [b, s, g, q + k + v], rotates queries and keys, and returns (q, k, v).

    qkv_split_arg_list: the number of elements of the queries, the key and the value in each group.
    """
    if tensor_format not in ("sbhd", "bshd"):
        raise Unsupported(f"apply_fused_qkv_rotary_pos_emb: tensor_format={tensor_format!r} is not supported; it is 'sbhd' or 'bshd', "
                          "or split qkv and call apply_rotary_pos_emb")
    if cu_seqlens is not None:
        raise InvalidArgument("apply_fused_qkv_rotary_pos_emb: cu_seqlens requires tensor_format='thd', which is not supported; leave it out")
    if cp_size > 1 and start_positions is not None:
        raise Unsupported("apply_fused_qkv_rotary_pos_emb: start_positions with cp_size > 1 is not supported; leave one out")
    if qkv.dim() != 4 or len(qkv_split_arg_list) != 3 or sum(qkv_split_arg_list) != qkv.shape[-1]:
        raise InvalidArgument(f"apply_fused_qkv_rotary_pos_emb: qkv has shape {tuple(qkv.shape)} and qkv_split_arg_list is "
                              f"{list(qkv_split_arg_list)}; three numbers add up to the last of four dimensions")
    return _apply_qkv(qkv, _angles(q_freqs, "q_freqs"), _angles(k_freqs, "k_freqs"), _positions(start_positions), list(qkv_split_arg_list),
                      tensor_format, interleaved, cp_size, cp_rank)
