"""Quantisation, transposition of FP8 codes and amaxes by PyTorch's operations."""

from __future__ import annotations

import itertools
from typing import Any, Dict, List, Optional, Union

import torch

from te_fl.tensors import Quantized

from te_fl.reference_torch.values import FLT_MAX, amax_of, cast, matrix, quotient, store, values


def _kept(out: Any) -> List[torch.Tensor]:
    parts = (out.data, out.columnwise_data, out.scale_inv, out.columnwise_scale_inv, out.amax, out.columnwise_amax, out.scale)
    return [p for p in parts if p is not None]


def quantize(input: torch.Tensor, output: Quantized, noop_flag: Optional[torch.Tensor]) -> None:
    if noop_flag is None:
        store(output, values(input), input.dtype)
        return
    before = [part.clone() for part in _kept(output)]  # the flag is read on the device, so that the host need not wait
    store(output, values(input), input.dtype)
    skipped = noop_flag.reshape(()) != 0
    for part, old in zip(_kept(output), before):
        bits = part.view(torch.uint8) if part.element_size() == 1 else part
        bits.copy_(torch.where(skipped, old.view(bits.dtype), bits))


def dequantize(input: Quantized, output: torch.Tensor) -> None:
    output.copy_(values(input))


def bgrad_quantize(input: torch.Tensor, output: Quantized, bias_grad: torch.Tensor) -> None:
    bias_grad.copy_(matrix(values(input)).sum(0))
    store(output, values(input), input.dtype)


def multi_tensor_quantize(inputs: List[torch.Tensor], outputs: List[Quantized], noop_flag: Optional[torch.Tensor]) -> None:
    for x, out in zip(inputs, outputs):
        quantize(x, out, noop_flag)


def split_quantize(input: torch.Tensor, outputs: List[Quantized]) -> None:
    begin = 0
    for out in outputs:
        rows = out.shape[0]
        store(out, values(input[begin:begin + rows]), input.dtype)
        begin += rows


def cast_to_fp8(input: torch.Tensor, output: torch.Tensor, scale: torch.Tensor, amax: Optional[torch.Tensor], scale_inv: Optional[torch.Tensor]) -> None:
    x = values(input)
    if amax is not None:
        amax.copy_(torch.fmax(amax, amax_of(x)))
    if scale_inv is not None:
        scale_inv.copy_(quotient(1.0, scale))
    output.view(torch.uint8).copy_(cast(x * scale, output.dtype).view(torch.uint8))


def fp8_transpose(input: torch.Tensor, output: torch.Tensor, scale_inv: Optional[torch.Tensor] = None,
                  column_sums: Optional[torch.Tensor] = None) -> None:
    if column_sums is not None:
        total = (values(input) * (1.0 if scale_inv is None else scale_inv)).sum(0)
        column_sums.copy_(total)
    output.view(torch.uint8).copy_(input.view(torch.uint8).t())


def compute_amax(input: torch.Tensor, amax: torch.Tensor) -> None:
    amax.fill_(amax_of(values(input)))


def fused_amax_and_scale_update_after_reduction(amax_reduction_buffer: Optional[torch.Tensor], amax_histories: List[torch.Tensor],
                                                scales: List[torch.Tensor], algo: str, fp8_dtype: str, margin: float) -> None:
    numerator = torch.finfo(torch.float8_e5m2 if fp8_dtype == "e5m2" else torch.float8_e4m3fn).max * 2.0 ** -margin
    starts = list(itertools.accumulate((history.shape[1] for history in amax_histories), initial=0))
    by_length: Dict[int, List[int]] = {}
    for i, history in enumerate(amax_histories):
        by_length.setdefault(history.shape[0], []).append(i)
    for places in by_length.values():  # histories of one length are updated as one
        history, scale = torch.cat([amax_histories[i] for i in places], 1), torch.cat([scales[i].reshape(-1) for i in places])
        last = history[0]
        if amax_reduction_buffer is not None:
            flat = amax_reduction_buffer.reshape(-1)
            reduced = torch.cat([flat[starts[i]:starts[i + 1]] for i in places])
            last = torch.where(reduced != 0, reduced, last)
        rolled = torch.cat((history[1:], last[None]))
        amax = last if algo == "most_recent" else rolled.nan_to_num(0.0, float("inf")).clamp_min(0).amax(0)
        fresh = quotient(numerator, amax).clamp_max(FLT_MAX)
        changed = last != 0  # a NaN is not 0
        scale = torch.where(changed & (amax > 0) & amax.isfinite(), fresh, scale).clamp_max(FLT_MAX)
        rolled[0] = 0
        widths = [amax_histories[i].shape[1] for i in places]
        for i, new_scale, new_history in zip(places, scale.split(widths), torch.where(changed, rolled, history).split(widths, 1)):
            scales[i].copy_(new_scale.reshape(scales[i].shape))
            amax_histories[i].copy_(new_history)


def supports_margin(margin: float) -> Union[bool, str]:
    return True if -100 <= margin <= 100 else "a margin beyond 100 is left to reference.host, which checks it"


OPS = {f.__name__: f for f in (quantize, dequantize, bgrad_quantize, multi_tensor_quantize, split_quantize, cast_to_fp8, fp8_transpose, compute_amax,
                               fused_amax_and_scale_update_after_reduction)}
