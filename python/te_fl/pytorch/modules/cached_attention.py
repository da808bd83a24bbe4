"""Attention of new tokens to cached keys and values: converts the arguments of a forward with inference_params."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple

import torch

from te_fl.common.recipe import attends
from te_fl.errors import FailedPrecondition, InvalidArgument, Unsupported
from te_fl.pytorch.fp8 import quantization
from te_fl.pytorch.modules.inference import InferenceParams
from te_fl.pytorch.runtime.refuse import refuse


class CachedCall(NamedTuple):
    """Arguments of attention over all keys and values; cumulative lengths are ordered as in attention's forward."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: str
    mask: str
    lengths: tuple

    def output(self, out: torch.Tensor, layout: str, *inputs: Optional[torch.Tensor]) -> torch.Tensor:
        """Converts the output to the forward's layout and blocks gradients to these inputs."""
        if layout == "sbhd":
            out = out.transpose(0, 1).contiguous()
        needs = [t for t in inputs if t is not None and t.requires_grad]
        return _WithoutGradient.apply(out, *needs) if needs and torch.is_grad_enabled() else out


class _WithoutGradient(torch.autograd.Function):
    """Passes the output through; its backward raises an error that says that there is no gradient."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise Unsupported("DotProductAttention: a forward with inference_params has no gradient, as the cache holds numbers alone; train without "
                          "inference_params, and generate under torch.no_grad()")


def check(where: str, params: Any, recomputes_keys: bool = False) -> InferenceParams:
    """Refuses inference_params that a forward of self-attention cannot use. recomputes_keys: keys come from another input."""
    if not isinstance(params, InferenceParams):
        raise refuse(where, "inference_params", params, "give a te_fl.pytorch.InferenceParams")
    if recomputes_keys:
        raise refuse(where, "inference_params", params, "keys of cross-attention are the encoder's at each step, and a cache would add them to those "
                     "before; leave it out there, or take a decoder of self-attention alone")
    if torch.compiler.is_compiling():
        raise refuse(where, "inference_params", params, "graphs of torch.compile hold no caches of keys and values; leave fullgraph=True out")
    if quantization.enabled() and attends(quantization.active_recipe()):
        raise refuse(where, "inference_params", params, "FP8 attention would scale all tokens anew with each one; take a recipe without fp8_dpa")
    if params.batch_size == 0:
        raise FailedPrecondition(f"{where}: inference_params has no batch; call its pre_step() before each pass of the model")
    return params


def rotary_places(params: InferenceParams, angles: torch.Tensor, tokens: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns (each sequence's first position, the angles for all positions of the padded input). tokens: per sequence, including padding."""
    longest = max(params.sequences.values())
    if longest > angles.shape[0]:
        raise InvalidArgument(f"MultiheadAttention: rotary_pos_emb has {angles.shape[0]} positions, and the longest sequence of inference_params "
                              f"{longest} tokens; give the angles of max_sequence_length positions")
    reached = max(params.sequences_pre_step.values()) + tokens
    if reached > angles.shape[0]:  # only padding positions are beyond the given angles
        angles = torch.cat((angles, angles.new_zeros(reached - angles.shape[0], *angles.shape[1:])))
    return params.get_seqlens_pre_step()[:params.batch_size], angles


def _check_lengths(where: str, name: str, sums: Optional[torch.Tensor], *known: torch.Tensor) -> None:
    """Refuses cumulative lengths that differ from the cache's. Tensors other than the cache's own are read from the device, which synchronises, so
    they are not checked during graph capture.
    """
    if sums is None or any(sums is one for one in known) or sums.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    found = sums.tolist()
    if not any(found == one.tolist()[:len(found)] for one in known):
        raise InvalidArgument(f"{where}: {name} is {found}, and inference_params.{name} {known[-1].tolist()}; give that, or leave it out")


def _check_call(where: str, params: InferenceParams, mask: str, attention_mask: Any, lengths: tuple) -> None:
    cu_q, cu_kv, cu_q_padded, cu_kv_padded, max_q, max_kv = lengths
    if "padding" not in mask:
        raise InvalidArgument(f"{where}: attn_mask_type is {mask!r} with inference_params, whose sequences have lengths of their own; give "
                              "'padding_causal' or 'padding'")
    for name, value in (("attention_mask", attention_mask), ("cu_seqlens_q_padded", cu_q_padded), ("cu_seqlens_kv_padded", cu_kv_padded)):
        if value is not None:
            raise InvalidArgument(f"{where}: {name} is given with inference_params, which knows the lengths of its sequences; leave it out")
    for name, bound, longest in (("max_seqlen_q", max_q, max(params.new_tokens())), ("max_seqlen_kv", max_kv, max(params.new_tokens()))):
        if bound is not None and bound < longest:
            raise InvalidArgument(f"{where}: {name} is {bound}, and a sequence of inference_params' batch has {longest} new tokens; leave it out")
    _check_lengths(where, "cu_seqlens_q", cu_q, params.cu_seqlens_q)
    _check_lengths(where, "cu_seqlens_kv", cu_kv, params.cu_seqlens_q, params.cu_seqlens_kv)


def over_cache(where: str, module: Any, params: InferenceParams, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, mask: str,
               attention_mask: Any, lengths: tuple) -> CachedCall:
    """Writes new keys and values to the cache for the module's layer_number, and returns the call of attention with all keys and values. If this
    function raises, nothing was written. If attention refuses the call later, the new tokens' places may have been written, and a repeated call
    overwrites them. lengths: the forward's, in CachedCall's order; they must equal the cache's, or be None.
    """
    _check_call(where, params, mask, attention_mask, lengths)
    if q.shape[:-2] != k.shape[:-2]:
        raise InvalidArgument(f"{where}: queries have shape {tuple(q.shape)} and keys {tuple(k.shape)} with inference_params; give those of the same "
                              "new tokens")
    params.check_owner(module.layer_number, int(module._number))
    k, v, cu_q, cu_kv, longest, _ = params.step(module.layer_number, k, v, layout)
    params.take_place(module.layer_number, int(module._number))
    if params.is_paged:
        k, v = params.convert_paged_to_nonpaged(module.layer_number)
    batch = params.batch_size
    k, v, cu_q, cu_kv = k[:batch], v[:batch], cu_q[:batch + 1], cu_kv[:batch + 1]
    mask = "padding_causal_bottom_right" if "causal" in mask else mask  # the queries are the last tokens of each sequence
    if layout != "thd":
        return CachedCall(q.transpose(0, 1) if layout == "sbhd" else q, k, v, "bshd", mask, (cu_q, cu_kv, None, None, None, None))
    # The flattened cache is a packed (thd) tensor in which padding follows each sequence.
    begins = torch.arange(batch + 1, dtype=torch.int32, device=k.device) * longest
    return CachedCall(q, k.flatten(0, 1), v.flatten(0, 1), "thd", mask, (cu_q, cu_kv, cu_q, begins, params.max_ctx_len, longest))
