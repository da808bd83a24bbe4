"""The FP8 state of te-fl's PyTorch modules, in checkpoints and in the attributes that frameworks read."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from te_fl import _native
from te_fl.common.recipe import DelayedScaling, Recipe, as_data, attends
from te_fl.pytorch.fp8 import extra_state, quantization
from te_fl.pytorch.fp8.availability import get_default_recipe
from te_fl.pytorch.fp8.sharded_weights import is_sharded
from te_fl.pytorch.runtime.computed import Computed
from te_fl.pytorch.runtime.dtypes import LIKE

FP8State = List[Tuple[str, torch.Tensor]]  # tensors with te_fl::nn's names


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


class HasFP8State(torch.nn.Module):
    """A base class of modules with scales and amax histories in C++, which belong to the sites `_sites` of their layer."""

    _sites: Tuple[str, ...] = ()
    _places = extra_state.PRODUCT
    _states: Any  # of all layers, and of the FusedLayer that this module is a part of
    _loaded: FP8State  # loaded FP8 state, kept here until the first layer exists
    _recipe: Optional[Recipe]  # the recipe of the last forward in an autocast
    _recipe_parts: Sequence[torch.nn.Module] = ()  # other modules whose _recipe is that of this module's forwards
    _in_fp8: bool  # true if the last forward outside of a backward computed in FP8
    _model_init: Optional[quantization.ModelInit]

    def _quantizer_sites(self) -> List[Tuple[str, str]]:
        """The module_type and name of each linear map for the roles of a CustomRecipe's quantizers."""
        return [("linear", getattr(self, "name", None) or "")]

    def _new_states(self) -> Any:
        return States()

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

    # -- attributes that frameworks read

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
