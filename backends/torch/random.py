"""Philox 4x32-10 by PyTorch's integer operations, and dropout with it. Words are int64 tensors with values below 2^32."""

from __future__ import annotations

from typing import Optional, Tuple

import torch

from te_fl.reference_torch import repeat
from te_fl.reference_torch.values import values

_LOW = 0xFFFFFFFF
_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def _product(x: torch.Tensor, factor: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """The high and the low word of x * factor. The parts are multiplied by 16 bits, since int64 has no unsigned product of two words."""
    low = (x & 0xFFFF) * factor
    high = (x >> 16) * factor + (low >> 16)
    return (high >> 16) & _LOW, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(seed: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """The four words of each counter, [.., 4]. seed: int64 []; counters: int64, each a 64-bit number."""
    key = [seed & _LOW, (seed >> 32) & _LOW]
    words = [counters & _LOW, (counters >> 32) & _LOW, torch.zeros_like(counters), torch.zeros_like(counters)]
    for turn in range(10):
        (high0, low0), (high1, low1) = _product(words[0], _MULTIPLIERS[0]), _product(words[2], _MULTIPLIERS[1])
        k0, k1 = ((k + turn * w) & _LOW for k, w in zip(key, _WEYL))
        words = [high1 ^ words[1] ^ k0, low1, high0 ^ words[3] ^ k1, low0]
    return torch.stack(words, -1)


def kept(count: int, p: float, seed: torch.Tensor, offset: torch.Tensor, device: torch.device) -> torch.Tensor:
    """For each of `count` elements, whether dropout with probability p keeps it, bool."""
    if p == 0:
        return torch.ones(count, dtype=torch.bool, device=device)
    words = philox(seed, torch.arange((count + 3) // 4, device=device) + offset)
    return words.reshape(-1)[:count] >= _least(p)


def kept_at(elements: torch.Tensor, p: float, seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """kept() of the elements with these numbers, int64."""
    words = philox(seed, (elements >> 2) + offset)
    return words.gather(-1, (elements & 3)[:, None])[:, 0] >= _least(p)


def _least(p: float) -> int:
    """The smallest word that is kept: p as FP32 times 2^32, rounded up."""
    return -int(-torch.tensor(p, dtype=torch.float32).double().item() * 2.0 ** 32 // 1)


def packed(bits: torch.Tensor) -> torch.Tensor:
    """Eight bits in each byte, the first in the lowest place."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)


def unpacked(mask: torch.Tensor, count: int) -> torch.Tensor:
    bits = (mask[:, None] >> torch.arange(8, dtype=torch.uint8, device=mask.device)) & 1
    return bits.reshape(-1)[:count] != 0


def dropped(x: torch.Tensor, keeps: torch.Tensor, p: float) -> torch.Tensor:
    return torch.where(keeps.view(x.shape), x / (1 - p), 0.0)


def state(seed: int, offset: int, seed_tensor: Optional[torch.Tensor], offset_tensor: Optional[torch.Tensor],
          device: torch.device) -> Tuple[torch.Tensor, torch.Tensor]:
    """The call's random state as int64 [] on the device, modulo 2^64."""
    repeat.abandon()
    first = torch.full((), signed(seed), dtype=torch.int64, device=device) if seed_tensor is None else seed_tensor.view(torch.int64).reshape(())
    second = torch.full((), signed(offset), dtype=torch.int64, device=device)
    return first, second if offset_tensor is None else second + offset_tensor.view(torch.int64).reshape(())


def signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def dropout_fwd(input: torch.Tensor, output: torch.Tensor, mask: torch.Tensor, p: float, seed: int, offset: int, seed_tensor: Optional[torch.Tensor],
                offset_tensor: Optional[torch.Tensor]) -> None:
    keeps = kept(input.numel(), p, *state(seed, offset, seed_tensor, offset_tensor, input.device), input.device)
    x = values(input)
    mask.copy_(packed(keeps))
    output.copy_(dropped(x, keeps, p))


def dropout_bwd(grad_output: torch.Tensor, mask: torch.Tensor, grad_input: torch.Tensor, p: float) -> None:
    grad_input.copy_(dropped(values(grad_output), unpacked(mask, grad_output.numel()), p))


OPS = {"dropout_fwd": dropout_fwd, "dropout_bwd": dropout_bwd}
