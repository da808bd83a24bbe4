"""A vendor's functions with Transformer Engine's arguments as implementations of the typed ops, for te_fl.pytorch.

An adapter serves plain tensors only: no quantised ones, no scaling modes, no arguments that Transformer Engine's function does not have. It is
registered with the function, under the function's impl_id, kind, vendor and priority. A typed op writes its outputs in place: the function's results
are copied there, unless the function takes the output.

Missing are the ops whose two forms differ in meaning: the gradients of biases (vendors return them in either order), fused attention (its saved tensors
differ) and the router (its maps have several formats).
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Optional, Tuple

import torch

from te_fl.errors import Unsupported
from te_fl.registration import DEVICE_TYPES, OpImpl
from te_fl.tex_form import NOT_BEGUN, TexImpl
from te_fl.torch_streams import private_name
from te_fl.transformer_engine_torch.enums import DType, NVTE_QKV_Format

_Run = Callable[..., Any]
_ADAPTERS: Dict[str, Callable[[_Run], Callable[..., None]]] = {}
_CHUNK = 65536  # elements that a block of a multi-tensor kernel takes, as Transformer Engine's optimizers pass it
_WORKSPACE = 32 << 20
_DTYPES = {torch.float32: DType.kFloat32, torch.float16: DType.kFloat16, torch.bfloat16: DType.kBFloat16}


def _adapter(*names: str) -> Callable:
    def add(make: Callable[[_Run], Callable[..., None]]) -> Callable:
        _ADAPTERS.update(dict.fromkeys(names, make))
        return make
    return add


def _write(output: torch.Tensor, made: torch.Tensor) -> None:
    if made is not output and made.data_ptr() != output.data_ptr():
        output.copy_(made.view(output.shape))


_KINDS = "gelu qgelu relu srelu silu geglu qgeglu reglu sreglu swiglu glu".split()


@_adapter(*_KINDS)
def _activation(run: _Run) -> Callable[..., None]:
    return lambda input, output: _write(output, run(input, None))


@_adapter(*(f"d{name}" for name in _KINDS))
def _activation_gradient(run: _Run) -> Callable[..., None]:
    return lambda grad, input, output: _write(output, run(grad, input, None))


@_adapter("clamped_swiglu")
def _clamped(run: _Run) -> Callable[..., None]:
    return lambda input, output, limit, alpha: _write(output, run(input, None, limit, alpha))


@_adapter("clamped_dswiglu")
def _clamped_gradient(run: _Run) -> Callable[..., None]:
    return lambda grad, input, output, limit, alpha: _write(output, run(grad, input, None, limit, alpha))


@_adapter("layernorm_fwd")
def _layernorm(run: _Run) -> Callable[..., None]:
    def fwd(x, gamma, beta, z, mu, rsigma, epsilon, zero_centered_gamma):
        made = run(x, gamma, beta, epsilon, z, None, _dtype(z), 0, zero_centered_gamma)
        for output, value in zip((z, mu, rsigma), made):
            _write(output, value)
    return fwd


@_adapter("rmsnorm_fwd")
def _rmsnorm(run: _Run) -> Callable[..., None]:
    def fwd(x, gamma, z, rsigma, epsilon, zero_centered_gamma):
        made, _, statistics = run(x, gamma, epsilon, z, None, _dtype(z), 0, zero_centered_gamma)
        _write(z, made)
        _write(rsigma, statistics)
    return fwd


@_adapter("layernorm_bwd")
def _layernorm_gradient(run: _Run) -> Callable[..., None]:
    def bwd(dz, x, mu, rsigma, gamma, dx, dgamma, dbeta, zero_centered_gamma):
        for output, value in zip((dx, dgamma, dbeta), run(dz, x, mu, rsigma, gamma, 0, zero_centered_gamma)):
            if output is not None:
                _write(output, value)
    return bwd


@_adapter("rmsnorm_bwd")
def _rmsnorm_gradient(run: _Run) -> Callable[..., None]:
    def bwd(dz, x, rsigma, gamma, dx, dgamma, zero_centered_gamma):
        for output, value in zip((dx, dgamma), run(dz, x, rsigma, gamma, 0, zero_centered_gamma)):
            _write(output, value)
    return bwd


@_adapter("rmsnorm_bwd_add")
def _rmsnorm_gradient_and_residual(run: _Run) -> Callable[..., None]:
    def bwd(dz, x, add, rsigma, gamma, dx, dgamma, zero_centered_gamma):
        for output, value in zip((dx, dgamma), run(dz, x, add, rsigma, gamma, 0, zero_centered_gamma)):
            _write(output, value)
    return bwd


_SOFTMAX = ("scaled", "scaled_upper_triang_masked", "scaled_aligned_causal_masked")


@_adapter(*(f"{kind}_softmax_forward" for kind in _SOFTMAX))
def _softmax(run: _Run) -> Callable[..., None]:
    return lambda input, output, scale: _write(output, run(input, scale))


@_adapter("scaled_masked_softmax_forward")
def _masked_softmax(run: _Run) -> Callable[..., None]:
    return lambda input, mask, output, scale: _write(output, run(input, mask, scale))


@_adapter(*(f"{kind}_softmax_backward" for kind in (*_SOFTMAX, "scaled_masked")))
def _softmax_gradient(run: _Run) -> Callable[..., None]:
    # Transformer Engine's kernels write the result to the gradient that they read.
    return lambda output_grad, softmax_results, input_grad, scale: _write(input_grad, run(output_grad.clone(), softmax_results, scale))


@functools.lru_cache(maxsize=None)
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)


@_adapter("generic_gemm")
def _gemm(run: _Run) -> Callable[..., None]:
    def product(a, b, d, bias, pre_gelu_out, pre_gelu_in, bias_grad, trans_a, trans_b, gelu, accumulate, accumulate_bias_grad, use_split_accumulator,
                alpha, beta):
        factors = {} if alpha == 1 and (beta == 1 or not accumulate) else {"alpha": alpha, "beta": beta if accumulate else None}
        workspace = _workspace(d.device)
        # If the function fails while it accumulates, d keeps its values for the next implementation.
        made, _, before, _ = run(b, trans_b, a, trans_a, d.clone() if accumulate else d, None, _dtype(d), bias, _dtype(d if bias is None else bias), gelu,
                                 None, False, workspace, _WORKSPACE, accumulate, use_split_accumulator, **factors)
        _write(d, made)
        if pre_gelu_out is not None:
            _write(pre_gelu_out, before)
    return product


def _gemm_supports(pre_gelu_in: Any, bias_grad: Any) -> Any:
    return "it computes no gradients of GELU or of biases" if pre_gelu_in is not None or bias_grad is not None else True


def _supports_all() -> bool:
    return True


_SUPPORTS: Dict[str, Callable[..., Any]] = {"generic_gemm": _gemm_supports}


@_adapter("fused_rope_forward", "fused_rope_backward")
def _rope(run: _Run) -> Callable[..., None]:
    def rope(input, freqs, output, start_positions, cu_seqlens, layout, interleaved, cp_size, cp_rank):
        _write(output, run(input, freqs, start_positions, NVTE_QKV_Format[f"NVTE_{layout.upper()}"], interleaved, cu_seqlens, cp_size, cp_rank))
    return rope


@_adapter("multi_tensor_scale")
def _scale(run: _Run) -> Callable[..., None]:
    return lambda inputs, outputs, noop_flag, scale: run(_CHUNK, noop_flag, [inputs, outputs], scale)


def _norm(norm: torch.Tensor, per_tensor_norms: Optional[torch.Tensor], made: Tuple[torch.Tensor, Any]) -> None:
    _write(norm, made[0])
    if per_tensor_norms is not None:
        _write(per_tensor_norms, made[1])


@_adapter("multi_tensor_l2norm")
def _l2norm(run: _Run) -> Callable[..., None]:
    return lambda inputs, norm, per_tensor_norms: _norm(norm, per_tensor_norms, run(_CHUNK, _zero(norm.device), [inputs], per_tensor_norms is not None))


@_adapter("multi_tensor_unscale_l2norm")
def _unscale_l2norm(run: _Run) -> Callable[..., None]:
    return lambda inputs, inv_scale, norm, per_tensor_norms: _norm(
        norm, per_tensor_norms, run(_CHUNK, _zero(norm.device), [inputs], inv_scale, per_tensor_norms is not None))


@_adapter("multi_tensor_adam")
def _adam(run: _Run) -> Callable[..., None]:
    def adam(grads, params, exp_avgs, exp_avg_sqs, master_params, noop_flag, lr, beta1, beta2, epsilon, weight_decay, step, mode, bias_correction):
        lists = [grads, params, exp_avgs, exp_avg_sqs, *([master_params] if master_params else [])]
        flag = _zero(params[0].device) if noop_flag is None else noop_flag
        run(_CHUNK, flag, lists, lr, beta1, beta2, epsilon, step, int(mode == "adamw"), int(bias_correction), weight_decay)
    return adam


@_adapter("multi_tensor_sgd")
def _sgd(run: _Run) -> Callable[..., None]:
    def sgd(grads, params, momentums, param_copies, noop_flag, lr, weight_decay, momentum, dampening, scale, nesterov, first_run, wd_after_momentum):
        lists = [grads, params, momentums, *([param_copies] if param_copies else [])]
        flag = _zero(params[0].device) if noop_flag is None else noop_flag
        run(_CHUNK, flag, lists, weight_decay, momentum, dampening, lr, nesterov, first_run, wd_after_momentum, scale)
    return sgd


@_adapter("moe_unpermute_fwd")
def _unpermute(run: _Run) -> Callable[..., None]:
    def fwd(input, row_id_map, probs, output):
        factors = input.new_empty(0, dtype=torch.float32) if probs is None else probs
        _write(output, run(input, _dtype(input), row_id_map.view(-1), factors, row_id_map.shape[1], row_id_map.shape[0]))
    return fwd


@_adapter("moe_permute_bwd")
def _permute_gradient(run: _Run) -> Callable[..., None]:
    def bwd(grad_output, row_id_map, probs, grad_input):
        factors = grad_output.new_empty(0, dtype=torch.float32) if probs is None else probs
        _write(grad_input, run(grad_output, _dtype(grad_output), row_id_map.view(-1), factors, row_id_map.shape[1], row_id_map.shape[0]))
    return bwd


def _zero(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def _dtype(tensor: torch.Tensor) -> Any:
    return _DTYPES[tensor.dtype]


def _reason(impl: TexImpl) -> str:
    """Returns the reason for which the function is not to be tried now; empty if it may be."""
    runner = impl.calls()
    return "it failed in this call already, in its form with Transformer Engine's arguments" if runner.failed_in_call() else runner.refusal()


def adapted(impl: TexImpl) -> Optional[OpImpl]:
    """The implementation of the typed op by the function; None if there is no adapter for the op."""
    make = _ADAPTERS.get(impl.op_name)
    if make is None:
        return None
    plain = make(impl.calls().checked)
    limits = _SUPPORTS.get(impl.op_name, _supports_all)
    is_writer = impl.op_name.startswith("multi_tensor_") and "l2norm" not in impl.op_name

    @functools.wraps(plain)
    def fn(**arguments: Any) -> None:
        try:
            plain(**arguments)
        except NotImplementedError:
            raise
        except Exception as error:
            if is_writer and not isinstance(error, NOT_BEGUN):
                raise
            # Outputs are written in full by the next implementation.
            raise Unsupported(f"it failed with {type(error).__name__}: {error}") from error

    @functools.wraps(limits)
    def supports(**arguments: Any) -> Any:
        return _reason(impl) or limits(**arguments)
    devices = impl.devices
    if devices is None:
        private = private_name()
        devices = [*(d for d in DEVICE_TYPES if d != "ext"), *([f"ext:{private}"] if private != "privateuseone" else [])]
    return OpImpl(impl.op_name, impl.impl_id, impl.kind, fn, vendor=impl.vendor, priority=impl.priority, supported_dtypes=impl.supported_dtypes,
                  min_arch=impl.architecture or None, supports=supports, devices=devices, tensors="torch")
