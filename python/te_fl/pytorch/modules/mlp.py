"""LayerNormMLP: a normalisation, a linear layer (fc1), an activation and a second linear layer (fc2)."""

from __future__ import annotations

from typing import Any, Callable, List, NoReturn, Optional, Tuple, Union

import torch

from te_fl.errors import InvalidArgument
from te_fl.pytorch.autograd.checkpoint import checkpoint
from te_fl.pytorch.modules.linear import NormsInput, add_norm_parameters, mark_norm_parameters, norm_options, normalise
from te_fl.pytorch.modules.parallel import divided, set_parallel
from te_fl.pytorch.modules.parameters import default_init, parameter_dtype, part_name
from te_fl.pytorch.runtime import refuse as rules
from te_fl.pytorch.runtime.device import device_of
from te_fl.pytorch.runtime.dtypes import DTYPE_NAMES

GATED = ("geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu")


class LayerNormMLP(NormsInput):
    """y = act(norm(x) A1^T + b1) A2^T + b2.

    activation: one of gelu, geglu, glu, qgelu, qgeglu, relu, reglu, srelu, sreglu, silu, swiglu, clamped_swiglu; with a gated activation,
    fc1 has twice as many rows. activation_params: a dict for clamped_swiglu: limit (default 7.0), alpha (1.702) and glu_linear_offset
    (1.0). return_bias: fc2's bias is returned instead of added. return_layernorm_output: the normalised input is returned as well.
    seq_length, micro_batch_size: accepted for compatibility; Transformer Engine uses them to warm up a compiler. The other arguments are
    LayerNormLinear's.
    """

    _kind = "layernorm_mlp"
    _sites = ("fc1_fp8", "fc2_fp8")
    _remade = frozenset(("apply_bias", "eps", "zero_centered_gamma", "activation", "activation_params", "sequence_parallel"))
    def _quantizer_sites(self) -> List[Tuple[str, str]]:
        return [("linear", part_name(self.name or None, part) or part) for part in ("fc1", "fc2")]

    ub_overlap_ag = ub_overlap_rs = ub_overlap_rs_dgrad = ub_bulk_dgrad = ub_bulk_wgrad = False  # flags for Userbuffers, which te-fl does not have

    @rules.checks_keywords()
    def __init__(self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, sequence_parallel: bool = False,
                 return_bias: bool = False, get_rng_state_tracker: Optional[Callable] = None, tp_group: Optional[Any] = None,
                 tp_size: int = 1, init_method: Optional[Callable] = None, bias: bool = True, normalization: str = "LayerNorm",
                 activation: str = "gelu", activation_params: Optional[dict] = None, output_layer_init_method: Optional[Callable] = None,
                 fuse_wgrad_accumulation: bool = False, params_dtype: Optional[torch.dtype] = None, return_layernorm_output: bool = False,
                 return_layernorm_output_gathered: bool = False, seq_length: Optional[int] = None, micro_batch_size: Optional[int] = None,
                 set_parallel_mode: bool = False, zero_centered_gamma: bool = False, device: Union[torch.device, str, None] = None,
                 ub_overlap_ag: bool = False, name: Optional[str] = None, ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False,
                 ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False, delay_wgrad_compute: bool = False,
                 symmetric_ar_type: Optional[str] = None, checkpoint: bool = False) -> None:
        super().__init__(name)
        where = "LayerNormMLP"
        rules.check(where, locals())
        self._divide(tp_group, tp_size, sequence_parallel)
        self._divides, self.set_parallel_mode = self.tp_size > 1 and bool(set_parallel_mode), bool(set_parallel_mode)
        if self.sequence_parallel and not set_parallel_mode:
            raise InvalidArgument(f"{where}: sequence_parallel needs set_parallel_mode=True with tp_size = {self.tp_size}; without it nobody sums the "
                             "ranks' outputs")
        self._refuse_overlap(ub_overlap_ag=ub_overlap_ag, ub_overlap_rs=ub_overlap_rs, ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
                             ub_bulk_dgrad=ub_bulk_dgrad, ub_bulk_wgrad=ub_bulk_wgrad)
        self.activation, self.activation_params = activation, activation_params
        _clamp(where, activation, activation_params)
        self.hidden_size, self.ffn_hidden_size = int(hidden_size), divided(where, "ffn_hidden_size", int(ffn_hidden_size), self.tp_size)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, bool(zero_centered_gamma)
        self.use_bias, self.return_bias = bool(bias), bool(return_bias)
        self.apply_bias, self.size_per_partition = self.use_bias and not self.return_bias, self.ffn_hidden_size
        self.return_layernorm_output = bool(return_layernorm_output)
        self.return_layernorm_output_gathered = bool(return_layernorm_output_gathered)
        self.fuse_wgrad_accumulation, self.checkpoint = bool(fuse_wgrad_accumulation), bool(checkpoint)
        dtype, device = parameter_dtype(params_dtype, where), device_of(device)
        self.params_dtype = dtype
        add_norm_parameters(self, self.hidden_size, device, dtype)
        rows = self.ffn_hidden_size * (2 if activation in GATED else 1)
        init, tracker = init_method or default_init, get_rng_state_tracker
        self._add_weight("fc1_weight", torch.empty(rows, self.hidden_size, device=device, dtype=dtype), init, tracker)
        self._add_bias("fc1_bias", rows, device, dtype)
        self._add_weight("fc2_weight", torch.empty(self.hidden_size, self.ffn_hidden_size, device=device, dtype=dtype),
                         output_layer_init_method or default_init, tracker)
        self._add_bias("fc2_bias", self.hidden_size, device, dtype)
        self.reset_parameters(defer_init=device.type == "meta")
        products = [name for name in self._parameters if name.startswith("fc")]
        self._read_names = tuple(products if self._divides else self._parameters)
        self._delay_wgrad(delay_wgrad_compute, ub_bulk_wgrad, products)

    def reset_parameters(self, defer_init: Optional[bool] = False) -> None:
        super().reset_parameters(bool(defer_init))
        if defer_init:
            return
        mark_norm_parameters(self)
        set_parallel(self.fc1_weight, 0)
        set_parallel(self.fc2_weight, 1)
        if self.use_bias:
            set_parallel(self.fc1_bias, 0)
            if self.set_parallel_mode:
                self.fc2_bias.sequence_parallel = self.sequence_parallel

    @property
    def _clamp(self) -> dict:
        return _clamp("LayerNormMLP", self.activation, self.activation_params)

    def _add_bias(self, name: str, rows: int, device, dtype) -> None:
        if self.use_bias:
            self._add_parameter(name, torch.empty(rows, device=device, dtype=dtype), torch.nn.init.zeros_)
        else:
            setattr(self, name, torch.empty(0, dtype=dtype, device=device))

    def _options(self) -> dict:
        return {"hidden_size": self.hidden_size, "ffn_hidden_size": self.ffn_hidden_size, "activation": self.activation,
                "bias": self.use_bias, "return_bias": self.use_bias and not self.apply_bias or self._divides,
                "param_dtype": DTYPE_NAMES[self.params_dtype], **self._clamp, **norm_options(self), "normalizes": not self._divides, **self._row_options()}

    @rules.hides_misspelt
    def forward(self, inp: torch.Tensor, is_first_microbatch: Optional[bool] = None, **misspelt: NoReturn):
        """Maps inp [..., hidden_size] to the same shape; also returns the bias and the normalised input if requested."""
        if misspelt:
            raise rules.misspelling(LayerNormMLP.forward, misspelt)
        if self._divides:
            return self._divided_forward(inp, is_first_microbatch)
        if self.checkpoint and torch.is_grad_enabled():
            out = checkpoint(self._compute, inp, is_first_microbatch, use_reentrant=False)
        else:
            out = self._compute(inp, is_first_microbatch)
        if not self.return_bias and not self.return_layernorm_output:
            return out
        result = (out,)
        if self.return_bias:
            result += (self.fc2_bias.to(out.dtype) if self.use_bias else None,)
        if self.return_layernorm_output:
            result += (normalise(self, inp),)
        return result

    def _divided_forward(self, inp: torch.Tensor, first: Optional[bool]):
        if torch.compiler.is_compiling():
            self._check_compiled()
        if self.checkpoint and torch.is_grad_enabled():
            out, shown = checkpoint(self._compute_part, inp, first, use_reentrant=False)
        else:
            out, shown = self._compute_part(inp, first)
        bias = self.fc2_bias.to(out.dtype) if self.use_bias else None
        if bias is not None and self.apply_bias:
            out = out + bias
        result = (out, *((bias,) if self.return_bias else ()), *((shown,) if self.return_layernorm_output else ()))
        return result if len(result) > 1 else out

    def _compute_part(self, inp: torch.Tensor, first: Optional[bool]) -> Tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum of the ranks' outputs, without fc2's bias, and the normalised input."""
        normed = normalise(self, inp)
        if self._layer_moves_rows:
            return self._compute(self._own_rows(normed), first), normed
        whole = self._into(normed)
        out = self._finish_output(self._compute(whole, first))
        return out, whole if self.return_layernorm_output_gathered and self.sequence_parallel else normed

    def _compute(self, inp: torch.Tensor, is_first_microbatch: Optional[bool]) -> torch.Tensor:
        return self._forward(inp, is_first_microbatch, self.fuse_wgrad_accumulation)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, activation={self.activation!r}"


def _clamp(where: str, activation: str, params: Optional[dict]) -> dict:
    """Converts activation_params to the layer's options."""
    if not params:
        return {}
    if activation != "clamped_swiglu":
        raise InvalidArgument(f"{where}: activation_params is {params!r}; only clamped_swiglu has parameters")
    unknown = set(params) - {"limit", "alpha", "glu_linear_offset"}
    if unknown:
        raise InvalidArgument(f"{where}: activation_params names {sorted(unknown)[0]!r}; clamped_swiglu has limit, alpha and glu_linear_offset")
    return {"clamp_limit": float(params.get("limit", 7.0)), "clamp_alpha": float(params.get("alpha", 1.702)),
            "glu_linear_offset": float(params.get("glu_linear_offset", 1.0))}
