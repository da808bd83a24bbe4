"""Optimizers that update all parameters of a group in one te-fl call, and the underlying functions on lists of tensors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any, Optional

import torch
from torch.optim.optimizer import Optimizer, required

from te_fl import _native, multi_tensor, ops
from te_fl.errors import InvalidArgument, Unsupported
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor, address_of
from te_fl.pytorch.fp8.shards import write_all
from te_fl.pytorch.optimizers.states import MOMENTS, States, is_own_master
from te_fl.pytorch.optimizers.states import local as _local
from te_fl.pytorch.runtime.refuse import checks_keywords

__all__ = ["FusedAdam", "FusedSGD", "MultiTensorApply", "multi_tensor_adam", "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master",
           "multi_tensor_adam_fp8", "multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale", "multi_tensor_scale_tensor", "multi_tensor_sgd",
           "multi_tensor_unscale_l2norm"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _float32(param: torch.Tensor) -> torch.Tensor:
    """The parameter's values in FP32; a copy if it holds FP8 codes or 16-bit values. A DTensor gives a DTensor."""
    param = param.detach()
    local = _local(param)
    if not isinstance(local, Float8Tensor):
        return param.float()
    values = local.dequantize(dtype=torch.float32)
    if local is param:
        return values
    whole = torch.empty_like(param, dtype=torch.float32)
    _local(whole).copy_(values)
    return whole


def _check_parameter(optimizer: str, param: torch.Tensor) -> None:
    if param.dtype not in _FLOATS:
        raise Unsupported(f"{optimizer}: a parameter has dtype {param.dtype}; it is float32, float16 or bfloat16")
    if not _local(param).is_contiguous():
        raise Unsupported(f"{optimizer}: a parameter of shape {tuple(param.shape)} is not contiguous; give param.contiguous()")


class _GroupedCalls:
    """Groups tensors into calls. Tensors of one call agree in device, in the dtypes of parameter and gradient, and in properties that the caller
    adds.

    A parameter of FP8 codes is updated through FP32 values (its master weight if it has one), and write_codes() quantises the result.
    """

    def __init__(self, optimizer: str):
        self._optimizer, self._rows, self._codes = optimizer, {}, []

    def add(self, param: torch.Tensor, grad: torch.Tensor, *rest: torch.Tensor, master: Optional[torch.Tensor] = None, key: Any = None) -> None:
        if grad.is_sparse:
            raise Unsupported(f"{self._optimizer}: sparse gradients are not supported; give the embedding sparse=False")
        grad = _local(grad)
        if not grad.is_contiguous():
            grad = grad.contiguous()
        param, master = _local(param), None if master is None else _local(master)
        if isinstance(param, Float8Tensor):
            values = _float32(param) if master is None else master
            self._codes.append((param, values))
            param, master = values, None
        if param.numel() == 0:  # this rank's empty shard: the parameter has fewer rows than there are ranks
            return
        if master is not None:
            rest = (*rest, master)
        self._rows.setdefault((param.device, param.dtype, grad.dtype, master is not None, key), []).append((grad, param, *rest))

    def __iter__(self):
        for (device, *_, key), rows in self._rows.items():
            yield device, key, [list(column) for column in zip(*rows)]

    def write_codes(self) -> None:
        write_all([(param._codes, values) for param, values in self._codes])
        torch.autograd.graph.increment_version([param for param, _ in self._codes])


def _check_number(optimizer: str, name: str, value: Any, rule: str = "0 or more", below: float = math.inf) -> None:
    """Checks a default option as PyTorch's optimizers do. Values that a scheduler or a parameter group sets later are not checked."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise InvalidArgument(f"{optimizer}: {name} is a tensor of {value.numel()} elements; it has one")
    if isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
        raise TypeError(f"{optimizer}: {name} is {value!r}; it is a number")
    number = float(value)
    if not (0.0 <= number < below or number == below == math.inf):
        raise InvalidArgument(f"{optimizer}: {name} is {number}; it is {rule}")


class _Optimizer(Optimizer):
    """Common base with Transformer Engine's zero_grad, which sets gradients to None by default."""

    set_grad_none: Optional[bool] = None
    _kept: tuple = ("set_grad_none",)  # attributes that are copied and pickled in addition to those of PyTorch's optimizers

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in self._kept if name in self.__dict__}}

    def _deprecated_set_grad_none(self, value: Optional[bool]) -> None:
        self.set_grad_none = value
        if value is not None:
            warnings.warn(f"{type(self).__name__}: set_grad_none is deprecated; give zero_grad() set_to_none", DeprecationWarning)

    def zero_grad(self, set_to_none: Optional[bool] = None) -> None:
        if self.set_grad_none is not None:
            if set_to_none not in (None, self.set_grad_none):
                raise InvalidArgument(f"zero_grad: set_to_none={set_to_none}, but the optimizer was made with "
                                      f"set_grad_none={self.set_grad_none}; leave one out")
            set_to_none = self.set_grad_none
        super().zero_grad(set_to_none=set_to_none is not False)


def _check_state_dtypes(capturable: bool, master_weights: bool, master: torch.dtype, first: torch.dtype, second: torch.dtype, remainders: bool) -> None:
    if master_weights and master not in (torch.float32, torch.float16):
        raise InvalidArgument(f"FusedAdam: master_weight_dtype is {master}; it is torch.float32 or torch.float16")
    for name, dtype in (("exp_avg_dtype", first), ("exp_avg_sq_dtype", second)):
        if dtype not in (*_FLOATS, torch.uint8):
            raise InvalidArgument(f"FusedAdam: {name} is {dtype}; it is torch.float32, float16, bfloat16, or uint8 for FP8")
    if not capturable:
        return
    if (first, second) not in ((torch.float32,) * 2, (torch.bfloat16,) * 2):
        raise InvalidArgument(f"FusedAdam: capturable=True with exp_avg_dtype={first} and exp_avg_sq_dtype={second}; both are float32, or both bfloat16")
    if master_weights and (master is not torch.float32 or remainders):
        raise InvalidArgument("FusedAdam: capturable=True requires whole master weights in float32; leave master_weight_dtype and "
                              "store_param_remainders out")


def _with_group_steps(state_dict: dict, defaults: dict) -> dict:
    """Adds each group's step count to a state_dict of PyTorch's Adam, which counts steps for each parameter."""
    state, groups = {number: dict(entry) for number, entry in state_dict["state"].items()}, [dict(group) for group in state_dict["param_groups"]]
    for group in groups:
        for option in ("amsgrad", "maximize"):
            if group.get(option):
                raise Unsupported(f"FusedAdam: the state_dict is of an optimizer with {option}=True, which FusedAdam has not; train on with that optimizer")
        counted = {int(state[number].pop("step")) for number in group["params"] if "step" in state.get(number, ())}
        if len(counted) > 1:
            raise InvalidArgument(f"FusedAdam: the parameters of a group of the state_dict have made {sorted(counted)} steps, and FusedAdam counts those of "
                                  "a group; give parameters with other numbers groups of their own")
        if counted:
            group.setdefault("step", counted.pop())
        group.setdefault("bias_correction", defaults["bias_correction"])
    return {**state_dict, "state": state, "param_groups": groups}


class FusedAdam(_Optimizer):
    """Adam, or AdamW with adam_w_mode (the default), for float32, float16 and bfloat16 parameters.

    master_weights: 16-bit and FP8 parameters are copies of FP32 master weights in the optimizer's state; an FP32 parameter is its own master_param.
    Without master weights, a step on FP8 codes rounds the new values to FP8, and small updates are lost. capturable: step count, learning rate and
    the skip flag (grad_scaler) are read from device memory, so a CUDA graph can capture the step. use_decoupled_grad: gradients are read from
    param.decoupled_grad.

    The state consists of exp_avg, exp_avg_sq and master_param, in FP32 unless exp_avg_dtype, exp_avg_sq_dtype (float16, bfloat16, or uint8 for FP8)
    or master_weight_dtype (float16) say otherwise; float16 and FP8 states have a scale for each tensor. A step computes in FP32 and rounds each new
    value once; state_dict() contains FP32 values. store_param_remainders: with FP32 master weights, the master_param of a BF16 parameter holds the
    INT16 remainders of the master weight, which halves the memory. capturable requires FP32 master weights, and moments that are both FP32 or both
    BF16.
    """

    _kept = ("adam_w_mode", "capturable", "master_weights", "use_decoupled_grad", "master_weight_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
             "store_param_remainders", "_states", "_step_supports_amp_scaling", *_Optimizer._kept)

    @checks_keywords()
    def __init__(self, params: Iterable[torch.nn.Parameter | dict], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False, *, bias_correction: bool = True, adam_w_mode: bool = True,
                 capturable: bool = False, master_weights: bool = False, master_weight_dtype: torch.dtype = torch.float32,
                 exp_avg_dtype: torch.dtype = torch.float32, exp_avg_sq_dtype: torch.dtype = torch.float32, use_decoupled_grad: bool = False,
                 store_param_remainders: bool = False, set_grad_none: Optional[bool] = None) -> None:
        if amsgrad:
            raise Unsupported("FusedAdam: amsgrad=True is not supported; leave it out")
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            _check_number("FusedAdam", name, value)
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise InvalidArgument(f"FusedAdam: betas is {betas!r}; it is a pair, the decay of exp_avg and that of exp_avg_sq")
        for i, beta in enumerate(betas):
            _check_number("FusedAdam", f"betas[{i}]", beta, "0 or more and less than 1", 1.0)
        _check_state_dtypes(capturable, master_weights, master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, store_param_remainders)
        if capturable and not isinstance(lr, torch.Tensor):
            lr = torch.tensor(lr, dtype=torch.float32, device="cpu")
        super().__init__(params, {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode, self.capturable = 1 if adam_w_mode else 0, capturable
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.master_weight_dtype, self.exp_avg_dtype, self.exp_avg_sq_dtype = master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype
        self.store_param_remainders = bool(store_param_remainders and master_weights and master_weight_dtype is torch.float32)
        self._states = States(master_weight_dtype if master_weights else torch.float32, exp_avg_dtype, exp_avg_sq_dtype, self.store_param_remainders)
        self._deprecated_set_grad_none(set_grad_none)
        if capturable:
            self._step_supports_amp_scaling = True

    @staticmethod
    def _device(group: dict) -> torch.device:
        return group["params"][0].device if group["params"] else torch.device("cpu")

    def zero_grad(self, set_to_none: Optional[bool] = None) -> None:
        if not self.use_decoupled_grad:
            return super().zero_grad(set_to_none)
        for group in self.param_groups:
            for param in group["params"]:
                if set_to_none is not False:
                    param.decoupled_grad = None
                elif getattr(param, "decoupled_grad", None) is not None:
                    param.decoupled_grad.zero_()

    def initialize_state(self, param: torch.Tensor, store_param_remainders: Optional[bool] = None) -> None:
        """Creates a parameter's state, as the first step does. store_param_remainders: must equal the constructor's value."""
        if store_param_remainders not in (None, self._states.has_remainders(param, "master_param")):
            raise InvalidArgument(f"FusedAdam: initialize_state: store_param_remainders={store_param_remainders} for a parameter of {param.dtype}; the "
                                  f"optimizer was made with store_param_remainders={self.store_param_remainders}, which counts for bfloat16")
        _check_parameter("FusedAdam", param)
        state = self.state[param]
        for name in MOMENTS:
            state[name] = self._states.empty(param, name)
        if self._has_master(param):
            self._make_master(param)
        elif self.master_weights:
            state["master_param"] = param.detach()

    def _make_master(self, param: torch.Tensor) -> None:
        self.state[param]["master_param"] = master = self._states.empty(param, "master_param")
        self._states.write(param, "master_param", master, _float32(param))

    def _has_master(self, param: torch.Tensor) -> bool:
        return self.master_weights and not is_own_master(param)

    def _is_master(self, param: torch.Tensor) -> bool:
        """True if the state's master_param shares the parameter's memory."""
        return self.master_weights and is_own_master(param)

    def get_unscaled_state(self, param: torch.Tensor, state_name: str, skip_unscale: bool = False) -> torch.Tensor:
        """Returns the state 'exp_avg', 'exp_avg_sq' or 'master_param' of a parameter, unscaled in FP32; for remainders, the INT16 tensor itself.
        skip_unscale: returns bfloat16 moments unconverted.
        """
        state = param if state_name == "master_param" and self._is_master(param) else self.state[param][state_name]
        own, dtype = _local(state).detach(), self._states.dtype_of(param, state_name)
        if skip_unscale and dtype is not torch.bfloat16:
            raise InvalidArgument(f"FusedAdam: get_unscaled_state: skip_unscale=True, and {state_name} is {dtype}; it requires torch.bfloat16")
        return own if skip_unscale or dtype is torch.int16 else self._states.read(param, state_name, own)

    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Sets one of 'exp_avg', 'exp_avg_sq' and 'master_param' of a parameter from values in the form of get_unscaled_state(). The master_param of
        an FP32 parameter stays the parameter itself: Transformer Engine's checkpoints contain stale values there.
        """
        if state_name == "master_param" and self._is_master(param):
            self.state[param][state_name] = param.detach()
            return
        remainders = self._states.has_remainders(param, state_name)
        if remainders != (unscaled_state.dtype is torch.int16):
            raise InvalidArgument(f"FusedAdam: {state_name} is {unscaled_state.dtype}, and the optimizer keeps "
                                  f"{'INT16 remainders' if remainders else 'values'} of it; give store_param_remainders as when it was saved")
        if state_name not in self.state[param]:
            self.state[param][state_name] = self._states.empty(param, state_name)
        state, values = self.state[param][state_name], _local(unscaled_state).to(param.device)
        if remainders:
            _local(state).copy_(values)
        else:
            self._states.write(param, state_name, state, values.float())

    def state_dict(self) -> dict:
        """As PyTorch's state_dict(), with states in the form of get_unscaled_state()."""
        saved = super().state_dict()
        if self._states.plain and not self.master_weights:
            return saved
        numbers = {number: param for group, own in zip(saved["param_groups"], self.param_groups) for number, param in zip(group["params"], own["params"])}
        for number, entry in saved["state"].items():
            saved["state"][number] = {name: self._whole(numbers[number], name, value) for name, value in entry.items()}
        return saved

    def _whole(self, param: torch.Tensor, name: str, state: torch.Tensor) -> torch.Tensor:
        """A state for state_dict(). A DTensor gives a DTensor."""
        values = self.get_unscaled_state(param, name)
        if name == "master_param" and self._is_master(param):
            values = values.clone()  # a copy, so that writes to the dict's tensors do not change the parameter
        if _local(state) is state:
            return values
        whole = torch.empty_like(state, dtype=values.dtype)
        _local(whole).copy_(values)
        return whole

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a state_dict of this optimizer, of Transformer Engine's, or of PyTorch's Adam and AdamW. PyTorch's own method would round the state
        to the parameters' dtype.
        """
        state_dict = _with_group_steps(state_dict, self.defaults)
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved, params):
            entry = state_dict["state"].get(number)
            if entry is None:
                continue
            self.state[param] = {}
            for name, value in entry.items():
                if value is not None and (name != "master_param" or self.master_weights):
                    self.set_scaled_state(param, name, value if value.dtype is torch.int16 else value.float())
            if self._has_master(param) and "master_param" not in self.state[param]:
                self._make_master(param)  # the optimizer that saved the state had no master weights
        for group in self.param_groups:
            if "step" in group and self.capturable:
                group["step"] = torch.as_tensor(group["step"], dtype=torch.int64, device=self._device(group)).reshape(1)
            elif "step" in group:
                group["step"] = int(group["step"])

    def _skip_flags(self, grad_scaler) -> dict:
        """Unscales the gradients. Returns for each device an int32 flag that says whether the step is skipped."""
        if grad_scaler is None:
            return {}
        if not self.capturable:
            raise Unsupported("FusedAdam: step(grad_scaler=..) needs capturable=True; else call grad_scaler.step(optimizer)")
        if self.use_decoupled_grad:
            raise Unsupported("FusedAdam: step(grad_scaler=..) with use_decoupled_grad=True is not supported: a scaler unscales param.grad")
        if grad_scaler._per_optimizer_states[id(self)]["stage"].name == "READY":
            grad_scaler.unscale_(self)
        found = grad_scaler._per_optimizer_states[id(self)]["found_inf_per_device"]
        return {device: (value != 0).to(torch.int32).reshape(1) for device, value in found.items()}

    def _advance(self, group: dict, skip: dict) -> None:
        # A group without parameters counts steps too, since its checkpoint may be loaded on a rank that has parameters in the group.
        if not self.capturable:
            group["step"] = group.get("step", 0) + 1
            return
        device = self._device(group)
        if not isinstance(group["lr"], torch.Tensor) or group["lr"].device != device:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        if "step" not in group:
            group["step"] = torch.zeros(1, dtype=torch.int64, device=device)
        group["step"] += 1 if device not in skip else 1 - skip[device]

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        """Performs one step. grad_scaler: with capturable, unscales the gradients, and skips the step on the device if one is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skip = self._skip_flags(grad_scaler)
        for group in self.param_groups:
            self._advance(group, skip)
            calls, rounded = _GroupedCalls("FusedAdam"), []
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if grad is None:
                    continue
                if not self.state[param]:
                    self.initialize_state(param)
                elif self._is_master(param):
                    self._follow(param)
                self._add(calls, param, grad, rounded)
            for device, _, lists in calls:
                self._update(group, lists, skip.get(device))
            calls.write_codes()
            for each in rounded:
                self._states.write(*each)
        _native.step_boundary()
        return loss

    def _follow(self, param: torch.Tensor) -> None:
        """Updates master_param after the parameter's memory was replaced, for example by Module.to()."""
        state = self.state[param]
        if "master_param" not in state or address_of(_local(state["master_param"])) != address_of(_local(param)):
            state["master_param"] = param.detach()

    def _add(self, calls: _GroupedCalls, param: torch.Tensor, grad: torch.Tensor, rounded: list) -> None:
        """Adds a parameter to a call, and appends to `rounded` the state values that must be written back after the call."""
        state = self.state[param]
        if self._is_master(param):
            state = {name: state[name] for name in MOMENTS}
        if self._states.plain:
            return calls.add(param, grad, _local(state["exp_avg"]), _local(state["exp_avg_sq"]), master=state.get("master_param"))
        values = {name: self._states.read(param, name, t) for name, t in state.items()}
        rounded += [(param, name, state[name], t) for name, t in values.items() if self._states.dtype_of(param, name) is not torch.float32]
        master = values.get("master_param")
        if master is not None and self._states.has_remainders(param, "master_param"):  # the weight is split into the parameter and its remainder
            torch.autograd.graph.increment_version([param])
            return calls.add(master, grad, values["exp_avg"], values["exp_avg_sq"])
        calls.add(param, grad, values["exp_avg"], values["exp_avg_sq"], master=master)

    def _update(self, group: dict, lists: list, skip: Optional[torch.Tensor]) -> None:
        options = {"lr_tensor": group["lr"].reshape(1), "step_tensor": group["step"]} if self.capturable else \
            {"lr": float(group["lr"]), "step": group["step"]}
        if len(lists) > 4:
            options["master_params"] = lists[4]
        if skip is not None:
            options["noop_flag"] = skip
        ops.multi_tensor_adam(grads=lists[0], params=lists[1], exp_avgs=lists[2], exp_avg_sqs=lists[3], beta1=group["betas"][0],
                              beta2=group["betas"][1], epsilon=group["eps"], weight_decay=group["weight_decay"],
                              mode="adamw" if self.adam_w_mode else "l2", bias_correction=bool(group["bias_correction"]), **options)
        torch.autograd.graph.increment_version(lists[1])


class FusedSGD(_Optimizer):
    """Stochastic gradient descent with momentum, for float32, float16 and bfloat16 parameters; momentum_buffer is FP32.

    wd_after_momentum: adds the weight decay after the momentum instead of before.
    """

    _kept = ("wd_after_momentum", "materialize_master_grads", *_Optimizer._kept)

    @checks_keywords()
    def __init__(self, params: Iterable[torch.nn.Parameter | dict], lr: float | Any = required, momentum: float = 0.0,
                 dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, *, wd_after_momentum=False,
                 materialize_master_grads=True, set_grad_none: Optional[bool] = None):
        for name, value in (("lr", 0.0 if lr is required else lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            _check_number("FusedSGD", name, value)
        if nesterov and (momentum <= 0.0 or dampening != 0.0):
            raise InvalidArgument(f"FusedSGD: nesterov=True needs momentum above 0 and no dampening; they are {momentum} and {dampening}")
        if not materialize_master_grads:
            raise Unsupported("FusedSGD: materialize_master_grads=False is not supported, which Apex's own AMP would need; leave it out")
        super().__init__(params, {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
                                  "nesterov": nesterov})
        self.wd_after_momentum, self.materialize_master_grads = wd_after_momentum, True
        self._deprecated_set_grad_none(set_grad_none)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("nesterov", False)

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a state_dict of this optimizer or of Transformer Engine's. PyTorch's own method would round the state to the parameters' dtype."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved, params):
            buffer = state_dict["state"].get(number, {}).get("momentum_buffer")
            if buffer is not None:
                self.state[param]["momentum_buffer"] = buffer.detach().to(param.device, torch.float32, copy=True)

    def get_momentums(self, params: list) -> tuple[list, bool]:
        """Returns the parameters' momentum buffers, creating missing ones, and whether all were missing."""
        new = [param for param in params if "momentum_buffer" not in self.state[param]]
        for param in new:
            _check_parameter("FusedSGD", param)
            self.state[param]["momentum_buffer"] = torch.zeros_like(param, dtype=torch.float32, memory_format=torch.contiguous_format)
        return [self.state[param]["momentum_buffer"] for param in params], len(new) == len(params)

    @torch.no_grad()
    def step(self, closure=None):
        """Performs one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            calls = _GroupedCalls("FusedSGD")
            for param in group["params"]:
                if param.grad is None:
                    continue
                (momentum,), first = self.get_momentums([param])
                calls.add(param, param.grad, _local(momentum), key=first)
            for _, first, (grads, params, momentums) in calls:
                ops.multi_tensor_sgd(grads=grads, params=params, momentums=momentums, lr=float(group["lr"]), momentum=group["momentum"],
                                     weight_decay=group["weight_decay"], dampening=group["dampening"], nesterov=group["nesterov"],
                                     first_run=first, wd_after_momentum=self.wd_after_momentum)
                torch.autograd.graph.increment_version(params)
            calls.write_codes()
        _native.step_boundary()
        return loss


class MultiTensorApply:
    """Calls a function on lists of tensors, leaving out empty tensors. chunk_size is passed to the function; te-fl's functions ignore it."""

    def __init__(self, chunk_size):
        self.chunk_size = chunk_size

    def __call__(self, op, noop_flag_buffer, tensor_lists, *args):
        lengths = [len(tensors) for tensors in tensor_lists]
        if len(set(lengths)) > 1:
            raise InvalidArgument(f"MultiTensorApply: the lists have {lengths} tensors; they go together, one by one")
        rows = [row for row in zip(*tensor_lists) if row[0].numel() > 0]
        if not rows:
            return None
        return op(self.chunk_size, noop_flag_buffer, [[_local(t) for t in column] for column in zip(*rows)], *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list, scale: float) -> None:
    """tensor_lists[1] = scale * tensor_lists[0]; noop_flag, int32, is set to 1 if a value is not finite."""
    ops.multi_tensor_scale(inputs=tensor_lists[0], outputs=tensor_lists[1], noop_flag=noop_flag, scale=float(scale))


def _norms(tensor_lists: list, per_tensor: Optional[bool]) -> dict:
    first = tensor_lists[0][0]
    norms = {"norm": torch.zeros(1, dtype=torch.float32, device=first.device)}
    if per_tensor:
        norms["per_tensor_norms"] = torch.zeros(len(tensor_lists[0]), dtype=torch.float32, device=first.device)
    return norms


def multi_tensor_l2norm(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list, per_tensor: Optional[bool] = None) -> tuple:
    """Returns the Euclidean norm of all tensors, [1], and with per_tensor the norm of each (otherwise an empty tensor)."""
    norms = _norms(tensor_lists, per_tensor)
    ops.multi_tensor_l2norm(inputs=tensor_lists[0], **norms)
    return norms["norm"], norms.get("per_tensor_norms", norms["norm"].new_empty(0))


def multi_tensor_unscale_l2norm(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list, inv_scale: torch.Tensor,
                                per_tensor: Optional[bool] = None) -> tuple:
    """As multi_tensor_l2norm for the tensors times inv_scale; the tensors are unchanged."""
    norms = _norms(tensor_lists, per_tensor)
    ops.multi_tensor_unscale_l2norm(inputs=tensor_lists[0], inv_scale=inv_scale, **norms)
    return norms["norm"], norms.get("per_tensor_norms", norms["norm"].new_empty(0))


def multi_tensor_adam(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list, lr: float, beta1: float, beta2: float, epsilon: float,
                      step: int, mode: int, bias_correction: int, weight_decay: float) -> None:
    """One step of Adam on the lists [gradients, parameters, exp_avg, exp_avg_sq], optionally followed by FP32 master weights. mode: 0 is L2
    regularisation, 1 is AdamW.
    """
    masters = {"master_params": tensor_lists[4]} if len(tensor_lists) > 4 else {}
    ops.multi_tensor_adam(grads=tensor_lists[0], params=tensor_lists[1], exp_avgs=tensor_lists[2], exp_avg_sqs=tensor_lists[3],
                          noop_flag=noop_flag, lr=lr, beta1=beta1, beta2=beta2, epsilon=epsilon, step=step,
                          mode="adamw" if mode else "l2", bias_correction=bool(bias_correction), weight_decay=weight_decay, **masters)
    torch.autograd.graph.increment_version(tensor_lists[1])


def multi_tensor_adam_capturable(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list, lr: torch.Tensor, beta1: float, beta2: float,
                                 epsilon: float, step: torch.Tensor, mode: int, bias_correction: int, weight_decay: float,
                                 inv_scale: torch.Tensor) -> None:
    """As multi_tensor_adam without master weights. The gradients are multiplied in place by inv_scale. lr, step and inv_scale are device tensors."""
    multi_tensor.multi_tensor_adam_capturable(chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay,
                                              inv_scale)
    torch.autograd.graph.increment_version(tensor_lists[1])


def multi_tensor_adam_capturable_master(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list, lr: torch.Tensor, beta1: float, beta2: float,
                                        epsilon: float, step: torch.Tensor, mode: int, bias_correction: int, weight_decay: float,
                                        inv_scale: torch.Tensor) -> None:
    """As multi_tensor_adam_capturable, with FP32 master weights as the fifth list."""
    multi_tensor.multi_tensor_adam_capturable_master(chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, mode, bias_correction,
                                                     weight_decay, inv_scale)
    torch.autograd.graph.increment_version(tensor_lists[1])


def multi_tensor_adam_fp8(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list, lr: float, beta1: float, beta2: float, epsilon: float,
                          step: int, mode: int, bias_correction: int, weight_decay: float, fp8_dtype: Any) -> None:
    """As multi_tensor_adam, on the lists [gradients, uint8 codes of the parameters, exp_avg, exp_avg_sq, FP32 weights, scales, amaxes, scale_invs].
    fp8_dtype: a DType of te_fl.pytorch.runtime.constants.
    """
    multi_tensor.multi_tensor_adam_fp8(chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, fp8_dtype)
    torch.autograd.graph.increment_version(tensor_lists[1])


def multi_tensor_scale_tensor(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list, scale: torch.Tensor) -> None:
    """As multi_tensor_scale, with the factor in device memory."""
    multi_tensor.multi_tensor_scale_tensor(chunk_size, noop_flag, tensor_lists, scale)


def multi_tensor_sgd(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list, wd: float, momentum: float, dampening: float, lr: float,
                     nesterov: bool, first_run: bool, wd_after_momentum: bool, scale: float) -> None:
    """One step of SGD on the lists [gradients, parameters, momentums], optionally followed by 16-bit copies of the parameters."""
    copies = {"param_copies": tensor_lists[3]} if len(tensor_lists) > 3 else {}
    ops.multi_tensor_sgd(grads=tensor_lists[0], params=tensor_lists[1], momentums=tensor_lists[2], noop_flag=noop_flag, lr=lr,
                         weight_decay=wd, momentum=momentum, dampening=dampening, scale=scale, nesterov=nesterov, first_run=first_run,
                         wd_after_momentum=wd_after_momentum, **copies)
    torch.autograd.graph.increment_version(tensor_lists[1])
