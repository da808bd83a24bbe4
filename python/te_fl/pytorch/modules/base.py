"""The base class of te-fl's PyTorch modules: parameters, C++ layers created on demand, FP8 state."""

from __future__ import annotations

import contextlib
import copy
import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from te_fl import _native
from te_fl.common.recipe import DelayedScaling, as_data, attends
from te_fl.compat.variables import read_determinism
from te_fl.errors import InvalidArgument
from te_fl.pytorch.autograd import torch_checkpoint
from te_fl.pytorch.autograd.call import give_writes, plain, take_writes, use_torch_memory, watch
from te_fl.pytorch.autograd.delayed_wgrad import DelaysWgrad
from te_fl.pytorch.fp8 import extra_state, plain_codes, quantization, weight_cache
from te_fl.pytorch.fp8.availability import get_default_recipe
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor, keeping_codes, rules_of
from te_fl.pytorch.fp8.quantization import captures
from te_fl.pytorch.modules.layers import NativeLayer, TracedLayer
from te_fl.pytorch.modules.parallel import TensorParallel, mark_again, marks_of
from te_fl.pytorch.fp8.sharded_weights import initialise, is_sharded
from te_fl.pytorch.runtime import registry, traced
from te_fl.pytorch.runtime.computed import Computed
from te_fl.pytorch.runtime.device import check_devices, default_device, native_device
from te_fl.pytorch.runtime.dtypes import DTYPE_CODES, DTYPE_NAMES, LIKE
from te_fl.pytorch.runtime.refuse import refuse


watch(quantization._state, weight_cache._thread, torch_checkpoint._reentrant)


FP8State = List[Tuple[str, torch.Tensor]]  # tensors with te_fl::nn's names


def default_init(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)


class States:
    """A module's FP8 state in C++, shared by all of its layers. Copying gives a new, empty state."""

    def __init__(self):
        self.native = _native.fp8_states()

    def __reduce__(self):
        return States, ()

    def of(self, key: Any) -> Any:
        """The C++ state for the layer with this key."""
        return self.native

    def tensors(self) -> FP8State:
        return [(n, t.clone()) for n, t in _native.fp8_state(self.native, LIKE)]

    def load(self, state: FP8State) -> FP8State:
        """Loads the state; entries that `state` lacks are reset. Returns the state that must be loaded again once a layer exists."""
        return [] if _native.load_fp8_state(self.native, state) else state

    def retire(self) -> None:
        _native.retire_fp8_states(self.native)


class TransformerEngineBaseModule(DelaysWgrad, TensorParallel, torch.nn.Module):
    """Base class of modules with a layer of te_fl::nn.

    Derived classes set _kind and _sites (the layer's FP8 sites), and implement _options() and _tensors().
    """

    _kind: str
    _sites: Tuple[str, ...] = ()
    _places = extra_state.PRODUCT

    def __init__(self, name: Optional[str] = None):
        super().__init__()
        read_determinism()
        self.name = name
        self._layers: Dict[Tuple[str, Any], NativeLayer] = {}  # the C++ layers by (kind, key)
        self._states = self._new_states()  # of all layers, and of the FusedLayer that this module is a part of
        self._loaded: List[Tuple[str, torch.Tensor]] = []  # loaded FP8 state, kept here until the first layer exists
        self._recipe = None  # the recipe of the last forward in an autocast
        self._in_fp8 = False  # true if the last forward outside of a backward computed in FP8
        self._fused_in: "weakref.WeakSet[Any]" = weakref.WeakSet()  # each FusedLayer that this module is a part of; copies of a layer share parts
        self._initialisers: Dict[str, Tuple[Callable, Optional[Callable]]] = {}
        self._number = registry.enter(self)
        self.wgrad_accumulation_and_reduce_hooks: List[Callable[[], Any]] = []
        self._model_init = quantization.model_init()  # None: weights are stored in high precision
        self._products: List[str] = []  # names of the weights that quantized_model_init stores as codes

    def _new_states(self) -> Any:
        return States()

    # -- parameters

    def _add_parameter(self, name: str, value: torch.Tensor, init: Callable, tracker: Optional[Callable] = None) -> None:
        self.register_parameter(name, torch.nn.Parameter(value))
        self._initialisers[name] = (init, tracker)

    def _add_weight(self, name: str, value: torch.Tensor, init: Callable, tracker: Optional[Callable] = None) -> None:
        """Adds a weight of a matrix product. In quantized_model_init, the weight is stored as FP8 codes only."""
        self._add_parameter(name, value, init, tracker)
        if self._model_init is not None:
            self._products.append(name)

    def reset_parameters(self, defer_init: Optional[bool] = False) -> None:
        """Initialises the parameters. Parameters on the meta device are first allocated on default_device()."""
        if defer_init:
            return
        for name, (init, tracker) in self._initialisers.items():
            param = getattr(self, name)
            if param.device.type == "meta":
                param = self._replaced(name, torch.empty_like(param, device=default_device()))
            random = contextlib.nullcontext()
            if tracker is not None:
                stream = getattr(self, "rng_tracker_name", None)
                random = tracker().fork(stream) if stream else tracker().fork()
            with torch.no_grad(), random:
                if name in self._products:
                    self._initialise_codes(name, param, init)
                else:
                    init(param)

    def _replaced(self, name: str, value: torch.Tensor) -> torch.nn.Parameter:
        """Replaces a parameter by one that holds `value`, with the attributes of the old one."""
        before = getattr(self, name)
        param = torch.nn.Parameter(value, requires_grad=before.requires_grad)
        param.__dict__.update(before.__dict__)
        setattr(self, name, param)
        return param

    def _initialise_codes(self, name: str, param: torch.Tensor, init: Callable) -> None:
        rules = rules_of(self._model_init.native_recipe)
        if is_sharded(param):
            made, values = initialise(param, rules, init)
            param = param if made is param else self._replaced(name, made)
            if self._model_init.preserve_high_precision_init_val:
                Float8Tensor._keep_initial(param, values.cpu())
            return
        high = param.detach() if type(param) is torch.nn.Parameter else torch.empty(param.shape, dtype=param.dtype, device=param.device)
        init(high)
        if isinstance(param, Float8Tensor):
            param.copy_(high)
        else:
            param = self._replaced(name, Float8Tensor.quantised(high, rules))
        if self._model_init.preserve_high_precision_init_val:
            param._keep_initial(high.cpu())

    def _split_names(self, split: Any, out_features: int, what: str) -> List[Tuple[str, int]]:
        """(prefix, rows) of each part of a weight; a single part without prefix if it is not split."""
        where = type(self).__name__
        if split is None:
            return [("", out_features)]
        if isinstance(split, dict):
            parts = list(split.items())
        else:
            split = (split,) if isinstance(split, str) else tuple(split)
            if not split or out_features % len(split) != 0:
                raise InvalidArgument(f"{where}: {out_features} {what} do not divide into the {len(split)} equal parts of parameters_split")
            parts = [(name, out_features // len(split)) for name in split]
        if sum(rows for _, rows in parts) != out_features:
            raise InvalidArgument(f"{where}: the parts of parameters_split sum to {sum(rows for _, rows in parts)}; "
                             f"there are {out_features} {what}")
        return [(name if name.endswith("_") else name + "_", int(rows)) for name, rows in parts]

    def _add_split(self, name: str, parts: List[Tuple[str, int]], shape: Tuple[int, ...], device, dtype, init, tracker=None) -> List[str]:
        """Registers consecutive slices of one array as parameters, and returns their names."""
        if name == "weight" and len(parts) > 1 and self._model_init is not None:
            raise refuse(type(self).__name__, "parameters_split", tuple(prefix[:-1] for prefix, _ in parts),
                         "inside quantized_model_init a weight is whole: leave it out (attention: give fuse_qkv_params=True)")
        whole = torch.empty(sum(rows for _, rows in parts), *shape, device=device, dtype=dtype)
        # Each slice gets a storage object of its own over that memory: tools that write storages to files treat tensors with one storage as one
        # parameter.
        own = len(parts) > 1 and type(whole) is torch.Tensor and whole.numel() > 0 and whole.device.type in ("cpu", "cuda")
        add = self._add_weight if name == "weight" else self._add_parameter
        at, names = 0, []
        for prefix, rows in parts:
            names.append(prefix + name)
            part = whole[at:at + rows]
            add(names[-1], torch.from_dlpack(part) if own else part, init, tracker)
            at += rows
        return names

    # -- FP8 attributes that frameworks read

    fsdp_group: Any = None  # prepare_te_modules_for_fsdp() sets it
    # Not used by te-fl; the values are Transformer Engine's defaults.
    fsdp_wrapped = False
    symmetric_ar_type: Optional[str] = None
    ub_name: Optional[str] = None

    @Computed
    def fp8(self) -> bool:
        """True if the last forward ran in FP8."""
        return self._in_fp8

    @Computed
    def fp8_initialized(self) -> bool:
        """True if the last forward ran in FP8, or weights are stored as FP8 codes."""
        return self._in_fp8 or self._model_init is not None

    @Computed
    def fp8_calibration(self) -> bool:
        """True in a calibrating autocast."""
        return quantization.calibrating()

    @Computed
    def fp8_meta_tensors_initialized(self) -> bool:
        """True if delayed scaling's scales exist."""
        return bool(self._fp8_state())

    @Computed
    def primary_weights_in_fp8(self) -> bool:
        """True if the module was constructed in quantized_model_init."""
        return self._model_init is not None

    @Computed
    def preserve_high_precision_init_val(self) -> bool:
        """True if the module keeps the high-precision values that its FP8 weights were made from."""
        return self._model_init is not None and self._model_init.preserve_high_precision_init_val

    @property
    def fp8_meta(self) -> dict:
        """A dict with fp8_checkpoint (whether checkpoints contain FP8 state of the module) and the recipe. Frameworks add entries of their own."""
        meta = self.__dict__.setdefault("_fp8_meta", {"fp8_group": None})
        meta["fp8_checkpoint"] = bool(self._fp8_state())
        if self._recipe is not None or "recipe" not in meta:
            meta["recipe"] = self._recipe or quantization.active_recipe() or get_default_recipe()
        return meta

    @fp8_meta.setter
    def fp8_meta(self, meta: dict) -> None:
        self.__dict__["_fp8_meta"] = meta

    @property
    def is_fsdp2(self) -> bool:
        """True if fully_shard has sharded a parameter."""
        return any(is_sharded(param) for param in self._parameters.values() if param is not None)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """No effect: Transformer Engine's method makes fp8_meta's recipe available, which te-fl's always has."""

    # -- the layer

    def _options(self) -> dict:
        raise NotImplementedError

    def _options_of(self, kind: str, key: Any) -> dict:
        """The options of the layer with this kind and key; see _layer()."""
        return self._options()

    def _layer_of(self, x: Any) -> Union[NativeLayer, TracedLayer]:
        """The layer for this input; TypeError if the input is not a tensor."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{type(self).__name__}: the input is a {type(x).__name__}; it must be a torch.Tensor")
        if torch.compiler.is_compiling():  # tested first: tracing must not depend on which layers exist already
            return self._layer(x.device)
        return self._layers.get((self._kind, None)) or self._layer(x.device)

    def _tensors(self, names: Sequence[str]) -> Tuple[torch.Tensor, ...]:
        """The parameters with these names. PyTorch's parametrisations turn a parameter into a plain attribute."""
        own = self._parameters
        try:
            return tuple([own[n] for n in names])
        except KeyError:
            return tuple([own[n] if n in own else getattr(self, n) for n in names])

    def _layer(self, device: torch.device, kind: Optional[str] = None, key: Any = None) -> Union[NativeLayer, TracedLayer]:
        kind = kind or self._kind
        name = (kind, key)
        if torch.compiler.is_compiling():
            self._check_compiled()
            traced.graph.check_device(type(self).__name__, device)
            return TracedLayer(kind, () if key is None else key, self._width(kind))
        layer = self._layers.get(name)
        if layer is None:
            if "_is_replica" in self.__dict__ and quantization.delays() and self._owns_state(kind):
                raise refuse(type(self).__name__, "recipe", "DelayedScaling()", "torch.nn.DataParallel drops a replica, and its scales, after one forward; "
                             "use DistributedDataParallel, or a recipe without state")
            self._check_devices(device)  # before the layer is created: a layer for a wrong device would stay in _layers
            use_torch_memory(device)
            states = (("", self._states.of(key)),) if self._owns_state(kind) else ()
            native = _native.layer(kind, {**self._options_of(kind, key), "device": native_device(device)}, states)
            delays = self.delay_wgrad_compute and kind == self._kind
            if delays:
                _native.delay_layer_wgrad(native)
            self._load_waiting()
            layer = self._layers[name] = NativeLayer(native, delays)  # assigned last, so that KeyboardInterrupt never leaves a half-made layer
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

    def _run(self, layer: Union[NativeLayer, TracedLayer], inputs: Tuple[torch.Tensor, ...], parameters: Tuple[torch.Tensor, ...], first=None,
             attention=None, random=None, accumulates: bool = False, extras: Tuple[torch.Tensor, ...] = (), activation: int = -1) -> torch.Tensor:
        """Checks the first input and runs the layer.

        activation: the output's dtype outside of torch.autocast, as an index in te_fl.tensors.DTYPES; -1: the input's dtype.
        """
        x = inputs[0]
        kind = "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type  # x.device.type creates a new string on each access, which is slower
        autocasts = torch.is_autocast_enabled(kind)
        if x.dtype not in DTYPE_NAMES:
            if not autocasts or len(inputs) > 1 or not x.is_floating_point():
                raise refuse(type(self).__name__, "input", f"a tensor of {x.dtype}", "give torch.float32, torch.bfloat16 or torch.float16")
            inputs = (x.float(),)
        if x.layout is not torch.strided or x.is_meta:
            raise refuse(type(self).__name__, "input", f"a tensor of layout {x.layout} on {x.device}", "give a dense tensor with memory")
        if autocasts:
            activation = DTYPE_CODES[torch.get_autocast_dtype(kind)]
        return layer.compute(self, inputs, extras, parameters, activation, first, attention, random, accumulates)

    def _forward(self, key: Tuple[str, None], inp: Any, first: Optional[bool], accumulates: bool) -> torch.Tensor:
        """The output of the module's own layer (key: its key in _layers) for one input and the parameters of _own(). Equivalent to _run(), with a
        fast path.
        """
        if not accumulates and not torch.compiler.is_compiling() and captures.flag is None:
            try:
                output = plain(self.__dict__, key, inp, first)
            except RuntimeError:
                self._check_devices(inp.device)
                raise
            if output is not None:
                return output
        return self._run(self._layer_of(inp), (inp,), self._own(), first, accumulates=accumulates)

    # Called by layers on their module (modules/layers.py), and by graphs, which find the module by its number (compile/compiled.py).

    def _width(self, kind: str) -> int:
        """The output's last extent; -1: equal to the input's."""
        return -1

    def _in_graph(self, device: torch.device, kind: str, key: tuple) -> Tuple[NativeLayer, Optional[List[int]]]:
        """The layer of this name, and for each of the layer's parameters its index in the graph's list of parameters; None: the order is equal."""
        return self._layer(device, kind), None

    def _notice(self) -> int:
        return quantization.notice(self)

    _remade: frozenset = frozenset()  # names of attributes that a program may set, and whose change requires new layers

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "tp_group" and self.tp_size > 1 and "_number" in self.__dict__:  # layers refer to the group, so they are created again
            self.set_tensor_parallel_group(value)
            return
        before = self.__dict__.get("_parameters", {}).get(name)
        super().__setattr__(name, value)
        # Set by fully_shard, which drops the marks; a program that assigns its own parameter must mark it itself.
        if before is not None and (is_sharded(before) or is_sharded(value)):
            mark_again(self._parameters.get(name), marks_of(before))
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

    def _marks(self) -> Dict[str, Dict[str, Any]]:
        return {name: marks_of(param) for name, param in self._parameters.items()}

    def _mark_again(self, marks: Dict[str, Dict[str, Any]]) -> None:
        for name, param in self._parameters.items():
            mark_again(param, marks.get(name, {}))

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

    # -- FP8 state

    def _fp8_state(self) -> List[Tuple[str, torch.Tensor]]:
        state = self._states.tensors()
        there = {name for name, _ in state}
        return state + [(name, tensor) for name, tensor in self._loaded if name not in there]

    def _load(self, state: List[Tuple[str, torch.Tensor]]) -> None:
        """Sets the FP8 state in place; entries that `state` lacks are reset."""
        self._loaded = self._states.load(state)

    def _load_waiting(self) -> None:
        if self._loaded:
            self._load(self._loaded)

    def _saved(self) -> Callable[[], None]:
        """Returns a function that restores the current FP8 state in place."""
        state = self._fp8_state()
        return lambda: self._load(state)

    _attends = False  # true if the state belongs to FP8 attention, which only some recipes use

    def get_extra_state(self) -> torch.Tensor:
        """FP8 state for checkpoints, uint8. Before the first forward with delayed scaling the state is empty, except inside of an autocast with
        delayed scaling: there it is the initial state of the first forward, so that tools that load checkpoints into existing tensors find the right
        size.
        """
        state, recipe = self._fp8_state(), self._recipe
        if not state and self._sites and quantization.delays() and (not self._attends or attends(quantization.active_recipe())):
            recipe = quantization.active_recipe()
            state = extra_state.initial(self._sites, recipe.amax_history_len, self._places)
        if not state or not self._sites:
            return extra_state.nothing()
        if recipe is None:
            recipe = DelayedScaling(amax_history_len=state[1][1].shape[0])
        products = len(self._sites) * self._places.kept[1] // 2
        return extra_state.write(as_data(recipe), extra_state.to_theirs(state, self._sites, self._places, recipe),
                                 {"fp8_checkpoint": True, "num_gemms": products})

    def set_extra_state(self, state: Any) -> None:
        where = type(self).__name__
        read = extra_state.read(state, where)
        if not read or not self._sites:
            return
        own = extra_state.from_theirs(read, self._sites, where, self._places)
        self._recipe = read.get("recipe", self._recipe)
        device = next((p.device for p in self.parameters(recurse=False)), torch.device("cpu"))
        if device.type != "meta":
            own = [(n, t.to(device)) for n, t in own]
        if own:
            self._load(own)
        else:
            self._loaded = []

    def reset_fp8_meta_tensors(self) -> None:
        """Resets all scales to 1 and clears the amax histories."""
        self._load([])

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


def parameter_dtype(params_dtype: Optional[torch.dtype], where: str) -> torch.dtype:
    dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
    if dtype not in DTYPE_NAMES:
        raise refuse(where, "params_dtype", dtype, "it is torch.float32, torch.bfloat16 or torch.float16")
    return dtype
