"""Adapters of products, norms, activations, softmax, rotary embedding and functions over lists of tensors."""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch

from te_fl.errors import Unsupported
from te_fl.transformer_engine_torch.enums import DType, NVTE_QKV_Format
from te_fl.transformer_engine_torch.typed_function import CHUNK, WORKSPACE, VendorFunction, adapter, dtype_of, workspaces, write, zero

_FORMATS = {"e4m3": DType.kFloat8E4M3, "e5m2": DType.kFloat8E5M2}
_KINDS = "gelu qgelu relu srelu silu geglu qgeglu reglu sreglu swiglu glu".split()


@adapter(*_KINDS)
def _activation(run: VendorFunction) -> Callable[..., None]:
    return lambda input, output: write(output, run(input, None))


@adapter(*(f"d{name}" for name in _KINDS))
def _activation_gradient(run: VendorFunction) -> Callable[..., None]:
    return lambda grad, input, output: write(output, run(grad, input, None))


@adapter("clamped_swiglu")
def _clamped(run: VendorFunction) -> Callable[..., None]:
    return lambda input, output, limit, alpha: write(output, run(input, None, limit, alpha))


@adapter("clamped_dswiglu")
def _clamped_gradient(run: VendorFunction) -> Callable[..., None]:
    return lambda grad, input, output, limit, alpha: write(output, run(grad, input, None, limit, alpha))


@adapter(*(f"dbias_d{name}" for name in "gelu silu relu qgelu srelu".split()))
def _activation_and_bias_gradient(run: VendorFunction) -> Callable[..., None]:
    def gradients(grad, input, output, dbias):
        shape = -1, input.shape[-1]
        first, second = run(grad.reshape(shape), input.reshape(shape), None)
        if first.numel() != dbias.numel():  # vendors return the two in either order; of one row they are equal
            first, second = second, first
        write(dbias, first)
        write(output, second)
    return gradients


@adapter("layernorm_fwd")
def _layernorm(run: VendorFunction) -> Callable[..., None]:
    def fwd(x, gamma, beta, z, mu, rsigma, epsilon, zero_centered_gamma):
        made = run(x, gamma, beta, epsilon, z, None, dtype_of(z), 0, zero_centered_gamma)
        for output, value in zip((z, mu, rsigma), made):
            write(output, value)
    return fwd


@adapter("rmsnorm_fwd")
def _rmsnorm(run: VendorFunction) -> Callable[..., None]:
    def fwd(x, gamma, z, rsigma, epsilon, zero_centered_gamma):
        made, _, statistics = run(x, gamma, epsilon, z, None, dtype_of(z), 0, zero_centered_gamma)
        write(z, made)
        write(rsigma, statistics)
    return fwd


@adapter("layernorm_bwd")
def _layernorm_gradient(run: VendorFunction) -> Callable[..., None]:
    def bwd(dz, x, mu, rsigma, gamma, dx, dgamma, dbeta, zero_centered_gamma):
        for output, value in zip((dx, dgamma, dbeta), run(dz, x, mu, rsigma, gamma, 0, zero_centered_gamma)):
            if output is not None:
                write(output, value)
    return bwd


@adapter("rmsnorm_bwd")
def _rmsnorm_gradient(run: VendorFunction) -> Callable[..., None]:
    def bwd(dz, x, rsigma, gamma, dx, dgamma, zero_centered_gamma):
        for output, value in zip((dx, dgamma), run(dz, x, rsigma, gamma, 0, zero_centered_gamma)):
            write(output, value)
    return bwd


@adapter("rmsnorm_bwd_add")
def _rmsnorm_gradient_and_residual(run: VendorFunction) -> Callable[..., None]:
    def bwd(dz, x, add, rsigma, gamma, dx, dgamma, zero_centered_gamma):
        for output, value in zip((dx, dgamma), run(dz, x, add, rsigma, gamma, 0, zero_centered_gamma)):
            write(output, value)
    return bwd


_SOFTMAX = ("scaled", "scaled_upper_triang_masked", "scaled_aligned_causal_masked")


@adapter(*(f"{kind}_softmax_forward" for kind in _SOFTMAX))
def _softmax(run: VendorFunction) -> Callable[..., None]:
    return lambda input, output, scale: write(output, run(input, scale))


@adapter("scaled_masked_softmax_forward")
def _masked_softmax(run: VendorFunction) -> Callable[..., None]:
    return lambda input, mask, output, scale: write(output, run(input, mask, scale))


@adapter(*(f"{kind}_softmax_backward" for kind in (*_SOFTMAX, "scaled_masked")))
def _softmax_gradient(run: VendorFunction) -> Callable[..., None]:
    # Transformer Engine's kernels write the result to the gradient that they read.
    return lambda output_grad, softmax_results, input_grad, scale: write(input_grad, run(output_grad.clone(), softmax_results, scale))


def _product_limits(function: VendorFunction) -> Callable[..., Any]:
    return lambda pre_gelu_in: "it computes no gradient of GELU" if pre_gelu_in is not None else True


def _add_rows(bias_grad: Optional[torch.Tensor], a: torch.Tensor, trans_a: bool, accumulate: bool) -> None:
    """Computes the gradient of a bias, which Transformer Engine's function has only with the gradient of a product."""
    if bias_grad is not None:
        total = a.sum(0 if trans_a else 1, dtype=torch.float32)
        bias_grad.copy_(bias_grad.float() + total if accumulate else total)


@adapter("generic_gemm", limits=_product_limits)
def _gemm(run: VendorFunction) -> Callable[..., None]:
    def product(a, b, d, bias, pre_gelu_out, pre_gelu_in, bias_grad, trans_a, trans_b, gelu, accumulate, accumulate_bias_grad, use_split_accumulator,
                alpha, beta):
        factors = {} if alpha == 1 and (beta == 1 or not accumulate) else {"alpha": alpha, "beta": beta if accumulate else None}
        [workspace] = workspaces(d.device, 1)
        # If the function fails while it accumulates, d keeps its values for the next implementation.
        made, _, before, _ = run(b, trans_b, a, trans_a, d.clone() if accumulate else d, None, dtype_of(d), bias, dtype_of(d if bias is None else bias), gelu,
                                 None, False, workspace, WORKSPACE, accumulate, use_split_accumulator, **factors)
        write(pre_gelu_out, before)
        write(d, made)
        _add_rows(bias_grad, a, trans_a, accumulate_bias_grad)
    return product


def _groups_limits(function: VendorFunction) -> Callable[..., Any]:
    def limits(alpha, beta, accumulate):
        return True if alpha == 1 and (beta == 1 or not accumulate) else f"it has no factors, and the call has alpha {alpha} and beta {beta}"
    return limits


@adapter("te_general_grouped_gemm", limits=_groups_limits)
def _groups(run: VendorFunction) -> Callable[..., None]:
    def products(a, b, d, bias, bias_grad, trans_a, trans_b, accumulate, accumulate_bias_grad, use_split_accumulator, alpha, beta):
        if len({each.dtype for each in d}) > 1:
            raise Unsupported(f"it writes results of one dtype, and the call has {sorted({str(each.dtype) for each in d})}")
        outputs = [each.clone() for each in d] if accumulate else list(d)  # as for a single product
        # A product without terms is left to PyTorch: kernels differ in what they write then.
        filled = [i for i, each in enumerate(outputs) if each.numel() and a[i].numel()]
        if filled:
            empty, biases = d[0].new_empty(0), [bias[i] for i in filled] if bias else None
            run([b[i] for i in filled], trans_b, [a[i] for i in filled], trans_a, [outputs[i] for i in filled], dtype_of(d[0]),
                [outputs[i].shape[0] for i in filled], biases or [empty] * len(filled), dtype_of(biases[0] if biases else d[0]), False, [empty] * len(filled),
                False, list(workspaces(d[0].device)), WORKSPACE, accumulate, use_split_accumulator, 0)
        for i, output in enumerate(outputs):
            if output.numel() and not a[i].numel() and not accumulate:
                output.zero_()
            if output.numel() and not a[i].numel() and bias:
                output.add_(bias[i])
            write(d[i], output)
        for each, rows in zip(bias_grad or (), a):
            _add_rows(each, rows, trans_a, accumulate_bias_grad)
    return products


@adapter("fused_rope_forward", "fused_rope_backward")
def _rope(run: VendorFunction) -> Callable[..., None]:
    def rope(input, freqs, output, start_positions, cu_seqlens, layout, interleaved, cp_size, cp_rank):
        write(output, run(input, freqs, start_positions, NVTE_QKV_Format[f"NVTE_{layout.upper()}"], interleaved, cu_seqlens, cp_size, cp_rank))
    return rope


@adapter("fused_qkv_rope_forward")
def _qkv_rope(run: VendorFunction) -> Callable[..., None]:
    def rope(qkv_input, q_freqs, k_freqs, q_out, k_out, v_out, start_positions, q_dim, k_dim, v_dim, layout, interleaved, cp_size, cp_rank):
        made = run(qkv_input, q_freqs, k_freqs, start_positions, [q_dim, k_dim, v_dim], NVTE_QKV_Format[f"NVTE_{layout.upper()}"], interleaved, cp_size, cp_rank)
        for output, value in zip((q_out, k_out, v_out), made):
            write(output, value)
    return rope


def _without_starts(function: VendorFunction) -> Callable[..., Any]:
    return lambda start_positions: "it takes no start_positions" if start_positions is not None else True


@adapter("fused_qkv_rope_backward", limits=_without_starts)
def _qkv_rope_gradient(run: VendorFunction) -> Callable[..., None]:
    def rope(q_grad, k_grad, v_grad, q_freqs, k_freqs, qkv_grad, start_positions, q_dim, k_dim, v_dim, layout, interleaved, cp_size, cp_rank):
        write(qkv_grad, run(q_grad, k_grad, v_grad, q_freqs, k_freqs, [q_dim, k_dim, v_dim], NVTE_QKV_Format[f"NVTE_{layout.upper()}"], interleaved, cp_size,
                            cp_rank))
    return rope


@adapter("multi_tensor_scale")
def _scale(run: VendorFunction) -> Callable[..., None]:
    return lambda inputs, outputs, noop_flag, scale: run(CHUNK, noop_flag, [inputs, outputs], scale)


def _norm(norm: torch.Tensor, per_tensor_norms: Optional[torch.Tensor], made: Tuple[torch.Tensor, Any]) -> None:
    write(norm, made[0])
    if per_tensor_norms is not None:
        write(per_tensor_norms, made[1])


@adapter("multi_tensor_l2norm")
def _l2norm(run: VendorFunction) -> Callable[..., None]:
    return lambda inputs, norm, per_tensor_norms: _norm(norm, per_tensor_norms, run(CHUNK, zero(norm.device), [inputs], per_tensor_norms is not None))


@adapter("multi_tensor_unscale_l2norm")
def _unscale_l2norm(run: VendorFunction) -> Callable[..., None]:
    return lambda inputs, inv_scale, norm, per_tensor_norms: _norm(
        norm, per_tensor_norms, run(CHUNK, zero(norm.device), [inputs], inv_scale, per_tensor_norms is not None))


@adapter("multi_tensor_adam")
def _adam(run: VendorFunction) -> Callable[..., None]:
    def adam(grads, params, exp_avgs, exp_avg_sqs, master_params, noop_flag, lr, beta1, beta2, epsilon, weight_decay, step, mode, bias_correction):
        lists = [grads, params, exp_avgs, exp_avg_sqs, *([master_params] if master_params else [])]
        flag = zero(params[0].device) if noop_flag is None else noop_flag
        run(CHUNK, flag, lists, lr, beta1, beta2, epsilon, step, int(mode == "adamw"), int(bias_correction), weight_decay)
    return adam


@adapter("multi_tensor_sgd")
def _sgd(run: VendorFunction) -> Callable[..., None]:
    def sgd(grads, params, momentums, param_copies, noop_flag, lr, weight_decay, momentum, dampening, scale, nesterov, first_run, wd_after_momentum):
        lists = [grads, params, momentums, *([param_copies] if param_copies else [])]
        flag = zero(params[0].device) if noop_flag is None else noop_flag
        run(CHUNK, flag, lists, weight_decay, momentum, dampening, lr, nesterov, first_run, wd_after_momentum, scale)
    return sgd


# ---- codes

@adapter("fp8_transpose")
def _transpose(run: VendorFunction) -> Callable[..., None]:
    # The layout does not depend on the format of the codes.
    return lambda input, output: write(output.view(torch.uint8), run(input.view(torch.uint8), DType.kFloat8E4M3, out=output.view(torch.uint8)))


@adapter("compute_amax")
def _amax(run: VendorFunction) -> Callable[..., None]:
    def compute(input, amax):
        amax.zero_()  # a function that takes the maximum with what is there gives the same
        run(input, amax)
    return compute


@adapter("fused_amax_and_scale_update_after_reduction")
def _scales(run: VendorFunction) -> Callable[..., None]:
    def update(amax_reduction_buffer, amax_histories, scales, algo, fp8_dtype, margin):
        reduced = torch.cat([history[0] for history in amax_histories]) if amax_reduction_buffer is None else amax_reduction_buffer
        run(reduced, amax_histories, scales, algo, _FORMATS[fp8_dtype], margin)
    return update


@adapter("dropout_bwd")
def _dropout_gradient(run: VendorFunction) -> Callable[..., None]:
    return lambda grad_output, mask, grad_input, p: write(grad_input, run(grad_output, mask, p))
