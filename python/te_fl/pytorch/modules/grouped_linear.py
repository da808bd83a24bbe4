"""Grouped linear layers for a mixture of experts: the experts' rows are consecutive in one input."""

from __future__ import annotations

import numbers
import operator
import sys
from typing import Any, Callable, List, NoReturn, Optional, Sequence, Tuple, Union

import torch

from te_fl.errors import InvalidArgument
from te_fl.pytorch.autograd.given_memory import GradientInto, ResultInto, count_write
from te_fl.pytorch.fp8 import quantization
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor
from te_fl.pytorch.modules.base import TransformerEngineBaseModule
from te_fl.pytorch.modules.grouped_parameters import EachExpert, expert_names, regroup
from te_fl.pytorch.modules.parallel import divided, mark_product
from te_fl.pytorch.modules.parameters import default_init, parameter_dtype
from te_fl.pytorch.runtime import refuse as rules
from te_fl.pytorch.runtime.computed import Computed
from te_fl.pytorch.runtime.device import device_of
from te_fl.pytorch.runtime.dtypes import DTYPE_NAMES
from te_fl.pytorch.runtime.refuse import checks_keywords, hides_misspelt, misspelling, refuse
from te_fl.tensors import read_on_host


class GroupedLinear(TransformerEngineBaseModule):
    """y_i = x_i A_i^T + b_i for the rows x_i of each of num_gemms experts, in FP8 inside autocast.

    The parameters are weight0, weight1, .. and bias0, .. . One grouped GEMM op computes all experts in each direction. In FP8 each expert has its own
    scales. One op quantises the rows of all experts, and one op quantises all weights; both results are used in forward and backward. With biases,
    output gradients are instead quantised expert by expert, together with their sums. parallel_mode, tp_size and tp_group determine only the shapes
    of the weights: the module has no collective, and the ranks exchange tokens before and after it. return_bias returns a list of biases.
    save_original_input and use_grouped_tensor have no effect: te-fl chooses what the forward saves, and always uses grouped ops.
    single_grouped_weight: one parameter weight [num_gemms, out_features, in_features] for all experts; single_grouped_bias: one parameter bias
    [num_gemms, out_features]. Autograd and the optimizer then have one tensor instead of one for each expert. Checkpoints of either form can be
    loaded. The other arguments are Linear's.
    """

    _kind = "grouped_linear"
    num_gemms = 0
    single_grouped_weight = single_grouped_bias = ub_overlap_ag = ub_overlap_rs = False

    @checks_keywords()
    def __init__(self, num_gemms: int, in_features: int, out_features: int, sequence_parallel: bool = False, fuse_wgrad_accumulation: bool = False,
                 tp_group: Optional[Any] = None, tp_size: int = 1, get_rng_state_tracker: Optional[Callable] = None,
                 rng_tracker_name: Optional[str] = None, init_method: Optional[Callable] = None, bias: bool = True, return_bias: bool = False,
                 params_dtype: Optional[torch.dtype] = None, parallel_mode: Optional[str] = None, device: Union[torch.device, str, None] = None,
                 ub_overlap_rs: bool = False, ub_overlap_ag: bool = False, ub_name: Optional[str] = None, delay_wgrad_compute: bool = False,
                 save_original_input: bool = False, single_grouped_weight: bool = False, single_grouped_bias: bool = False, name: Optional[str] = None,
                 use_grouped_tensor: Optional[bool] = None) -> None:
        if isinstance(num_gemms, bool) or not isinstance(num_gemms, numbers.Integral) or num_gemms < 1:
            raise InvalidArgument(f"GroupedLinear: num_gemms is {num_gemms!r}; it is the number of experts, 1 or more")
        super().__init__(name)
        self.num_gemms = int(num_gemms)
        rules.values("GroupedLinear", locals())
        rules.tensor_parallel("GroupedLinear", tp_group, tp_size)
        rules.parallel_mode("GroupedLinear", parallel_mode)
        rules.only("GroupedLinear", *((n, bool(v), False, "te-fl has no Userbuffers; leave it out") for n, v in
                                      (("ub_overlap_rs", ub_overlap_rs), ("ub_overlap_ag", ub_overlap_ag))))
        self.single_grouped_weight, self.single_grouped_bias = bool(single_grouped_weight), bool(single_grouped_bias and bias)
        if self.single_grouped_weight and self._model_init is not None:
            raise refuse("GroupedLinear", "single_grouped_weight", True, "inside quantized_model_init each expert has codes and a scale of its own; "
                         "leave it out")
        if use_grouped_tensor not in (None, True, False):
            raise TypeError(f"GroupedLinear: use_grouped_tensor is {use_grouped_tensor!r}; it is a bool or None")
        self._divide(tp_group, tp_size, sequence_parallel)
        if self.tp_size > 1 and bias:
            raise InvalidArgument(f"GroupedLinear: bias=True with tp_size = {self.tp_size}: the sum over ranks, which is outside of the module, would count "
                             "the biases several times; give bias=False")
        self.parallel_mode, self.save_original_input, self.ub_name = parallel_mode, save_original_input, ub_name
        self.use_grouped_tensor = use_grouped_tensor
        self.in_features = divided("GroupedLinear", "in_features", int(in_features), self.tp_size if parallel_mode == "row" else 1)
        self.out_features = divided("GroupedLinear", "out_features", int(out_features), self.tp_size if parallel_mode == "column" else 1)
        self.params_dtype = parameter_dtype(params_dtype, "GroupedLinear")
        self.use_bias, self.return_bias, self.apply_bias = bool(bias), bool(return_bias), bool(bias) and not return_bias
        self.fuse_wgrad_accumulation = bool(fuse_wgrad_accumulation)
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        self._add_experts(init_method or default_init, device_of(device))
        self.reset_parameters(defer_init=getattr(self, self._weight_names[0]).device.type == "meta")
        self._delay_wgrad(delay_wgrad_compute, False, self._read_names)

    def _add_experts(self, init: Callable, device: torch.device) -> None:
        self._weight_names = expert_names("weight", self.num_gemms, self.single_grouped_weight)
        self._bias_names = expert_names("bias", self.num_gemms, self.single_grouped_bias)
        self._read_names = self._weight_names + (self._bias_names if self.use_bias else ())
        dtype, experts = self.params_dtype, (self.num_gemms,)
        weight_shape, bias_shape = (self.out_features, self.in_features), (self.out_features,)
        if self.single_grouped_weight:
            weight_shape, init = (*experts, *weight_shape), EachExpert(init)  # type: ignore[assignment]
        if self.single_grouped_bias:
            bias_shape = (*experts, *bias_shape)  # type: ignore[assignment]
        # Weight and bias of an expert follow one another, because optimizer states depend on the order of parameters.
        weights, biases = list(self._weight_names), list(self._bias_names)
        while weights or biases:
            if weights:
                self._add_weight(weights.pop(0), torch.empty(weight_shape, dtype=dtype, device=device), init, self.get_rng_state_tracker)
            if biases:
                name = biases.pop(0)
                if not self.use_bias:
                    setattr(self, name, torch.empty(0, dtype=dtype, device=device))
                    continue
                self._add_parameter(name, torch.empty(bias_shape, dtype=dtype, device=device), torch.nn.init.zeros_)
                if self.single_grouped_bias:
                    getattr(self, name).is_grouped_bias = True

    def reset_parameters(self, defer_init: Optional[bool] = False) -> None:
        super().reset_parameters(bool(defer_init))
        if not defer_init:
            mark_product(self, self._weight_names, self._bias_names if self.use_bias else ())

    # -- the layer

    _remade = frozenset(("apply_bias",))

    @property
    def _sites(self) -> Tuple[str, ...]:
        return tuple(f"gemm{i}" for i in range(self.num_gemms))

    def _quantizer_sites(self) -> List[Tuple[str, str]]:
        return [("grouped_linear", self.name or "")]

    def _options(self) -> dict:
        return {"num_gemms": self.num_gemms, "in_features": self.in_features, "out_features": self.out_features, "bias": self.use_bias,
                "return_bias": self.use_bias and not self.apply_bias, "param_dtype": DTYPE_NAMES[self.params_dtype],
                "single_grouped_weight": self.single_grouped_weight, "single_grouped_bias": self.single_grouped_bias}

    @Computed
    def fp8(self) -> bool:
        """True if checkpoints contain FP8 state of the module, that is, with delayed scaling."""
        return bool(self._fp8_state())

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """For frameworks that merge the experts' states before loading: fp8_meta has a recipe after this call."""
        if num_gemms != self.num_gemms:
            raise InvalidArgument(f"GroupedLinear: init_fp8_metadata({num_gemms}); the module has num_gemms = {self.num_gemms}")

    def _load_from_state_dict(self, state_dict, prefix, *arguments) -> None:
        regroup(state_dict, prefix, "weight", self.num_gemms, self.single_grouped_weight)
        if self.use_bias:
            regroup(state_dict, prefix, "bias", self.num_gemms, self.single_grouped_bias)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    # -- a forward

    @hides_misspelt
    def forward(self, inp: torch.Tensor, m_splits: Union[Sequence[int], torch.Tensor], is_first_microbatch: Optional[bool] = None,
                out: Optional[torch.Tensor] = None, dgrad_out: Optional[torch.Tensor] = None, **misspelt: NoReturn):
        """Maps inp [.., in_features], whose m_splits[i] rows belong to expert i, to [.., out_features]; with return_bias also returns a list of
        biases.

        m_splits: a list, or a tensor of integers. A device tensor is copied to the host once per forward, which synchronises and is refused during
        graph capture. out [rows, out_features] and dgrad_out [rows, in_features]: memory for the result and for the gradient of inp.
        is_first_microbatch: as in Linear; True also overwrites main_grad.
        """
        if misspelt:
            raise misspelling(GroupedLinear.forward, misspelt)
        if torch.compiler.is_compiling():
            raise refuse("GroupedLinear", "m_splits", "the rows of each expert", "graphs of torch.compile hold no products of sizes that differ from "
                         "step to step; leave fullgraph=True out, or call it outside of the compiled function")
        self._check_tensor(inp)
        splits = self._checked_splits(inp, m_splits)
        if isinstance(inp, Float8Tensor):
            inp = inp.dequantize()
        if torch.is_autocast_enabled(inp.device.type) and inp.dtype not in DTYPE_NAMES and inp.is_floating_point():
            inp = inp.float()
        if inp.dtype not in DTYPE_NAMES:
            raise refuse("GroupedLinear", "input", f"a tensor of {inp.dtype}", "give torch.float32, torch.bfloat16 or torch.float16")
        x = inp.reshape(-1, self.in_features).resolve_neg().contiguous()
        activation = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        _check_memory("out", out, (x.shape[0], self.out_features), activation, x.device)
        _check_memory("dgrad_out", dgrad_out, (x.shape[0], self.in_features), x.dtype, x.device)
        _check_apart("out", out, x)
        # Without FP8 the backward reads the input for the weights' gradients; in FP8 it reads saved codes.
        if dgrad_out is not None and not quantization.enabled() and any(getattr(self, name).requires_grad for name in self._weight_names):
            _check_apart("dgrad_out", dgrad_out, x)
        if out is not None:
            count_write(out)
        if dgrad_out is not None:
            x = GradientInto.apply(x, dgrad_out)
        inputs = (x, torch.tensor(splits, dtype=torch.int64, device="cpu"))
        # `data` bypasses autograd's version counter, which is safe because nothing reads the memory here.
        if out is not None or dgrad_out is not None:
            inputs += tuple(_NO_MEMORY if t is None else t.data for t in (out, dgrad_out if x.requires_grad else None))
        y = _untraced()(self, inputs, is_first_microbatch)
        if out is not None:
            y = ResultInto.apply(y, out)
        y = y if out is not None or inp.dim() == 2 else y.view(*inp.shape[:-1], self.out_features)
        return (y, [bias.to(y.dtype) for bias in self._each_bias()]) if self.return_bias else y

    def _each_bias(self) -> Sequence[torch.Tensor]:
        return self.bias.unbind(0) if self.single_grouped_bias else [getattr(self, name) for name in self._bias_names]

    def _compute(self, inputs: Tuple[torch.Tensor, ...], first: Optional[bool]) -> torch.Tensor:
        return self._run(inputs, self._own(), first, accumulates=self.fuse_wgrad_accumulation)

    def _checked_splits(self, inp: torch.Tensor, m_splits: Any) -> Tuple[int, ...]:
        if isinstance(m_splits, torch.Tensor) and (m_splits.dim() != 1 or m_splits.is_floating_point() or m_splits.dtype == torch.bool):
            raise TypeError(f"GroupedLinear: m_splits is {m_splits.dtype} {tuple(m_splits.shape)}; it is a list, or integers [{self.num_gemms}]")
        try:
            splits = tuple(map(operator.index, read_on_host(m_splits, "GroupedLinear: m_splits") if isinstance(m_splits, torch.Tensor) else m_splits))
        except TypeError:
            raise TypeError(f"GroupedLinear: m_splits is {m_splits!r}; it is a list of {self.num_gemms} integers") from None
        if len(splits) != self.num_gemms:
            raise InvalidArgument(f"GroupedLinear: m_splits has {len(splits)} elements; num_gemms is {self.num_gemms}")
        if inp.dim() < 2 or inp.shape[-1] != self.in_features:
            raise InvalidArgument(f"GroupedLinear: the input has shape {tuple(inp.shape)}; its last dimension is in_features = {self.in_features}")
        rows = inp.numel() // self.in_features
        if min(splits) < 0 or sum(splits) != rows:
            raise InvalidArgument(f"GroupedLinear: m_splits is {list(splits)}, which sums to {sum(splits)}; the input has {rows} rows, and no expert "
                                  "has fewer than 0")
        return splits

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"


_NO_MEMORY = torch.empty(0, dtype=torch.float32, device="cpu")
_disabled: Optional[Callable] = None


def _untraced() -> Callable:
    """GroupedLinear._compute(), excluded from tracing by torch.compile."""
    global _disabled
    dynamo = sys.modules.get("torch._dynamo")  # imported once a program compiles
    if dynamo is None:
        return GroupedLinear._compute
    if _disabled is None:
        _disabled = dynamo.disable(GroupedLinear._compute)
    return _disabled


def _check_apart(name: str, memory: Optional[torch.Tensor], x: torch.Tensor) -> None:
    """Refuses result memory that overlaps the input: an expert's rows would be overwritten before later experts or the backward read them."""
    if memory is None:
        return
    (begin, end), (first, last) = ((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (memory, x))
    if begin < last and first < end:
        raise InvalidArgument(f"GroupedLinear: {name} shares memory with the input, whose rows would be written before they are read; give it memory of "
                              "its own")


def _check_memory(name: str, memory: Optional[torch.Tensor], shape: Tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    if memory is None:
        return
    if memory.shape != shape or memory.dtype != dtype or memory.device != device or not memory.is_contiguous() or memory.requires_grad:
        raise InvalidArgument(f"GroupedLinear: {name} is {memory.dtype} {tuple(memory.shape)} on {memory.device}; it is a contiguous {dtype} {shape} "
                              f"on {device} that needs no gradient")
