"""SwiGLU: y = silu(a) b of rows [a, b], in FP32."""

import triton
import triton.language as tl

from te_fl_triton.common import compact, implementation

BLOCK = 1024


@triton.jit(do_not_specialize=["blocks"])
def forward_kernel(input, output, columns, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    a = tl.load(input + 2 * row * columns + at, inside, 0.0).to(tl.float32)
    b = tl.load(input + (2 * row + 1) * columns + at, inside, 0.0).to(tl.float32)
    tl.store(output + row * columns + at, (a / (1.0 + tl.exp(-a)) * b).to(output.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["blocks"])
def backward_kernel(grad, input, output, columns, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    dy = tl.load(grad + row * columns + at, inside, 0.0).to(tl.float32)
    a = tl.load(input + 2 * row * columns + at, inside, 0.0).to(tl.float32)
    b = tl.load(input + (2 * row + 1) * columns + at, inside, 0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-a))
    da = dy * b * sigmoid * (1.0 + a * (1.0 - sigmoid))
    tl.store(output + 2 * row * columns + at, da.to(output.dtype.element_ty), inside)
    tl.store(output + (2 * row + 1) * columns + at, (dy * a * sigmoid).to(output.dtype.element_ty), inside)


def launch(kernel, columns, elements, *tensors):
    if elements == 0:
        return
    blocks = triton.cdiv(columns, BLOCK)
    kernel[(elements // columns * blocks,)](*tensors, columns, blocks, BLOCK)


def forward(input, output):
    launch(forward_kernel, output.shape[-1], output.numel(), input, output)


def backward(grad, input, output):
    launch(backward_kernel, grad.shape[-1], grad.numel(), grad, input, output)


def implementations(devices):
    return [implementation("swiglu", forward, lambda input, output: compact(input=input, output=output), devices),
            implementation("dswiglu", backward, lambda grad, input, output: compact(grad=grad, input=input, output=output), devices)]
