"""RMS normalisation: z = x rsigma g, with rsigma = 1/sqrt(mean(x^2) + epsilon) for each row, in FP32."""

import torch
import triton
import triton.language as tl

from te_fl_triton.common import compact, implementation

MAX_COLUMNS = 16384  # one program holds a whole row in its registers
MAX_PROGRAMS = 256   # for the backward, in which each program sums dgamma over its rows


@triton.jit
def forward_kernel(x, gamma, z, rsigma, columns, epsilon, ONE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, inside, 0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(values * values, 0) / columns + epsilon)
    weight = tl.load(gamma + at, inside, 0.0).to(tl.float32) + ONE
    tl.store(z + row * columns + at, (values * factor * weight).to(z.dtype.element_ty), inside)
    tl.store(rsigma + row, factor)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(dz, x, rsigma, gamma, dx, sums, rows, columns, ONE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < columns
    weight = tl.load(gamma + at, inside, 0.0).to(tl.float32) + ONE
    sum_of_weight = tl.zeros([BLOCK], tl.float32)
    row = tl.program_id(0)
    while row < rows:  # Triton's interpreter does not support range() with bounds known only at run time
        begin = row.to(tl.int64) * columns
        factor = tl.load(rsigma + row)
        normal = tl.load(x + begin + at, inside, 0.0).to(tl.float32) * factor
        gradient = tl.load(dz + begin + at, inside, 0.0).to(tl.float32)
        sum_of_weight += gradient * normal
        inner = gradient * weight
        mean = tl.sum(inner * normal, 0) / columns
        tl.store(dx + begin + at, (factor * (inner - normal * mean)).to(dx.dtype.element_ty), inside)
        row += tl.num_programs(0)
    tl.store(sums + tl.program_id(0).to(tl.int64) * columns + at, sum_of_weight, inside)


@triton.jit(do_not_specialize=["programs"])
def sum_kernel(sums, dgamma, programs, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    total = tl.zeros([BLOCK], tl.float32)
    row = sums + at
    program = 0
    while program < programs:
        total += tl.load(row, inside, 0.0)
        row += columns
        program += 1
    tl.store(dgamma + at, total.to(dgamma.dtype.element_ty), inside)


def block_size(columns):
    return max(triton.next_power_of_2(columns), 128)  # at least 128, as each smaller block size would compile another kernel


def warp_count(block):
    return min(max(block // 512, 1), 16)


def forward(x, gamma, z, rsigma, epsilon, zero_centered_gamma):
    columns = gamma.numel()
    if x.numel() == 0:
        return
    block = block_size(columns)
    forward_kernel[(x.numel() // columns,)](x, gamma, z, rsigma, columns, epsilon, int(zero_centered_gamma), block, num_warps=warp_count(block))


def backward(dz, x, rsigma, gamma, dx, dgamma, zero_centered_gamma):
    columns = gamma.numel()
    rows = x.numel() // columns
    programs = min(rows, MAX_PROGRAMS)
    sums = torch.empty((programs, columns), dtype=torch.float32, device=x.device)
    block = block_size(columns)
    if rows > 0:
        backward_kernel[(programs,)](dz, x, rsigma, gamma, dx, sums, rows, columns, int(zero_centered_gamma), block,
                                     num_warps=warp_count(block))
    sum_kernel[(triton.cdiv(columns, 128),)](sums, dgamma, programs, columns, 128)


def supports(x, gamma, z=None, dz=None, dx=None):
    columns = gamma.shape[0]
    if not 0 < columns <= MAX_COLUMNS:
        return f"rows have {columns} elements, and the kernels take 1 to {MAX_COLUMNS}"
    return compact(x=x, gamma=gamma, z=z, dz=dz, dx=dx)


def supports_forward(x, gamma, z):
    return supports(x, gamma, z=z)


def supports_backward(dz, x, gamma, dx):
    return supports(x, gamma, dz=dz, dx=dx)


def implementations(devices):
    return [implementation("rmsnorm_fwd", forward, supports_forward, devices),
            implementation("rmsnorm_bwd", backward, supports_backward, devices)]
