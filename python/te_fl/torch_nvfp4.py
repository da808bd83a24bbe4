"""NVFP4 in PyTorch's operations, with all of its variants (arXiv 2509.25149): square blocks of weights, the random Hadamard transform of the copy for
products over rows, and stochastic rounding of gradients. Optional ones are an amax for each row, and 4over6: each block's largest value is mapped to the
code 4 or 6, whichever gives the smaller error.

A code's value is c s d. c is 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign, s is the block's E4M3 scale, and d = amax / (6 * 448) of the tensor or the
row. Under 4over6, 256 may replace 448, to leave headroom for the scales of blocks that use the code 4.
"""

from __future__ import annotations

import functools
from typing import Tuple

import torch

from te_fl.common.recipe import NVFP4Rules

BLOCK, LARGEST_CODE, LARGEST_FACTOR = 16, 6.0, 448.0
_FINITE = torch.finfo(torch.float32).max
_MIDPOINTS_TO_LOWER, _MIDPOINTS_TO_UPPER = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)  # ties go to the code whose last bit is 0
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)  # Transformer Engine's fixed signs of the Hadamard transform


def sizes(x: torch.Tensor) -> torch.Tensor:
    return x.abs().nan_to_num(nan=0.0, posinf=float("inf"))


def _largest_of_blocks(x: torch.Tensor, square: bool) -> torch.Tensor:
    """The largest magnitude of each block, [rows, columns / 16]; square blocks are repeated for each row. NaNs are ignored."""
    rows, columns = x.shape
    largest = sizes(x).view(rows, columns // BLOCK, BLOCK).amax(-1)
    return largest.view(rows // BLOCK, BLOCK, -1).amax(1).repeat_interleave(BLOCK, 0) if square else largest


def _over(dividend: float, divisor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(divisor, dividend) / divisor  # PyTorch rounds (number / tensor) twice


def encode(amax: torch.Tensor, largest_factor: float) -> torch.Tensor:
    """The multiplier applied to values before block scales are computed; [n, 1] for [n] amaxes, of the tensor or of each row."""
    multiplier = _over(largest_factor * LARGEST_CODE, amax.view(-1, 1)).clamp(max=_FINITE)
    return torch.where(multiplier == 0, 1.0, multiplier)


def _as_factors(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(max=LARGEST_FACTOR).to(torch.float8_e4m3fn)


def _scaled(x: torch.Tensor, factors: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    """x divided by its blocks' scales, [rows, columns], from -6 to 6."""
    each = (factors.float() * multiplier.reciprocal()).reciprocal().clamp(max=_FINITE)
    return (x.view(*factors.shape, BLOCK) * each.unsqueeze(-1)).clamp(-LARGEST_CODE, LARGEST_CODE).view(x.shape)


def _nearest(magnitudes: torch.Tensor) -> torch.Tensor:
    """Rounds values from 0 to 6 to the nearest codes 0 to 7."""
    codes = torch.zeros(magnitudes.shape, dtype=torch.uint8, device=magnitudes.device)
    for point in _MIDPOINTS_TO_LOWER:
        codes += magnitudes > point
    for point in _MIDPOINTS_TO_UPPER:
        codes += magnitudes >= point
    return codes


def _at_random(magnitudes: torch.Tensor) -> torch.Tensor:
    """As _nearest(), with stochastic rounding to one of the two neighbouring codes."""
    step = torch.where(magnitudes < 2, 0.5, torch.where(magnitudes < 4, 1.0, 2.0))
    lower = (magnitudes / step).floor() * step
    upwards = torch.rand(magnitudes.shape, dtype=torch.float32, device=magnitudes.device) * step < magnitudes - lower
    return _nearest(lower + torch.where(upwards, step, 0.0))


def encode_codes(scaled: torch.Tensor, at_random: bool) -> torch.Tensor:
    """UINT8 codes of values from -6 to 6; NaN becomes 6."""
    scaled = torch.where(scaled.isnan(), LARGEST_CODE, scaled)
    magnitudes = scaled.abs()
    return (_at_random(magnitudes) if at_random else _nearest(magnitudes)) | scaled.signbit().to(torch.uint8) << 3


def decoded(codes: torch.Tensor) -> torch.Tensor:
    """The FP32 values of codes, without scales."""
    number = (codes & 7).float()  # computed, not looked up: copying a table to the device would synchronise, and fail during graph capture
    magnitudes = torch.where(number < 4, number / 2, torch.where(number < 7, number - 2, LARGEST_CODE))
    return torch.where(codes > 7, -magnitudes, magnitudes)


def _error(x: torch.Tensor, codes: torch.Tensor, factors: torch.Tensor, amax: torch.Tensor, rules: NVFP4Rules) -> torch.Tensor:
    """Returns for each block the sum of its absolute or squared errors, [rows, blocks], added in the order of NVIDIA's kernel."""
    value = decoded(codes).view(*factors.shape, BLOCK) * factors.float().unsqueeze(-1) * amax.view(-1, 1, 1)
    difference = value / torch.full_like(value, LARGEST_CODE * rules.largest_scale) - x.view(value.shape)
    errors = difference * difference if rules.squared else difference.abs()
    total = torch.zeros_like(errors[..., 0])
    for error in errors.unbind(-1):
        total = total + error
    if not rules.square:
        return total
    total = total.view(-1, BLOCK, total.shape[1])
    while total.shape[1] > 1:
        lower, upper = total.chunk(2, 1)
        total = lower + upper
    return total.squeeze(1).repeat_interleave(BLOCK, 0)


def _four_or_six(x: torch.Tensor, largest: torch.Tensor, multiplier: torch.Tensor, amax: torch.Tensor,
                 rules: NVFP4Rules) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns (codes, scales) under 4over6. largest: the largest magnitude of each block."""
    base = largest / torch.full_like(largest, LARGEST_CODE) * multiplier
    found = []
    for factors in (_as_factors(base * (LARGEST_CODE / 4)), _as_factors(base)):
        codes = encode_codes(_scaled(x, factors, multiplier), False)
        found.append((codes, factors, _error(x, codes, factors, amax, rules)))
    (codes4, factors4, error4), (codes6, factors6, error6) = found
    four = error4 < error6
    return torch.where(four.repeat_interleave(BLOCK, 1), codes4, codes6), torch.where(four, factors4.float(), factors6.float()).to(factors6.dtype)


def quantised(x: torch.Tensor, amax: torch.Tensor, rules: NVFP4Rules) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes [rows, columns], one a byte, and the E4M3 scales [rows, columns / 16] of x, FP32, along its rows. amax: FP32 [1], or [rows]."""
    blocks = _largest_of_blocks(x, rules.square)
    if rules.four_over_six:
        return _four_or_six(x, blocks, encode(amax, rules.largest_scale), amax, rules)
    multiplier = encode(amax, LARGEST_FACTOR)
    factors = _as_factors(blocks * (multiplier * torch.full_like(multiplier, LARGEST_CODE).reciprocal()))
    return encode_codes(_scaled(x, factors, multiplier), rules.stochastic), factors


def values(codes: torch.Tensor, factors: torch.Tensor, amax: torch.Tensor, largest_scale: float) -> torch.Tensor:
    """The FP32 values [rows, columns] of codes, one a byte, and E4M3 scales [rows, columns / 16]. amax: FP32 [1], or [rows]."""
    rows, blocks = factors.shape
    amax = amax.view(-1, 1)
    unit = torch.full_like(amax[:1], LARGEST_CODE * largest_scale).reciprocal()
    factors = factors.float()
    each = factors * amax * unit
    # NVIDIA's order of multiplication, unless the product overflows FP32. For an infinite amax, encode() is 1.
    each = torch.where(each.isfinite(), each, factors * torch.where(amax.isfinite(), amax * unit, 1.0))
    return (decoded(codes).view(rows, blocks, BLOCK) * each.unsqueeze(-1)).view(codes.shape)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Packs two codes into a byte, the first in the lower half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpacked(data: torch.Tensor) -> torch.Tensor:
    return torch.stack((data & 15, data >> 4), -1).view(data.shape[0], -1)


@functools.lru_cache(maxsize=None)
def hadamard_matrix(device: torch.device) -> torch.Tensor:
    """FP32 [16, 16]: the orthogonal Hadamard matrix, its rows multiplied by the fixed signs."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < BLOCK:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (torch.tensor(_SIGNS, dtype=torch.float32).view(-1, 1) * matrix / BLOCK ** 0.5).to(device)


def transformed(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x [rows, columns] times the matrix, in groups of 16 columns, rounded to x's dtype."""
    return (x.float().view(-1, BLOCK) @ matrix).to(x.dtype).view(x.shape)
