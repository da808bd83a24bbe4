"""Row orders of a gated MLP's weights."""

import torch

from te_fl.errors import InvalidArgument

__all__ = ["deinterleave_glu_tensor", "interleave_glu_tensor"]


def _swap_first_two(tensor: torch.Tensor, interleave_size: int, to_interleaved: bool) -> torch.Tensor:
    rows = tensor.shape[0]
    if interleave_size <= 0 or rows % (2 * interleave_size) != 0:
        raise InvalidArgument(f"interleave_size is {interleave_size} and the tensor has {rows} rows; twice the former divides the latter")
    blocks = rows // (2 * interleave_size)
    first = (2, blocks) if to_interleaved else (blocks, 2)
    return tensor.reshape(*first, interleave_size, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Reorders rows from [gate; linear] to alternating blocks of interleave_size gate rows and interleave_size linear rows."""
    return _swap_first_two(tensor, interleave_size, True)


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """The inverse of interleave_glu_tensor."""
    return _swap_first_two(tensor, interleave_size, False)
