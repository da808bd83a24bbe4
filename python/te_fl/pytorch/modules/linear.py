"""Linear layers: y = x A^T + b, with or without a normalisation before."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple, Union

import torch

from te_fl.pytorch.modules.base import TransformerEngineBaseModule, default_init, parameter_dtype
from te_fl.pytorch.runtime import refuse as rules
from te_fl.pytorch.runtime.device import device_of
from te_fl.pytorch.runtime.dtypes import DTYPE_NAMES
from te_fl.pytorch.runtime.refuse import checks_keywords, only, refuse


_LINEAR, _LAYERNORM_LINEAR = ("linear", None), ("layernorm_linear", None)  # the keys of the modules' own layers


def _check_forward(where: str, fp8_output: Any, fp8_grad: Any) -> None:
    only(where, ("fp8_output", bool(fp8_output), False, "outputs are of the activation dtype"),
         ("fp8_grad", bool(fp8_grad), False, "gradients of inputs are of the input's dtype"))


class _Product(TransformerEngineBaseModule):
    """Shared by Linear and LayerNormLinear: the weight, the bias, and their parts."""

    _sites = ("fp8",)

    def _set_up(self, in_features, out_features, fuse_wgrad_accumulation, get_rng_state_tracker, rng_tracker_name, init_method, bias,
                return_bias, params_dtype, parallel_mode, parameters_split, device) -> None:
        where = type(self).__name__
        self.in_features, self.out_features = int(in_features), int(out_features)
        self.params_dtype = parameter_dtype(params_dtype, where)
        self.use_bias, self.return_bias = bool(bias), bool(return_bias)
        self.apply_bias = self.use_bias and not self.return_bias
        self.fuse_wgrad_accumulation = bool(fuse_wgrad_accumulation)
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        self.parallel_mode, self.tp_size = parallel_mode, 1
        self._parts = self._split_names(parameters_split, self.out_features, "output features")
        self.weight_names = self._add_split("weight", self._parts, (self.in_features,), device, self.params_dtype,
                                            init_method or default_init, get_rng_state_tracker)
        self.bias_names = [prefix + "bias" for prefix, _ in self._parts]
        if self.use_bias:
            self._add_split("bias", self._parts, (), device, self.params_dtype, torch.nn.init.zeros_)
        else:
            for name in self.bias_names:
                setattr(self, name, torch.empty(0, dtype=self.params_dtype, device=device))
        self._own_names = self.weight_names + (self.bias_names if self.use_bias else [])
        norm = ("layer_norm_weight", "layer_norm_bias")
        self._read_names = tuple([n for n in norm if n in self._parameters] + self._own_names)  # those of _own()

    def _own(self) -> Tuple[torch.Tensor, ...]:
        return self._tensors(self._own_names)

    def _width(self, kind: str) -> int:
        return self.out_features if kind == self._kind else -1

    def _product_options(self) -> dict:
        options = {"in_features": self.in_features, "out_features": self.out_features, "bias": self.use_bias,
                   "return_bias": self.return_bias, "param_dtype": DTYPE_NAMES[self.params_dtype]}
        if self._parts[0][0]:
            options["parameters_split"] = [(prefix[:-1], rows) for prefix, rows in self._parts]
        return options

    def _result(self, output: torch.Tensor):
        if not self.return_bias:
            return output
        if not self.use_bias:
            return output, None
        bias = torch.cat([getattr(self, n) for n in self.bias_names]) if len(self.bias_names) > 1 else getattr(self, self.bias_names[0])
        return output, bias.to(output.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"


class Linear(_Product):
    """y = x A^T + b, in FP8 inside autocast.

    in_features, out_features: of x and y. init_method: called on the weight; None: normal with mean 0 and standard deviation 0.023.
    return_bias: the bias is returned and not added. parameters_split: names, or names with rows, of the parts that the weight and the bias
    are registered as. params_dtype: None is torch's default dtype. device: None is cuda where there is one, else cpu.
    fuse_wgrad_accumulation: the weight's gradient is added to weight.main_grad. delay_wgrad_compute: the weight's gradient, and without FP8
    the bias's, is computed by backward_dw(), to be called after each backward. get_rng_state_tracker: a function whose result's fork() the
    initialisation runs in. tp_group and tp_size are refused unless they say one rank; sequence_parallel, the ub_ arguments and
    parallel_mode then have no effect, as in Transformer Engine.
    """

    _kind = "linear"

    @checks_keywords()
    def __init__(self, in_features: int, out_features: int, sequence_parallel: bool = False, fuse_wgrad_accumulation: bool = False,
                 tp_group: Optional[Any] = None, tp_size: int = 1, get_rng_state_tracker: Optional[Callable] = None,
                 rng_tracker_name: Optional[str] = None, init_method: Optional[Callable] = None, bias: bool = True,
                 return_bias: bool = False, params_dtype: Optional[torch.dtype] = None, parallel_mode: Optional[str] = None,
                 parameters_split: Optional[Union[Tuple[str, ...], Dict[str, int]]] = None, device: Union[torch.device, str, None] = None,
                 ub_overlap_ag: bool = False, ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = False,
                 ub_bulk_wgrad: bool = False, ub_name: Optional[str] = None, delay_wgrad_compute: bool = False,
                 symmetric_ar_type: Optional[str] = None, save_original_input: bool = False, name: Optional[str] = None) -> None:
        super().__init__(name)
        rules.check("Linear", locals())
        self._set_up(in_features, out_features, fuse_wgrad_accumulation, get_rng_state_tracker, rng_tracker_name, init_method, bias,
                     return_bias, params_dtype, parallel_mode, parameters_split, device_of(device))
        # Backward reads what it needs of the input, quantised or not; keeping the original as well would change no result.
        self.save_original_input = save_original_input
        self.reset_parameters(defer_init=self.weight_device().type == "meta")
        self._delay_wgrad(delay_wgrad_compute, ub_bulk_wgrad, self._own_names)

    def weight_device(self) -> torch.device:
        return getattr(self, self.weight_names[0]).device

    def _options(self) -> dict:
        return self._product_options()

    def forward(self, inp: torch.Tensor, is_first_microbatch: Optional[bool] = None, fp8_output: Optional[bool] = False,
                fp8_grad: Optional[bool] = False):
        """inp [..., in_features] -> [..., out_features].

        is_first_microbatch: True quantises the weight and keeps it, False
        reuses what was kept unless the weight has changed since.
        """
        if fp8_output or fp8_grad:
            _check_forward("Linear", fp8_output, fp8_grad)
        output = self._forward(_LINEAR, inp, is_first_microbatch, self.fuse_wgrad_accumulation)
        return self._result(output) if self.return_bias else output


class LayerNormLinear(_Product):
    """y = norm(x) A^T + b; in FP8 the normalisation writes the product's quantised input.

    normalization: 'LayerNorm' or 'RMSNorm'. zero_centered_gamma: the norm's weight is stored minus 1. return_layernorm_output: the
    normalised input is returned as well. The other arguments are Linear's.
    """

    _kind = "layernorm_linear"
    _remade = frozenset(("eps", "zero_centered_gamma"))

    @checks_keywords()
    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, sequence_parallel: bool = False,
                 fuse_wgrad_accumulation: bool = False, tp_group: Optional[Any] = None, tp_size: int = 1,
                 get_rng_state_tracker: Optional[Callable] = None, init_method: Optional[Callable] = None, bias: bool = True,
                 normalization: str = "LayerNorm", return_bias: bool = False, params_dtype: Optional[torch.dtype] = None,
                 parallel_mode: Optional[str] = None, return_layernorm_output: bool = False, return_layernorm_output_gathered: bool = False,
                 parameters_split: Optional[Union[Tuple[str, ...], Dict[str, int]]] = None, zero_centered_gamma: bool = False,
                 device: Union[torch.device, str, None] = None, ub_overlap_ag: bool = False, ub_overlap_rs: bool = False,
                 ub_overlap_rs_dgrad: bool = False, ub_bulk_wgrad: bool = False, ub_bulk_dgrad: bool = False, ub_name: Optional[str] = None,
                 delay_wgrad_compute: bool = False, symmetric_ar_type: Optional[str] = None, name: Optional[str] = None) -> None:
        super().__init__(name)
        rules.check("LayerNormLinear", locals())
        device = device_of(device)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, bool(zero_centered_gamma)
        # With one rank the gathered output is the output.
        self.return_layernorm_output = bool(return_layernorm_output)
        self.return_layernorm_output_gathered = bool(return_layernorm_output_gathered)
        add_norm_parameters(self, int(in_features), device, parameter_dtype(params_dtype, "LayerNormLinear"))
        self._set_up(in_features, out_features, fuse_wgrad_accumulation, get_rng_state_tracker, None, init_method, bias, return_bias,
                     params_dtype, parallel_mode, parameters_split, device)
        self.reset_parameters(defer_init=device.type == "meta")
        self._delay_wgrad(delay_wgrad_compute, ub_bulk_wgrad, self._own_names)

    def reset_layer_norm_parameters(self) -> None:
        reset_norm_parameters(self)

    def _own(self) -> Tuple[torch.Tensor, ...]:
        return (*norm_parameters(self), *super()._own())

    def _options(self) -> dict:
        return {**self._product_options(), **norm_options(self)}

    def _options_of(self, kind: str, key: Any) -> dict:
        return options_of(self, kind)

    def forward(self, inp: torch.Tensor, is_first_microbatch: Optional[bool] = None, fp8_output: Optional[bool] = False,
                fp8_grad: Optional[bool] = False):
        """inp [..., in_features] -> [..., out_features], then the bias and the normalised input as asked for."""
        if fp8_output or fp8_grad:
            _check_forward("LayerNormLinear", fp8_output, fp8_grad)
        out = self._result(self._forward(_LAYERNORM_LINEAR, inp, is_first_microbatch, self.fuse_wgrad_accumulation))
        if not self.return_layernorm_output:
            return out
        normed = normalise(self, inp)
        return (*out, normed) if self.return_bias else (out, normed)


# The normalisation in front of a product: parameters layer_norm_weight and, for LayerNorm, layer_norm_bias.


def add_norm_parameters(module, hidden_size: int, device, dtype) -> None:
    start = torch.nn.init.zeros_ if module.zero_centered_gamma else torch.nn.init.ones_
    module._add_parameter("layer_norm_weight", torch.empty(hidden_size, device=device, dtype=dtype), start)
    if module.normalization == "LayerNorm":
        module._add_parameter("layer_norm_bias", torch.empty(hidden_size, device=device, dtype=dtype), torch.nn.init.zeros_)
    else:
        module.layer_norm_bias = None


def reset_norm_parameters(module) -> None:
    with torch.no_grad():
        for name in ("layer_norm_weight", "layer_norm_bias"):
            if name in module._initialisers:
                module._initialisers[name][0](getattr(module, name))


def norm_parameters(module) -> Tuple[torch.Tensor, ...]:
    return (module.layer_norm_weight,) if module.layer_norm_bias is None else (module.layer_norm_weight, module.layer_norm_bias)


def norm_options(module) -> dict:
    return {"epsilon": module.eps, "zero_centered_gamma": module.zero_centered_gamma, "normalization": module.normalization}


def normalise(module, inp: torch.Tensor) -> torch.Tensor:
    """The normalised input in high precision, for those who want it besides the module's output."""
    kind = "layernorm" if module.normalization == "LayerNorm" else "rmsnorm"
    return module._run(module._layer(inp.device, kind), (inp,), norm_parameters(module))


def options_of(module, kind: str) -> dict:
    """The options of the module's layer, or of that of normalise()."""
    if kind == module._kind:
        return module._options()
    weight = module.layer_norm_weight
    return {"hidden_size": weight.shape[0], "epsilon": module.eps, "zero_centered_gamma": module.zero_centered_gamma,
            "param_dtype": DTYPE_NAMES[weight.dtype]}
