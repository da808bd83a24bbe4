"""Parameters that store only FP8 codes and appear with the dtype of the values they were quantised from."""

from __future__ import annotations

import contextlib
import copy
import threading
from types import MethodType
from typing import Any, Callable, Iterator, Optional

import torch
from torch.utils._pytree import tree_leaves, tree_map

from te_fl import _native, ops
from te_fl.errors import DataLoss, Unsupported
from te_fl.pytorch.fp8.codes import Codes as Codes, MXFP8Codes, Rules as Rules, make_rules as make_rules
from te_fl.pytorch.fp8 import sharding
from te_fl.pytorch.fp8.shards import Rows
from te_fl.pytorch.runtime.callers import called_from
from te_fl.pytorch.runtime.constants import DType
from te_fl.pytorch.runtime.dtypes import DTYPE_CODES, DTYPE_NAMES
from te_fl.tensors import SCALINGS

_aten = torch.ops.aten
_CODES = torch.float8_e4m3fn
_DISTRIBUTED = "torch.distributed."


class _Dequantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: "Float8Tensor", dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = tensor.dtype
        return tensor._codes.read(dtype)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad.to(ctx.dtype), None


class QuantizedTensor(torch.Tensor):
    """A tensor that stores quantised codes and behaves as a high-precision tensor."""


class Float8Tensor(sharding.Sharded, QuantizedTensor):
    """A tensor that stores only FP8 codes and behaves as a tensor of `dtype`.

    Every operation that reads it gets dequantised values and returns a plain tensor; detach(), clone() and moves to another device keep the codes.
    In-place operations, including copy_(), quantise, with scales from the amax of the written values, whatever the recipe. A view with another shape
    is a copy of the dequantised values, so writing to it does not change the codes. FSDP's fully_shard() shards and gathers the codes
    (te_fl.pytorch.fp8.sharding).
    """

    def __new__(cls, codes: Codes, dtype: torch.dtype, requires_grad: bool = False) -> "Float8Tensor":
        made = torch.Tensor._make_wrapper_subclass(cls, codes.data.shape, dtype=dtype, device=codes.data.device, requires_grad=requires_grad)
        made._codes = codes
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl
    __dlpack_c_exchange_api__ = None  # its memory does not hold values of its dtype

    @classmethod
    def quantised(cls, values: torch.Tensor, rules: Rules) -> "Float8Tensor":
        """Quantises `values`; the result has their dtype and device."""
        if values.dtype not in DTYPE_NAMES:
            raise Unsupported(f"Float8Tensor: the dtype {values.dtype} is not supported; codes show torch.float32, torch.bfloat16 or torch.float16")
        codes = Codes.empty(rules, values.shape, values.device)
        codes.write(values.detach())
        return cls(codes, values.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        own = _OWN.get(func)
        if own is not None:
            return own(func, *args, **kwargs)
        if func._schema.is_mutable:
            return _write(func, args, kwargs)
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))

    # -- Transformer Engine's names

    def dequantize(self, *, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        """The values as a plain tensor of the given dtype; None: this tensor's dtype."""
        return _Dequantise.apply(self, self.dtype if dtype is None else dtype)

    def quantize_(self, tensor: torch.Tensor) -> "Float8Tensor":
        """Quantises a tensor's values into this tensor."""
        with torch.no_grad():
            return self.copy_(tensor)

    @property
    def _data(self) -> torch.Tensor:
        return self._codes.data.view(torch.uint8)

    @property
    def _scale_inv(self) -> torch.Tensor:
        return self._codes.scale_inv

    @property
    def _transpose(self) -> Optional[torch.Tensor]:
        """The transposed codes, if a quantizer or a training forward has made them and they are up to date; else None."""
        codes = self._codes
        return None if codes.columns is None or codes.columns_are_old or isinstance(codes, MXFP8Codes) else codes.columns.view(torch.uint8)

    @property
    def _fp8_dtype(self) -> DType:
        return DType.kFloat8E4M3

    # -- te-fl's modules

    def _lent(self, training: bool) -> tuple:
        """The parts for a layer's call in C++; see set_codes_class() in lent_parameter.hpp."""
        codes = self._codes
        self.__dict__.pop("_values", None)
        if training:
            codes.add_columns()
        return (codes.data, codes.scale_inv, codes.amax, codes.columns, codes.columns_scale_inv, DTYPE_CODES[self.dtype],
                SCALINGS.index(codes.rules.scaling))

    def _keep_initial(self, values: torch.Tensor) -> None:
        """Adds methods that return and free the high-precision values that the codes were made from."""
        self._high_precision_init_val = values
        self._initial_writes = self._codes.writes if isinstance(self, Float8Tensor) else None  # None for a DTensor
        self.get_high_precision_init_val = MethodType(_initial, self)
        self.clear_high_precision_init_val = MethodType(_clear_initial, self)

    # -- access to a tensor's memory

    @property
    def data(self) -> "Float8Tensor":
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Takes over another tensor's codes, device and dtype, as Module.to() requires; values of a plain tensor are quantised."""
        if not isinstance(value, Float8Tensor):
            value = Float8Tensor.quantised(value, self._codes.rules)
        torch.Tensor.data.__set__(self, value)
        self._codes = value._codes

    def __setitem__(self, index: Any, value: Any) -> None:
        """Writes some of the values, which requantises all of them."""
        values = self.detach().dequantize()
        values[index] = value
        self.copy_(values)

    def float(self) -> torch.Tensor:
        return self._as(torch.float32)

    def bfloat16(self) -> torch.Tensor:
        return self._as(torch.bfloat16)

    def half(self) -> torch.Tensor:
        return self._as(torch.float16)

    def _as(self, dtype: torch.dtype) -> torch.Tensor:
        """Converts to a plain tensor; inside of keeping_codes() keeps the codes and changes the nominal dtype."""
        return self.to(dtype) if _keeping.depth > 0 else self.dequantize(dtype=dtype)

    def numpy(self, **options: Any):
        return self.dequantize().numpy(**options)

    def tolist(self) -> list:
        return self.detach().dequantize().tolist()

    def data_ptr(self) -> int:
        """The address of the dequantised values, in memory that lives until a layer reads this tensor. Writes to that memory do not change the codes;
        address_of() gives the codes' address.
        """
        return 0 if called_from(_DISTRIBUTED) else self._shown().data_ptr()

    def share_memory_(self) -> "Float8Tensor":
        held = isinstance(self._codes, MXFP8Codes)
        for part in (self._codes.data, self._codes.scale_inv, self._codes.amax, *((self._codes.columns, self._codes.columns_scale_inv) if held else ())):
            if part is not None:
                part.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self._codes.data.is_shared()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage that data_ptr() points into."""
        if called_from(_DISTRIBUTED):  # torch.distributed treats tensors without memory of their dtype by this result
            return torch.UntypedStorage(0, device=self.device)
        return self._shown().untyped_storage()

    def _shown(self) -> torch.Tensor:
        values = self.__dict__.get("_values")
        if values is None or (values.shape, values.dtype, values.device) != (self.shape, self.dtype, self.device):
            values = self._values = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if self.device.type != "meta":
            values.copy_(self._codes.read(self.dtype))
        return values

    def __dlpack__(self, **options: Any):
        raise BufferError("a Float8Tensor has no memory of its dtype to lend; dequantize() has its values, _data its codes")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"Float8Tensor({self.detach().dequantize()}, scaling={self._codes.rules.scaling!r}{grad})"

    # -- copies

    def __deepcopy__(self, memo: dict) -> "Float8Tensor":
        if id(self) in memo:
            return memo[id(self)]
        copied = memo[id(self)] = Float8Tensor(self._codes.to(self.device, always=True), self.dtype, self.requires_grad)
        for name, value in self.__dict__.items():
            if name not in ("_codes", "_values", "_high_precision_init_val", *_METHODS):
                setattr(copied, name, copy.deepcopy(value, memo))
        if "_high_precision_init_val" in self.__dict__:
            copied._keep_initial(self._high_precision_init_val)
            copied._initial_writes = self._initial_writes
        return copied

    def __reduce_ex__(self, protocol: int) -> tuple:
        codes = self._codes
        if isinstance(codes, MXFP8Codes):
            parts = tuple(part.view(torch.uint8) for part in (codes.data, codes.scale_inv, codes.columns, codes.columns_scale_inv))
            return _rebuilt_mxfp8, (*parts, codes.rules.square, self.dtype, self.requires_grad, getattr(self, "_is_param", False))
        data = codes.data.clone() if isinstance(codes, Rows) else codes.data  # pickling saves a tensor's whole storage, so rows are copied first
        return _rebuilt, (data.view(torch.uint8), codes.scale_inv, codes.amax, tuple(codes.rules), self.dtype, self.requires_grad,
                          getattr(self, "_is_param", False))


def address_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; for a Float8Tensor the address of its codes."""
    return tensor._codes.data.data_ptr() if isinstance(tensor, Float8Tensor) else tensor.data_ptr()


_METHODS = ("get_high_precision_init_val", "clear_high_precision_init_val")


def _initial(parameter: Float8Tensor) -> Optional[torch.Tensor]:
    """Returns the high-precision host values that the codes were made from; None if they were freed. If the codes were written since, for example by
    an initialisation after construction, returns the codes' dequantised values.
    """
    kept = getattr(parameter, "_high_precision_init_val", None)
    if kept is None or parameter._initial_writes is None or parameter._initial_writes == parameter._codes.writes:
        return kept
    return parameter.detach().dequantize().cpu()


def _clear_initial(parameter: Float8Tensor) -> None:
    parameter.__dict__.pop("_high_precision_init_val", None)


def _rebuilt(data, scale_inv, amax, rules, dtype, requires_grad, is_parameter) -> Float8Tensor:
    made = Float8Tensor(Codes(Rules(*rules), data.view(_CODES), scale_inv, amax), dtype, requires_grad)
    if is_parameter:
        made._is_param = True
    return made


def _rebuilt_mxfp8(data, scale_inv, columns, columns_scale_inv, square, dtype, requires_grad, is_parameter) -> Float8Tensor:
    codes = MXFP8Codes(Rules("mxfp8", square=square), data.view(_CODES), scale_inv.view(torch.float8_e8m0fnu), None)
    codes.columns, codes.columns_scale_inv = columns.view(_CODES), columns_scale_inv.view(torch.float8_e8m0fnu)
    made = Float8Tensor(codes, dtype, requires_grad)
    if is_parameter:
        made._is_param = True
    return made


def _theirs(data, fp8_dtype, scale_inv, dtype, shape, transpose=None) -> Float8Tensor:
    """Converts Transformer Engine's Float8Tensor of a checkpoint."""
    if int(fp8_dtype) != DType.kFloat8E4M3:
        raise DataLoss(f"a Float8Tensor {tuple(shape)} of the checkpoint holds codes of Transformer Engine's dtype {int(fp8_dtype)}; te-fl's "
                       f"parameters hold E4M3, which is {int(DType.kFloat8E4M3)}")
    data = transpose.t().contiguous() if data is None else data
    codes = Codes(Rules("tensor"), data.view(_CODES).reshape(shape), scale_inv.float().reshape(1), torch.empty_like(scale_inv.reshape(1)))
    ops.compute_amax(input=codes.read(torch.float32), amax=codes.amax)
    return Float8Tensor(codes, dtype)


class _Keeping(threading.local):
    depth = 0


_keeping = _Keeping()


@contextlib.contextmanager
def keeping_codes() -> Iterator[None]:
    """While active on this thread, a dtype conversion changes only the nominal dtype and keeps the codes, as Module.to(dtype) needs."""
    _keeping.depth += 1
    try:
        yield
    finally:
        _keeping.depth -= 1


# -- operations


def _plain(value: Any) -> Any:
    return value._codes.read(value.dtype) if isinstance(value, Float8Tensor) else value


def _write(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Runs an in-place operation on dequantised values, and quantises the written ones afterwards."""
    values, owners = {}, {}

    def plain(value: Any) -> Any:
        if not isinstance(value, Float8Tensor):
            return value
        key = id(value._codes)
        if key not in values:
            values[key] = value._codes.read(value.dtype)
            owners[id(values[key])] = value
        return values[key]

    result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        passed = args[number] if number < len(args) else kwargs.get(argument.name)
        for tensor in tree_leaves(passed):
            if isinstance(tensor, Float8Tensor):
                written = values[id(tensor._codes)]
                if written.shape != tensor.shape:
                    raise Unsupported(f"{func}: a Float8Tensor {tuple(tensor.shape)} cannot take the shape {tuple(written.shape)} in place; "
                                      "work on its dequantize()")
                tensor._codes.write(written)
    return tree_map(lambda r: owners.get(id(r), r), result)


def _alias(func: Callable, tensor: Float8Tensor) -> Float8Tensor:
    return Float8Tensor(tensor._codes, tensor.dtype)


def _clone(func: Callable, tensor: Float8Tensor, **options: Any) -> Float8Tensor:
    return Float8Tensor(tensor._codes.to(tensor.device, always=True), tensor.dtype)


def _copy(func: Callable, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(to, Float8Tensor):
        return to.copy_(source._codes.read(to.dtype if to.dtype in DTYPE_NAMES else torch.float32), non_blocking)
    same = isinstance(source, Float8Tensor) and source._codes.rules.scaling == to._codes.rules.scaling and source.shape == to.shape
    if same and sharding.copies_codes(to._codes, source._codes):
        to._codes.copy_(source._codes)
    else:
        sharding.check_write(to._codes)
        to._codes.write(_plain(source))
    return to


def _to_copy(func: Callable, tensor: Float8Tensor, *, dtype: Optional[torch.dtype] = None, device: Any = None, non_blocking: bool = False,
             **options: Any) -> torch.Tensor:
    dtype = dtype or tensor.dtype
    if dtype == tensor.dtype or (_keeping.depth > 0 and dtype in DTYPE_NAMES):
        made = tensor._codes.to(device or tensor.device, non_blocking, always=True)
        sharding.note_copy(made, tensor._codes)
        return Float8Tensor(made, dtype)
    return func(tensor._codes.read(dtype), device=device, non_blocking=non_blocking, **options)


def _new_empty(func: Callable, tensor: Float8Tensor, size: Any, **kwargs: Any) -> torch.Tensor:
    """Returns codes if torch.distributed.checkpoint allocates a copy of a tensor, into which it then copies this tensor's codes; else values."""
    if tuple(size) == tuple(tensor.shape) and kwargs.get("dtype") in (None, tensor.dtype) and called_from("torch.distributed.checkpoint."):
        return Float8Tensor(Codes.empty(tensor._codes.rules, tensor.shape, torch.device(kwargs.get("device") or tensor.device)), tensor.dtype)
    return _like(func, tensor, size, **kwargs)


def _like(func: Callable, tensor: Float8Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return func(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), *args, **kwargs)


_OWN = {_aten.detach.default: _alias, _aten.alias.default: _alias, _aten.clone.default: _clone, _aten.copy_.default: _copy,
        _aten._to_copy.default: _to_copy, _aten.new_empty.default: _new_empty, **sharding.OPERATIONS}
_OWN.update({op: _like for op in (
    _aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default, _aten.rand_like.default,
    _aten.randn_like.default, _aten.new_ones.default, _aten.new_full.default,
    _aten.new_empty_strided.default)})

_native.set_codes_class(Float8Tensor)
# torch.load(weights_only=True) may call these functions.
_TE = "transformer_engine.pytorch"
torch.serialization.add_safe_globals([_rebuilt, _rebuilt_mxfp8, (_theirs, f"{_TE}.tensor.float8_tensor._make_float8_tensor_in_reduce_ex"),
                                      (DType, f"{_TE}.constants.DType")])
