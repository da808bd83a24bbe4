"""Transformer Engine's FusibleOperation and derived classes, and sequences of operations (Row).

An operation maps an input tensor and optional extra inputs to an output tensor and optional extra outputs. A row passes each output to the next
operation. Extra inputs come from the caller and extra outputs go to the caller, in the operations' order. A named channel instead connects an extra
output to extra inputs of later operations in the row.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import torch

from te_fl.errors import FailedPrecondition, InvalidArgument, Unsupported
from te_fl.pytorch.autograd.once import once_differentiable
from te_fl.pytorch.fp8 import extra_state
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor

Result = Tuple[torch.Tensor, Sequence[torch.Tensor]]  # the input of the next operation, and the extra outputs


class FusibleOperation(torch.nn.Module):
    """The base class of operations. A direct call runs a row of this one operation."""

    @property
    def is_fused_op(self) -> bool:
        """True if it consists of several basic operations."""
        raise NotImplementedError

    def _materialise(self) -> None:
        """Allocates and initialises parameters on the meta device."""

    def pre_first_fuser_forward(self) -> None:
        """A hook that a user-defined operation may override; called before the first forward, for example to create parameters."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """A hook that a user-defined operation may override; called before each forward. requires_grad: a backward may follow."""


class BasicOperation(FusibleOperation):
    """One operation. num_extra_inputs, num_extra_outputs: the numbers of extra tensors.

    A user-defined class defines op_forward(ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer, **kwargs), where both quantizers are
    None, and op_backward(ctx, grad_output), which returns the gradient of the input and an iterable of the parameters' gradients. ctx is an
    OperationContext. With extra tensors the class defines instead fuser_forward(ctxs, input_, *, basic_op_extra_inputs, .., basic_op_kwargs), which
    returns the output and [extra outputs], and fuser_backward(ctxs, grad_output, *, basic_op_grad_extra_outputs), which returns the gradients of the
    input, [of parameters] and [of extra inputs]. These lists have one element.
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0

    def __init__(self) -> None:
        super().__init__()
        self._open_channels()

    def _open_channels(self) -> None:
        self._extra_input_channels: List[Optional[str]] = [None] * self.num_extra_inputs
        self._extra_output_channels: List[Optional[str]] = [None] * self.num_extra_outputs
        self._extra_output_to_caller: List[bool] = [True] * self.num_extra_outputs
        self._began = False  # true after pre_first_fuser_forward() was called
        self._in_a_row = False  # true after the first forward; the channels can no longer change

    @property
    def is_fused_op(self) -> bool:
        return False

    def _check_channel(self, kind: str, index: int, count: int, channel: Optional[str]) -> None:
        where = type(self).__name__
        if not 0 <= index < count:
            raise IndexError(f"{where}: extra {kind} {index} of {count}")
        if channel is not None and (not isinstance(channel, str) or not channel):
            raise InvalidArgument(f"{where}: channel is {channel!r}; it is a name, or None")
        if self._in_a_row:
            raise FailedPrecondition(f"{where}: it has computed, and its channels stay as they were; name the channels of a new "
                                     "operation")

    def set_extra_input_channel(self, index: int, channel: Optional[str]) -> "BasicOperation":
        """Connects the extra input to the earlier operation of the row that fills the channel. None: the input comes from the caller."""
        self._check_channel("input", index, self.num_extra_inputs, channel)
        self._extra_input_channels[index] = channel
        return self

    def set_extra_output_channel(self, index: int, channel: Optional[str], *, output_to_caller: bool = True) -> "BasicOperation":
        """Sends the extra output to the channel, for later operations of the row, and with output_to_caller also to the caller. None: only to the
        caller.
        """
        self._check_channel("output", index, self.num_extra_outputs, channel)
        if not isinstance(output_to_caller, bool):
            raise TypeError(f"{type(self).__name__}: output_to_caller is {output_to_caller!r}; it is a bool")
        self._extra_output_channels[index], self._extra_output_to_caller[index] = channel, channel is None or output_to_caller
        return self

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> Union[torch.Tensor, Tuple[torch.Tensor, ...]]:
        """Returns the output, or with extra outputs a tuple (output, *extra outputs)."""
        return Row((self,))(input, *extra_inputs, basic_op_kwargs=[kwargs])

    def _takes_bias(self, after: Any, x: torch.Tensor) -> bool:
        """True if, for this input, this operation can add the bias of the operation `after` itself."""
        return False

    def _compute(self, x: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> Result:
        pairs = (("fuser_forward", "fuser_backward"), ("op_forward", "op_backward"))
        if not any(all(hasattr(self, name) for name in pair) for pair in (pairs if self.num_extra_inputs + self.num_extra_outputs == 0 else pairs[:1])):
            raise Unsupported(f"{type(self).__name__}: a custom operation is supported with op_forward() and op_backward(), or with extra tensors with "
                              "fuser_forward() and fuser_backward(); define them, or write what it does as a torch.nn.Module, which Sequential takes too")
        out, *shown = _OwnOperation.apply(self, kwargs, torch.is_grad_enabled(), x, *extra_inputs, *self.parameters())
        return out, shown

    # A checkpoint has a state for each operation; it is empty except with delayed scaling.

    def get_extra_state(self) -> torch.Tensor:
        return extra_state.nothing()

    def set_extra_state(self, state: Any) -> None:
        if state is not None and state.numel() > 0:
            raise InvalidArgument(f"{type(self).__name__}: the checkpoint has {state.numel()} bytes of FP8 state for it, and it has none")


class FusedOperation(FusibleOperation):
    """A sequence of basic operations."""

    def __init__(self, basic_ops: Iterable[FusibleOperation]) -> None:
        super().__init__()
        self.basic_ops = torch.nn.ModuleList(basic_ops)
        if len(self.basic_ops) == 0:
            raise InvalidArgument(f"{type(self).__name__}: basic_ops is empty; give one operation or more")

    @property
    def is_fused_op(self) -> bool:
        return True

    def _materialise(self) -> None:
        for op in self.basic_ops:
            op._materialise()

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor,
                basic_op_kwargs: Optional[List[Dict[str, Any]]] = None) -> Union[torch.Tensor, Tuple[torch.Tensor, ...]]:
        """The output of the last operation; with extra outputs a tuple. basic_op_kwargs: the keyword arguments of each basic operation's forward."""
        return Row((self,))(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)


@dataclasses.dataclass
class OperationContext:
    """Carries data from op_forward() to op_backward() of a user-defined operation: attributes, and tensors by save_for_backward()."""

    saved_tensors: Optional[Tuple[Optional[torch.Tensor], ...]] = None
    to_save: Optional[Tuple[Optional[torch.Tensor], ...]] = None
    _saved_tensors_range: Optional[Tuple[int, int]] = None  # an attribute of Transformer Engine's; always None in te-fl
    requires_grad: bool = True

    def save_for_backward(self, *tensors: Optional[torch.Tensor]) -> None:
        self.to_save = tensors


class _OwnOperation(torch.autograd.Function):
    """The autograd node of a user-defined operation; returns the output and the extra outputs."""

    @staticmethod
    def forward(ctx: Any, op: Any, kwargs: dict, grads: bool, x: torch.Tensor, *others: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        extras, own = others[:op.num_extra_inputs], OperationContext(requires_grad=grads and any(t.requires_grad for t in (x, *others)))
        no_quantizers: dict = dict(prev_op_grad_output_quantizer=None, next_op_input_quantizer=None)
        if hasattr(op, "fuser_forward"):
            out, (shown,) = op.fuser_forward([own], x, basic_op_extra_inputs=[extras], basic_op_kwargs=[kwargs], **no_quantizers)
        else:
            out, shown = op.op_forward(own, x, **no_quantizers, **kwargs), ()
        _check_count(op, "extra outputs", len(shown), op.num_extra_outputs)
        ctx.save_for_backward(*(own.to_save or ()))
        own.to_save = None
        ctx.op, ctx.own, ctx.parameters = op, own, len(others) - len(extras)
        results: List[torch.Tensor] = []
        for t in (out, *shown):  # PyTorch requires that outputs are distinct tensors
            results.append(t.view_as(t) if any(t is one for one in (x, *others, *results)) else t)
        ctx.mark_non_differentiable(*(t for t in results if not t.is_floating_point()))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *of_extras: torch.Tensor) -> Any:
        op, ctx.own.saved_tensors = ctx.op, ctx.saved_tensors
        if hasattr(op, "fuser_backward"):
            dx, (dparameters,), (dextras,) = op.fuser_backward([ctx.own], grad, basic_op_grad_extra_outputs=[of_extras])
        else:
            dx, dparameters = op.op_backward(ctx.own, grad)
            dextras = ()
        dparameters, dextras = tuple(dparameters), tuple(dextras)
        _check_count(op, "gradients of parameters", len(dparameters), ctx.parameters)
        _check_count(op, "gradients of extra inputs", len(dextras), op.num_extra_inputs)
        return (None, None, None, dx, *dextras, *dparameters)


def _computes_its_own_way(op: Any) -> bool:
    """True if a user-defined class overrides the computation. te-fl's own operations, from which that class may derive, define none of these methods.
    """
    return any(hasattr(op, name) for name in ("op_forward", "op_backward", "fuser_forward", "fuser_backward"))


def _has_hooks(op: Any) -> bool:
    kind = type(op)
    return (kind.pre_first_fuser_forward is not FusibleOperation.pre_first_fuser_forward
            or kind.pre_fuser_forward is not FusibleOperation.pre_fuser_forward)


def _check_count(op: Any, what: str, count: int, wanted: int) -> None:
    if count != wanted:
        raise InvalidArgument(f"{type(op).__name__}: it has returned {count} {what}; it has {wanted}")


def _basic(op: Any) -> List[Any]:
    return [basic for part in op.basic_ops for basic in _basic(part)] if op.is_fused_op else [op]


class Row:
    """A sequence of operations. The constructor checks the channels."""

    def __init__(self, ops: Sequence[FusibleOperation]):
        self._ops = ops
        self.basic_ops: List[Any] = [basic for op in ops for basic in _basic(op)]
        self._check_channels()
        for op in self.basic_ops:
            op._in_a_row = True
        self.num_extra_inputs = sum(channel is None for op in self.basic_ops for channel in op._extra_input_channels)

    def _check_channels(self) -> None:
        filled: Dict[str, str] = {}
        for op in self.basic_ops:
            for channel in op._extra_input_channels:
                if channel is not None and channel not in filled:
                    raise InvalidArgument(f"{type(op).__name__}: no operation before it fills the channel {channel!r}")
            for channel in op._extra_output_channels:
                if channel in filled:
                    raise InvalidArgument(f"{type(op).__name__}: the channel {channel!r} is filled by {filled[channel]} already")
                if channel is not None:
                    filled[channel] = type(op).__name__

    def _call_hooks(self, ops: Sequence[Any], inputs: Sequence[torch.Tensor]) -> None:
        for op in ops:
            if not op._began:
                op.pre_first_fuser_forward()
                op._began = True
        parameters = [p for op in self.basic_ops for p in op.parameters()]
        needs = torch.is_grad_enabled() and any(t.requires_grad for t in (*inputs, *parameters))
        for op in ops:
            op.pre_fuser_forward(requires_grad=needs)

    def __call__(self, x: torch.Tensor, *extra_inputs: torch.Tensor, basic_op_kwargs: Optional[Sequence[Dict[str, Any]]] = None
                 ) -> Union[torch.Tensor, Tuple[torch.Tensor, ...]]:
        if len(extra_inputs) != self.num_extra_inputs:
            raise InvalidArgument(f"{', '.join(type(op).__name__ for op in self.basic_ops)}: {len(extra_inputs)} extra inputs are given; they take "
                             f"{self.num_extra_inputs}")
        kwargs = [{}] * len(self.basic_ops) if basic_op_kwargs is None else basic_op_kwargs
        if len(kwargs) != len(self.basic_ops):
            raise InvalidArgument(f"basic_op_kwargs has {len(kwargs)} elements; there are {len(self.basic_ops)} basic operations")
        x, *extra_inputs = (t.dequantize() if isinstance(t, Float8Tensor) else t for t in (x, *extra_inputs))
        for op in self._ops:
            op._materialise()
        own_hooks = [op for op in self.basic_ops if _has_hooks(op)]
        if own_hooks:
            self._call_hooks(own_hooks, (x, *extra_inputs))
        waiting, channels, shown = list(extra_inputs), {}, []
        at = 0
        while at < len(self.basic_ops):
            op, after = self.basic_ops[at], self.basic_ops[at + 1] if at + 1 < len(self.basic_ops) else None
            own_way = _computes_its_own_way(op)
            if after is not None and not own_way and not kwargs[at] and not kwargs[at + 1] and op._takes_bias(after, x):
                x, at = op._with_bias(x, after.bias), at + 2  # Adding the bias inside of the GEMM rounds the sum only once.
                continue
            own = [waiting.pop(0) if channel is None else channels[channel] for channel in op._extra_input_channels]
            x, extras = (BasicOperation._compute if own_way else type(op)._compute)(op, x, *own, **kwargs[at])
            for extra, channel, to_caller in zip(extras, op._extra_output_channels, op._extra_output_to_caller):
                if channel is not None:
                    channels[channel] = extra
                if to_caller:
                    shown.append(extra)
            at += 1
        return (x, *shown) if shown else x
