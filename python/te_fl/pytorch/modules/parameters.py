"""The parameters of te-fl's PyTorch modules: how they are created, initialised, and marked for frameworks."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from te_fl.errors import InvalidArgument
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor, make_rules
from te_fl.pytorch.fp8.quantization import ModelInit
from te_fl.pytorch.fp8.sharded_weights import initialise, is_sharded
from te_fl.pytorch.modules.parallel import mark_again, find_marks
from te_fl.pytorch.runtime.device import default_device
from te_fl.pytorch.runtime.dtypes import DTYPE_NAMES
from te_fl.pytorch.runtime.refuse import refuse


def part_name(name: Optional[str], part: str) -> Optional[str]:
    """The name of a module's part; None if the module has none."""
    return f"{name}.{part}" if name is not None else None


def default_init(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)


def parameter_dtype(params_dtype: Optional[torch.dtype], where: str) -> torch.dtype:
    dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
    if dtype not in DTYPE_NAMES:
        raise refuse(where, "params_dtype", dtype, "it is torch.float32, torch.bfloat16 or torch.float16")
    return dtype


class HasParameters(torch.nn.Module):
    """A base class of modules that create their parameters by _add_parameter(), _add_weight() and _add_split()."""

    _initialisers: Dict[str, Tuple[Callable, Optional[Callable]]]  # by parameter name: the init method, and the function that returns an RNG tracker
    _model_init: Optional[ModelInit]  # None: weights are stored in high precision
    _products: List[str]  # names of the weights that quantized_model_init stores as codes

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
        rules = make_rules(self._model_init.native_recipe)
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

    def _marks(self) -> Dict[str, Dict[str, Any]]:
        return {name: find_marks(param) for name, param in self._parameters.items()}

    def _mark_again(self, marks: Dict[str, Dict[str, Any]]) -> None:
        for name, param in self._parameters.items():
            mark_again(param, marks.get(name, {}))
