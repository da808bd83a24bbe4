"""MoELayer: a mixture of experts as one module."""

from __future__ import annotations

import math
import numbers
import sys
from typing import Any, Callable, List, NoReturn, Optional, Tuple, Union

import torch

from te_fl.errors import FailedPrecondition, InvalidArgument
from te_fl.pytorch.autograd.torch_checkpoint import repeated
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.distributed.sequence_ranks import SequenceRanks
from te_fl.pytorch.modules.base import TransformerEngineBaseModule
from te_fl.pytorch.modules.grouped_parameters import EachExpert, expert_names, regroup
from te_fl.pytorch.modules.mlp import GATED, _clamp
from te_fl.pytorch.modules.parameters import default_init, parameter_dtype
from te_fl.pytorch.runtime import refuse as rules
from te_fl.pytorch.runtime.device import default_device, device_of
from te_fl.pytorch.runtime.dtypes import DTYPE_NAMES
from te_fl.pytorch.runtime.refuse import checks_keywords, hides_misspelt, misspelling, refuse

_ACTIVATIONS = ("gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu", "clamped_swiglu")
_SCORES = ("sigmoid", "softmax", "sqrtsoftplus")
_task = torch._C._current_graph_task_id


class _WithLoss(torch.autograd.Function):
    """Returns the output and the auxiliary loss. Its backward, which precedes the layer's, writes the loss's gradient to memory that the layer's reads."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, loss: torch.Tensor, loss_grad: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        ctx.loss_grad = loss_grad
        ctx.set_materialize_grads(False)
        ctx.like = y.detach()[:0], y.shape
        return y.view_as(y), loss.view(()).clone()

    @staticmethod
    def backward(ctx, grad: Optional[torch.Tensor], loss_grad: Optional[torch.Tensor]):
        if loss_grad is None:
            ctx.loss_grad.zero_()
        else:
            ctx.loss_grad.copy_(loss_grad.view(1))
        if grad is None:
            like, shape = ctx.like
            grad = like.new_zeros(shape)
        return grad, None, None


class MoELayer(TransformerEngineBaseModule):
    """A mixture of experts: a router chooses top_k of num_experts MLPs for each token, and their outputs are summed, weighted by the router's
    probabilities. No token is dropped. The router computes in FP32; inside autocast the experts compute in FP8, each with its own scales.

    hidden_size, ffn_hidden_size: the sizes of a token and of the inner layer of an expert. activation: that of the experts, as in LayerNormMLP, with
    activation_params. bias: fc1 and fc2 have biases. score_function: 'softmax', 'sigmoid' or 'sqrtsoftplus'; use_pre_softmax: the softmax is over
    all experts, before the choice. num_groups, group_topk: only experts of the group_topk best of num_groups groups can be chosen. scaling_factor: of
    the probabilities. expert_bias: a buffer that is added to the scores for the choice, which update_expert_bias() changes by
    expert_bias_update_rate. aux_loss_coeff, z_loss_coeff: coefficients of the load-balancing loss, and of the mean squared log-sum-exp of the logits;
    with one of them forwards return (output, loss). shared_ffn_hidden_size: the inner size of an MLP whose output for each token is added;
    shared_expert_gate: times the sigmoid of a linear function of the token. single_grouped_weight: fc1_weight [num_experts, out, in] is one
    parameter, and so are fc2_weight and the biases; False: fc1_weight0, .. , which can be frozen one by one. ep_group: the process group over which the
    experts are divided; the rank has the weights of num_local_experts, and tokens of its own. The other arguments are Linear's;
    output_layer_init_method initialises fc2.
    """

    _kind = "moe_layer"
    ep_group: Optional[Any] = None
    _sites: Tuple[str, ...] = ()

    @checks_keywords()
    def __init__(self, hidden_size: int, ffn_hidden_size: int, num_experts: int, top_k: int = 2, *, activation: str = "swiglu",
                 activation_params: Optional[dict] = None, bias: bool = False, score_function: str = "softmax", use_pre_softmax: bool = False,
                 num_groups: Optional[int] = None, group_topk: Optional[int] = None, scaling_factor: float = 1.0, expert_bias: bool = False,
                 expert_bias_update_rate: float = 1e-3, aux_loss_coeff: float = 0.0, z_loss_coeff: float = 0.0, shared_ffn_hidden_size: int = 0,
                 shared_expert_gate: bool = False, single_grouped_weight: bool = True, ep_group: Optional[Any] = None, init_method: Optional[Callable] = None,
                 output_layer_init_method: Optional[Callable] = None, get_rng_state_tracker: Optional[Callable] = None,
                 rng_tracker_name: Optional[str] = None, fuse_wgrad_accumulation: bool = False, delay_wgrad_compute: bool = False,
                 params_dtype: Optional[torch.dtype] = None, device: Union[torch.device, str, None] = None, name: Optional[str] = None) -> None:
        super().__init__(name)
        where = "MoELayer"
        rules.process_group(where, "ep_group", ep_group)
        self.ep_size = 1 if ep_group is None else collectives.size_of(ep_group)
        self.set_expert_parallel_group(ep_group)
        for argument, value in (("hidden_size", hidden_size), ("ffn_hidden_size", ffn_hidden_size), ("num_experts", num_experts), ("top_k", top_k)):
            rules.size(where, argument, value)
        rules.choice(where, "activation", activation, _ACTIVATIONS)
        rules.choice(where, "score_function", score_function, _SCORES)
        self.hidden_size, self.ffn_hidden_size, self.num_experts, self.top_k = map(int, (hidden_size, ffn_hidden_size, num_experts, top_k))
        self.activation, self.activation_params, self.use_bias = activation, activation_params, bool(bias)
        _clamp(where, activation, activation_params)
        self.score_function, self.use_pre_softmax = score_function, bool(use_pre_softmax)
        self.num_groups, self.group_topk, self.scaling_factor = num_groups, group_topk, float(scaling_factor)
        self.aux_loss_coeff, self.z_loss_coeff = float(aux_loss_coeff), float(z_loss_coeff)
        self.enable_expert_bias, self.expert_bias_update_rate = bool(expert_bias), float(expert_bias_update_rate)
        self.shared_ffn_hidden_size, self.shared_expert_gate = shared_ffn_hidden_size, bool(shared_expert_gate)
        self.single_grouped_weight = bool(single_grouped_weight)
        self._check_router(where)
        if self.single_grouped_weight and self._model_init is not None:
            raise refuse(where, "single_grouped_weight", True, "inside quantized_model_init each expert has codes and a scale of its own; give "
                         "single_grouped_weight=False")
        self.params_dtype = parameter_dtype(params_dtype, where)
        self.fuse_wgrad_accumulation = bool(fuse_wgrad_accumulation)
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        device = device_of(device)
        self._add_parameters(init_method or default_init, output_layer_init_method or init_method or default_init, device)
        self.reset_parameters(defer_init=device.type == "meta")
        self._delay_wgrad(delay_wgrad_compute, False, [n for n in self._read_names if n.startswith(("fc1_", "fc2_", "shared_fc"))])

    def _check_router(self, where: str) -> None:
        def refused(what: str, value: Any, rule: str) -> InvalidArgument:
            return InvalidArgument(f"{where}: {what} is {value!r}; {rule}")

        if self.num_experts % self.ep_size:
            raise refused("num_experts", self.num_experts, f"the {self.ep_size} ranks of ep_group have equally many experts; give a multiple")
        if self.top_k > self.num_experts:
            raise refused("top_k", self.top_k, f"it is at most num_experts, {self.num_experts}")
        if (self.num_groups is None) != (self.group_topk is None):
            raise refused("num_groups", self.num_groups, f"group_topk is {self.group_topk!r}; give both, or leave both out")
        if self.num_groups is not None and self.group_topk is not None:
            rules.size(where, "num_groups", self.num_groups)
            rules.size(where, "group_topk", self.group_topk)
            if self.num_experts % self.num_groups != 0:
                raise refused("num_groups", self.num_groups, f"it divides num_experts, {self.num_experts}")
            if self.group_topk > self.num_groups:
                raise refused("group_topk", self.group_topk, f"it is at most num_groups, {self.num_groups}")
            reached = self.group_topk * (self.num_experts // self.num_groups)
            if self.top_k > reached:
                raise refused("top_k", self.top_k, f"the {self.group_topk} chosen groups have {reached} experts; choose more groups, or fewer experts")
        if self.use_pre_softmax and self.score_function != "softmax":
            raise refused("use_pre_softmax", True, f"it belongs to score_function='softmax', which is {self.score_function!r}; leave it out")
        if self.enable_expert_bias and self.score_function == "softmax":
            raise refused("expert_bias", True, "with score_function='softmax' it is not defined; give 'sigmoid' or 'sqrtsoftplus', or leave it out")
        for what in ("aux_loss_coeff", "z_loss_coeff", "expert_bias_update_rate"):
            if not (math.isfinite(getattr(self, what)) and getattr(self, what) >= 0):
                raise refused(what, getattr(self, what), "it is a finite number, 0 or more")
        if not math.isfinite(self.scaling_factor):
            raise refused("scaling_factor", self.scaling_factor, "it is a finite number")
        shared = self.shared_ffn_hidden_size
        if isinstance(shared, bool) or not isinstance(shared, numbers.Integral) or shared < 0:
            raise refused("shared_ffn_hidden_size", shared, "it is an integer, 0 (no shared experts) or more")
        if self.shared_expert_gate and not shared:
            raise refused("shared_expert_gate", True, "it multiplies the output of shared experts; give shared_ffn_hidden_size, or leave it out")

    def _add_parameters(self, init: Callable, output_init: Callable, device: torch.device) -> None:
        """Registers the parameters in the order of the layer in C++."""
        read: List[str] = []
        tracker, dtype, experts = self.get_rng_state_tracker, self.params_dtype, self.num_local_experts

        def add(name: str, shape: Tuple[int, ...], method: Callable, product: bool = False) -> None:
            value = torch.empty(shape, dtype=dtype, device=device)
            if product:
                self._add_weight(name, value, method, tracker)
            else:
                self._add_parameter(name, value, method, tracker)
            read.append(name)

        def add_experts(kind: str, shape: Tuple[int, ...], method: Callable, product: bool) -> None:
            single = self.single_grouped_weight
            for name in expert_names(kind, experts, single):
                add(name, (experts, *shape) if single else shape, EachExpert(method) if single else method, product)
                if single and not product:
                    getattr(self, name).is_grouped_bias = True

        def add_map(prefix: str, out: int, inner: int, method: Callable) -> None:
            add_experts(f"{prefix}_weight", (out, inner), method, True)
            if self.use_bias:
                add_experts(f"{prefix}_bias", (out,), torch.nn.init.zeros_, False)

        rows = 2 if self.activation in GATED else 1
        add("router_weight", (self.num_experts, self.hidden_size), init)
        if self.enable_expert_bias:
            self.register_buffer("expert_bias", torch.zeros(self.num_experts, dtype=torch.float32, device=device))
            self.register_buffer("local_tokens_per_expert", torch.zeros(self.num_experts, dtype=torch.int64, device=device), persistent=False)
            read.append("expert_bias")
        add_map("fc1", rows * self.ffn_hidden_size, self.hidden_size, init)
        add_map("fc2", self.hidden_size, self.ffn_hidden_size, output_init)
        if self.shared_expert_gate:
            add("shared_gate_weight", (1, self.hidden_size), init)
        if self.shared_ffn_hidden_size:
            inner = int(self.shared_ffn_hidden_size)
            for prefix, out, size, method in (("shared_fc1", rows * inner, self.hidden_size, init), ("shared_fc2", self.hidden_size, inner, output_init)):
                add(f"{prefix}_weight", (out, size), method, True)
                if self.use_bias:
                    add(f"{prefix}_bias", (out,), torch.nn.init.zeros_)
        self._read_names = tuple(read)
        shared = ("shared_experts.fc1_fp8", "shared_experts.fc2_fp8") if self.shared_ffn_hidden_size else ()
        self._sites = tuple(f"fc{n}_gemm{i}" for n in (1, 2) for i in range(experts)) + shared

    def reset_parameters(self, defer_init: Optional[bool] = False) -> None:
        super().reset_parameters(bool(defer_init))
        if defer_init or not self.enable_expert_bias:
            return
        for name in ("expert_bias", "local_tokens_per_expert"):
            buffer = getattr(self, name)
            if buffer.is_meta:
                setattr(self, name, torch.zeros_like(buffer, device=default_device()))
            else:
                buffer.zero_()

    # -- the layer

    def _options(self) -> dict:
        return {"hidden_size": self.hidden_size, "ffn_hidden_size": self.ffn_hidden_size, "num_experts": self.num_experts, "top_k": self.top_k,
                "activation": self.activation, **_clamp("MoELayer", self.activation, self.activation_params), "bias": self.use_bias,
                "score_function": self.score_function, "use_pre_softmax": self.use_pre_softmax, "num_groups": self.num_groups or 0,
                "group_topk": self.group_topk or 0, "scaling_factor": self.scaling_factor, "expert_bias": self.enable_expert_bias,
                "aux_loss_coeff": self.aux_loss_coeff, "z_loss_coeff": self.z_loss_coeff, "shared_ffn_hidden_size": int(self.shared_ffn_hidden_size),
                "shared_expert_gate": self.shared_expert_gate, "single_grouped_weight": self.single_grouped_weight,
                "param_dtype": DTYPE_NAMES[self.params_dtype], **self._expert_ranks()}

    @property
    def num_local_experts(self) -> int:
        """The number of experts whose weights this rank has."""
        return self.num_experts // self.ep_size

    def set_expert_parallel_group(self, ep_group: Optional[Any]) -> None:
        """Sets the group over which the experts are divided, of as many ranks as the module was made for, from the next forward on. A copy or a pickle
        of a module has no group.
        """
        rules.process_group("MoELayer", "ep_group", ep_group)
        size = 1 if ep_group is None else collectives.size_of(ep_group)
        if size != self.ep_size:
            raise InvalidArgument(f"MoELayer: ep_group has {size} ranks, and the module's experts are divided over {self.ep_size}; give a group of that size")
        if ep_group is not self.ep_group:  # the next forward creates layers for the new group
            self._forget_layers()
        self.__dict__["ep_group"] = ep_group

    def _expert_ranks(self) -> dict:
        if self.ep_size == 1:
            return {}
        if self.ep_group is None:
            raise FailedPrecondition(f"MoELayer: its experts are divided over {self.ep_size} ranks, and it has no group; call set_expert_parallel_group(group)")
        return {"expert_ranks": SequenceRanks(self.ep_group, self.router_weight.device)}

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "ep_group": None}

    def _load_from_state_dict(self, state_dict, prefix, *arguments) -> None:
        for kind in ("fc1_weight", "fc2_weight", *(("fc1_bias", "fc2_bias") if self.use_bias else ())):
            regroup(state_dict, prefix, kind, self.num_local_experts, self.single_grouped_weight)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _apply(self, fn, recurse: bool = True):
        before = self.expert_bias if self.enable_expert_bias else None
        result = super()._apply(fn, recurse)
        if before is not None and self.expert_bias.dtype != torch.float32:  # half() and the like; an update of 0.001 is lost in 16 bits
            moved = self.expert_bias.device
            self.expert_bias = before if before.device == moved or before.is_meta else before.to(moved)
        return result

    @hides_misspelt
    def forward(self, inp: torch.Tensor, is_first_microbatch: Optional[bool] = None, **misspelt: NoReturn):
        """Maps inp [..., hidden_size] to the same shape. With an auxiliary loss, returns (output, loss), and the program adds the loss, a scalar, to
        its own.

        is_first_microbatch: as in Linear; True also overwrites main_grad.
        """
        if misspelt:
            raise misspelling(MoELayer.forward, misspelt)
        if torch.compiler.is_compiling():
            raise refuse("MoELayer", "fullgraph", True, "graphs of torch.compile hold no products of sizes that differ from step to step; leave it out, "
                         "or call the layer outside of the compiled function")
        self._check_tensor(inp)
        if inp.dim() < 1 or inp.shape[-1] != self.hidden_size:
            raise InvalidArgument(f"MoELayer: the input has shape {tuple(inp.shape)}; its last dimension is hidden_size = {self.hidden_size}")
        return _untraced()(self, inp, is_first_microbatch)

    def _compute(self, inp: torch.Tensor, first: Optional[bool]):
        has_loss = self.aux_loss_coeff != 0 or self.z_loss_coeff != 0
        counts = self.enable_expert_bias and self.training
        if not has_loss and not counts:
            return self._run((inp.contiguous(),), self._own(), first, accumulates=self.fuse_wgrad_accumulation)
        loss = inp.new_empty(1 if has_loss else 0, dtype=torch.float32)
        tokens = inp.new_empty(self.num_experts if counts else 0, dtype=torch.int64)
        loss_grad = inp.new_ones(1 if has_loss else 0, dtype=torch.float32)
        # `data` bypasses autograd's version counter: the layer's backward reads loss_grad after _WithLoss's has written it.
        memory = (loss, tokens, loss_grad.data)
        y = self._run((inp.contiguous(), *memory), self._own(), first, accumulates=self.fuse_wgrad_accumulation)
        # The second run of a checkpoint, which is inside of a backward, does not count again. With use_reentrant=True the first has no gradients.
        if counts and _task() < 0 and (torch.is_grad_enabled() or repeated()):
            self.local_tokens_per_expert += tokens
        if not has_loss:
            return y
        return _WithLoss.apply(y, loss, loss_grad) if y.requires_grad else (y, loss.view(()))

    @torch.no_grad()
    def update_expert_bias(self, rate: Optional[float] = None, group: Optional[Any] = None) -> None:
        """Call this after an optimizer step: adds `rate` (expert_bias_update_rate) to the bias of experts that had fewer tokens than the mean since
        the last call, and subtracts it from that of experts with more. group: the data-parallel process group, whose ranks' tokens are summed.
        """
        if not self.enable_expert_bias:
            raise FailedPrecondition("MoELayer: update_expert_bias(): the layer has no expert bias; create it with expert_bias=True")
        tokens = self.local_tokens_per_expert
        if group is not None:
            collectives.all_reduce(tokens, group)
        missing = tokens.double().mean() - tokens.double()
        self.expert_bias += torch.sign(missing).float() * (self.expert_bias_update_rate if rate is None else rate)
        tokens.zero_()

    def extra_repr(self) -> str:
        return (f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, num_experts={self.num_experts}, top_k={self.top_k}, ep_size={self.ep_size}, "
                f"activation={self.activation!r}, score_function={self.score_function!r}")


_disabled: Optional[Callable] = None


def _untraced() -> Callable:
    """MoELayer._compute(), excluded from tracing by torch.compile."""
    global _disabled
    dynamo = sys.modules.get("torch._dynamo")  # imported once a program compiles
    if dynamo is None:
        return MoELayer._compute
    if _disabled is None:
        _disabled = dynamo.disable(MoELayer._compute)
    return _disabled
