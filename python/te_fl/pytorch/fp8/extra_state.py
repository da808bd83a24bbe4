"""FP8 state in checkpoints, in the form that Transformer Engine's modules save: a pickled dict of tensors in a tensor of bytes.

Reading it runs no code of the checkpoint: names other than those of recipes and tensors are refused.
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

_LIKE = torch.empty(0)  # says that tensors are to be PyTorch's
_THEIRS, _OURS = "transformer_engine.common.recipe", "te_fl.common.recipe"


class _Writer(pickle._Pickler):
    """Names recipes as Transformer Engine does, so that it can read them."""

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
        """With one key in place of the storage's address, so that the same state has the same bytes in every process: tools that read a
        checkpoint into present tensors want one of its size, and others compare or hash what they wrote. A stream holds one storage."""
        load, (data,) = storage.__reduce__()
        address = str(storage._untyped_storage._cdata).encode()
        key, fixed = (b"X" + struct.pack("<I", len(a)) + a for a in (address, b"0" * 20))
        head, *rest = data.split(key, 2)  # it is named twice, before the storage's own bytes
        self.save_reduce(load, (fixed.join((head, *rest)),), obj=storage)

    dispatch = {**pickle._Pickler.dispatch, type: save_type, torch.storage.TypedStorage: save_storage}


def _format_of_name(owner: Any, name: str) -> recipes.Format:
    """Stands for getattr() in a pickle that Python 3.11.0 to 3.11.3 wrote: it names the members of an enumeration by it, and
    te-fl nothing else."""
    if owner is not recipes.Format or name not in recipes.Format.__members__:
        raise DataLoss(f"FP8 state of a checkpoint asks for {name!r} of {owner!r}, which no recipe or tensor needs; it is not read")
    return recipes.Format[name]


_ALLOWED = {
    ("builtins", "getattr"): _format_of_name,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): lambda data: torch.load(io.BytesIO(data), weights_only=True),
    # Megatron derives its recipe, and Transformer Engine's modules name it in what they save. It has no fields of its own.
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
    """The state of a module that has none: no bytes, in a storage with an address of its own, since what writes storages to files takes two of
    the same address for one."""
    return _native.empty_bytes(_LIKE)


def write(recipe: Any, tensors: dict, extra: dict) -> torch.Tensor:
    """The bytes of one module's state, uint8."""
    return write_dict({"recipe": recipe, **tensors, "extra_fp8_variables": extra})


def write_dict(state: dict) -> torch.Tensor:
    """The bytes of a dict of such states, or of what they are made of, uint8."""
    stream = io.BytesIO()
    _Writer(stream, protocol=4).dump(state)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def read(state: Any, where: str) -> dict:
    """The argument of write(); {} of an empty state. te_fl.errors.DataLoss for what cannot be read."""
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
        raise DataLoss(f"{where}: {error}") from None
    except Exception as error:
        raise DataLoss(f"{where}: the extra state cannot be read: {error}") from error
    if found is not None and not isinstance(found, dict):
        raise DataLoss(f"{where}: the extra state is a {type(found).__name__}; it is a dict of tensors")
    return found or {}


class Places(NamedTuple):
    """Where a site's tensors are among those that Transformer Engine keeps for it, forward and backward, and how many it keeps."""

    forward: Tuple[int, ...]
    backward: Tuple[int, ...]
    kept: Tuple[int, int]


# A product has input, weight and output forward, the output's and the input's gradient backward; te-fl's layers keep those that they
# quantise. Attention has three products, among whose places are those of qkv, s and o, and of do, dp and dqkv.
PRODUCT = Places((0, 1), (0,), (3, 2))
_PLAIN = {"dtype": torch.float32, "device": "cpu"}  # The program's own defaults do not count here.
ATTENTION = Places((2, 8, 3), (3, 5, 0), (9, 6))


def _directions(places: Places):
    return ("fwd", places.forward, places.kept[0]), ("bwd", places.backward, places.kept[1])


def initial(sites: Sequence[str], length: int, places: Places = PRODUCT) -> List[Tuple[str, torch.Tensor]]:
    """The state with which a module's first forward begins, by a recipe whose histories have this length: scales 1 and no amaxes."""
    state = []
    for site in sites:
        for direction, own, _ in _directions(places):
            state += [(f"{site}.{direction}.scale", torch.ones(len(own), **_PLAIN)),
                      (f"{site}.{direction}.amax_history", torch.zeros(length, len(own), **_PLAIN))]
    return state


def _largest_gradient(recipe: Any) -> float:
    """The largest value of the FP8 format that scales of gradients are for by the recipe; 0 where it has none."""
    named = getattr(recipe, "fp8_format", None)
    return float(named.value.max_bwd) if isinstance(named, recipes.Format) else 0.0


def to_theirs(state: Sequence[Tuple[str, torch.Tensor]], sites: Sequence[str], places: Places = PRODUCT, recipe: Any = None) -> dict:
    """recipe: the one that is saved beside it, whose format says what the scales of gradients are for."""
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
                largest = by_name.get(f"{site}.{direction}.fp8_max")  # the last backward may have been by a recipe of another format
                is_new = not history.any() and bool((scale == 1).all())  # no amax has been seen, and the scale of no type is 1
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
