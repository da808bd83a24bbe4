"""CPU offloading of activations between a layer's forward and its backward, with Transformer Engine's names.

Saved-tensor hooks collect a layer's saved tensors while its forward runs. te-fl's layers keep their saved activations (FP8 codes and scales) in C++,
and autograd saves only their token; _native.move_saved_memory() moves that memory. Copies run on a separate stream into pinned memory. On a host
without GPUs they are plain copies, and the rest works the same.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from typing import Any, Dict, List, Optional, Tuple

import torch

from te_fl import _native
from te_fl.errors import FailedPrecondition, InvalidArgument
from te_fl.pytorch.runtime.refuse import integer

__all__ = ["ManualOffloadSynchronizer", "get_cpu_offload_context", "is_cpu_offload_enabled", "mark_activation_offload", "mark_not_offload"]

LEAST_BYTES = 256 * 1024  # smaller tensors stay on the device: the copy costs more than the freed memory is worth
_kept: "weakref.WeakSet[Any]" = weakref.WeakSet()  # one _Mark for each tensor that must not be offloaded
_contexts: List[Any] = []  # the contexts that the program is in, the innermost last


class _Mark:
    """Marks the memory of a tensor that must not be offloaded. Stored as an attribute of the tensor, so it lives as long as the tensor."""

    def __init__(self, tensor: torch.Tensor):
        self.begin, self.end = _extent(tensor)


def _extent(tensor: torch.Tensor) -> Tuple[int, int]:
    """The address range of a tensor's memory, from its first element to the end of its last."""
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


class _Segment:
    """One contiguous range of memory with activations of a layer. The bytes are on the device, on the host, or on both."""

    def __init__(self, memory: torch.Tensor):
        self.device = memory.device
        self.memory: Optional[torch.Tensor] = memory  # uint8 on the device; None while only the host has the bytes
        self.host: Optional[torch.Tensor] = None
        self.saved: "weakref.WeakSet[_Saved]" = weakref.WeakSet()  # placeholders for the program's tensors in this memory
        self.ready = _event(self.device)  # recorded when `memory` has its values
        _record(self.ready, None)

    @property
    def bytes(self) -> int:
        return (self.host if self.memory is None else self.memory).numel()

    @property
    def emptied(self) -> bool:
        """True if the program has freed the storage (resize_()), which it fills again before the backward. Such a segment is not offloaded."""
        return self.memory.storage_offset() + self.memory.numel() > self.memory.untyped_storage().nbytes()

    def to_host(self, host: torch.Tensor, stream: Optional[torch.cuda.Stream]) -> None:
        if stream is not None:
            stream.wait_event(self.ready)
            self.memory.record_stream(stream)  # the program may free the storage before the copy has run
        for saved in list(self.saved):
            saved.let_go()
        self.host = host
        with _on(stream):
            host.copy_(self.memory, non_blocking=stream is not None)


def _as_bytes(memory: torch.Tensor, storage: Optional[torch.UntypedStorage]) -> torch.Tensor:
    """The memory as a uint8 tensor. If it lies in a storage of the program, the tensor views that storage, since the program may free and refill it.
    """
    if storage is None:
        return memory
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(storage, memory.data_ptr() - storage.data_ptr(), (memory.numel(),))


def _event(device: torch.device) -> Optional[torch.cuda.Event]:
    return torch.cuda.Event() if device.type == "cuda" else None


def _record(event: Optional[torch.cuda.Event], stream: Optional[torch.cuda.Stream]) -> None:
    if event is not None:
        event.record(stream or torch.cuda.current_stream())


def _written_error(dtype: torch.dtype, shape: torch.Size) -> RuntimeError:
    return RuntimeError(f"get_cpu_offload_context: a tensor of {dtype} {tuple(shape)} that this backward reads was written after the forward had saved it; "
                        "write a copy of it, or write it after the backward")


class _Staying:
    """A placeholder in autograd's graph for a tensor that stays on the device. It detects in-place writes, which PyTorch does not detect for tensors
    saved by hooks.
    """

    def __init__(self, tensor: torch.Tensor):
        self._tensor, self._version = tensor, tensor._version

    @property
    def written(self) -> bool:
        return self._tensor._version != self._version

    def unpack(self) -> torch.Tensor:
        if self.written:
            raise _written_error(self._tensor.dtype, self._tensor.shape)
        return self._tensor


class _Saved:
    """A placeholder in autograd's graph for an offloaded tensor. It holds the only reference to the segment, so memory that the graph drops is freed.
    """

    def __init__(self, state: "_LayerState", segment: _Segment, tensor: torch.Tensor):
        self._state, self._segment, self._dtype, self._shape = state, segment, tensor.dtype, tensor.shape
        self._kept: Optional[_Staying] = _Staying(tensor.detach())  # until the segment is copied to the host
        self._written = False  # true if the tensor was written in place between the forward and the copy
        segment.saved.add(self)

    def let_go(self) -> None:
        """Drops the device tensor; called before the segment is copied to the host."""
        self._written, self._kept = self._kept is not None and self._kept.written, None

    def unpack(self) -> torch.Tensor:
        if self._written or self._kept is not None and self._kept.written:
            raise _written_error(self._dtype, self._shape)
        self._state.bring()
        _wait(self._segment)
        return self._segment.memory.view(self._dtype).view(self._shape)


class _Forward:
    """A placeholder in autograd's graph for the token of a te-fl layer. Holds the segments of the forward's saved memory, and their addresses."""

    def __init__(self, state: "_LayerState", token: torch.Tensor, segments: List[_Segment]):
        self._state, self._token, self._segments = state, token, segments
        self._addresses = [s.memory.data_ptr() for s in segments]

    def unpack(self) -> torch.Tensor:
        if self._state.bring():
            for segment in self._segments:
                _wait(segment)
            self.follow()
        return self._token

    def follow(self) -> None:
        """Makes the forward's record in C++ use the current memory of its segments, on the device or on the host."""
        moved = [i for i, s in enumerate(self._segments) if s.host is not None]  # segments without a host copy have not moved
        there = [s.host if s.memory is None else s.memory for s in self._segments]
        _native.move_saved_memory(self._token, tuple([(self._addresses[i], self._segments[i].bytes, there[i]) for i in moved]))
        for i in moved:
            self._addresses[i] = there[i].data_ptr()


def _wait(segment: _Segment) -> None:
    if segment.ready is not None:
        torch.cuda.current_stream().wait_event(segment.ready)


class _LayerState:
    """The activations of one forward of one layer."""

    def __init__(self, owner: "OffloadSynchronizer", number: int):
        self._owner, self.number, self.state = owner, number, "kept"
        self._segments: "weakref.WeakValueDictionary[Tuple[int, int], _Segment]" = weakref.WeakValueDictionary()
        self._forwards: "weakref.WeakSet[_Forward]" = weakref.WeakSet()
        self._finished: Optional[torch.cuda.Event] = None

    # -- the hooks of saved tensors

    def push(self, tensor: torch.Tensor) -> Any:
        # Parameters stay on the device, and so do tensors saved after the layer's offload began.
        if type(tensor) is not torch.Tensor or self.state != "kept":
            return _Staying(tensor)
        memory = _native.saved_memory(tensor) if tensor.dtype is torch.int64 and tensor.numel() == 1 and tensor.is_cpu else None
        if memory is not None:
            forward = _Forward(self, tensor, [self._segment(_as_bytes(m, storage)) for m, storage in memory if _worth_it(m)])
            self._forwards.add(forward)
            return forward
        if not _worth_it(tensor) or not tensor.is_contiguous():
            return _Staying(tensor)
        return _Saved(self, self._segment(tensor.detach().view(-1).view(torch.uint8)), tensor)

    def _segment(self, memory: torch.Tensor) -> _Segment:
        """The segment of this memory, shared by all saved tensors that view it."""
        key = (memory.data_ptr(), memory.numel())
        found = self._segments.get(key)
        if found is None:
            found = self._segments[key] = _Segment(memory)
        return found

    def bring(self) -> bool:
        """Starts the reload if the activations are on the host. Returns True if they were offloaded."""
        if self.state in ("offloading", "offloaded"):
            self.start_reload()  # no prefetch has started the reload
        return self.state == "reloading"

    # -- offload and reload

    def start_offload(self) -> None:
        self._expect("start_offload_layer", "kept")
        self.state = "offloading"
        for index, segment in enumerate(list(self._segments.values())):
            if segment.emptied:
                continue  # the segment stays on the device
            stream = self._owner.stream(segment.device)
            segment.to_host(self._owner.host_memory((self.number, index), segment), stream)
            if stream is not None:
                self._finished = torch.cuda.Event()
                self._finished.record(stream)

    def release(self) -> None:
        """Frees the device memory after the copy to the host, in the order of the current stream."""
        self._expect("release_activation_forward_gpu_memory", "offloading")
        self.state = "offloaded"
        if self._finished is not None:
            torch.cuda.current_stream().wait_event(self._finished)
        for segment in list(self._segments.values()):
            if segment.host is not None:
                segment.memory = None
        for forward in list(self._forwards):
            forward.follow()

    def start_reload(self) -> None:
        if self.state == "offloading":
            self.release()
        self._expect("start_reload_layer", "offloaded")
        self.state = "reloading"
        for segment in list(self._segments.values()):
            if segment.memory is not None:
                continue
            segment.memory = torch.empty(segment.bytes, dtype=torch.uint8, device=segment.device)
            stream = self._owner.stream(segment.device)
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())  # the memory may be in use on the current stream until then
                segment.memory.record_stream(stream)
            with _on(stream):
                segment.memory.copy_(segment.host, non_blocking=stream is not None)
                _record(segment.ready, stream)

    def _expect(self, what: str, state: str) -> None:
        if self.state != state:
            raise FailedPrecondition(f"{what}: the activations of layer {self.number} are {self.state}; they are to be {state}")

    def offloaded_bytes(self) -> int:
        return sum(s.bytes for s in list(self._segments.values()) if s.host is not None)


def _worth_it(tensor: torch.Tensor) -> bool:
    if tensor.numel() * tensor.element_size() < LEAST_BYTES or tensor.is_meta or (torch.cuda.is_available() and not tensor.is_cuda):
        return False
    begin, end = _extent(tensor)
    return all(mark.end <= begin or mark.begin >= end for mark in _kept)


def _on(stream: Optional[torch.cuda.Stream]) -> Any:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


class OffloadSynchronizer:
    """Tracks the location of the activations of num_layers consecutive layers. retain_pinned_cpu_buffers: each step reuses the host buffers of the
    previous one.
    """

    def __init__(self, num_layers: int, retain_pinned_cpu_buffers: bool = False, offload_stream: Optional[torch.cuda.Stream] = None):
        if num_layers < 1:
            raise InvalidArgument(f"get_cpu_offload_context: model_layers is {num_layers}; it is the number of layers that run in the context, 1 or more")
        self.num_layers = num_layers
        self._retains, self._stream = retain_pinned_cpu_buffers, offload_stream
        self._buffers: Dict[Tuple[int, int], Tuple[torch.Tensor, weakref.ref]] = {}
        self.layers: List[_LayerState] = []  # of the current or last forward

    def stream(self, device: torch.device) -> Optional[torch.cuda.Stream]:
        if device.type != "cuda":
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def host_memory(self, place: Tuple[int, int], segment: _Segment) -> torch.Tensor:
        known, user = self._buffers.get(place, (None, lambda: None))
        if known is None or known.numel() != segment.bytes or user() is not None:
            known = torch.empty(segment.bytes, dtype=torch.uint8, device="cpu", pin_memory=segment.device.type == "cuda")
        if self._retains:
            self._buffers[place] = (known, weakref.ref(segment))
        return known

    def begin_layer(self) -> _LayerState:
        if len(self.layers) == self.num_layers:
            self.layers = []
        self.layers.append(_LayerState(self, len(self.layers)))
        return self.layers[-1]

    def begin_backward(self, layers: List[_LayerState], number: int) -> None:
        """Called before the backward of a layer. layers: the states of the layer's forward; number: the layer's index."""

    def push(self, state: _LayerState, tensor: torch.Tensor) -> Any:
        return state.push(tensor)

    def get_offloaded_total_size_mb(self) -> float:
        """Host memory of the last forward's offloaded activations, in MiB."""
        return sum(state.offloaded_bytes() for state in self.layers) / 2 ** 20


class DefaultOffloadSynchronizer(OffloadSynchronizer):
    """Offloads the first num_offloaded_layers layers. A layer is copied to the host while the next layer runs, and reloaded while the backward
    passes of later layers run. At the end of a forward, at most num_layers - num_offloaded_layers layers have their activations on the device.
    """

    def __init__(self, num_layers: int, num_offloaded_layers: int, retain_pinned_cpu_buffers: bool = False,
                 offload_stream: Optional[torch.cuda.Stream] = None):
        super().__init__(num_layers, retain_pinned_cpu_buffers, offload_stream)
        self._offloaded = num_offloaded_layers
        self._distance = num_layers - num_offloaded_layers  # the number of layers between a running layer and the layer that is released at that time

    def begin_layer(self) -> _LayerState:
        state = super().begin_layer()
        before, released = state.number - 1, state.number - self._distance
        # States may already have advanced if a backward ran early: a forward may have fewer layers than num_layers, or fail midway.
        if 0 <= before < self._offloaded and self.layers[before].state == "kept":
            self.layers[before].start_offload()
        if 0 <= released < self._offloaded and self.layers[released].state == "offloading":
            self.layers[released].release()
        return state

    def push(self, state: _LayerState, tensor: torch.Tensor) -> Any:
        return state.push(tensor) if state.number < self._offloaded else _Staying(tensor)

    def begin_backward(self, layers: List[_LayerState], number: int) -> None:
        ahead = number - self._distance + 1
        if 0 <= ahead < self._offloaded and layers[ahead].state in ("offloading", "offloaded"):
            layers[ahead].start_reload()


class ManualOffloadSynchronizer(OffloadSynchronizer):
    """The program calls for each layer's offload and reload. A backward reloads activations that are still on the host by itself."""

    def start_offload_layer(self, layer_id: int) -> None:
        self.layers[layer_id].start_offload()

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        self.layers[layer_id].release()

    def start_reload_layer(self, layer_id: int) -> None:
        self.layers[layer_id].start_reload()


class _Context(contextlib.ContextDecorator):
    """The context manager around a layer's forward; entered once for each layer."""

    def __init__(self, synchronizer: OffloadSynchronizer):
        self._synchronizer, self._hooks = synchronizer, None
        self._layers: List[_LayerState] = []
        self._last: Optional[_LayerState] = None

    def __enter__(self) -> "_Context":
        if self._hooks is not None:
            raise FailedPrecondition("get_cpu_offload_context: the context was entered inside of itself; enter it for one layer after the other")
        synchronizer = self._synchronizer
        state = self._last = synchronizer.begin_layer()
        self._layers = synchronizer.layers
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: synchronizer.push(state, tensor), _unpack)
        self._hooks.__enter__()
        _contexts.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _contexts.remove(self)
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(*error)
        if error[0] is not None:
            self._synchronizer.layers = []  # the next forward begins with its first layer

    @property
    def inside_context(self) -> bool:
        """True between __enter__ and __exit__."""
        return self._hooks is not None

    def synchronization_function(self, tensor: torch.Tensor) -> torch.Tensor:
        """Applied to a layer's output after the layer's context has ended. Its autograd node detects the start of the layer's backward."""
        if self._last is None or self._hooks is not None:
            raise FailedPrecondition("get_cpu_offload_context: the second function takes a layer's output once its context has been left")
        if not tensor.requires_grad:
            raise InvalidArgument(f"get_cpu_offload_context: a tensor of shape {tuple(tensor.shape)} was given to the second function, and it needs no "
                             "gradient, so that it has no backward to wait for")
        layers, number = self._layers, self._last.number
        tensor.grad_fn.register_prehook(lambda grads: self._synchronizer.begin_backward(layers, number))
        return tensor


def _unpack(saved: Any) -> torch.Tensor:
    return saved.unpack()


def is_cpu_offload_enabled() -> bool:
    """True inside of an offloading context."""
    return bool(_contexts)


def _tensors(function: str, tensors: Tuple[Optional[torch.Tensor], ...]) -> List[torch.Tensor]:
    for tensor in tensors:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{function}: it marks tensors, and {type(tensor).__name__} is none; give it the activations themselves, as an input of a "
                            "layer. Parameters always stay")
    return [tensor for tensor in tensors if tensor is not None]


def mark_not_offload(*tensors: Optional[torch.Tensor]) -> None:
    """Keeps these tensors on the device for as long as they live."""
    for tensor in _tensors("mark_not_offload", tensors):
        tensor._te_fl_stays = _Mark(tensor)
        _kept.add(tensor._te_fl_stays)


def mark_activation_offload(*tensors: Optional[torch.Tensor]) -> None:
    """Undoes mark_not_offload(). Other activations need no mark to be offloaded."""
    for tensor in _tensors("mark_activation_offload", tensors):
        tensor.__dict__.pop("_te_fl_stays", None)


def get_cpu_offload_context(enabled: bool = False, num_layers: Optional[int] = 1, model_layers: int = 1, offload_activations: bool = True,
                            offload_weights: bool = False, double_buffering: bool = False, manual_synchronization: bool = False,
                            retain_pinned_cpu_buffers: bool = False, offload_stream: Optional[Any] = None):
    """Returns (context, sync_function); with manual_synchronization also a ManualOffloadSynchronizer. For each of model_layers layers:

        with context:
            x = layer(x)
        x = sync_function(x)

    The first num_layers layers are offloaded, at most model_layers - 1; with manual_synchronization, the layers that the program names. Tensors below
    256 KiB, parameters, non-contiguous tensors and tensors of mark_not_offload() stay on the device. enabled=False: both do nothing. offload_stream:
    the stream for copies; only with manual_synchronization. offload_weights and double_buffering have no effect, as in Transformer Engine;
    offload_weights warns.
    """
    nothing = (contextlib.nullcontext(), lambda tensor: tensor, None)[:3 if manual_synchronization else 2]
    if not enabled:
        return nothing
    if not offload_activations and not offload_weights:
        raise InvalidArgument("get_cpu_offload_context: offload_activations and offload_weights are both False, so there is nothing to offload")
    if offload_weights:
        warnings.warn("get_cpu_offload_context: offload_weights has no effect: weights stay on the device", FutureWarning)
        if not offload_activations:
            return nothing
    if offload_stream is not None and not manual_synchronization:
        raise InvalidArgument("get_cpu_offload_context: offload_stream requires manual_synchronization=True; set that, or leave offload_stream out")
    if manual_synchronization:
        manual = ManualOffloadSynchronizer(model_layers, retain_pinned_cpu_buffers, offload_stream)
        context = _Context(manual)
        return context, context.synchronization_function, manual
    for name, value in (("num_layers", num_layers), ("model_layers", model_layers)):
        integer("get_cpu_offload_context", name, value)
    if not 0 <= num_layers < model_layers:
        raise InvalidArgument(f"get_cpu_offload_context: num_layers is {num_layers} and model_layers {model_layers}; the last layer is not offloaded, since its "
                         "backward comes next")
    if num_layers == model_layers - 1:
        warnings.warn("get_cpu_offload_context: with num_layers = model_layers - 1 a layer is copied while nothing else can run; offload fewer", UserWarning)
    context = _Context(DefaultOffloadSynchronizer(model_layers, num_layers, retain_pinned_cpu_buffers))
    return context, context.synchronization_function
