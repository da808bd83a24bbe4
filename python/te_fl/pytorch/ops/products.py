"""Matrix product operations: te-fl's modules with the operations' parameters and checkpoint state."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Optional, Tuple, Union

import torch
from torch.nn.utils.parametrize import is_parametrized

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.fp8 import extra_state
from te_fl.pytorch.modules import grouped_linear, linear
from te_fl.pytorch.modules.parameters import parameter_dtype
from te_fl.pytorch.modules.layers import NativeLayer
from te_fl.pytorch.modules.parallel import divided
from te_fl.pytorch.ops.operation import BasicOperation, FusedOperation, Result
from te_fl.pytorch.ops.plain import AllReduce, ReduceScatter
from te_fl.pytorch.runtime import refuse as rules
from te_fl.pytorch.runtime.device import default_device, device_of
from te_fl.pytorch.runtime.refuse import checks_keywords, only, parallel_mode, refuse

_FORWARD, _BACKWARD = ("scale_fwd", "amax_history_fwd"), ("scale_bwd", "amax_history_bwd")


def _init(weight: torch.Tensor) -> None:
    torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def _ranks(where: str, mode: Optional[str], group: Optional[Any]) -> Tuple[Optional[str], Optional[Any], int]:
    """Returns (mode, group, number of ranks) of a linear operation; for one rank, mode and group are None."""
    parallel_mode(where, mode)
    ranks = 1 if mode is None else collectives.size_of(group)
    return (None, None, 1) if ranks == 1 else (mode, torch.distributed.group.WORLD if group is None else group, ranks)


class _Product(BasicOperation):
    """Common base of linear operations. As in Transformer Engine's operations, the FP8 state has scales of input, weight and output gradient."""

    _places = extra_state.Places((0, 1), (0,), (2, 1))
    _first_weight = "weight"

    def get_extra_state(self) -> torch.Tensor:
        flat = extra_state.read(super(BasicOperation, self).get_extra_state(), type(self).__name__)
        if not flat:
            return extra_state.nothing()
        shared = {"recipe": flat["recipe"], "extra_fp8_variables": flat["extra_fp8_variables"]}
        return extra_state.write_dict({mode: {**shared, **{name: flat[name] for name in names}}
                                       for mode, names in (("forward", _FORWARD), ("backward", _BACKWARD))})

    def set_extra_state(self, state: Any) -> None:
        where = type(self).__name__
        found = extra_state.read(state, where)
        if not found:
            return
        if not isinstance(found.get("forward"), dict) or not isinstance(found.get("backward"), dict):
            raise InvalidArgument(f"{where}: the FP8 state in the checkpoint is that of a module; an operation's has a forward and a backward part")
        tensors = {name: part.get(name) for part, names in ((found["forward"], _FORWARD), (found["backward"], _BACKWARD)) for name in names}
        super(BasicOperation, self).set_extra_state(extra_state.write(found["forward"].get("recipe"), tensors, {}))

    def _materialise(self) -> None:
        if any(p.device.type == "meta" for p in self.parameters(recurse=False)):
            self.reset_parameters()

    def _own_dtype(self) -> torch.dtype:
        """The parameters' current dtype: the model may have been converted, or loaded with assign=True."""
        return getattr(self, self._first_weight).dtype

    def _in_own_dtype(self, x: torch.Tensor) -> torch.Tensor:
        """Casts the input to the weight's dtype, in which operations compute. Unchanged in torch.autocast, which casts, and if not floating point."""
        return x if torch.is_autocast_enabled(x.device.type) or not x.is_floating_point() else x.to(self._own_dtype())


class BasicLinear(_Product, linear.Linear):
    """y = x A^T, in FP8 inside autocast.

    tensor_parallel_mode: 'column' or 'row', as te_fl.pytorch.Linear's parallel_mode. tensor_parallel_group: None is the default group.
    rng_state_tracker_function: returns a tracker, in whose fork() the weight is initialised. accumulate_into_main_grad: the weight's gradient is
    added to weight.main_grad. userbuffers_options: refused.
    """

    @checks_keywords()
    def __init__(self, in_features: int, out_features: int, *, device: Union[torch.device, str, None] = None, dtype: Optional[torch.dtype] = None,
                 tensor_parallel_mode: Optional[str] = None, tensor_parallel_group: Optional[Any] = None, sequence_parallel: bool = False,
                 rng_state_tracker_function: Optional[Callable] = None, accumulate_into_main_grad: bool = False,
                 userbuffers_options: Optional[Dict[str, Any]] = None) -> None:
        only("BasicLinear", ("userbuffers_options", userbuffers_options, None, "te-fl has no Userbuffers; leave it out"))
        mode, group, ranks = _ranks("BasicLinear", tensor_parallel_mode, tensor_parallel_group)
        linear.Linear.__init__(self, in_features, out_features, sequence_parallel=sequence_parallel and ranks > 1, tp_group=group, tp_size=ranks,
                               fuse_wgrad_accumulation=accumulate_into_main_grad, get_rng_state_tracker=rng_state_tracker_function, init_method=_init,
                               bias=False, params_dtype=dtype, parallel_mode=mode, device=device)
        self._open_channels()
        self.local_in_features, self.local_out_features = self.in_features, self.out_features
        self.in_features, self.out_features = int(in_features), int(out_features)
        self.tensor_parallel_mode, self.tensor_parallel_group, self.tensor_parallel_size = mode, group, ranks

    def _product_options(self) -> dict:
        return {**super()._product_options(), "in_features": self.local_in_features, "out_features": self.local_out_features}

    def _make_options(self, kind: str, key: Any) -> dict:
        return {**self._options(), "bias": key is not None}

    def _in_graph(self, device: torch.device, kind: str, key: tuple) -> Tuple[NativeLayer, None]:
        return self._layer(device, kind, tuple(key) or None), None

    def _width(self, kind: str) -> int:
        return self.local_out_features

    def _takes_bias(self, after: Any, x: torch.Tensor) -> bool:
        own = self._own_dtype()
        if torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) != own:
            return False  # with a bias of another dtype, the sum has the wider dtype
        return type(after) is Bias and not self._divides and after.bias.dtype == own and after.bias.shape == (self.local_out_features,)

    def _with_bias(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self._run((self._in_own_dtype(x),), (self.weight, bias), key=("bias",), accumulates=self.fuse_wgrad_accumulation)

    def _compute(self, x: torch.Tensor) -> Result:
        return linear.Linear.forward(self, self._in_own_dtype(x)), ()


class Bias(BasicOperation):
    """Adds a bias over the last dimension. tensor_parallel: the `size` elements are sharded equally over the ranks of tensor_parallel_group (None:
    the default group).
    """

    @checks_keywords()
    def __init__(self, size: int, *, device: Union[torch.device, str, None] = None, dtype: Optional[torch.dtype] = None, tensor_parallel: bool = False,
                 tensor_parallel_group: Optional[Any] = None) -> None:
        super().__init__()
        rules.size("Bias", "size", size)
        self.tensor_parallel_size = collectives.size_of(tensor_parallel_group) if tensor_parallel else 1
        self.tensor_parallel, self.tensor_parallel_group = self.tensor_parallel_size > 1, tensor_parallel_group if tensor_parallel else None
        self.local_size = divided("Bias", "size", int(size), self.tensor_parallel_size)
        device = device_of(device)
        self.device = default_device() if device.type == "meta" else device
        self.register_parameter("bias", torch.nn.Parameter(torch.empty(self.local_size, device=device, dtype=parameter_dtype(dtype, "Bias"))))
        if device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeroes the bias, after allocating a bias on the meta device."""
        if self.bias.device.type == "meta":
            self.bias = torch.nn.Parameter(torch.empty_like(self.bias, device=self.device))
        with torch.no_grad():
            self.bias.zero_()

    def _materialise(self) -> None:
        if self.bias.device.type == "meta":
            self.reset_parameters()

    def _compute(self, x: torch.Tensor) -> Result:
        if x.dim() == 0 or x.shape[-1] != self.bias.shape[0]:
            raise InvalidArgument(f"Bias: the input has shape {tuple(x.shape)}; its last dimension is {self.bias.shape[0]}")
        return x + self.bias, ()


class Linear(FusedOperation):
    """y = x A^T + b, composed of a BasicLinear and a Bias. With tensor_parallel_mode 'row', each rank adds its own bias to its partial result,
    and an AllReduce follows (with sequence_parallel a ReduceScatter). Arguments as for BasicLinear.
    """

    @checks_keywords()
    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, device: Union[torch.device, str, None] = None,
                 dtype: Optional[torch.dtype] = None, tensor_parallel_mode: Optional[str] = None, tensor_parallel_group: Optional[Any] = None,
                 sequence_parallel: bool = False, rng_state_tracker_function: Optional[Callable] = None,
                 accumulate_into_main_grad: bool = False) -> None:
        mode, group, ranks = _ranks("Linear", tensor_parallel_mode, tensor_parallel_group)
        shared = dict(device=device, dtype=dtype)
        product = dict(shared, rng_state_tracker_function=rng_state_tracker_function, accumulate_into_main_grad=accumulate_into_main_grad)
        if mode == "row":
            ops = [BasicLinear(divided("Linear", "in_features", in_features, ranks), out_features, **product)]
        else:
            ops = [BasicLinear(in_features, out_features, tensor_parallel_mode=mode, tensor_parallel_group=group, sequence_parallel=sequence_parallel,
                               **product)]
        if bias:  # in mode 'row' each rank has its own bias over all features
            ops.append(Bias(out_features * (ranks if mode == "row" else 1), tensor_parallel=mode is not None, tensor_parallel_group=group, **shared))
        if mode == "row":
            ops.append(ReduceScatter(group) if sequence_parallel else AllReduce(group))
        super().__init__(ops)
        self._has_bias = bool(bias)
        self._show_parameters()
        self.register_load_state_dict_post_hook(_show_loaded_parameters)

    def _materialise(self) -> None:
        super()._materialise()
        own = self._parameters
        if own.get("weight") is not self.basic_ops[0]._parameters.get("weight") or self._has_bias and own.get("bias") is not self.basic_ops[1]._parameters.get("bias"):
            self._show_parameters()

    def _apply(self, fn: Callable, recurse: bool = True) -> "Linear":
        for op in self.basic_ops if recurse else ():
            op._apply(fn)
        self._show_parameters()
        return self

    def _show_parameters(self) -> None:
        """Registers the operations' parameters as its own too. A parameter under PyTorch's parametrisation is visible on the operation only."""
        if is_parametrized(self):
            raise Unsupported(f"Linear: {', '.join(self.parametrizations)} was parametrised, and its operations have it in their own right; parametrise the "
                              "operation: linear.basic_ops[0] for the weight, linear.basic_ops[1] for the bias")
        torch.nn.Module.register_parameter(self, "weight", self.basic_ops[0]._parameters.get("weight"))
        torch.nn.Module.register_parameter(self, "bias", self.basic_ops[1]._parameters.get("bias") if self._has_bias else None)

    def register_parameter(self, name: str, param: Optional[torch.nn.Parameter]) -> None:
        """Also registers the parameter with the operation that owns it."""
        if name == "bias" and param is not None and not self._has_bias:
            raise InvalidArgument("Linear: it was made with bias=False and takes no bias")
        if param is None and name in ("weight", "bias")[:1 + self._has_bias]:
            raise InvalidArgument(f"Linear: its {name} cannot be None; make a Linear with bias=False where it is to have no bias")
        super().register_parameter(name, param)
        if name in ("weight", "bias") and param is not None:
            setattr(self.basic_ops[0 if name == "weight" else 1], name, param)

    # In checkpoints the operations own the parameters.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *arguments: Any) -> None:
        """Renames the entries of a torch.nn.Linear checkpoint for the operations, which load afterwards."""
        for at, name in enumerate(("weight", "bias") if self._has_bias else ("weight",)):
            own = f"{prefix}basic_ops.{at}.{name}"
            if own not in state_dict and prefix + name in state_dict:
                state_dict[own] = state_dict.pop(prefix + name)


def _show_loaded_parameters(module: Linear, keys: Any) -> None:
    module._show_parameters()


class GroupedLinear(_Product, grouped_linear.GroupedLinear):
    """y_i = x_i A_i^T + b_i for the rows x_i of each of num_groups experts. An extra input holds the row count of each expert, integers [num_groups],
    which the host reads. scale_bias: a second extra input, [rows], is a factor of each row's bias. single_grouped_weight, single_grouped_bias: one
    parameter for the weights, or biases, of all experts. delay_wgrad_compute: backward_dw() computes the weights' gradients. Forwards take output and grad_input, preallocated memory for the
    result and for the input's gradient. Other arguments as for BasicLinear.
    """

    num_extra_inputs = 1

    @property
    def _first_weight(self) -> str:  # type: ignore[override]
        return self._weight_names[0]

    @checks_keywords()
    def __init__(self, num_groups: int, in_features: int, out_features: int, *, bias: bool = True, device: Union[torch.device, str, None] = None,
                 dtype: Optional[torch.dtype] = None, rng_state_tracker_function: Optional[Callable] = None, accumulate_into_main_grad: bool = False,
                 single_grouped_weight: bool = False, single_grouped_bias: bool = False, delay_wgrad_compute: bool = False,
                 scale_bias: bool = False) -> None:
        scales = bool(scale_bias and bias)
        grouped_linear.GroupedLinear.__init__(self, num_groups, in_features, out_features, fuse_wgrad_accumulation=accumulate_into_main_grad,
                                              get_rng_state_tracker=rng_state_tracker_function, init_method=_init, bias=bias, return_bias=scales,
                                              params_dtype=dtype, device=device, delay_wgrad_compute=delay_wgrad_compute,
                                              single_grouped_weight=single_grouped_weight, single_grouped_bias=single_grouped_bias)
        for name in [name for name in self._parameters if name.startswith("bias")]:  # optimizer states depend on the order of parameters
            self._parameters[name] = self._parameters.pop(name)
        self.num_groups, self._scale_bias = num_groups, scales
        self.num_extra_inputs = 2 if scales else 1
        self._open_channels()

    def _compute(self, x: torch.Tensor, splits: torch.Tensor, scales: Optional[torch.Tensor] = None, output: Optional[torch.Tensor] = None,
                 grad_input: Optional[torch.Tensor] = None) -> Result:
        if scales is not None and output is not None:
            raise refuse("GroupedLinear", "output", "a tensor", "with scale_bias the biases are added to a result of its own; leave it out")
        y = grouped_linear.GroupedLinear.forward(self, self._in_own_dtype(x), splits, out=output, dgrad_out=grad_input)
        return (y if scales is None else self._with_scaled_biases(*y, splits, scales)), ()

    def _with_scaled_biases(self, y: torch.Tensor, biases: list, splits: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        rows = y.numel() // self.out_features
        if scales.numel() != rows:
            raise InvalidArgument(f"GroupedLinear: the factors of biases have shape {tuple(scales.shape)}; the input has {rows} rows")
        own = torch.stack(biases).float().repeat_interleave(splits.to(y.device), 0, output_size=rows) * scales.float().view(-1, 1)
        return (y.float() + own.view(y.shape)).to(y.dtype)
