"""Arguments of ops other than plain tensors: quantised tensors, slices of a tensor as a list, and records saved by a forward for its backward."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, Optional, Protocol, Sequence, Union, runtime_checkable

from te_fl.errors import InvalidArgument, Unsupported

PARTS = ("data", "columnwise_data", "scale_inv", "columnwise_scale_inv", "amax", "columnwise_amax", "scale")  # of a Quantized
SCALINGS = ("none", "tensor", "block_1x128", "block_128x128", "mxfp8", "nvfp4")
DTYPES = ("f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2", "f4e2m1", "f8e8m0", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "bool")


@runtime_checkable
class Tensor(Protocol):
    """Any object that exports its memory by DLPack: tensors of PyTorch, NumPy and JAX. Ops also take te_fl.Quantized."""

    def __dlpack__(self) -> Any: ...


def _shape_of(data: Any) -> tuple:
    """The logical shape of a tensor of quantised codes; PyTorch's packed 4-bit dtype holds two codes per element."""
    shape = tuple(data.shape)
    return (*shape[:-1], 2 * shape[-1]) if shape and str(getattr(data, "dtype", "")).endswith("float4_e2m1fn_x2") else shape


class Quantized:
    """A quantised tensor by its parts. The parts may be tensors of any library, all on one device.

    data: the row-wise codes in the logical shape; None if there is only the column-wise copy. PyTorch's 4-bit dtype packs two codes per element
    (torch.float4_e2m1fn_x2), so its last dimension is half the logical one. scaling: "tensor", "block_1x128", "block_128x128", "mxfp8" or "nvfp4".
    shape: the logical shape; required if data is None. All other arguments are parts of te_fl_quant in te_fl/plugin.h, which specifies their shapes
    and dtypes. compute_scale: for an output, compute the scale from the values (current scaling) instead of reading `scale`.
    """

    __slots__ = ("data", "_scaling", "_flags", "_shape", "columnwise_data", "scale_inv", "columnwise_scale_inv", "amax", "columnwise_amax",
                 "scale", "amax_epsilon")

    def __init__(self, data: Optional[Tensor] = None, *, scaling: str = "tensor", scale_inv: Optional[Tensor] = None,
                 columnwise_data: Optional[Tensor] = None, columnwise_scale_inv: Optional[Tensor] = None, amax: Optional[Tensor] = None,
                 columnwise_amax: Optional[Tensor] = None, scale: Optional[Tensor] = None, amax_epsilon: float = 0.0,
                 compute_scale: bool = False, pow2_scale: bool = False, shape: Optional[Sequence[int]] = None):
        if scaling not in SCALINGS[1:]:
            raise InvalidArgument(f"scaling is {scaling!r}; it is one of {', '.join(SCALINGS[1:])}")
        if data is None and (columnwise_data is None or shape is None):
            raise InvalidArgument("give data, or columnwise_data with the logical shape")
        if data is not None and shape is not None and tuple(shape) != tuple(data.shape) and tuple(shape) != _shape_of(data):
            raise InvalidArgument(f"shape is {tuple(shape)}, data has {_shape_of(data)}")
        self.data, self._scaling, self._shape = data, SCALINGS.index(scaling), None if shape is None else tuple(shape)
        self._flags = (1 if compute_scale else 0) | (2 if pow2_scale else 0)
        self.columnwise_data, self.scale_inv, self.columnwise_scale_inv = columnwise_data, scale_inv, columnwise_scale_inv
        self.amax, self.columnwise_amax, self.scale, self.amax_epsilon = amax, columnwise_amax, scale, amax_epsilon

    @property
    def scaling(self) -> str:
        return SCALINGS[self._scaling]

    @property
    def shape(self) -> tuple:
        return _shape_of(self.data) if self.data is not None else self._shape

    def parts(self) -> list:
        """The tensors that it has: data, columnwise_data, scale_inv, columnwise_scale_inv, amax, columnwise_amax and scale, in this order."""
        return [held for held in (getattr(self, name) for name in PARTS) if held is not None]

    def __repr__(self) -> str:
        return f"te_fl.Quantized(shape={self.shape}, scaling={self.scaling!r})"


class QuantizedNames(NamedTuple):
    """The attributes by which ops read a class of quantised tensors; None: the class has no such attribute. _native.quantized_class() registers them.

    With `code`, the attribute that holds the dtype of the codes as Transformer Engine's number, the codes are uint8, the column-wise ones are
    transposed, and ops take the tensor as a matrix over its last dimension. stale: true while the column-wise copy is out of date. square: true for
    blocks of 128 x 128, false for 1 x 128; scaling: an index in SCALINGS; neither: one scale. flags: those of te_fl_quant. shape: the logical shape.
    """

    data: str
    columnwise_data: str
    scale_inv: Optional[str] = None
    columnwise_scale_inv: Optional[str] = None
    amax: Optional[str] = None
    columnwise_amax: Optional[str] = None
    scale: Optional[str] = None
    code: Optional[str] = None
    stale: Optional[str] = None
    square: Optional[str] = None
    scaling: Optional[str] = None
    flags: Optional[str] = None
    amax_epsilon: Optional[str] = None
    shape: Optional[str] = None


class QuantizedTarget(NamedTuple):
    """An output of an op: a quantised tensor of a registered class with a quantizer's settings.

    code: the dtype of the codes. scale, amax: FP32 [1]; None or an empty tensor: absent. If both are the same object, it is FP32 [2] with the scale
    and the amax. flags: 1 computes the scale, 2 truncates it to a power of two.
    """

    tensor: Any
    code: Any
    scale: Optional[Tensor] = None
    amax: Optional[Tensor] = None
    flags: int = 0
    amax_epsilon: float = 0.0


def read_on_host(numbers: Any, what: str) -> list:
    """The numbers in a list or tensor, as a list. Reading a device tensor synchronises. `what`: the name in the error raised during graph capture."""
    if isinstance(numbers, (list, tuple)):
        return list(numbers)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(numbers, torch.Tensor) and numbers.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Unsupported(f"{what}: a tensor on the device, which the host would read, while the current stream is being captured; give a list of numbers, "
                          "or leave this call out of the capture")
    return numbers.tolist()


class Rows:
    """Consecutive slices along a tensor's first dimension, for an op that takes a list of tensors. No tensor object is created for each slice.

    tensor: a plain tensor of any library, or a Quantized [rows, columns] of FP8 codes. Each slice of a Quantized is a quantised tensor of its own: in
    columnwise_data, scale_inv and the other parts, the slices' data (as defined by te_fl_quant) follow one another, so per-tensor scales are one
    number for each slice.
    sizes: the slices' row counts, each 0 or more, whose sum is the tensor's row count. A list, or a tensor of integers. The host reads a device
    tensor, which synchronises; during stream capture that raises te_fl.errors.Unsupported.
    """

    __slots__ = ("tensor", "sizes")

    def __init__(self, tensor: Union[Tensor, Quantized], sizes: Any):
        self.tensor, self.sizes = tensor, read_on_host(sizes, "te_fl.Rows: sizes")

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        return f"te_fl.Rows({self.sizes})"


class Saved:
    """The record that a forward op saves for its backward in addition to its documented outputs; pass the same object to both.

    storage: uint8 memory on the op's device, of te_fl.saved_bytes() bytes; None if that is 0.
    """

    __slots__ = ("storage", "_record")

    def __init__(self, storage: Optional[Tensor] = None):
        self.storage, self._record = storage, None
