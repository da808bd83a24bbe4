"""The two layers that a module's forward may have: one in C++, and its name in a graph of torch.compile. Both compute by the same method."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from te_fl.pytorch.autograd import torch_checkpoint
from te_fl.pytorch.autograd.call import LayerCall, overwrite_next, profiling, run, shown
from te_fl.pytorch.fp8 import quantization, weight_cache
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor
from te_fl.pytorch.fp8.quantization import captures
from te_fl.pytorch.runtime import traced

Tensors = Tuple[torch.Tensor, ...]


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """An input whose memory holds its values: neither codes, nor what PyTorch has yet to negate."""
    return tensor.dequantize() if type(tensor) is Float8Tensor else tensor.resolve_neg()


class NativeLayer:
    """A layer of te_fl::nn. delays: its backwards leave the gradients of weights to backward_dw()."""

    __slots__ = ("native", "delays", "last")

    def __init__(self, native: Any, delays: bool = False):
        self.native, self.delays = native, delays
        self.last: Optional[LayerCall] = None  # the last forward that was told by its tensors alone, which the next one is mostly like

    def compute(self, module: Any, inputs: Tensors, extras: Tensors, parameters: Tensors, activation: int, first: Any,
                attention: Optional[dict], random: Optional[torch.Tensor], accumulates: bool) -> torch.Tensor:
        """The output for these inputs of the module, whose FP8 state and autocast count. The arguments are LayerCall's fields and tensors;
        first: None where an autocast's flag may say it."""
        piece = torch_checkpoint.piece(module)
        if piece is None:
            again = quantization.first_autocast(module)
            if again is not None:
                with again:
                    return self.compute(module, inputs, extras, parameters, activation, first, attention, random, accumulates)
            updates, start = module._notice(), run
        else:
            updates, start = piece.updates, piece.run
        if profiling():
            start = shown(module, start)
        if self.delays and torch.is_grad_enabled():
            module._check_hooks()
        if first is None:
            first = quantization.reused_weights()
        elif first is not True and first is not False:  # 1, or a bool of NumPy's or PyTorch's
            first = bool(first)
        if captures.flag is not None:
            first = quantization.captured_first(first)
        if accumulates and first is True:
            overwrite_next(module, parameters)
        for t in inputs:
            if type(t) is Float8Tensor or t.is_neg():
                inputs = tuple(map(_values, inputs))
                break
        if len(inputs) == 1 and not inputs[0].is_contiguous():  # several are attention's, which takes strided ones
            inputs = (inputs[0].contiguous(),)
        elif len(inputs) > 1 and any([0 in t.stride() for t in inputs]):  # but none that is expanded
            inputs = tuple([t.contiguous() if 0 in t.stride() else t for t in inputs])
        call = self.last
        if (call is None or call.inputs != len(inputs) or attention is not None or random is not None or call.first is not first or call.activation != activation
                or call.updates != updates or call.accumulates is not accumulates):
            call = LayerCall(self.native, len(inputs), len(extras), activation, first, attention, random, updates, accumulates, self.delays)
            if attention is None and random is None:
                self.last = call
        try:
            return start(call, weight_cache.number(), *inputs, *extras, *parameters)
        except RuntimeError:  # te-fl's errors are such, and PyTorch's of tensors without memory
            module._check_devices(inputs[0].device, inputs[1:])
            raise


class TracedLayer:
    """A layer's name, which stands in a graph: module._in_graph() finds the layer by it at each run of the graph. Dynamo traces this class.

    key: words and then integers. width: the output's last extent; -1: the input's.
    """

    def __init__(self, kind: str, key: Tuple[Any, ...] = (), width: int = -1):
        self.kind, self.key, self.width = kind, key, width

    def compute(self, module: Any, inputs: Tensors, extras: Tensors, parameters: Tensors, activation: int, first: Any,
                attention: Optional[dict], random: Optional[torch.Tensor], accumulates: bool) -> torch.Tensor:
        """As NativeLayer.compute(). accumulates: false, as base._check_compiled() has seen to."""
        return traced.graph.forward(module, self, activation, first, inputs, extras, parameters, attention, random)
