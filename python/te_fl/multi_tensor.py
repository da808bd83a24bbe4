"""Optimizer steps and helpers on lists of tensors, with Transformer Engine's names and arguments. chunk_size, a launch parameter of NVIDIA's kernels,
has no effect.

tensor_lists holds one list for each role. Sums and products are computed in FP32, and each result is rounded once to its tensor's dtype. If the no-op
flag is set, an optimizer changes nothing.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import torch

from te_fl import ops
from te_fl.errors import InvalidArgument
from te_fl.remainders import divide, joined
from te_fl.tensors import Quantized

__all__ = ["multi_tensor_adam", "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master", "multi_tensor_adam_fp8",
           "multi_tensor_adam_param_remainder", "multi_tensor_compute_scale_and_scale_inv", "multi_tensor_compute_scale_inv_e8m0",
           "multi_tensor_l2norm", "multi_tensor_scale", "multi_tensor_scale_tensor", "multi_tensor_sgd", "multi_tensor_unscale_l2norm"]

Lists = Sequence[Sequence[torch.Tensor]]
_LARGEST = torch.finfo(torch.float32).max
_CODES = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}  # by Transformer Engine's dtype numbers


def _lists(function: str, tensor_lists: Lists, roles: str, optional: str = "") -> List[List[torch.Tensor]]:
    """Checks and copies the lists: one for each role, then any optional ones; tensors at equal positions must have equal numbers of elements."""
    fewest, most = len(roles.split()), len(f"{roles} {optional}".split())
    if not fewest <= len(tensor_lists) <= most:
        raise InvalidArgument(f"{function}: tensor_lists has {len(tensor_lists)} lists; it takes {roles.replace(' ', ', ')}"
                              f"{f' and if wanted {optional}' if optional else ''}")
    names = f"{roles} {optional}".split()
    count = len(tensor_lists[0])
    if count == 0:
        raise InvalidArgument(f"{function}: the list of {names[0]} has no tensor")
    for name, tensors in zip(names, tensor_lists):
        if len(tensors) != count:
            raise InvalidArgument(f"{function}: the list of {name} has {len(tensors)} tensors, that of {names[0]} {count}")
        for i, (tensor, first) in enumerate(zip(tensors, tensor_lists[0])):
            # Lists with one number per tensor, such as scales, are checked where they are used.
            if tensor.numel() != first.numel() and name not in ("scales", "amaxes", "scale_invs"):
                raise InvalidArgument(f"{function}: tensor {i} of {name} has {tensor.numel()} elements, of {names[0]} {first.numel()}")
    return [list(tensors) for tensors in tensor_lists]


def _alike(tensors: Sequence[torch.Tensor], model: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    """The tensors, viewed with the shapes of the model's tensors."""
    return [t if t.shape == m.shape else t.view(m.shape) for t, m in zip(tensors, model)]


def _one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.shape == (1,) else tensor.view(1)


def multi_tensor_scale(chunk_size: int, is_infinite: torch.Tensor, tensor_lists: Lists, scale: float) -> None:
    """Lists: [inputs, outputs]. is_infinite is set to 1 if an input or a result is not finite."""
    inputs, outputs = _lists("multi_tensor_scale", tensor_lists, "inputs outputs")
    ops.multi_tensor_scale(inputs=_alike(inputs, outputs), outputs=outputs, noop_flag=_one(is_infinite), scale=float(scale))


@torch.no_grad()
def multi_tensor_scale_tensor(chunk_size: int, is_infinite: torch.Tensor, tensor_lists: Lists, scale: torch.Tensor) -> None:
    """As multi_tensor_scale, with the factor in device memory."""
    inputs, outputs = _lists("multi_tensor_scale_tensor", tensor_lists, "inputs outputs")
    results = [x.float() * scale.view(()) for x in inputs]
    torch._foreach_copy_(outputs, _alike(results, outputs))
    _flag(is_infinite, torch.stack([torch.isfinite(t).all() for t in (*inputs, *outputs)]).all())


def _flag(flag: torch.Tensor, finite: torch.Tensor) -> None:
    flag.masked_fill_(~finite.view(()), 1)


def _norm(op: Any, name: str, flag: torch.Tensor, tensor_lists: Lists, per_tensor: Optional[bool], **options: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    (inputs,) = _lists(name, tensor_lists, "inputs")
    norm = torch.empty(1, dtype=torch.float32, device=inputs[0].device)
    each = torch.empty(len(inputs) if per_tensor else 0, dtype=torch.float32, device=inputs[0].device)
    op(inputs=inputs, norm=norm, per_tensor_norms=each if per_tensor else None, **options)
    _flag(flag, torch.isfinite(norm))
    return norm, each


def multi_tensor_l2norm(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists,
                        per_tensor: Optional[bool] = None) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns (the norm of all tensors [1], the norm of each; the latter is empty unless per_tensor). noop_flag is set to 1 if the norm is not
    finite.
    """
    return _norm(ops.multi_tensor_l2norm, "multi_tensor_l2norm", noop_flag, tensor_lists, per_tensor)


def multi_tensor_unscale_l2norm(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, inv_scale: torch.Tensor,
                                per_tensor: Optional[bool] = None) -> Tuple[torch.Tensor, torch.Tensor]:
    """As multi_tensor_l2norm, for the tensors times inv_scale."""
    return _norm(ops.multi_tensor_unscale_l2norm, "multi_tensor_unscale_l2norm", noop_flag, tensor_lists, per_tensor, inv_scale=_one(inv_scale))


class _Moments:
    """Converts Adam's moments, all of one dtype, to FP32 for the op, and writes the results back."""

    def __init__(self, function: str, firsts: List[torch.Tensor], seconds: List[torch.Tensor]):
        dtypes = {t.dtype for t in (*firsts, *seconds)}
        if dtypes not in ({torch.float32}, {torch.bfloat16}):
            raise InvalidArgument(f"{function}: both moments are all float32 or all bfloat16, not {', '.join(sorted(map(str, dtypes)))}")
        self._kept = None if dtypes == {torch.float32} else (firsts, seconds)
        self.first, self.second = (firsts, seconds) if self._kept is None else ([t.float() for t in firsts], [t.float() for t in seconds])

    def write(self) -> None:
        if self._kept is not None:
            torch._foreach_copy_(self._kept[0], self.first)
            torch._foreach_copy_(self._kept[1], self.second)


@torch.no_grad()
def _adam(function: str, noop_flag: torch.Tensor, lists: List[List[torch.Tensor]], beta1: float, beta2: float, epsilon: float, mode: int,
          bias_correction: int, weight_decay: float, **options: Any) -> None:
    """lists: gradients, parameters, moments, and optionally master weights."""
    gradients, params, firsts, seconds, *masters = lists
    moments = _Moments(function, firsts, seconds)
    ops.multi_tensor_adam(grads=_alike(gradients, params), params=params, exp_avgs=_alike(moments.first, params),
                          exp_avg_sqs=_alike(moments.second, params), master_params=_alike(masters[0], params) if masters else None,
                          noop_flag=_one(noop_flag), beta1=beta1, beta2=beta2, epsilon=epsilon, mode=int(mode),
                          bias_correction=int(bias_correction) == 1, weight_decay=weight_decay, **options)
    moments.write()


def multi_tensor_adam(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, lr: float, beta1: float, beta2: float, epsilon: float,
                      step: int, mode: int, bias_correction: int, weight_decay: float) -> None:
    """Lists: [gradients, parameters, first moments, second moments, optionally FP32 master weights]. mode: 0 is L2 regularisation, 1 is AdamW."""
    lists = _lists("multi_tensor_adam", tensor_lists, "gradients parameters exp_avgs exp_avg_sqs", "master_weights")
    _adam("multi_tensor_adam", noop_flag, lists, beta1, beta2, epsilon, mode, bias_correction, weight_decay, lr=float(lr), step=int(step))


@torch.no_grad()
def multi_tensor_adam_param_remainder(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, lr: float, beta1: float, beta2: float,
                                      epsilon: float, step: int, mode: int, bias_correction: int, weight_decay: float) -> None:
    """Lists: [gradients, BF16 parameters, moments, INT16 remainders]. Parameter and remainder together form the FP32 master weight."""
    name = "multi_tensor_adam_param_remainder"
    gradients, params, firsts, seconds, remainders = _lists(name, tensor_lists, "gradients parameters exp_avgs exp_avg_sqs remainders")
    for p, r in zip(params, remainders):
        if p.dtype != torch.bfloat16 or r.dtype != torch.int16:
            raise InvalidArgument(f"{name}: a parameter is {p.dtype} and its remainder {r.dtype}; they are bfloat16 and int16")
    remainders = _alike(remainders, params)
    masters = [joined(p, r) for p, r in zip(params, remainders)]
    _adam(name, noop_flag, [gradients, masters, firsts, seconds], beta1, beta2, epsilon, mode, bias_correction, weight_decay,
          lr=float(lr), step=int(step))
    for master, p, r in zip(masters, params, remainders):
        divide(master, p, r)


def multi_tensor_adam_fp8(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, lr: float, beta1: float, beta2: float, epsilon: float,
                          step: int, mode: int, bias_correction: int, weight_decay: float, fp8_dtype: Any) -> None:
    """Lists: [gradients, codes of the parameters, FP32 moments, FP32 master weights, scales, amaxes, scale_invs]."""
    name = "multi_tensor_adam_fp8"
    gradients, codes, firsts, seconds, masters, scales, amaxes, scale_invs = _lists(
        name, tensor_lists, "gradients parameters exp_avgs exp_avg_sqs master_weights scales amaxes scale_invs")
    dtype = _CODES.get(int(fp8_dtype))
    if dtype is None:
        raise InvalidArgument(f"{name}: fp8_dtype is {int(fp8_dtype)}, which is not an FP8 one: kFloat8E4M3 (7) or kFloat8E5M2 (8)")
    outputs = [Quantized(c.view(dtype).view(m.shape), scale=_one(s), amax=_one(a), scale_inv=_one(i))
               for c, m, s, a, i in zip(codes, masters, scales, amaxes, scale_invs)]
    _adam(name, noop_flag, [gradients, masters, firsts, seconds], beta1, beta2, epsilon, mode, bias_correction, weight_decay,
          lr=float(lr), step=int(step), fp8_params=outputs)


@torch.no_grad()
def _capturable(name: str, noop_flag: torch.Tensor, lists: List[List[torch.Tensor]], lr: torch.Tensor, beta1: float, beta2: float, epsilon: float,
                step: torch.Tensor, mode: int, bias_correction: int, weight_decay: float, inv_scale: torch.Tensor) -> None:
    """Unscales the gradients in place; the step uses the unscaled values before they are rounded to the gradients' dtype."""
    gradients = lists[0]
    unscaled = [g.float() * inv_scale.view(()) for g in gradients]
    _adam(name, noop_flag, [unscaled, *lists[1:]], beta1, beta2, epsilon, mode, bias_correction, weight_decay, lr_tensor=_one(lr),
          step_tensor=_one(step).to(torch.int64))
    skipped = noop_flag.view(()) != 0
    torch._foreach_copy_(gradients, [torch.where(skipped, g.float(), u) for g, u in zip(gradients, unscaled)])


def multi_tensor_adam_capturable(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, lr: torch.Tensor, beta1: float, beta2: float,
                                 epsilon: float, step: torch.Tensor, mode: int, bias_correction: int, weight_decay: float,
                                 inv_scale: torch.Tensor) -> None:
    """As multi_tensor_adam for gradients times inv_scale, with learning rate and step in device memory. The gradients are unscaled in place."""
    name = "multi_tensor_adam_capturable"
    _capturable(name, noop_flag, _lists(name, tensor_lists, "gradients parameters exp_avgs exp_avg_sqs"), lr, beta1, beta2, epsilon, step, mode,
                bias_correction, weight_decay, inv_scale)


def multi_tensor_adam_capturable_master(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, lr: torch.Tensor, beta1: float,
                                        beta2: float, epsilon: float, step: torch.Tensor, mode: int, bias_correction: int, weight_decay: float,
                                        inv_scale: torch.Tensor) -> None:
    """As multi_tensor_adam_capturable, with FP32 master weights as the fifth list."""
    name = "multi_tensor_adam_capturable_master"
    _capturable(name, noop_flag, _lists(name, tensor_lists, "gradients parameters exp_avgs exp_avg_sqs master_weights"), lr, beta1, beta2, epsilon,
                step, mode, bias_correction, weight_decay, inv_scale)


def multi_tensor_sgd(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, wd: float, momentum: float, dampening: float, lr: float,
                     nesterov: bool, first_run: bool, wd_after_momentum: bool, scale: float) -> None:
    """Lists: [gradients, parameters, momentums in the parameters' dtype, optionally copies of the parameters to write].

    As in Transformer Engine, the update is rounded to the parameter's dtype before it is added, so FP16 parameters are rounded twice.
    """
    gradients, params, kept, *copies = _lists("multi_tensor_sgd", tensor_lists, "gradients parameters momentums", "copies")
    options: dict = dict(momentum=momentum, dampening=dampening, nesterov=bool(nesterov), first_run=bool(first_run),
                         wd_after_momentum=bool(wd_after_momentum), scale=scale)
    copied = _alike(copies[0], params) if copies else None
    if any(p.dtype != torch.float32 for p in params):
        _sgd_by_roundings(_one(noop_flag), _alike(gradients, params), params, _alike(kept, params), copied, float(lr), wd, **options)
        return
    momentums = [m if m.dtype == torch.float32 else m.float() for m in kept]
    ops.multi_tensor_sgd(grads=_alike(gradients, params), params=params, momentums=_alike(momentums, params), param_copies=copied,
                         noop_flag=_one(noop_flag), lr=float(lr), weight_decay=wd, **options)
    rounded = [i for i, m in enumerate(kept) if m.dtype != torch.float32]
    if rounded and momentum != 0:
        torch._foreach_copy_([kept[i] for i in rounded], [momentums[i] for i in rounded])


@torch.no_grad()
def _sgd_by_roundings(noop_flag: torch.Tensor, gradients: List[torch.Tensor], params: List[torch.Tensor], momentums: List[torch.Tensor],
                      copies: Optional[List[torch.Tensor]], lr: float, weight_decay: float, *, momentum: float, dampening: float, nesterov: bool,
                      first_run: bool, wd_after_momentum: bool, scale: float) -> None:
    """SGD with two roundings. No op rounds twice, so this uses PyTorch's ops."""
    skipped = noop_flag.view(()) != 0
    for i, (p, kept) in enumerate(zip(params, momentums)):
        step, decay = gradients[i].float() * scale, p.float() * weight_decay if weight_decay else None
        if decay is not None and not wd_after_momentum:
            step = step + decay
        if momentum != 0:
            new = step if first_run else kept.float() * momentum + step * (1 - dampening)
            kept.copy_(torch.where(skipped, kept, new.to(kept.dtype)))
            step = step + new * momentum if nesterov else new
        if decay is not None and wd_after_momentum:
            step = step + decay
        p.copy_(torch.where(skipped, p, p + (step * -lr).to(p.dtype)))
        if copies is not None:
            copies[i].copy_(torch.where(skipped, copies[i], p.to(copies[i].dtype)))


def _flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


@torch.no_grad()
def _write(values: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    torch._foreach_copy_(list(tensors), [part.view(t.shape) for part, t in zip(values.split([t.numel() for t in tensors]), tensors)])


def scale_of_amax(amax: torch.Tensor, largest: float, pow2: bool, epsilon: float) -> torch.Tensor:
    """largest / amax, elementwise in FP32. 1 where amax is 0 or not finite; the largest FP32 number where the quotient overflows."""
    bounded = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    quotient = torch.div(torch.full_like(bounded, largest), bounded)
    scale = torch.where(torch.isinf(quotient), torch.full_like(quotient, _LARGEST), quotient)
    if pow2:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where((bounded == 0) | ~torch.isfinite(bounded), torch.ones_like(scale), scale)


def multi_tensor_compute_scale_and_scale_inv(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, max_fp8: float,
                                             force_pow_2_scales: bool, epsilon: float) -> None:
    """Lists: [amaxes, scales, inverse scales], FP32 of equal shapes. The no-op flag is ignored, since updating scales in a skipped step is harmless.
    """
    amaxes, scales, inverses = _lists("multi_tensor_compute_scale_and_scale_inv", tensor_lists, "block_amaxes block_scales block_scale_invs")
    scale = scale_of_amax(_flattened(amaxes), max_fp8, force_pow_2_scales, epsilon)
    _write(scale, scales)
    _write(torch.div(torch.ones_like(scale), scale), inverses)


def e8m0_of_amax(amax: torch.Tensor, largest: float = 448.0) -> torch.Tensor:
    """The E8M0 bits of amax / largest, rounded up to a power of two: 255 for NaN, 254 for infinity."""
    # The quotient is computed as a product with the rounded reciprocal, as in NVIDIA's extension.
    bits = (amax.float() * torch.tensor(1.0, dtype=torch.float32, device="cpu").div(largest).item()).view(torch.int32)
    exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    up = (fraction > 0) & (exponent != 254) & ~((exponent == 0) & (fraction <= 0x400000))
    finite = exponent + up.to(torch.int32)
    finite = torch.where(exponent == 255, torch.where(fraction > 0, 255, 254), finite)
    return finite.to(torch.uint8)


def multi_tensor_compute_scale_inv_e8m0(chunk_size: int, dummy: None, tensor_lists: Lists) -> None:
    """Lists: [BF16 amaxes, E8M0 bits of the inverse scales]."""
    name = "multi_tensor_compute_scale_inv_e8m0"
    if dummy is not None:
        raise InvalidArgument(f"{name}: a no-op flag is given; it takes None")
    amaxes, inverses = _lists(name, tensor_lists, "block_amaxes block_scale_invs")
    for amax, inverse in zip(amaxes, inverses):
        if amax.dtype != torch.bfloat16 or inverse.dtype.itemsize != 1:
            raise InvalidArgument(f"{name}: an amax is {amax.dtype} and its scale_inv {inverse.dtype}; they are bfloat16 and uint8")
    _write(e8m0_of_amax(_flattened(amaxes)), [i.view(torch.uint8) for i in inverses])
