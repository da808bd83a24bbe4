"""Checks of values in memory. A call on the host fails at once, and so does one under TE_FL_VALIDATE; otherwise the next synchronisation of the device
fails, because reading a value of a device's memory would make the host wait.
"""

from __future__ import annotations

from typing import Callable, Dict, List

import torch

from te_fl import _native
from te_fl.errors import InvalidArgument

_flags: Dict[torch.device, torch.Tensor] = {}  # int32 []: 1 + the place in _texts of a failed check, 0 if none failed
_texts: List[str] = []


def watch(device: torch.device) -> None:
    """Makes report() possible for the device. Until then failed checks on it are not reported."""
    _flags.setdefault(device, torch.zeros((), dtype=torch.int32, device=device))


def is_flag(t: torch.Tensor) -> bool:
    """True for a tensor in which failed checks of a device are kept."""
    return _flags.get(t.device) is t


def report(device: torch.device) -> None:
    """Raises InvalidArgument if a check has failed on the device since the last report. The device's work must have ended."""
    flag = _flags.get(device)
    number = 0 if flag is None or not _texts else int(flag)
    if number:
        flag.zero_()
        raise InvalidArgument(f"in an op that ran before on {device}, {_texts[number - 1]}")


def _reads_now(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return bool(_native.setting("TE_FL_VALIDATE")) and not (capturing is not None and capturing())


def require(right: torch.Tensor, text: Callable[[int], str], late: str) -> None:
    """Fails unless all elements of `right` are true. text: describes the first wrong element, by its index; late: describes the failure later."""
    if _reads_now(right.device):
        if not bool(right.all()):
            raise InvalidArgument(text(int((~right).reshape(-1).int().argmax())))
        return
    if late not in _texts:
        _texts.append(late)
    flag = _flags.get(right.device)
    if flag is not None:
        flag.copy_(torch.where(right.all(), flag, 1 + _texts.index(late)))


def within(name: str, numbers: torch.Tensor, low: int, bound: int, more: str) -> torch.Tensor:
    """Checks that all numbers are in [low, bound). Returns which are, as bool."""
    wide = numbers.long()  # PyTorch compares in the tensor's dtype, which may not have the bounds
    right = (wide >= low) & (wide < bound)
    rule = f"it must lie in [{low}, {bound}){more}"
    require(right, lambda at: f"{name}[{at}] is {int(numbers.reshape(-1)[at])}; {rule}", f"an element of {name} is wrong; {rule}")
    return right
