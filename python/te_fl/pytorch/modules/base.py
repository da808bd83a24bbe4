"""The base class of te-fl's PyTorch modules, which creates C++ layers on demand and runs them."""

from __future__ import annotations

import copy
import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from te_fl.common.recipe import as_data
from te_fl.compat.variables import read_determinism
from te_fl.pytorch.autograd.call import give_writes, plain, take_writes
from te_fl.pytorch.autograd.delayed_wgrad import DelaysWgrad
from te_fl.pytorch.fp8 import plain_codes, quantization
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor, keeping_codes
from te_fl.pytorch.fp8.quantization import captures
from te_fl.pytorch.fp8.sharded_weights import is_sharded
from te_fl.pytorch.modules.fp8_state import HasFP8State
from te_fl.pytorch.modules.layers import NativeLayer
from te_fl.pytorch.modules.parallel import TensorParallel, mark_again, find_marks
from te_fl.pytorch.modules.parameters import HasParameters
from te_fl.pytorch.runtime import registry, traced
from te_fl.pytorch.runtime.device import check_devices, check_memory
from te_fl.pytorch.runtime.dtypes import DTYPE_CODES, DTYPE_NAMES
from te_fl.pytorch.runtime.refuse import refuse


class TransformerEngineBaseModule(DelaysWgrad, TensorParallel, HasParameters, HasFP8State):
    """Base class of modules with a layer of te_fl::nn.

    Derived classes set _kind, _sites (the layer's FP8 sites) and _read_names (the names of the layer's parameters in its order), and implement _options().
    """

    _kind: str
    _read_names: Tuple[str, ...]

    def __init__(self, name: Optional[str] = None):
        super().__init__()
        read_determinism()
        self.name = name
        self._layers: Dict[Tuple[str, Any], NativeLayer] = {}  # the C++ layers by (kind, key)
        self._states, self._loaded, self._recipe, self._in_fp8 = self._new_states(), [], None, False
        self._fused_in: "weakref.WeakSet[Any]" = weakref.WeakSet()  # each FusedLayer that this module is a part of; copies of a layer share parts
        self._number = registry.enter(self)
        self.wgrad_accumulation_and_reduce_hooks: List[Callable[[], Any]] = []
        self._initialisers, self._model_init, self._products = {}, quantization.model_init(), []

    # -- the layer

    def _options(self) -> dict:
        raise NotImplementedError

    def _make_options(self, kind: str, key: Any) -> dict:
        """The options of the layer with this kind and key; see _layer()."""
        return self._options()

    def _check_tensor(self, x: Any) -> None:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{type(self).__name__}: the input is a {type(x).__name__}; it must be a torch.Tensor")

    def _own(self) -> Tuple[torch.Tensor, ...]:
        """The parameters of the module's layer. PyTorch's parametrisations turn a parameter into a plain attribute."""
        own = self._parameters
        try:
            return tuple([own[n] for n in self._read_names])
        except KeyError:
            return tuple([own[n] if n in own else getattr(self, n) for n in self._read_names])

    def _layer(self, device: torch.device, kind: str, key: Any = None) -> NativeLayer:
        name = (kind, key)
        layer = self._layers.get(name)
        if layer is None:
            if "_is_replica" in self.__dict__ and quantization.delays() and self._owns_state(kind):
                raise refuse(type(self).__name__, "recipe", "DelayedScaling()", "torch.nn.DataParallel drops a replica, and its scales, after one forward; "
                             "use DistributedDataParallel, or a recipe without state")
            self._check_devices(device)  # before the layer is created: a layer for a wrong device would stay in _layers
            states = (("", self._states.of(key)),) if self._owns_state(kind) else ()
            layer = NativeLayer(kind, self._make_options(kind, key), device, states, self.delay_wgrad_compute and kind == self._kind)
            self._load_waiting()
            self._layers[name] = layer  # assigned last, so that KeyboardInterrupt never leaves a half-made layer
        return layer

    def _check_compiled(self) -> None:
        """Called while torch.compile traces. Refuses features that a graph cannot contain; without fullgraph=True the function then runs eagerly."""
        for argument, is_set in (("quantized_model_init", self._model_init is not None), ("delay_wgrad_compute", self.delay_wgrad_compute),
                                ("fuse_wgrad_accumulation", getattr(self, "fuse_wgrad_accumulation", False))):
            if is_set:
                raise refuse(type(self).__name__, argument, True, "graphs of torch.compile hold no weights of FP8 codes alone, and compute the "
                             "gradients of weights in the backward, as gradients; leave fullgraph=True out, or this")
        if self._divides:
            raise refuse(type(self).__name__, "tp_size", self.tp_size, "graphs of torch.compile hold no collectives of te-fl's; leave fullgraph=True "
                         "out, or give Linear and the others one rank")

    def _check_devices(self, device: torch.device, others: Sequence[torch.Tensor] = ()) -> None:
        """Raises an error if parameters or other inputs are on another device than the first input, which is on `device`."""
        named = [(f"its input {2 + i}", t) for i, t in enumerate(others)]
        check_devices(type(self).__name__, device, named + [(f"the parameter {n!r}", p) for n, p in self._parameters.items()])

    def _owns_state(self, kind: str) -> bool:
        return bool(self._sites) and kind == self._kind

    def _run(self, inputs: Tuple[torch.Tensor, ...], parameters: Tuple[torch.Tensor, ...], first=None, kind: Optional[str] = None, key: Any = None,
             attention=None, random=None, accumulates: bool = False, extras: Tuple[torch.Tensor, ...] = (), activation: int = -1) -> torch.Tensor:
        """Checks the first input and runs the layer with this kind (None: the module's own) and key.

        activation: the output's dtype outside of torch.autocast, as an index in te_fl.tensors.DTYPES; -1: the input's dtype.
        """
        x, name = inputs[0], kind or self._kind
        self._check_tensor(x)
        if x.layout is not torch.strided or x.is_meta:  # before PyTorch is asked about autocast, which it does not know on meta
            raise refuse(type(self).__name__, "input", f"a tensor of layout {x.layout} on {x.device}", "give a dense tensor with memory")
        device = "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type  # x.device.type creates a new string on each access, which is slower
        autocasts = torch.is_autocast_enabled(device)
        if x.dtype not in DTYPE_NAMES:
            if not autocasts or len(inputs) > 1 or not x.is_floating_point():
                raise refuse(type(self).__name__, "input", f"a tensor of {x.dtype}", "give torch.float32, torch.bfloat16 or torch.float16")
            inputs = (x.float(),)
        if autocasts:
            activation = DTYPE_CODES[torch.get_autocast_dtype(device)]
        if torch.compiler.is_compiling():
            self._check_compiled()
            traced.graph.check_device(type(self).__name__, x.device)
            return traced.graph.forward(self, name, () if key is None else key, self._width(name), activation, first, inputs, extras, parameters, attention,
                                        random)
        layer = self._layers.get((name, key)) or self._layer(x.device, name, key)
        return layer.compute(self, inputs, extras, parameters, activation, first, attention, random, accumulates)

    def _forward(self, inp: Any, first: Optional[bool] = None, accumulates: bool = False, activation: int = -1) -> torch.Tensor:
        """The output of the module's own layer for one input and the parameters of _own(). Equivalent to _run(), with a fast path."""
        if plain is not None and not accumulates and not torch.compiler.is_compiling() and captures.flag is None:
            try:
                output = plain(self.__dict__, (self._kind, None), inp, first, activation)
            except RuntimeError as error:
                if type(inp) is not Float8Tensor:
                    check_memory(type(self).__name__, (inp,), error)
                self._check_devices(inp.device)
                raise
            if output is not None:
                return output
        return self._run((inp,), self._own(), first, accumulates=accumulates, activation=activation)

    # Called by layers on their module (modules/layers.py), and by graphs, which find the module by its number (compile/compiled.py).

    def _width(self, kind: str) -> int:
        """The output's last extent; -1: equal to the input's."""
        return -1

    def _in_graph(self, device: torch.device, kind: str, key: tuple) -> Tuple[NativeLayer, Optional[List[int]]]:
        """The layer of this name, and for each of the layer's parameters its index in the graph's list of parameters; None: the order is equal."""
        return self._layer(device, kind), None

    _remade: frozenset = frozenset()  # names of attributes that a program may set, and whose change requires new layers

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "tp_group" and self.tp_size > 1 and "_number" in self.__dict__:  # layers refer to the group, so they are created again
            self.set_tensor_parallel_group(value)
            return
        before = self.__dict__.get("_parameters", {}).get(name)
        super().__setattr__(name, value)
        # Set by fully_shard, which drops the marks; a program that assigns its own parameter must mark it itself.
        if before is not None and (is_sharded(before) or is_sharded(value)):
            mark_again(self._parameters.get(name), find_marks(before))
        if name in self._remade and "_layers" in self.__dict__:
            self._forget_layers()

    def _forget_layers(self) -> None:
        """Drops the C++ layers; the next forward creates new ones."""
        for fused in self._fused_in:
            fused.forget()
        self._layers = {}

    def _apply(self, fn, recurse: bool = True):
        state = self._fp8_state()
        self._forget_layers()  # first: layers hold weak references to parameters, and PyTorch refuses to swap a tensor that has weak references
        marks, writes = self._marks(), take_writes(self._parameters)
        try:
            with keeping_codes():
                result = super()._apply(fn, recurse)
        finally:
            give_writes(self._parameters, writes)
        self._mark_again(marks)
        self._forget(state)
        return result

    def _forget(self, state: List[Tuple[str, torch.Tensor]]) -> None:
        """Drops the layers; later ones are created with this FP8 state."""
        self._states.retire()
        self._layers, self._states = {}, self._new_states()
        device = next((p.device for p in self.parameters(recurse=False)), None)
        self._loaded = [(n, t if device is None or device.type == "meta" else t.to(device)) for n, t in state]

    def _load_from_state_dict(self, state_dict: dict, prefix: str, local_metadata: dict, strict: bool, missing_keys: List[str], *others: Any) -> None:
        if torch.__future__.get_swap_module_params_on_conversion():  # see _apply()
            self._forget_layers()
        marks, writes = self._marks(), take_writes(self._parameters)
        plain_codes.join(state_dict, prefix, self._parameters)
        try:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *others)
        finally:
            give_writes(self._parameters, writes)
        self._mark_again(marks)  # load_state_dict(assign=True) has replaced parameters, which lost their marks
        own = prefix + "_extra_state"
        # The checkpoint may come from PyTorch's own layers, and a module without scales needs no state.
        if own in missing_keys and not self._fp8_state():
            missing_keys.remove(own)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        plain_codes.divide(destination, prefix, self._parameters)

    # -- copies

    @property
    def __deepcopy__(self) -> Callable:
        """Returns a copy function for a module with PyTorch's parametrisations; without it, deepcopy would copy the whole __dict__ of the
        parametrised class, which refuses __getstate__. Raises AttributeError for other modules: wrappers that forward attribute access
        (torch.compile's) would otherwise be copied by it.
        """
        if not is_parametrized(self):
            raise AttributeError("__deepcopy__")
        return self._copied

    def _copied(self, memo: dict) -> "TransformerEngineBaseModule":
        made = memo[id(self)] = self.__new__(type(self))
        made.__setstate__(copy.deepcopy(type_before_parametrizations(self).__getstate__(self), memo))
        return made

    def __getstate__(self) -> dict:
        state = self.__dict__.copy()
        state["_loaded"] = [(n, t.detach().cpu()) for n, t in self._fp8_state()]
        state["_layers"], state["_recipe"] = {}, as_data(self._recipe)
        state["_copied_marks"] = self._marks()
        del state["_number"], state["_states"], state["_fused_in"]
        state.pop("_factory_made", None)  # quantizers, which the factory makes anew
        state.pop("fsdp_group", None)
        if "_fp8_meta" in state:
            state["_fp8_meta"] = {**state["_fp8_meta"], "fp8_group": None, "recipe": as_data(state["_fp8_meta"].get("recipe"))}
        if "tp_group" in state:  # process groups cannot be copied; set_tensor_parallel_group() gives the copy a group
            state["tp_group"], state["tp_group_initialized"] = None, self.tp_size == 1
        return state

    def __setstate__(self, state: dict) -> None:
        marks = state.pop("_copied_marks", {})
        super().__setstate__(state)
        self._fused_in = weakref.WeakSet()
        self._mark_again(marks)
        self._number, self._states = registry.enter(self), self._new_states()
        device = next((p.device for p in self.parameters(recurse=False)), torch.device("cpu"))
        if device.type != "meta":
            self._loaded = [(n, t.to(device)) for n, t in self._loaded]

    def _replicate_for_data_parallel(self) -> "TransformerEngineBaseModule":
        """torch.nn.DataParallel's replica, which computes one forward on a device of its own: it has layers and FP8 state of that device."""
        replica = super()._replicate_for_data_parallel()
        replica.__dict__.update(_layers={}, _loaded=[], _fused_in=weakref.WeakSet(), _number=registry.enter(replica), _states=replica._new_states())
        return replica

    def fast_setattr(self, name: str, value: Any) -> None:
        if hasattr(getattr(type(self), name, None), "__set__"):
            setattr(self, name, value)
        else:
            self.__dict__[name] = value
