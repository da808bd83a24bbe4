"""The layer in C++ of a module of te_fl.pytorch."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from te_fl import _native, torch_device
from te_fl.pytorch.autograd import torch_checkpoint
from te_fl.pytorch.autograd.call import LayerCall, overwrite_next, profiling, run, shown, use_torch_memory
from te_fl.pytorch.fp8 import quantization
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor
from te_fl.pytorch.fp8.quantization import captures
from te_fl.pytorch.runtime.device import check_memory

Tensors = Tuple[torch.Tensor, ...]


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """The input with its values in memory: dequantises FP8 codes, and resolves PyTorch's lazy negation."""
    return tensor.dequantize() if type(tensor) is Float8Tensor else tensor.resolve_neg()


class NativeLayer:
    """A layer of te_fl::nn, which allocates its memory on the device through PyTorch. The arguments are those of _native.layer()."""

    __slots__ = ("native", "delays", "last")

    def __init__(self, kind: str, options: dict, device: torch.device, states: Tuple[Tuple[str, Any], ...], delays: bool = False):
        use_torch_memory(device)
        self.native = _native.layer(kind, {**options, "device": torch_device.native_name(device)}, states, delays)
        self.delays = delays
        self.last: Optional[LayerCall] = None  # the LayerCall of the last forward that had only tensor arguments; the next forward usually equals it

    def compute(self, module: Any, inputs: Tensors, extras: Tensors, parameters: Tensors, activation: int, first: Any,
                attention: Optional[dict], random: Optional[torch.Tensor], accumulates: bool) -> torch.Tensor:
        """Runs the layer for a module, with the module's FP8 state and autocast. The arguments are LayerCall's fields and tensors. first:
        is_first_microbatch; None: the flag of quantization.reusing_weights() applies.
        """
        own = quantization.module_scope(module)
        if own is not None:
            with own:
                return self.compute(module, inputs, extras, parameters, activation, first, attention, random, accumulates)
        segment = torch_checkpoint.segment(module)
        if segment is None:
            again = quantization.notice(module, True)
            if again is not None:
                with again:
                    return self.compute(module, inputs, extras, parameters, activation, first, attention, random, accumulates)
            start = run
        else:
            start = segment.run
        if profiling():
            start = shown(module, start)
        if self.delays and torch.is_grad_enabled():
            module._check_hooks()
        if first is None:
            first = quantization.reused_weights()
        elif first is not True and first is not False:  # 1, or a bool of NumPy or PyTorch
            first = bool(first)
        if captures.flag is not None:
            first = quantization.captured_first(first)
        if accumulates and first is True:
            overwrite_next(module, parameters)
        for t in inputs:
            if type(t) is Float8Tensor or t.is_neg():
                inputs = tuple(map(_values, inputs))
                break
        if len(inputs) == 1 and not inputs[0].is_contiguous():  # attention, the layer with several inputs, accepts strided inputs
            inputs = (inputs[0].contiguous(),)
        elif len(inputs) > 1 and any([0 in t.stride() for t in inputs]):  # attention refuses expanded inputs (stride 0)
            inputs = tuple([t.contiguous() if 0 in t.stride() else t for t in inputs])
        call = self.last
        if (call is None or call.inputs != len(inputs) or attention is not None or random is not None or call.first is not first or call.activation != activation
                or call.accumulates is not accumulates):
            call = LayerCall(self.native, len(inputs), len(extras), activation, first, attention, random, accumulates, self.delays)
            if attention is None and random is None:
                self.last = call
        try:
            return start(call, *inputs, *extras, *parameters)
        except RuntimeError as error:  # te-fl's errors are RuntimeErrors, and so are PyTorch's for tensors without memory
            check_memory(type(module).__name__, inputs, error)
            module._check_devices(inputs[0].device, inputs[1:])
            raise
