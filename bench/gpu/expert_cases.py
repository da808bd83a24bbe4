"""The mixture-of-experts ops that expert_bandwidth.py measures: each case's call, and the bytes that it must move, each tensor counted exactly."""

from dataclasses import dataclass
from typing import Callable

import torch

import te_fl
from te_fl import ops
from te_fl.pytorch import (fused_topk_with_score_function, moe_permute, moe_permute_with_probs, moe_sort_chunks_by_index,
                           moe_sort_chunks_by_index_with_probs, moe_unpermute)

BF16, F32, E4M3, E5M2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2


@dataclass
class Experts:
    name: str
    tokens: int
    hidden: int
    experts: int
    topk: int

    @property
    def rows(self):
        return self.tokens * self.topk


SIZES = {"full": (Experts("8 experts", 8192, 4096, 8, 2), Experts("64 experts", 8192, 2048, 64, 8)),
         "small": (Experts("8 experts", 256, 256, 8, 2), Experts("16 experts", 128, 384, 16, 4))}


@dataclass
class Case:
    name: str
    build: Callable  # device -> (closure, bytes that the call must move)


def total_bytes(*tensors):
    """Returns the total bytes of the arguments: tensors, quantised tensors (data and scales), and lists of these."""
    total = 0
    for t in tensors:
        if isinstance(t, (list, tuple)):
            total += total_bytes(*t)
        elif isinstance(t, te_fl.Quantized):
            total += total_bytes(*(p for p in (t.data, t.columnwise_data, t.scale_inv, t.columnwise_scale_inv) if p is not None))
        else:
            total += t.numel() * t.element_size()
    return total


def keeping(function):
    """Wraps the function in a closure that keeps its last results alive, so that the next call's results get different memory."""
    kept = []

    def call():
        kept[:] = [function()]
    return call


def make_indices(e, device):
    """Draws distinct experts for each token, uniformly."""
    return torch.rand(e.tokens, e.experts, device=device).topk(e.topk, dim=1).indices.to(torch.int32)


def make_mask(e, device):
    return torch.zeros(e.tokens, e.experts, dtype=torch.bool, device=device).scatter_(1, make_indices(e, device).long(), True)


def permutations(e):
    def tokens(device):
        return torch.randn(e.tokens, e.hidden, device=device, dtype=BF16)

    def rows(device):
        return torch.randn(e.rows, e.hidden, device=device, dtype=BF16)

    def permute_index(device):
        x, indices = tokens(device), make_indices(e, device)
        made = moe_permute(x, indices, e.rows, map_type="index")
        return keeping(lambda: moe_permute(x, indices, e.rows, map_type="index")), total_bytes(x, indices, *made)

    def unpermute_index(device):
        _, there = moe_permute(tokens(device), make_indices(e, device), e.rows, map_type="index")
        y, probs = rows(device), torch.rand(e.tokens, e.topk, device=device)
        return keeping(lambda: moe_unpermute(y, there, probs, map_type="index")), total_bytes(y, there, probs, tokens(device))

    def permute_backward(device):
        _, there = moe_permute(tokens(device), make_indices(e, device), e.rows, map_type="index")
        there, dy, dx = there.view(e.topk, e.tokens), rows(device), tokens(device)
        return lambda: ops.moe_permute_bwd(grad_output=dy, row_id_map=there, grad_input=dx), total_bytes(dy, there, dx)

    def unpermute_backward(device):
        _, there = moe_permute(tokens(device), make_indices(e, device), e.rows, map_type="index")
        there, probs = there.view(e.topk, e.tokens), torch.rand(e.tokens, e.topk, device=device)
        dy, y, dx, dprobs = tokens(device), rows(device), rows(device), torch.empty_like(probs)
        return (lambda: ops.moe_unpermute_bwd(grad_output=dy, fwd_input=y, row_id_map=there, probs=probs, grad_input=dx, grad_probs=dprobs),
                total_bytes(dy, y, there, probs, dx, dprobs))

    def permute_mask(device):
        x, mask = tokens(device), make_mask(e, device)
        made = moe_permute(x, mask, e.rows, map_type="mask")
        return keeping(lambda: moe_permute(x, mask, e.rows, map_type="mask")), total_bytes(x, mask, *made)

    def permute_mask_probs(device):
        x, mask, probs = tokens(device), make_mask(e, device), torch.rand(e.tokens, e.experts, device=device)
        made = moe_permute_with_probs(x, probs, mask, e.rows)
        # counts only the probabilities of the selected experts
        return keeping(lambda: moe_permute_with_probs(x, probs, mask, e.rows)), total_bytes(x, mask, made[1], *made)

    def unpermute_mask(device):
        _, there = moe_permute(tokens(device), make_mask(e, device), e.rows, map_type="mask")
        y = rows(device)
        return keeping(lambda: moe_unpermute(y, there, map_type="mask")), total_bytes(y, there, tokens(device))

    def unpermute_mask_probs(device):
        _, there = moe_permute(tokens(device), make_mask(e, device), e.rows, map_type="mask")
        y, probs = rows(device), torch.rand(e.tokens, e.experts, device=device)
        taken = e.rows * probs.element_size()
        return keeping(lambda: moe_unpermute(y, there, probs, map_type="mask")), total_bytes(y, there, tokens(device)) + taken
    shape = f"{e.tokens}x{e.hidden} top-{e.topk} of {e.experts}"
    return [Case(f"moe_permute by index {shape}", permute_index), Case(f"moe_unpermute by index {shape}", unpermute_index),
            Case(f"moe_permute_bwd by index {shape}", permute_backward), Case(f"moe_unpermute_bwd by index {shape}", unpermute_backward),
            Case(f"moe_permute by mask {shape}", permute_mask), Case(f"moe_permute_with_probs by mask {shape}", permute_mask_probs),
            Case(f"moe_unpermute by mask {shape}", unpermute_mask), Case(f"moe_unpermute by mask, with probs {shape}", unpermute_mask_probs)]


def routers(e):
    cases = []
    for function in ("softmax", "sigmoid"):
        for tokens in (e.tokens, 16 * e.tokens):
            def forward(device, function=function, tokens=tokens):
                logits = torch.randn(tokens, e.experts, device=device)
                bias = torch.randn(e.experts, device=device) if function == "sigmoid" else None
                options = dict(topk=e.topk, use_pre_softmax=False, num_groups=0, group_topk=0, scaling_factor=1.0, score_function=function)
                probs, saved = torch.empty_like(logits), torch.empty_like(logits)
                chosen = torch.empty(logits.shape, dtype=torch.bool, device=device)
                return (lambda: ops.fused_topk_with_score_function_fwd(logits=logits, expert_bias=bias, probs=probs, routing_map=chosen,
                                                                       intermediate_output=saved, **options), total_bytes(logits, probs, saved, chosen))

            def backward(device, function=function, tokens=tokens):
                logits = torch.randn(tokens, e.experts, device=device)
                probs, saved, grad, out = (torch.empty_like(logits) for _ in range(4))
                chosen = torch.empty(logits.shape, dtype=torch.bool, device=device)
                ops.fused_topk_with_score_function_fwd(logits=logits, probs=probs, routing_map=chosen, intermediate_output=saved, topk=e.topk,
                                                       score_function=function)
                grad.normal_()
                return (lambda: ops.fused_topk_with_score_function_bwd(routing_map=chosen, intermediate_output=saved, grad_probs=grad, grad_logits=out,
                                                                       topk=e.topk, score_function=function), total_bytes(chosen, saved, grad, out))
            shape = f"{tokens}x{e.experts} top-{e.topk}"
            cases += [Case(f"router {function} {shape}", forward), Case(f"router {function} backward {shape}", backward)]
    return cases


def uneven(e):
    """Returns the number of rows of each expert: 0 for the second expert; the other numbers are no multiples of 16 if there are enough rows."""
    each = e.rows // e.experts
    sizes = [each + (7 if i % 2 else -7) for i in range(e.experts)]
    sizes[0] += sizes[1]
    sizes[1] = 0
    sizes[-1] += e.rows - sum(sizes)
    return sizes


def groups(e):
    plain = uneven(e)
    padded = [-(-n // 32) * 32 for n in plain]

    def padding(device):
        x = torch.randn(sum(plain), e.hidden, device=device, dtype=BF16)
        y = torch.empty(sum(padded), e.hidden, device=device, dtype=BF16)
        return lambda: ops.fused_multi_row_padding(input=x, output=y, input_rows=plain, padded_rows=padded), total_bytes(x, y)

    def unpadding(device):
        x = torch.randn(sum(padded), e.hidden, device=device, dtype=BF16)
        y = torch.empty(sum(plain), e.hidden, device=device, dtype=BF16)
        return lambda: ops.fused_multi_row_unpadding(input=x, output=y, input_rows=padded, unpadded_rows=plain), 2 * total_bytes(y)

    def chunks(device):
        x = torch.randn(e.rows, e.hidden, device=device, dtype=BF16)
        sizes = torch.tensor(plain, device=device)
        order = torch.randperm(e.experts, device=device)
        return keeping(lambda: moe_sort_chunks_by_index(x, sizes, order)), total_bytes(x, x, sizes, order)

    def chunks_probs(device):
        x, probs = torch.randn(e.rows, e.hidden, device=device, dtype=BF16), torch.rand(e.rows, device=device)
        sizes = torch.tensor(plain, device=device)
        order = torch.randperm(e.experts, device=device)
        return keeping(lambda: moe_sort_chunks_by_index_with_probs(x, probs, sizes, order)), total_bytes(x, x, probs, probs, sizes, order)
    shape = f"{e.rows}x{e.hidden} in {e.experts}"
    return [Case(f"padding to 32 {shape}", padding), Case(f"unpadding {shape}", unpadding), Case(f"chunk sort {shape}", chunks),
            Case(f"chunk sort with probs {shape}", chunks_probs)]


def activations(e):
    """Cases of the experts' gated activations, multiplied by each row's probability."""
    cases = []
    for name, gradient, halves in (("scaled_swiglu", "scaled_dswiglu", 2), ("scaled_clamped_swiglu", "scaled_clamped_dswiglu", 2),
                                   ("scaled_situglu", "scaled_dsituglu", 2), ("scaled_srelu", "scaled_dsrelu", 1)):
        def forward(device, name=name, halves=halves):
            x = torch.randn(e.rows, halves * e.hidden, device=device, dtype=BF16)
            y, scales = torch.empty(e.rows, e.hidden, device=device, dtype=BF16), torch.rand(e.rows, device=device)
            return lambda: getattr(ops, name)(input=x, act_scales=scales, output=y), total_bytes(x, y, scales)

        def backward(device, gradient=gradient, halves=halves):
            x = torch.randn(e.rows, halves * e.hidden, device=device, dtype=BF16)
            dy, scales, dx = torch.randn(e.rows, e.hidden, device=device, dtype=BF16), torch.rand(e.rows, device=device), torch.empty_like(x)
            dscales = torch.empty_like(scales)
            return (lambda: getattr(ops, gradient)(grad=dy, input=x, act_scales=scales, output=dx, grad_scales=dscales),
                    total_bytes(x, dy, scales, dx, dscales))
        shape = f"{e.rows}x{e.hidden}"
        cases += [Case(f"{name} {shape}", forward), Case(f"{gradient} {shape}", backward)]
    return cases


SCALINGS = ("delayed", "current", "block", "mxfp8")


def quantised(rows, cols, scaling, device, dtype=E4M3):
    """Allocates row-wise and column-wise codes."""
    if scaling == "mxfp8":
        padded = [-(-n // 128) * 128 for n in (rows, cols)]
        scales = [torch.empty(m, k, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
                  for m, k in ((padded[0], padded[1] // 32), (padded[0] // 32, padded[1]))]
        return te_fl.Quantized(torch.empty(rows, cols, dtype=dtype, device=device), scaling="mxfp8", scale_inv=scales[0],
                               columnwise_data=torch.empty(rows, cols, dtype=dtype, device=device), columnwise_scale_inv=scales[1])
    codes = dict(data=torch.empty(rows, cols, dtype=dtype, device=device), columnwise_data=torch.empty(cols, rows, dtype=dtype, device=device))
    if scaling == "block":
        padded = [-(-n // 4) * 4 for n in (rows, cols)]
        return te_fl.Quantized(**codes, scaling="block_1x128", pow2_scale=True,
                               scale_inv=torch.empty(-(-cols // 128), padded[0], device=device),
                               columnwise_scale_inv=torch.empty(-(-rows // 128), padded[1], device=device))
    inverse = torch.ones(1, device=device)
    return te_fl.Quantized(**codes, scale_inv=inverse, columnwise_scale_inv=inverse, amax=torch.zeros(1, device=device),
                           scale=torch.full((1,), 64.0, device=device), compute_scale=scaling == "current")


def quantisation(e):
    each = e.rows // e.experts // 16 * 16
    cases = []
    for scaling in SCALINGS:
        passes = 2 if scaling == "current" else 1  # current scaling reads the input twice, first to find its amax
        def split(device, scaling=scaling, passes=passes):
            x = torch.randn(each * e.experts, e.hidden, device=device, dtype=BF16)
            parts = [quantised(each, e.hidden, scaling, device) for _ in range(e.experts)]
            return lambda: ops.split_quantize(input=x, outputs=parts), passes * total_bytes(x) + total_bytes(parts)
        cases.append(Case(f"split_quantize {scaling} {each * e.experts}x{e.hidden} in {e.experts}", split))
    return cases


def inside_quantisation(e):
    """Returns cases of NVIDIA's group_quantize and bgrad_group_quantize on te-fl's ops, called as NVIDIA's package calls them."""
    import transformer_engine.pytorch  # noqa: F401  (its tensor classes are looked up where they are)
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    multiple = 128 if e.rows >= 128 * e.experts else 32
    each = e.rows // e.experts // multiple * multiple
    cases = []

    def make_quantizer(scaling, device):
        if scaling == "block":
            return Float8BlockQuantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1)
        if scaling == "mxfp8":
            return MXFP8Quantizer(tex.DType.kFloat8E4M3)
        return Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, device=torch.device(device))
    for scaling in ("current", "block", "mxfp8"):
        for bias in (False, True):
            if bias and scaling == "current":
                continue  # the package quantises the tensors of these recipes one at a time
            def grouped(device, scaling=scaling, bias=bias):
                x, quantizer = torch.randn(each * e.experts, e.hidden, device=device, dtype=BF16), make_quantizer(scaling, device)
                splits, _ = tex.splits_to_offsets_multi(torch.full((e.experts,), each, dtype=torch.int64), torch.device(device), strides=[e.hidden],
                                                        include_leading_zero=[True], dtypes=[torch.int64])
                function = tex.bgrad_group_quantize if bias else tex.group_quantize
                made = function(x, quantizer, e.experts, splits)
                group = made[0] if bias else made
                moved = (2 if scaling == "current" else 1) * total_bytes(x) + (total_bytes(made[1]) if bias else 0)
                for part in (group.rowwise_data, group.columnwise_data, group.scale_inv, group.columnwise_scale_inv):
                    moved += total_bytes(part) if part is not None else 0
                return keeping(lambda: function(x, quantizer, e.experts, splits)), moved
            cases.append(Case(f"{'bgrad_' if bias else ''}group_quantize {scaling} {each * e.experts}x{e.hidden} in {e.experts}", grouped))
    return cases


def expert_cases(size, inside):
    cases = []
    for e in SIZES[size]:
        cases += permutations(e) + routers(e) + groups(e) + activations(e) + quantisation(e) + (inside_quantisation(e) if inside else [])
    return cases
