"""Devices: which one modules are made on, and te-fl's name of it."""

from __future__ import annotations

from typing import Union

import torch

from te_fl.pytorch import private_device


def default_device() -> torch.device:
    """cuda where there is one, else the PrivateUse1 device of a vendor whose plugin te-fl has, else cpu."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return private_device.default() or torch.device("cpu")


def device_of(device: Union[torch.device, str, None]) -> torch.device:
    """The device of new parameters: `device`, or the default one."""
    return default_device() if device is None else torch.device(device)


def native_device(device: torch.device) -> str:
    """te-fl's name of a device of PyTorch's."""
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        return f"cuda:{device.index or 0}"
    return private_device.native_name(device)
