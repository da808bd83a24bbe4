"""transformer_engine.plugin.core.ops: the enumerations, and the classes from which backends derive. Backends import all names of this module, also
those that it has from others.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from contextlib import nullcontext
from enum import IntEnum
from typing import Any, Callable, Dict, List, Optional, Tuple, Type, Union

import torch

from te_fl import _native
from te_fl.plugin_core.logger_manager import get_logger
from te_fl.plugin_core.manager import OpManager, get_default_manager, get_manager, get_registry, reset_registry
from te_fl.transformer_engine_torch.enums import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.enums import __all__ as _ENUMS

logger = get_logger()

# Has members that Transformer Engine's own enumeration does not have; equal members are equal numbers.
DType = IntEnum("DType", "kByte kInt16 kInt32 kInt64 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat8E8M0 kFloat4E2M1 kNumTypes",  # noqa: F811
                start=0)
NVTE_Activation_Type = IntEnum("NVTE_Activation_Type", "GELU GEGLU SILU SWIGLU RELU REGLU QGELU QGEGLU SRELU SREGLU CLAMPED_SWIGLU", start=0)
CommGemmOverlapRole = IntEnum("CommGemmOverlapRole", "INPUT OUTPUT", start=0)

__all__ = ["ABC", "abstractmethod", "Any", "Callable", "Dict", "List", "Optional", "Tuple", "Type", "Union", "IntEnum", "nullcontext", "torch", "logger",
           "get_logger", *_ENUMS, "NVTE_Activation_Type", "CommGemmOverlapRole", "CommOverlapHelper", "CommOverlap", "CommOverlapP2P", "FlashAttentionBase",
           "TEFLBackendBase", "TEFLModule", "get_manager", "get_registry", "get_tefl_module", "reset_registry", "reset_tefl_module"]


def _made_by(name: str, op: str) -> type:
    return type(name, (), {"__new__": lambda cls, *arguments, **options: get_default_manager().call(op, *arguments, **options), "__module__": __name__,
                           "__doc__": f"Made by the op {op}."})


CommOverlapHelper = _made_by("CommOverlapHelper", "create_comm_overlap_helper")
CommOverlap, CommOverlapP2P = _made_by("CommOverlap", "create_comm_overlap"), _made_by("CommOverlapP2P", "create_comm_overlap_p2p")


class FlashAttentionBase(torch.nn.Module, ABC):
    """The base of a vendor's attention, which defines _forward_impl(). Made by TEFLModule.flash_attention(), it falls back to other vendors' classes."""

    def __init__(self, softmax_scale: float, attention_dropout: float = 0.0, attention_dropout_ctx: Optional[Callable] = None,
                 attention_type: str = "self", layer_number: Optional[int] = None, deterministic: bool = False) -> None:
        super().__init__()
        self.softmax_scale, self.attention_dropout, self.attention_type = softmax_scale, attention_dropout, attention_type
        self.attention_dropout_ctx = attention_dropout_ctx or nullcontext
        self.layer_number = 1 if layer_number is None else layer_number
        self.deterministic = deterministic
        self._manager: Optional[OpManager] = None
        self._init_params: Dict[str, Any] = {}

    @abstractmethod
    def _forward_impl(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Computes attention. The arguments are those of forward() of Transformer Engine's FlashAttention."""

    def forward(self, *arguments: Any, **options: Any) -> torch.Tensor:
        if self._manager is None:
            return self._forward_impl(*arguments, **options)

        def run(kind: type) -> torch.Tensor:
            other = self if kind is type(self) else kind(**self._init_params)
            return other._forward_impl(*arguments, **options)  # type: ignore[attr-defined,no-any-return]
        return self._manager.call_with_custom_impl("get_flash_attention_class", type(self), run)  # type: ignore[no-any-return]

    @property
    def backend_name(self) -> str:
        return type(self).__name__


class TEFLBackendBase(ABC):
    """The base of a backend: a method for each function of the extension module. Those that a backend does not define raise NotImplementedError."""

    @abstractmethod
    def is_available(self) -> bool:
        """True if the backend can run on this machine."""


def _lacking(name: str) -> Callable[..., Any]:
    def method(self: TEFLBackendBase, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no {name}")
    method.__name__ = name
    return method


for _name in (*_native.tex_names(), *_native.op_names()):
    if not hasattr(TEFLBackendBase, _name):
        setattr(TEFLBackendBase, _name, _lacking(_name))


class TEFLModule:
    """transformer_engine_torch by a manager: its functions run what the manager chooses; its enumerations and classes are te-fl's."""

    def __init__(self, manager: Optional[OpManager] = None) -> None:
        self._manager = get_default_manager() if manager is None else manager

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name in __all__ and isinstance(globals()[name], type):
            return globals()[name]
        self._manager.ensure_initialized()
        if name in self._manager.registry.list_operators():
            return functools.partial(self._manager.call, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}, and no op of that name is registered")

    def __dir__(self) -> List[str]:
        return sorted({*object.__dir__(self), *_ENUMS, *self._manager.registry.list_operators()})

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def flash_attention(self, softmax_scale: float, attention_dropout: float = 0.0, attention_dropout_ctx: Optional[Callable] = None,
                        attention_type: str = "self", layer_number: Optional[int] = None, deterministic: bool = False) -> Any:
        """Makes an object of the class that the op get_flash_attention_class returns."""
        options = {"softmax_scale": softmax_scale, "attention_dropout": attention_dropout, "attention_dropout_ctx": attention_dropout_ctx,
                   "attention_type": attention_type, "layer_number": layer_number, "deterministic": deterministic}
        made = self._manager.call("get_flash_attention_class")(**options)
        made._manager, made._init_params = self._manager, options
        return made

    def __repr__(self) -> str:
        return f"TEFLModule(operators={len(self._manager.registry.list_operators())}, manager={type(self._manager).__name__})"


_module: Optional[TEFLModule] = None


def get_tefl_module() -> TEFLModule:
    """The module of the process's manager. Returns the same object until reset_tefl_module()."""
    global _module
    if _module is None:
        _module = TEFLModule()
    return _module


def reset_tefl_module() -> None:
    global _module
    _module = None
