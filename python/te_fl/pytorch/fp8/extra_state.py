"""FP8 state in checkpoints, in the format of Transformer Engine's modules: a pickled dict of tensors, stored in a uint8 tensor.

Unpickling runs no code from the checkpoint: only the names of recipes and tensors are accepted.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from typing import Any, List, NamedTuple, Sequence, Tuple

import torch

from te_fl import _native
from te_fl.common import recipe as recipes
from te_fl.errors import DataLoss

_LIKE = torch.empty(0)  # passed to _native to request PyTorch tensors
_THEIRS, _OURS = "transformer_engine.common.recipe", "te_fl.common.recipe"


class _Writer(pickle._Pickler):
    """A pickler that writes recipes under Transformer Engine's names, so that Transformer Engine can read them."""

    def save_global(self, obj, name=None):
        if getattr(obj, "__module__", None) != _OURS:
            return super().save_global(obj, name)
        self.save(_THEIRS)
        self.save(obj.__qualname__)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)

    def save_type(self, obj):
        return self.save_global(obj) if obj.__module__ == _OURS else super().save_type(obj)

    def save_storage(self, storage):
        """Writes a fixed key instead of the storage's address, so that equal states give equal bytes in every process. Tools that load a checkpoint
        into existing tensors need equal sizes, and others compare or hash the bytes. Each stream holds one storage.
        """
        load, (data,) = storage.__reduce__()
        address = str(storage._untyped_storage._cdata).encode()
        key, fixed = (b"X" + struct.pack("<I", len(a)) + a for a in (address, b"0" * 20))
        head, *rest = data.split(key, 2)  # the key occurs twice, before the storage's bytes
        self.save_reduce(load, (fixed.join((head, *rest)),), obj=storage)

    dispatch = {**pickle._Pickler.dispatch, type: save_type, torch.storage.TypedStorage: save_storage}


def _format_of_name(owner: Any, name: str) -> recipes.Format:
    """Replaces getattr() in pickles of Python 3.11.0 to 3.11.3, which refer to enum members by getattr(). te-fl's pickles use it for nothing else."""
    if owner is not recipes.Format or name not in recipes.Format.__members__:
        raise DataLoss(f"FP8 state of a checkpoint refers to {name!r} of {owner!r}, which no recipe or tensor needs; it is not read")
    return recipes.Format[name]


_ALLOWED = {
    ("builtins", "getattr"): _format_of_name,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): lambda data: torch.load(io.BytesIO(data), weights_only=True),
    # Megatron subclasses the recipe without new fields, and Transformer Engine's modules save that class name.
    ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"): recipes.DelayedScaling,
    ("megatron.core.transformer.custom_layers.transformer_engine", "TEDelayedScaling"): recipes.DelayedScaling,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module, name):
        if module in (_THEIRS, _OURS):
            found = getattr(recipes, name, None)
            if isinstance(found, type):
                return found
        elif (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise DataLoss(f"FP8 state of a checkpoint names {module}.{name}, which no recipe or tensor needs; it is not read")


def nothing() -> torch.Tensor:
    """The state of a module without FP8 state: an empty tensor whose storage has a unique address. Tools that write storages to files treat equal
    addresses as one storage.
    """
    return _native.empty_bytes(_LIKE)


def write(recipe: Any, tensors: dict, extra: dict) -> torch.Tensor:
    """Serialises one module's state to uint8."""
    return write_dict({"recipe": recipe, **tensors, "extra_fp8_variables": extra})


def write_dict(state: dict) -> torch.Tensor:
    """Serialises a dict of such states, or of their parts, to uint8."""
    stream = io.BytesIO()
    _Writer(stream, protocol=4).dump(state)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def read(state: Any, where: str) -> dict:
    """Returns the dict that write() serialised; {} for an empty state. te_fl.errors.DataLoss for unreadable bytes."""
    if state is None or (isinstance(state, torch.Tensor) and state.numel() == 0):
        return {}
    if isinstance(state, torch.Tensor):
        state = io.BytesIO(state.detach().cpu().numpy().tobytes())
    if not isinstance(state, io.BytesIO):
        raise TypeError(f"{where}: the extra state is a {type(state).__name__}; it is a tensor of bytes or a BytesIO")
    state.seek(0)
    try:
        found = _Reader(state).load()
    except DataLoss as error:
        raise DataLoss(f"{where}: {error.args[0]}") from None
    except Exception as error:
        raise DataLoss(f"{where}: the extra state cannot be read: {error}") from error
    if found is not None and not isinstance(found, dict):
        raise DataLoss(f"{where}: the extra state is a {type(found).__name__}; it is a dict of tensors")
    return found or {}


class Places(NamedTuple):
    """Indices of a site's tensors in the arrays that Transformer Engine keeps for it, forward and backward, and the arrays' lengths."""

    forward: Tuple[int, ...]
    backward: Tuple[int, ...]
    kept: Tuple[int, int]


# A product has input, weight and output in the forward, and the gradients of output and input in the backward; te-fl's layers keep the entries that
# they quantise. Attention has three products; their entries include qkv, s and o, and do, dp and dqkv.
PRODUCT = Places((0, 1), (0,), (3, 2))
_PLAIN = {"dtype": torch.float32, "device": "cpu"}  # ignores the program's default dtype and device
ATTENTION = Places((2, 8, 3), (3, 5, 0), (9, 6))


def _directions(places: Places):
    return ("fwd", places.forward, places.kept[0]), ("bwd", places.backward, places.kept[1])


def initial(sites: Sequence[str], length: int, places: Places = PRODUCT) -> List[Tuple[str, torch.Tensor]]:
    """A module's initial state for a recipe with this history length: scales 1 and no amaxes."""
    state = []
    for site in sites:
        for direction, own, _ in _directions(places):
            state += [(f"{site}.{direction}.scale", torch.ones(len(own), **_PLAIN)),
                      (f"{site}.{direction}.amax_history", torch.zeros(length, len(own), **_PLAIN))]
    return state


def _largest_gradient(recipe: Any) -> float:
    """The largest value of the FP8 format that the recipe uses for gradients; 0 if the recipe has no format."""
    named = getattr(recipe, "fp8_format", None)
    return float(named.value.max_bwd) if isinstance(named, recipes.Format) else 0.0


def to_theirs(state: Sequence[Tuple[str, torch.Tensor]], sites: Sequence[str], places: Places = PRODUCT, recipe: Any = None) -> dict:
    """Converts state to Transformer Engine's arrays. recipe: the recipe saved with the state; its format determines the scales of gradients."""
    by_name, wanted = dict(state), _largest_gradient(recipe)
    if not by_name:
        return {}
    out = {}
    for direction, own, kept in _directions(places):
        scales, histories = [], []
        for site in sites:
            scale, history = by_name.get(f"{site}.{direction}.scale"), by_name.get(f"{site}.{direction}.amax_history")
            scales.append(torch.ones(kept, **_PLAIN))
            histories.append(torch.zeros(1 if history is None else history.shape[0], kept, **_PLAIN))
            if scale is not None:
                largest = by_name.get(f"{site}.{direction}.fp8_max")  # the last backward may have used a recipe with another format
                is_new = not history.any() and bool((scale == 1).all())  # no amax was recorded, and a scale of exactly 1 means initial state
                factor = wanted / largest.item() if wanted and largest is not None and not is_new else 1.0
                scales[-1][list(own)] = (scale.detach().cpu() * factor).clamp_(max=torch.finfo(torch.float32).max)
                histories[-1][:, list(own)] = history.detach().cpu()
        length = max(h.shape[0] for h in histories)
        columns = [torch.cat([h, h.new_zeros(length - h.shape[0], kept)]) for h in histories]
        out[f"scale_{direction}"], out[f"amax_history_{direction}"] = torch.cat(scales), torch.cat(columns, 1).contiguous()
    return out


def from_theirs(read_state: dict, sites: Sequence[str], where: str, places: Places = PRODUCT) -> List[Tuple[str, torch.Tensor]]:
    state, largest = [], _largest_gradient(read_state.get("recipe"))
    for direction, own, kept in _directions(places):
        scale, history = read_state.get(f"scale_{direction}"), read_state.get(f"amax_history_{direction}")
        if scale is None or history is None:
            return []
        if not isinstance(scale, torch.Tensor) or not isinstance(history, torch.Tensor):
            raise DataLoss(f"{where}: scale_{direction} and amax_history_{direction} are no tensors")
        if scale.numel() != kept * len(sites) or history.dim() != 2 or history.shape[1] != scale.numel():
            raise DataLoss(f"{where}: scale_{direction} has {scale.numel()} places and its history {tuple(history.shape)}; "
                           f"{len(sites)} products have {kept * len(sites)}")
        for i, site in enumerate(sites):
            at = [i * kept + place for place in own]
            state.append((f"{site}.{direction}.scale", scale[at].float().contiguous()))
            state.append((f"{site}.{direction}.amax_history", history[:, at].float().contiguous()))
            if direction == "bwd" and largest:
                state.append((f"{site}.{direction}.fp8_max", torch.full((1,), largest, **_PLAIN)))
    return state
