"""Operations without parameters: data movement, sums, scaling, collectives."""

from __future__ import annotations

from typing import Any, Iterable, Optional

import torch

from te_fl.common.recipe import native_of
from te_fl.errors import InvalidArgument
from te_fl.pytorch.autograd import regions
from te_fl.pytorch.autograd.once import once_differentiable
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.fp8 import quantization
from te_fl.pytorch.fp8.codes import rounded
from te_fl.pytorch.ops.operation import BasicOperation, Result
from te_fl.pytorch.runtime import refuse as rules
from te_fl.pytorch.runtime.refuse import checks_keywords, only, process_group, refuse


class Identity(BasicOperation):
    """Returns the input."""

    def _compute(self, x: torch.Tensor) -> Result:
        return x, ()


class Reshape(BasicOperation):
    """Reshapes the input, as torch.reshape."""

    @checks_keywords()
    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self._shape = tuple(shape)

    def _compute(self, x: torch.Tensor) -> Result:
        return x.reshape(self._shape), ()


class ConstantScale(BasicOperation):
    """Multiplies the input by a constant."""

    @checks_keywords()
    def __init__(self, scale: float) -> None:
        super().__init__()
        rules.number("ConstantScale", "scale", scale, "a number", lambda v: True)
        self.scale = scale

    def _compute(self, x: torch.Tensor) -> Result:
        return x * self.scale, ()


class Dropout(BasicOperation):
    """In training, sets each element to zero with probability p and divides the others by 1 - p."""

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
    """Adds an extra input to the input. in_place: writes the sum over the extra input."""

    num_extra_inputs = 1

    @checks_keywords()
    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = bool(in_place)

    def _compute(self, x: torch.Tensor, extra: torch.Tensor) -> Result:
        if not self._in_place:
            return extra + x, ()
        if torch.compiler.is_compiling():  # torch.compile does not allow a node to return a written alias
            out = extra + x
            with torch.no_grad():
                extra.copy_(out)
            return out.to(extra.dtype), ()
        return _AddInto.apply(x, extra), ()


class MakeExtraOutput(BasicOperation):
    """Returns the input both as the output and as the extra output. in_place permits overwriting the gradient of the extra output; te-fl does not use
    that.
    """

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
    """In an FP8 autocast, rounds the input to FP8 values. forward, backward: whether the input and the gradient are rounded.

    The result is in high precision. A following linear operation quantises it again, to the same FP8 codes; with block scaling, that operation
    computes its weight gradient from the rounded values. Under DelayedScaling values and gradients pass unchanged, since the scales belong to the
    linear operations.
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
    """The sum of all ranks' inputs. The backward passes the gradient, which must be equal on all ranks, unchanged."""

    @checks_keywords()
    def __init__(self, process_group: Optional[Any] = None, reduce_in_backward: bool = True) -> None:
        super().__init__()
        only("AllReduce", ("reduce_in_backward", bool(reduce_in_backward), True, "the gradient passes as it is; leave it out"))
        self._set_group(process_group)

    def _compute(self, x: torch.Tensor) -> Result:
        # summed() works in place, and other readers of x may exist, so it gets a copy.
        return (x if self.process_group_size == 1 else regions.summed(x.clone(), self.process_group)), ()


class AllGather(_Collective):
    """Concatenates all ranks' inputs along the first dimension. The backward is a reduce-scatter."""

    @checks_keywords()
    def __init__(self, process_group: Optional[Any] = None) -> None:
        super().__init__()
        self._set_group(process_group)

    def _compute(self, x: torch.Tensor) -> Result:
        return (x if self.process_group_size == 1 else regions.gathered(x, self.process_group)), ()


class ReduceScatter(_Collective):
    """This rank's shard, along the first dimension, of the sum of all ranks' inputs. The backward is an all-gather."""

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
