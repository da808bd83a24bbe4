"""te-fl's layers for torch.onnx.export: each function computes a layer's forward with PyTorch's ops, without a backward."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

from te_fl.pytorch.fp8 import quantization
from te_fl.pytorch.modules.attention import distances, padded, windowed
from te_fl.pytorch.runtime.dtypes import BY_CODE
from te_fl.pytorch.runtime.refuse import refuse

_WHERE = "onnx_export"


def forward(module: Any, kind: str, key: Tuple[Any, ...], activation: int, inputs: Sequence[torch.Tensor], extras: Sequence[torch.Tensor],
            parameters: Sequence[torch.Tensor], attention: Optional[dict], random: Optional[torch.Tensor]) -> torch.Tensor:
    """The output of the layer, computed with PyTorch's ops."""
    if quantization.enabled():
        raise refuse(_WHERE, "recipe", quantization.active_recipe(), "te-fl's FP8 products have no ONNX operators; export outside of te.autocast, and "
                     "quantise the exported model with the tools of its runtime")
    if random is not None:
        raise refuse(_WHERE, "training", True, "dropout is not exported; call eval() on the model")
    if kind not in _LAYERS:
        raise refuse(_WHERE, "module", type(module).__name__, "export its parts in plain PyTorch; the parameters have the same names")
    x = inputs[0]
    dtype = BY_CODE[activation] if activation >= 0 else x.dtype
    if kind == "attention":
        return _attention(module, key, [t.to(dtype) for t in inputs], extras, parameters, attention or {})
    return _LAYERS[kind](module, key, x, list(parameters), dtype)


def _normalised(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], options: dict, dtype: torch.dtype) -> torch.Tensor:
    weight = weight.float() + 1 if options["zero_centered_gamma"] else weight.float()
    if options["normalization"] == "LayerNorm":
        return F.layer_norm(x.float(), weight.shape, weight, bias.float(), options["epsilon"]).to(dtype)
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + options["epsilon"]) * weight).to(dtype)


def _norm(module: Any, key: tuple, x: torch.Tensor, parameters: list, dtype: torch.dtype) -> torch.Tensor:
    if hasattr(module, "_make_options"):
        kind = "layernorm" if len(parameters) == 2 else "rmsnorm"
        options = module._make_options(kind, None)
    else:  # the module is an L2Normalization
        options = {"epsilon": module.eps / key[0], "zero_centered_gamma": False}
    normalization = "LayerNorm" if len(parameters) == 2 else "RMSNorm"
    return _normalised(x, parameters[0], parameters[1] if len(parameters) == 2 else None, {**options, "normalization": normalization}, dtype)


def _product(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> torch.Tensor:
    weight, bias = (torch.cat([t.to(x.dtype) for t in parts]) if parts else None for parts in (weights, biases))
    return F.linear(x, weight, bias)


def _split_norm(options: dict, parameters: list) -> Tuple[torch.Tensor, Optional[torch.Tensor], list]:
    count = 2 if options["normalization"] == "LayerNorm" else 1
    return parameters[0], parameters[1] if count == 2 else None, parameters[count:]


def _linear(module: Any, key: tuple, x: torch.Tensor, parameters: list, dtype: torch.dtype) -> torch.Tensor:
    options, parts = module._options(), len(module.weight_names)
    x = x.to(dtype)
    if "normalization" in options:
        weight, bias, parameters = _split_norm(options, parameters)
        x = _normalised(x, weight, bias, options, dtype)
    return _product(x, parameters[:parts], parameters[parts:] if options["bias"] and not options["return_bias"] else [])


def _mlp(module: Any, key: tuple, x: torch.Tensor, parameters: list, dtype: torch.dtype) -> torch.Tensor:
    options = module._options()
    weight, bias, parameters = _split_norm(options, parameters)
    first, second = (parameters[:2], parameters[2:]) if options["bias"] else (parameters[:1], parameters[1:])
    hidden = _product(_normalised(x.to(dtype), weight, bias, options, dtype), first[:1], first[1:])
    hidden = _activated(options["activation"], hidden.float(), options).to(dtype)
    return _product(hidden, second[:1], second[1:] if not options["return_bias"] else [])


def _qgelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: Dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"), "qgelu": _qgelu, "relu": F.relu, "srelu": lambda x: F.relu(x).square(), "silu": F.silu}
_GATES = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}


def _activated(name: str, x: torch.Tensor, options: dict) -> torch.Tensor:
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name](x)
    a, b = x.chunk(2, -1)
    if name == "clamped_swiglu":
        limit, alpha, offset = options.get("clamp_limit", 7.0), options.get("clamp_alpha", 1.702), options.get("glu_linear_offset", 1.0)
        a, b = a.clamp(max=limit), b.clamp(-limit, limit)
        return a * torch.sigmoid(alpha * a) * (b + offset)
    return (torch.sigmoid(a) if name == "glu" else _ACTIVATIONS[_GATES[name]](a)) * b


def cumulative_lengths(mask: torch.Tensor) -> torch.Tensor:
    """The first token's index of each sequence, from a padding mask [batch, 1, 1, length], which is not validated."""
    return F.pad((~mask[:, 0, 0, :]).sum(1).cumsum(0), (1, 0)).to(torch.int32)


def _attention(module: Any, key: tuple, inputs: Sequence[torch.Tensor], extras: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor],
               options: dict) -> torch.Tensor:
    layout, mask, softcap, left, right, drops = key
    if layout == "thd":
        raise refuse(_WHERE, "qkv_format", layout, "packed sequences have no ONNX operator; give sbhd or bshd with a mask")
    if drops and module.attention_dropout > 0:
        raise refuse(_WHERE, "training", True, "dropout is not exported; call eval() on the model")
    q, k, v = (t.transpose(0, 1) if layout == "sbhd" else t for t in inputs)
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scale = 1 / math.sqrt(module.kv_channels) if module.softmax_scale is None else float(module.softmax_scale)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).float() * scale
    cap = float.fromhex(softcap)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    lengths = (options["cu_seqlens_q"], options["cu_seqlens_kv"]) if options.get("cu_seqlens_q") is not None else None
    from_bottom_right = distances(q.shape[1], k.shape[1], q.device, lengths, True)
    bias = extras[0] if extras else options.get("bias")
    if bias is not None:
        scores = scores + bias.float()
    if options.get("alibi_slopes") is not None:
        slopes = options["alibi_slopes"].float()
        scores = scores + (slopes[:, :, None, None] if slopes.dim() == 2 else slopes[:, None, None]) * from_bottom_right
    top_left = "causal" in mask and not mask.endswith("bottom_right")
    behind = distances(q.shape[1], k.shape[1], q.device) if top_left else from_bottom_right
    hidden = windowed((left, right), behind)
    if "causal" in mask:
        hidden = hidden | (behind > 0)
    if lengths is not None:
        hidden = hidden | padded(lengths[0], q.shape[1])[:, None, :, None] | padded(lengths[1], k.shape[1])[:, None, None]
    if options.get("attn_mask") is not None:
        hidden = hidden | options["attn_mask"].bool()
    scores = scores.masked_fill(hidden, -math.inf)
    sink = {"vanilla": None, "off-by-one": torch.zeros(q.shape[2], device=q.device)}.get(module.softmax_type, parameters[0] if parameters else None)
    if sink is not None:
        scores = torch.cat([scores, sink.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)], -1)
    shares = torch.softmax(scores, -1)[..., :k.shape[1]]
    shares = shares.masked_fill(hidden, 0.0)  # also zeroes the row of a query that attends to no key
    out = torch.einsum("bhqk,bkhd->bqhd", shares.to(v.dtype), v)
    return out.transpose(0, 1) if layout == "sbhd" else out


_LAYERS: Dict[str, Callable] = {"linear": _linear, "layernorm_linear": _linear, "layernorm_mlp": _mlp, "layernorm": _norm, "rmsnorm": _norm,
                                "attention": _attention}
