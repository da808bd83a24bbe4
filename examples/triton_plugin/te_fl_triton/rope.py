"""Rotary position embedding for layouts sbhd and bshd: a pair (a, b) at angles f_a, f_b becomes (a cos f_a - b sin f_a, b cos f_b + a sin f_b)."""

import triton
import triton.language as tl

from te_fl_triton.common import compact, implementation

TILE = 2048  # pairs, or copied elements, per program, as many as its registers hold
LEAST = 64   # smallest block of a head per program, as each smaller size would compile another kernel
HEADS = 16   # maximum number of heads of one token per program


# One compiled kernel is used for all values of the arguments in do_not_specialize. `sequences`: number of consecutive tokens with the same
# position: the batch size in sbhd, 1 in bshd.
@triton.jit(do_not_specialize=["freqs", "length", "sequences", "heads", "cp_size", "cp_rank"])
def kernel(input, output, freqs, length, sequences, heads, width, rotated, cp_size, cp_rank, INTERLEAVED: tl.constexpr,
           BACKWARD: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr):
    blocks = tl.cdiv(heads, HEADS)
    token = tl.program_id(0) // blocks
    head = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    row = (token.to(tl.int64) * heads + head)[:, None] * width
    position = token // sequences % length
    if cp_size > 1:  # the rank holds chunks cp_rank and 2 cp_size - 1 - cp_rank of the sequence
        half = length // 2
        position = tl.where(position < half, cp_rank * half + position, (2 * cp_size - 1 - cp_rank) * half + position - half)
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + rotated // 2
    inside = (head < heads)[:, None] & (pair < rotated // 2)[None, :]
    angles = freqs + position.to(tl.int64) * rotated
    angle_a = tl.load(angles + first, pair < rotated // 2, 0.0)[None, :]
    angle_b = tl.load(angles + second, pair < rotated // 2, 0.0)[None, :]
    a = tl.load(input + row + first[None, :], inside, 0.0).to(tl.float32)
    b = tl.load(input + row + second[None, :], inside, 0.0).to(tl.float32)
    if BACKWARD:  # the transpose of the forward, also if the two angles differ
        new_a = a * tl.cos(angle_a) + b * tl.sin(angle_b)
        new_b = b * tl.cos(angle_b) - a * tl.sin(angle_a)
    else:
        new_a = a * tl.cos(angle_a) - b * tl.sin(angle_a)
        new_b = b * tl.cos(angle_b) + a * tl.sin(angle_b)
    tl.store(output + row + first[None, :], new_a.to(output.dtype.element_ty), inside)
    tl.store(output + row + second[None, :], new_b.to(output.dtype.element_ty), inside)
    if REST > 0:
        column = rotated + tl.program_id(1) * REST + tl.arange(0, REST)
        inside = (head < heads)[:, None] & (column < width)[None, :]
        tl.store(output + row + column[None, :], tl.load(input + row + column[None, :], inside, 0.0), inside)


def of_a_program(count):
    return min(max(triton.next_power_of_2(max(count, 1)), LEAST), TILE)


def rotate(input, freqs, output, layout, interleaved, cp_size, cp_rank, backward):
    if input.numel() == 0:
        return
    length, batch = (input.shape[0], input.shape[1]) if layout == "sbhd" else (input.shape[1], input.shape[0])
    heads, width, rotated = input.shape[2], input.shape[3], freqs.shape[3]
    pairs, rest = of_a_program(rotated // 2), of_a_program(width - rotated) if width > rotated else 0
    at_once = min(HEADS, TILE // max(pairs, rest))
    parts = max(triton.cdiv(rotated // 2, pairs), triton.cdiv(width - rotated, rest) if rest else 1)
    kernel[(length * batch * triton.cdiv(heads, at_once), parts)](
        input, output, freqs, length, batch if layout == "sbhd" else 1, heads, width, rotated, cp_size, cp_rank, interleaved, backward,
        at_once, pairs, rest)


def forward(input, freqs, output, start_positions, cu_seqlens, layout, interleaved, cp_size, cp_rank):
    rotate(input, freqs, output, layout, interleaved, cp_size, cp_rank, False)


def backward(input, freqs, output, start_positions, cu_seqlens, layout, interleaved, cp_size, cp_rank):
    rotate(input, freqs, output, layout, interleaved, cp_size, cp_rank, True)


def supports(input, freqs, output, start_positions, layout, cp_size):
    if layout == "thd":
        return "layout thd is not supported"
    if start_positions is not None:
        return "start_positions are not supported: a kernel in Triton cannot report one that lies past the angles"
    if input.ndim != 4 or freqs.shape[3] > input.shape[3] or freqs.shape[3] % 2 != 0:
        return f"input has shape {input.shape} and freqs {freqs.shape}"
    length = input.shape[0 if layout == "sbhd" else 1]
    if length * cp_size > freqs.shape[0] or (cp_size > 1 and length % 2 != 0):
        return f"{length} tokens of each of {cp_size} ranks do not fit {freqs.shape[0]} angles"
    return compact(input=input, freqs=freqs, output=output)


def implementations(devices):
    return [implementation("fused_rope_forward", forward, supports, devices),
            implementation("fused_rope_backward", backward, supports, devices)]
