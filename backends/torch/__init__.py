"""reference.torch: implementations of catalogue ops by PyTorch's own operations, on any device that PyTorch has.

They hold docs/numerics.md's contract as reference.host does. te-fl registers them when it makes a device from one of PyTorch's (te_fl.torch_device), so
that a call on such a device runs there; ops that this package lacks run on copies on the host.
"""

from __future__ import annotations

import functools
from typing import Callable, Dict, Iterable, Optional

from torch.utils._triton import has_triton

from te_fl.registration import BackendImplKind, OpImpl, OpRegistry

from te_fl.reference_torch import (activation, attention, cross_entropy, embedding, gemm, norm, optimizer, permutation, quantize, random, repeat, rope,
                                   router, scaled_activation, softmax, tensor)
from te_fl.reference_torch.values import SCALINGS

_SUPPORTS: Dict[str, Callable] = {name: module.supports for module in (attention, cross_entropy) for name in module.OPS}
_SUPPORTS["fill"], _SUPPORTS["strided_copy"] = tensor.supports_fill, tensor.supports_copy
_SUPPORTS["fused_amax_and_scale_update_after_reduction"] = quantize.supports_margin
_MODULES = (activation, attention, cross_entropy, embedding, gemm, norm, optimizer, permutation, quantize, random, rope, router, scaled_activation,
            softmax, tensor)


def implementations(devices: Optional[Iterable[str]] = None) -> Iterable[OpImpl]:
    """One OpImpl for each op. devices: te-fl's device types, such as "cuda" or "ext:acme"; None: all but extension devices."""
    for module in _MODULES:
        for name, function in module.OPS.items():
            yield OpImpl(op_name=name, impl_id="reference.torch", kind=BackendImplKind.REFERENCE, fn=repeat.uncast(function), supports=_SUPPORTS.get(name),
                         devices=None if devices is None else tuple(devices), scalings=SCALINGS, tensors="torch", supports_tensors="te_fl", in_place=True,
                         deterministic=True, graph_safe=True, repeat=functools.partial(repeat.record, name, repeat.uncast(function)))


def compiled_implementations(device_type: str, devices: Iterable[str]) -> Iterable[OpImpl]:
    """reference.torch_compiled, if PyTorch's compiler has kernels for PyTorch's device type; else none."""
    if not has_triton():
        return ()
    from te_fl.reference_torch import compiled
    return () if compiled.missing(device_type) else compiled.implementations(devices, _SUPPORTS)


def register(registry: OpRegistry) -> None:
    for implementation in implementations(("cpu",)):
        registry.register_impl(implementation)
