"""A stand-in for FlagGems on the host: functions with the signatures and results of FlagGems 5.0.2 by PyTorch's operations. `calls` counts them."""

import collections
import functools
import os

import torch

if os.environ.get("STAND_IN_FAILS"):
    raise RuntimeError("no device was detected,\nas FlagGems says")

device, vendor_name, __version__ = os.environ.get("STAND_IN_DEVICE", "cpu"), "nvidia", "5.0.2"
calls = collections.Counter()


def _counted(function):
    @functools.wraps(function)
    def run(*arguments, **options):
        calls[function.__name__] += 1
        return function(*arguments, **options)
    return run


def _same_as(name, function):
    def run(*arguments, **options):
        return function(*arguments, **options)
    run.__name__ = name
    return _counted(run)


aten = torch.ops.aten
gelu, silu, sigmoid, tanh = (_same_as(name, getattr(aten, name)) for name in ("gelu", "silu", "sigmoid", "tanh"))
exp, rsqrt, cos, sin = (_same_as(name, getattr(aten, name)) for name in ("exp", "rsqrt", "cos", "sin"))
gelu_backward, silu_backward = _same_as("gelu_backward", aten.gelu_backward), _same_as("silu_backward", aten.silu_backward)
add, sub, addmm_out = _same_as("add", torch.add), _same_as("sub", torch.sub), _same_as("addmm_out", torch.addmm)
sum_dim, mean_dim = _same_as("sum_dim", torch.sum), _same_as("mean_dim", torch.mean)


class ops:
    """The general functions."""

    mul = staticmethod(_same_as("mul", torch.mul))
    mm_out = staticmethod(_same_as("mm_out", lambda a, b, *, out: out.copy_(a.float() @ b.float())))


def mul(*_, **__):
    raise AssertionError("this is Hopper's")


mm_out = mul


@_counted
def softmax(x, dim, half_to_float=False):
    return torch.softmax(x, dim)


@_counted
def softmax_backward(grad_output, output, dim, input_dtype):
    assert grad_output.is_contiguous() and output.is_contiguous()
    y = output.float()
    return (y * (grad_output - (grad_output * y).sum(dim, keepdim=True))).to(input_dtype)


@_counted
def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    """The statistics have the input's dtype."""
    y, mean, inverse = torch.native_layer_norm(input, list(normalized_shape), weight, bias, eps)
    return y, mean.reshape(-1).to(input.dtype), inverse.reshape(-1).to(input.dtype)


@_counted
def layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight=None, bias=None, output_mask=None):
    """The first dimension alone counts rows."""
    assert input.dim() == 2 and grad_out.dim() == 2
    dy, x, w = grad_out.float(), input.float(), weight.float()
    normed = (x - mean[:, None]) * rstd[:, None]
    d = dy * w
    dx = rstd[:, None] * (d - d.mean(-1, keepdim=True) - normed * (d * normed).mean(-1, keepdim=True))
    return dx.to(input.dtype), (dy * normed).sum(0).to(weight.dtype), dy.sum(0).to(bias.dtype) if output_mask[2] else None


@_counted
def rms_norm_forward(x, normalized_shape, weight, eps=1e-5):
    v = x.float()
    inverse = (v.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (v * inverse * weight).to(x.dtype), inverse.reshape(-1)


@_counted
def rms_norm_backward(dy, x, inv_rms, normalized_shape, weight, eps=1e-5):
    columns = x.shape[-1]
    v, grad = x.float().reshape(-1, columns), dy.float().reshape(-1, columns)
    normed = v * inv_rms[:, None]
    d = grad * weight
    dx = inv_rms[:, None] * (d - normed * (d * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype).reshape(x.shape), (grad * normed).sum(0).to(x.dtype)


def swiglu(*_):
    raise ValueError("for CUDA only")


dswiglu = geglu = dgeglu = swiglu


@_counted
def flash_attention_forward(query, key, value, cumulative_sequence_length_q, cumulative_sequence_length_k, max_q, max_k, dropout_p, is_causal,
                            return_debug_mask, *, scale=None, disable_splitkv=False):
    """[batch, length, heads, size]; the log-sum-exp [batch, heads, length]."""
    assert disable_splitkv and dropout_p == 0 and cumulative_sequence_length_q is None and not return_debug_mask
    q, k, v = (t.transpose(1, 2).float() for t in (query, key, value))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return (torch.softmax(scores, -1) @ v).to(query.dtype).transpose(1, 2), scores.logsumexp(-1), None, None, None
