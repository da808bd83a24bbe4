"""Linear layers, y = x A^T + b, with an optional preceding normalisation."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NoReturn, Optional, Tuple, Union

import torch

from te_fl.pytorch.modules.base import TransformerEngineBaseModule
from te_fl.pytorch.modules.parallel import divided, mark_product
from te_fl.pytorch.modules.parameters import default_init, parameter_dtype
from te_fl.pytorch.runtime import refuse as rules
from te_fl.pytorch.runtime.device import device_of
from te_fl.pytorch.runtime.dtypes import DTYPE_NAMES
from te_fl.pytorch.runtime.refuse import checks_keywords, hides_misspelt, misspelling, only, refuse


def _check_forward(where: str, fp8_output: Any, fp8_grad: Any) -> None:
    only(where, ("fp8_output", bool(fp8_output), False, "outputs are of the activation dtype"),
         ("fp8_grad", bool(fp8_grad), False, "gradients of inputs are of the input's dtype"))


class _Product(TransformerEngineBaseModule):
    """Common base of Linear and LayerNormLinear: the weight, the bias, and their slices."""

    _sites = ("fp8",)
    _remade = frozenset(("apply_bias", "sequence_parallel"))
    # Flags for Transformer Engine's Userbuffers, which te-fl does not have.
    ub_overlap_ag_fprop = ub_overlap_rs_fprop = ub_overlap_ag_dgrad = ub_overlap_rs_dgrad = ub_bulk_dgrad = ub_bulk_wgrad = False

    def _set_up(self, in_features, out_features, fuse_wgrad_accumulation, get_rng_state_tracker, rng_tracker_name, init_method, bias,
                return_bias, params_dtype, parallel_mode, parameters_split, device) -> None:
        """Sets the attributes and registers the weight and the bias. Called after _divide()."""
        where = type(self).__name__
        parts = self._split_names(parameters_split, int(out_features), "output features")
        self.in_features, self.out_features, self._parts = self._own_part(int(in_features), int(out_features), parallel_mode, parts)
        self.params_dtype = parameter_dtype(params_dtype, where)
        self.use_bias, self.return_bias = bool(bias), bool(return_bias)
        self.apply_bias = self.use_bias and not self.return_bias
        self.fuse_wgrad_accumulation = bool(fuse_wgrad_accumulation)
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        self.parallel_mode = parallel_mode
        self._divides = self.tp_size > 1 and parallel_mode is not None
        self.parameter_split_sizes = [rows for _, rows in self._parts]
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
        self._read_names = tuple([n for n in norm if n in self._parameters] + self._own_names)

    @property
    def _adds_bias_last(self) -> bool:
        """True if the bias is added once, to the sum of the ranks' results."""
        return self._divides and self.parallel_mode == "row" and self.apply_bias

    def _own_part(self, in_features: int, out_features: int, mode: Optional[str], parts: List[Tuple[str, int]]):
        """This rank's numbers of input and output features, and its rows of each slice of the weight."""
        where, ranks = type(self).__name__, self.tp_size
        if mode == "row":
            return divided(where, "in_features", in_features, ranks), out_features, parts
        if mode != "column":
            return in_features, out_features, parts
        own = [(prefix, divided(where, f"the part {prefix[:-1]!r} of out_features" if prefix else "out_features", rows, ranks)) for prefix, rows in parts]
        return in_features, out_features // ranks, own

    def reset_parameters(self, defer_init: Optional[bool] = False) -> None:
        super().reset_parameters(bool(defer_init))
        if not defer_init:
            mark_product(self, self.weight_names, self.bias_names if self.use_bias else ())

    def _divided_forward(self, inp: torch.Tensor, first: Optional[bool]) -> torch.Tensor:
        """_forward() with this rank's shard of the weight, between the collectives of tensor parallelism."""
        if torch.compiler.is_compiling():
            self._check_compiled()
        column = self.parallel_mode == "column"
        if self._layer_moves_rows:
            if not column:
                self._check_rows(inp)
            output = self._forward(self._own_rows(inp), first, self.fuse_wgrad_accumulation)
        else:
            output = self._forward(self._into(inp) if column else inp, first, self.fuse_wgrad_accumulation)
            if not column:
                output = self._finish_output(output)
        if column:
            return output
        return output + self._whole_bias().to(output.dtype) if self._adds_bias_last else output

    def _whole_bias(self) -> torch.Tensor:
        return torch.cat([getattr(self, n) for n in self.bias_names]) if len(self.bias_names) > 1 else getattr(self, self.bias_names[0])

    def _width(self, kind: str) -> int:
        return self.out_features if kind == self._kind else -1

    def _product_options(self) -> dict:
        options = {"in_features": self.in_features, "out_features": self.out_features, "bias": self.use_bias,
                   "return_bias": self.use_bias and not self.apply_bias or self._adds_bias_last, "param_dtype": DTYPE_NAMES[self.params_dtype]}
        if self._parts[0][0]:
            options["parameters_split"] = [(prefix[:-1], rows) for prefix, rows in self._parts]
        if self._layer_moves_rows:
            options.update(parallel_mode=self.parallel_mode, **self._row_options())
        return options

    def _result(self, output: torch.Tensor):
        if not self.return_bias:
            return output
        if not self.use_bias:
            return output, None
        return output, self._whole_bias().to(output.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"


class Linear(_Product):
    """y = x A^T + b, in FP8 inside autocast.

    in_features, out_features: the sizes of the last dimension of x and of y. init_method: a function that initialises the weight in place;
    None: normal distribution with mean 0 and standard deviation 0.023. return_bias: the bias is returned instead of added.
    parameters_split: names, or names with row counts, of the slices of weight and bias that are registered as separate parameters.
    params_dtype: the dtype of the parameters; None: torch's default dtype. device: the device of the parameters; None: cuda if available,
    else cpu. fuse_wgrad_accumulation: the weight's gradient is added to weight.main_grad. delay_wgrad_compute: backward_dw(), to be called
    after each backward pass, computes the weight's gradient (without FP8 also the bias's). get_rng_state_tracker: a function that returns
    an RNG tracker; parameters are initialised inside of its fork(). tp_group, tp_size: the process group whose ranks shard the module, and
    the number of ranks if no group is given; set_tensor_parallel_group() may set the group later. parallel_mode: 'column' shards
    out_features over the ranks; 'row' shards in_features, and the ranks' partial results are summed; None: every rank has all features.
    sequence_parallel: the input of 'column' and the output of 'row' are sharded over the ranks along the first dimension. On one rank, the
    arguments of tensor parallelism and the ub_ arguments have no effect. On several ranks, the ub_ arguments are refused with
    sequence_parallel. See docs/ranks-pytorch.md.
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
        self._divide(tp_group, tp_size, sequence_parallel)
        if parallel_mode is not None:
            self._refuse_overlap(ub_overlap_ag=ub_overlap_ag, ub_overlap_rs=ub_overlap_rs, ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
                                 ub_bulk_dgrad=ub_bulk_dgrad, ub_bulk_wgrad=ub_bulk_wgrad)
        self._set_up(in_features, out_features, fuse_wgrad_accumulation, get_rng_state_tracker, rng_tracker_name, init_method, bias,
                     return_bias, params_dtype, parallel_mode, parameters_split, device_of(device))
        # The forward saves what the backward reads of the input, quantised or not. save_original_input therefore changes no result.
        self.save_original_input, self.ub_name = save_original_input, ub_name
        self.reset_parameters(defer_init=self.weight_device().type == "meta")
        self._delay_wgrad(delay_wgrad_compute, ub_bulk_wgrad, self._own_names)

    def weight_device(self) -> torch.device:
        return getattr(self, self.weight_names[0]).device

    def _options(self) -> dict:
        return self._product_options()

    @hides_misspelt
    def forward(self, inp: torch.Tensor, is_first_microbatch: Optional[bool] = None, fp8_output: Optional[bool] = False,
                fp8_grad: Optional[bool] = False, **misspelt: NoReturn):
        """Maps inp [..., in_features] to [..., out_features].

        is_first_microbatch: True quantises the weight and caches it; False reuses the cached weight unless the weight has changed since.
        """
        if misspelt:
            raise misspelling(Linear.forward, misspelt)
        if fp8_output or fp8_grad:
            _check_forward("Linear", fp8_output, fp8_grad)
        if self._divides:
            return self._result(self._divided_forward(inp, is_first_microbatch))
        output = self._forward(inp, is_first_microbatch, self.fuse_wgrad_accumulation)
        return self._result(output) if self.return_bias else output


# Helpers for a normalisation in front of a product, with parameters layer_norm_weight and, for LayerNorm, layer_norm_bias.


def add_norm_parameters(module, hidden_size: int, device, dtype) -> None:
    start = torch.nn.init.zeros_ if module.zero_centered_gamma else torch.nn.init.ones_
    module._add_parameter("layer_norm_weight", torch.empty(hidden_size, device=device, dtype=dtype), start)
    if module.normalization == "LayerNorm":
        module._add_parameter("layer_norm_bias", torch.empty(hidden_size, device=device, dtype=dtype), torch.nn.init.zeros_)
    else:
        module.layer_norm_bias = None


def norm_parameters(module) -> Tuple[torch.Tensor, ...]:
    return (module.layer_norm_weight,) if module.layer_norm_bias is None else (module.layer_norm_weight, module.layer_norm_bias)


def mark_norm_parameters(module) -> None:
    """Marks the norm's parameters for frameworks: with sequence_parallel, each rank has a partial gradient, to be summed over the group."""
    for param in norm_parameters(module):
        param.sequence_parallel = module.sequence_parallel


def norm_options(module) -> dict:
    return {"epsilon": module.eps, "zero_centered_gamma": module.zero_centered_gamma, "normalization": module.normalization}


def normalise(module, inp: torch.Tensor) -> torch.Tensor:
    """The normalised input in high precision, for modules that return it."""
    kind = "layernorm" if module.normalization == "LayerNorm" else "rmsnorm"
    return module._run((inp,), norm_parameters(module), kind=kind)


class NormsInput(TransformerEngineBaseModule):
    """Common base of modules with a normalisation in front of a product."""

    def reset_layer_norm_parameters(self) -> None:
        with torch.no_grad():
            for name in ("layer_norm_weight", "layer_norm_bias"):
                if name in self._initialisers:
                    self._initialisers[name][0](getattr(self, name))

    def _shows_whole(self) -> bool:
        return self.return_layernorm_output and self.return_layernorm_output_gathered

    def _make_options(self, kind: str, key: Any) -> dict:
        """The options of the module's layer, or of the layer of normalise()."""
        if kind == self._kind:
            return self._options()
        weight = self.layer_norm_weight
        return {"hidden_size": weight.shape[0], "epsilon": self.eps, "zero_centered_gamma": self.zero_centered_gamma,
                "param_dtype": DTYPE_NAMES[weight.dtype]}


class LayerNormLinear(NormsInput, _Product):
    """y = norm(x) A^T + b. In FP8 the normalisation directly writes the GEMM's quantised input.

    normalization: 'LayerNorm' or 'RMSNorm'. zero_centered_gamma: the norm's weight is stored minus 1. return_layernorm_output: the
    normalised input is returned as well. The other arguments are Linear's.
    """

    _kind = "layernorm_linear"
    _remade = _Product._remade | {"eps", "zero_centered_gamma"}

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
        self._divide(tp_group, tp_size, sequence_parallel)
        if parallel_mode is not None:
            self._refuse_overlap(ub_overlap_ag=ub_overlap_ag, ub_overlap_rs=ub_overlap_rs, ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
                                 ub_bulk_wgrad=ub_bulk_wgrad, ub_bulk_dgrad=ub_bulk_dgrad)
        if parallel_mode == "row" and self.tp_size > 1:
            raise refuse("LayerNormLinear", "parallel_mode", parallel_mode, "each rank would normalise its own features alone; normalise first, and give "
                         "Linear the mode 'row'")
        self.eps, self.normalization, self.zero_centered_gamma, self.ub_name = eps, normalization, bool(zero_centered_gamma), ub_name
        self.return_layernorm_output = bool(return_layernorm_output)
        self.return_layernorm_output_gathered = bool(return_layernorm_output_gathered)
        add_norm_parameters(self, int(in_features), device, parameter_dtype(params_dtype, "LayerNormLinear"))
        self._set_up(in_features, out_features, fuse_wgrad_accumulation, get_rng_state_tracker, None, init_method, bias, return_bias,
                     params_dtype, parallel_mode, parameters_split, device)
        if self._divides:  # the collective lies between the normalisation and the product
            self._kind, self._read_names = "linear", tuple(self._own_names)
        self.reset_parameters(defer_init=device.type == "meta")
        self._delay_wgrad(delay_wgrad_compute, ub_bulk_wgrad, self._own_names)

    def reset_parameters(self, defer_init: Optional[bool] = False) -> None:
        super().reset_parameters(defer_init)
        if not defer_init:
            mark_norm_parameters(self)

    def _options(self) -> dict:
        return self._product_options() if self._divides else {**self._product_options(), **norm_options(self)}

    @hides_misspelt
    def forward(self, inp: torch.Tensor, is_first_microbatch: Optional[bool] = None, fp8_output: Optional[bool] = False,
                fp8_grad: Optional[bool] = False, **misspelt: NoReturn):
        """Maps inp [..., in_features] to [..., out_features]; also returns the bias and the normalised input if requested."""
        if misspelt:
            raise misspelling(LayerNormLinear.forward, misspelt)
        if fp8_output or fp8_grad:
            _check_forward("LayerNormLinear", fp8_output, fp8_grad)
        if self._divides:
            return self._divided_norm_forward(inp, is_first_microbatch)
        out = self._result(self._forward(inp, is_first_microbatch, self.fuse_wgrad_accumulation))
        if not self.return_layernorm_output:
            return out
        normed = normalise(self, inp)
        return (*out, normed) if self.return_bias else (out, normed)

    def _divided_norm_forward(self, inp: torch.Tensor, first: Optional[bool]):
        if torch.compiler.is_compiling():
            self._check_compiled()
        normed = normalise(self, inp)
        into = self._own_rows(normed) if self._layer_moves_rows else self._into(normed)
        out = self._result(self._forward(into, first, self.fuse_wgrad_accumulation))
        if not self.return_layernorm_output:
            return out
        shown = into if self.return_layernorm_output_gathered and self.sequence_parallel else normed
        return (*out, shown) if self.return_bias else (out, shown)
