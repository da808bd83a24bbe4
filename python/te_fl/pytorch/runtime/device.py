"""The default device of modules, and conversions of PyTorch devices."""

from __future__ import annotations

from typing import Iterable, Optional, Tuple, Union

import torch

from te_fl import torch_device
from te_fl.errors import InvalidArgument, Unsupported


def default_device() -> torch.device:
    """PyTorch's current accelerator if one is available, else cpu."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch_device.default() or torch.device("cpu")


def device_of(device: Union[torch.device, str, None]) -> torch.device:
    """The device for new parameters: `device`, or the default device for None."""
    return default_device() if device is None else torch.device(device)


def check_devices(where: str, device: torch.device, tensors: Iterable[Tuple[str, Optional[torch.Tensor]]]) -> None:
    """Raises an error if one of these named tensors is on another device than the first input, which is on `device`."""
    for name, t in tensors:
        if t is None or t.device == device:
            continue
        if t.is_meta:
            raise InvalidArgument(f"{where}: {name} is on the meta device, without memory; give it some with the module's reset_parameters(), or with "
                                  f"to_empty(device={str(device)!r}) and values")
        raise InvalidArgument(f"{where}: the input is on {device} and {name} on {t.device}; give the input as input.to({str(t.device)!r}), or move "
                              f"the module with module.to({str(device)!r})")


def check_memory(where: str, tensors: Iterable[torch.Tensor], error: BaseException) -> None:
    """Raises an error if an input is of a class whose tensors have no memory of their own. error: why the call has failed; Unsupported names that."""
    for t in () if isinstance(error, Unsupported) else tensors:
        if type(t) in (torch.Tensor, torch.nn.Parameter) or t.numel() == 0:
            continue
        try:
            held = t.data_ptr() != 0
        except RuntimeError:
            held = False
        if not held:
            raise Unsupported(f"{where}: the input is a {type(t).__name__}, which has no memory of its own; give a dense torch.Tensor, such as the one that a "
                              "subclass wraps")
