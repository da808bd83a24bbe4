"""Operations without parameters that move, add and scale tensors."""

from __future__ import annotations

from typing import Any, Iterable, Optional

import torch

from te_fl.common.recipe import native_of
from te_fl.pytorch.autograd import regions
from te_fl.pytorch.autograd.once import once_differentiable
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.fp8 import quantization
from te_fl.pytorch.fp8.codes import rounded
from te_fl.pytorch.ops.operation import BasicOperation, Result
from te_fl.pytorch.runtime import refuse as rules
from te_fl.pytorch.runtime.refuse import checks_keywords, only, process_group, refuse


class Identity(BasicOperation):
    """The input."""

    def _compute(self, x: torch.Tensor) -> Result:
        return x, ()


class Reshape(BasicOperation):
    """The input in another shape, as torch.reshape has it."""

    @checks_keywords()
    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self._shape = tuple(shape)

    def _compute(self, x: torch.Tensor) -> Result:
        return x.reshape(self._shape), ()


class ConstantScale(BasicOperation):
    """The input times a number."""

    @checks_keywords()
    def __init__(self, scale: float) -> None:
        super().__init__()
        rules.number("ConstantScale", "scale", scale, "a number", lambda v: True)
        self.scale = scale

    def _compute(self, x: torch.Tensor) -> Result:
        return x * self.scale, ()


class Dropout(BasicOperation):
    """In training, elements are zero with probability p and the others are divided by 1 - p."""

    @checks_keywords()
    def __init__(self, p: float) -> None:
        super().__init__()
        rules.number("Dropout", "p", p, "a probability, from 0 to 1", lambda v: 0.0 <= v <= 1.0)
        self.dropout_probability = p

    def _compute(self, x: torch.Tensor) -> Result:
        if not self.training:
            return x, ()
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return torch.nn.functional.dropout(x, self.dropout_probability), ()


class _AddInto(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        out = extra.detach()
        out += x
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, grad


class AddExtraInput(BasicOperation):
    """The sum of the input and an extra input. in_place: it is written over the extra input."""

    num_extra_inputs = 1

    @checks_keywords()
    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = bool(in_place)

    def _compute(self, x: torch.Tensor, extra: torch.Tensor) -> Result:
        if not self._in_place:
            return extra + x, ()
        if torch.compiler.is_compiling():  # a graph takes no written alias out of a node
            out = extra + x
            with torch.no_grad():
                extra.copy_(out)
            return out.to(extra.dtype), ()
        return _AddInto.apply(x, extra), ()


class MakeExtraOutput(BasicOperation):
    """The input, as output and as extra output. in_place allows that the gradient of the extra output is written over; te-fl does not."""

    num_extra_outputs = 1

    @checks_keywords()
    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = bool(in_place)

    def _compute(self, x: torch.Tensor) -> Result:
        return x, (x,)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, native_recipe: dict, forward: bool, backward: bool) -> torch.Tensor:
        ctx.recipe = native_recipe if backward else None
        return rounded(x, native_recipe, False) if forward else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad if ctx.recipe is None else rounded(grad, ctx.recipe, True), None, None, None


class Quantize(BasicOperation):
    """The input, in an FP8 autocast as it reads after a quantisation. forward, backward: whether that is done to the input and to the gradient.

    Values are handed on in high precision, and a product quantises them once more, to the same codes; by blocks, those of its weight's gradient are
    of the values as they read. Under DelayedScaling values and gradients pass as they are, since the scales are the products'.
    """

    @checks_keywords()
    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._quantize_forward, self._quantize_backward = bool(forward), bool(backward)

    def _compute(self, x: torch.Tensor) -> Result:
        if not quantization.enabled() or quantization.delays() or not (self._quantize_forward or self._quantize_backward):
            return x, ()
        if torch.compiler.is_compiling():
            raise refuse("Quantize", "forward" if self._quantize_forward else "backward", True, "graphs of torch.compile hold no tensors of codes; leave "
                         "fullgraph=True out")
        return _Rounded.apply(x, native_of(quantization.active_recipe()), self._quantize_forward, self._quantize_backward), ()


class _Collective(BasicOperation):
    def _set_group(self, group: Optional[Any]) -> None:
        process_group(type(self).__name__, "process_group", group)
        self.process_group, self.process_group_size = group, collectives.size_of(group)


class AllReduce(_Collective):
    """The sum of all ranks' inputs; the gradient, which is assumed to be the same on all, passes."""

    @checks_keywords()
    def __init__(self, process_group: Optional[Any] = None, reduce_in_backward: bool = True) -> None:
        super().__init__()
        only("AllReduce", ("reduce_in_backward", bool(reduce_in_backward), True, "the gradient passes as it is; leave it out"))
        self._set_group(process_group)

    def _compute(self, x: torch.Tensor) -> Result:
        # The sum is written over its operand, which others may read.
        return (x if self.process_group_size == 1 else regions.summed(x.clone(), self.process_group)), ()


class AllGather(_Collective):
    """All ranks' inputs along the first dimension; each gets its part of the sum of the gradients."""

    @checks_keywords()
    def __init__(self, process_group: Optional[Any] = None) -> None:
        super().__init__()
        self._set_group(process_group)

    def _compute(self, x: torch.Tensor) -> Result:
        return (x if self.process_group_size == 1 else regions.gathered(x, self.process_group)), ()


class ReduceScatter(_Collective):
    """This rank's part, along the first dimension, of the sum of all ranks' inputs; gradients are gathered."""

    @checks_keywords()
    def __init__(self, process_group: Optional[Any] = None) -> None:
        super().__init__()
        self._set_group(process_group)

    def _compute(self, x: torch.Tensor) -> Result:
        if self.process_group_size == 1:
            return x, ()
        if x.dim() == 0 or x.shape[0] % self.process_group_size != 0:
            raise InvalidArgument(f"ReduceScatter: the input has shape {tuple(x.shape)}; the {self.process_group_size} ranks divide its first dimension")
        return regions.scattered(x, self.process_group), ()
