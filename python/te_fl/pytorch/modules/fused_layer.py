"""Runs a whole Transformer layer as one te-fl call per direction."""

from __future__ import annotations

from typing import List, Tuple

import torch
from torch.nn.modules import module as torch_module

from te_fl import _native
from te_fl.pytorch.autograd import torch_checkpoint
from te_fl.pytorch.distributed.sequence_ranks import SequenceRanks
from te_fl.pytorch.fp8 import quantization
from te_fl.pytorch.modules.attention import DotProductAttention, score_cap
from te_fl.pytorch.modules.base import TransformerEngineBaseModule
from te_fl.pytorch.modules.layer_in_parts import TransformerCall
from te_fl.pytorch.modules.layers import NativeLayer
from te_fl.pytorch.modules.linear import LayerNormLinear, Linear
from te_fl.pytorch.modules.mlp import LayerNormMLP
from te_fl.pytorch.modules.multihead_attention import L2Normalization, MultiheadAttention
from te_fl.pytorch.modules.norm import LayerNorm, RMSNorm
from te_fl.pytorch.runtime import export, traced
from te_fl.pytorch.runtime import random as generator
from te_fl.pytorch.runtime.device import check_devices
from te_fl.pytorch.runtime.dtypes import DTYPE_NAMES

# The module classes that the fused call can replace. A part has the same name here and in te_fl::nn::TransformerLayer.
_FORWARDS = {kind: kind.forward for kind in (LayerNormLinear, DotProductAttention, Linear, LayerNormMLP, MultiheadAttention, LayerNorm, RMSNorm, L2Normalization)}

# PyTorch's hooks of all modules; each is a dict, which PyTorch changes in place.
_GLOBAL_HOOKS = (torch_module._global_backward_pre_hooks, torch_module._global_backward_hooks, torch_module._global_forward_pre_hooks,
                 torch_module._global_forward_hooks)


def _find(module: torch.nn.Module, path: str) -> torch.nn.Module:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _differ(children: dict, known: dict) -> bool:
    if torch.compiler.is_compiling():  # PyTorch 2.7's Dynamo does not trace a comparison of dicts
        return len(children) != len(known) or any([children.get(name) is not child for name, child in known.items()])
    return children != known


class FusedLayer:
    """The fused implementation of a TransformerLayer. Has one C++ layer for each combination of mask, softcap, window and dropout that it is called
    with. The FP8 state belongs to the parts.
    """

    def __init__(self, owner: torch.nn.Module):
        self._layers: dict = {}
        self._places: List[Tuple[torch.nn.Module, str, dict]] = []
        self._attention, self._mlp = owner.self_attention, owner.layernorm_mlp
        self._core = self._attention.core_attention  # cached; usable() checks that it is still the module's part
        self._divides = owner.tp_size > 1
        self._tree = [(path, part) for path, part in owner.named_modules() if path]
        # The modules' own dicts of children, compared later to detect replaced or added children.
        self._children = [(m._modules, dict(m._modules)) for m in (owner, owner.self_attention)]
        self._parts = [(path, part) for path, part in self._tree if isinstance(part, TransformerEngineBaseModule)]
        self._divided = [part for _, part in self._parts if part.tp_size > 1] if self._divides else []
        self._products = [part for _, part in self._parts if hasattr(part, "fuse_wgrad_accumulation")]
        for _, part in self._parts:
            part._fused_in.add(self)
        # Computed here and not in a call, because a later change of this attribute would make torch.compile create another graph.
        self._agree = self._parts_agree()

    def serves(self, owner: torch.nn.Module, call: TransformerCall) -> bool:
        """True if the fused call can compute `call` with the current parts."""
        return (not call.checkpoint_core_attention and call.thd_attention_policies is None and call.inference_params is None
                and not isinstance(call.rotary_pos_emb, (tuple, list)) and (not self._divides or self._supports_ranks(owner))
                and (self._core.cp_group is None or self._core._context() is None) and self._core.training is owner.training
                and not export.state.exporting and not quantization.by_module() and self.usable())

    def _supports_ranks(self, owner: torch.nn.Module) -> bool:
        """True if the fused call supports the sharded parts: all use one group, and no dropout draws from a tracker's stream."""
        if torch.compiler.is_compiling() or owner.training and (owner.hidden_dropout > 0 or self._core.attention_dropout > 0):
            return False
        group = owner.layernorm_mlp.tp_group
        return (all(part.tp_group is group and part.tp_group_initialized for part in self._divided)
                and all(part.sequence_parallel == owner.sequence_parallel for part in self._products))

    def usable(self) -> bool:
        """True if the fused call is equivalent to the parts: they have the original classes and forwards, and no hooks, which it would not run."""
        if any(_GLOBAL_HOOKS):
            return False
        for children, known in self._children:
            if _differ(children, known):
                return False
        for _, part in self._tree:
            kind = type(part)
            if kind not in _FORWARDS or kind.forward is not _FORWARDS[kind] or "forward" in part.__dict__:
                return False
            if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
                return False
        return self._agree and not any([part.fuse_wgrad_accumulation for part in self._products])

    def _parts_agree(self) -> bool:
        """True if all linear layers add their biases, and all norms have the same eps and zero_centered_gamma. The norms of queries and keys are
        compared with qk_norm_eps and False instead.
        """
        if any(part.apply_bias != part.use_bias for part in self._products):
            return False
        usual, own = (self._mlp.eps, self._mlp.zero_centered_gamma), (self._attention.qk_norm_eps, False)
        return all((part.eps, part.zero_centered_gamma) == (own if path.endswith(("q_norm", "k_norm")) else usual)
                   for path, part in self._parts if isinstance(part, (LayerNormLinear, LayerNorm, RMSNorm)))

    def forget(self) -> None:
        """Drops the C++ layers, because a part has other memory, FP8 state or settings; the next forward creates new layers."""
        self._layers, self._agree = {}, self._parts_agree()

    def parameters(self) -> List[Tuple[torch.nn.Module, str]]:
        """Returns (submodule, parameter name) for all parameters of the submodules, in order."""
        return [(part, name) for _, part in self._parts for name in part._parameters if part._parameters[name] is not None]

    def order(self) -> List[int]:
        """The index in parameters() of each of the layer's parameters."""
        known = {(id(part), name): i for i, (part, name) in enumerate(self.parameters())}
        return [known[id(module), name] for module, name, _ in self._places]

    def layer(self, owner, device: torch.device, name: Tuple[str, str, int, int, bool]) -> NativeLayer:
        """The C++ layer for a mask, a softcap in hexadecimal, the two bounds of a window, and whether dropout is active."""
        mask, softcap, *size, drops = name
        core = self._core
        hidden, inner = (owner.hidden_dropout, core.attention_dropout) if drops else (0.0, 0.0)
        attention, mlp = self._attention, self._mlp
        key = (device, mask, softcap, *size, hidden, inner, attention.rotary_pos_interleaved, attention.qk_norm_before_rope, attention.qkv_format,
               owner.sequence_parallel, owner.parallel_attention_mlp, owner.apply_residual_connection_post_layernorm, owner.output_layernorm)
        layer = self._layers.get(key)
        if layer is None:
            self.check_devices(device)
            options = {"hidden_size": attention.hidden_size, "ffn_hidden_size": mlp.ffn_hidden_size, "activation": mlp.activation,
                       "num_attention_heads": attention.num_attention_heads_per_partition, "num_gqa_groups": attention.num_gqa_groups_per_partition,
                       "kv_channels": attention.kv_channels, "normalization": mlp.normalization, "epsilon": mlp.eps,
                       "zero_centered_gamma": mlp.zero_centered_gamma, "bias": mlp.use_bias, "hidden_dropout": hidden,
                       "attention_dropout": inner, "parallel_attention_mlp": owner.parallel_attention_mlp,
                       "layout": attention.qkv_format, "mask_type": mask, "window_left": size[0], "window_right": size[1],
                       "softcap": float.fromhex(softcap), "softmax_type": core.softmax_type, "rotary_interleaved": attention.rotary_pos_interleaved,
                       "param_dtype": DTYPE_NAMES[mlp.params_dtype], **mlp._clamp,
                       "apply_residual_connection_post_layernorm": owner.apply_residual_connection_post_layernorm,
                       "output_layernorm": owner.output_layernorm, "fuse_qkv_params": attention.fuse_qkv_params,
                       "qkv_weight_interleaved": attention.qkv_weight_interleaved}
            if self._divides:
                options.update(sequence_ranks=SequenceRanks(mlp.tp_group, device), sequence_parallel=owner.sequence_parallel)
            if attention.qk_norm_type is not None:
                options.update(qk_norm=attention.qk_norm_type, qk_norm_epsilon=attention.qk_norm_eps,
                               qk_norm_before_rope=attention.qk_norm_before_rope)
            if core.softmax_scale is not None:
                options["softmax_scale"] = float(core.softmax_scale)
            states = tuple((path + ".", part._states.native) for path, part in self._parts if part._sites)
            layer = NativeLayer("transformer_layer", options, device, states)
            for _, part in self._parts:
                part._load_waiting()
            names = [name for name, _ in _native.layer_parameters(layer.native)]
            modules = [(_find(owner, path), name) for path, _, name in (n.rpartition(".") for n in names)]
            self._places = [(module, name, module._parameters) for module, name in modules]
            self._layers[key] = layer  # assigned last, so that KeyboardInterrupt never leaves a half-made layer
        return layer

    def forward(self, owner: torch.nn.Module, call: TransformerCall) -> torch.Tensor:
        """Returns the layer's output. call: a call for which serves() returned true."""
        where, x, core = "TransformerLayer", call.hidden_states, self._core
        cap = score_cap(where, call.softcap)
        lengths = (call.cu_seqlens_q, call.cu_seqlens_q, call.cu_seqlens_q_padded, call.cu_seqlens_q_padded, call.max_seqlen_q, call.max_seqlen_q)
        # Under sequence parallelism x is this rank's shard along the first dimension, while attention sees the complete sequences.
        whole = x.new_empty(1).expand(x.shape[0] * owner.tp_size, *x.shape[1:]) if self._divides and owner.sequence_parallel and x.dim() == 3 else x
        mask, size, attention, extras = core._prepared(
            where, self._attention.qkv_format, call.self_attn_mask_type, call.window_size, None, cap, whole, whole, call.attention_mask, lengths,
            call.core_attention_bias_type, call.core_attention_bias, call.alibi_slopes)
        angles = call.rotary_pos_emb
        if angles is not None:
            attention["rotary_angles"] = angles if angles.dtype == torch.float32 else angles.float()
        # The softcap is passed as text, since a layer's name in a graph consists of words and integers.
        name = (mask, cap.hex(), *size, owner.training or not (torch.is_grad_enabled() or torch_checkpoint.repeated()))
        drops = owner.training and (owner.hidden_dropout > 0 or core.attention_dropout > 0)
        random = generator.draw_for(owner, x.device) if drops else None
        if torch.compiler.is_compiling():
            for _, part in self._parts:
                part._check_compiled()
            traced.graph.check_device(where, x.device)
            parameters = tuple(getattr(part, own) for part, own in self.parameters())
            return traced.graph.forward(owner, "transformer_layer", name, -1, -1, call.is_first_microbatch, (x,), extras, parameters, attention or None, random)
        layer = self.layer(owner, x.device, name)
        # PyTorch's parametrisations turn a parameter into a plain attribute.
        parameters = [own[name] if name in own else getattr(module, name) for module, name, own in self._places]
        return layer.compute(owner, (x,), extras, parameters, -1, call.is_first_microbatch, attention or None, random, False)

    def check_devices(self, device: torch.device) -> None:
        """Raises an error if a part's parameter is on another device than the input, which is on `device`."""
        for path, part in self._parts:
            check_devices("TransformerLayer", device, ((f"the parameter '{path}.{name}'", p) for name, p in part._parameters.items()))
