"""Transformer Engine's modules for PyTorch, on te-fl's ops: te_fl.pytorch.Linear(768, 768) on cuda and on cpu."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from te_fl.frameworks import require

require("torch")

# The form `import X as X` marks a name as public for type checkers.
from te_fl.common import recipe as recipe  # noqa: E402
from te_fl.errors import did_you_mean  # noqa: E402
from te_fl.pytorch.modules.attention import DotProductAttention as DotProductAttention  # noqa: E402
from te_fl.pytorch.autograd.checkpoint import checkpoint as checkpoint, recompute_contexts as recompute_contexts  # noqa: E402
from te_fl.pytorch.fp8.plain_codes import saving_codes as saving_codes  # noqa: E402
from te_fl.pytorch.fp8.quantization import autocast as autocast, fp8_autocast as fp8_autocast  # noqa: E402
from te_fl.pytorch.fp8.quantization import fp8_model_init as fp8_model_init, quantized_model_init as quantized_model_init  # noqa: E402
from te_fl.pytorch.modules.linear import LayerNormLinear as LayerNormLinear, Linear as Linear  # noqa: E402
from te_fl.pytorch.modules.mlp import LayerNormMLP as LayerNormMLP  # noqa: E402
from te_fl.pytorch.modules.multihead_attention import MultiheadAttention as MultiheadAttention  # noqa: E402
from te_fl.pytorch.modules.norm import LayerNorm as LayerNorm, RMSNorm as RMSNorm  # noqa: E402
from te_fl.pytorch.modules.transformer import TransformerLayer as TransformerLayer  # noqa: E402
from te_fl.pytorch.fp8.weight_cache import cache_quantized_weights as cache_quantized_weights  # noqa: E402
from te_fl.compat import known_names as _known_names, same_modules as _same_modules, table as _table  # noqa: E402
from te_fl.compat.variables import read_variables as _read_variables  # noqa: E402
from te_fl.pytorch.distributed import quarantine as _quarantine  # noqa: E402, F401  (has the ranks agree)
from te_fl.pytorch import compile as _compile  # noqa: E402, F401  (enters itself where the other subpackages look for it)

if TYPE_CHECKING:  # names that __getattr__() imports on first access
    from te_fl.pytorch import optimizers as optimizers, ops as ops
    from te_fl.pytorch.runtime import constants as constants
    from te_fl.pytorch.functions import cross_entropy as cross_entropy
    from te_fl.pytorch.autograd.offload import ManualOffloadSynchronizer as ManualOffloadSynchronizer, get_cpu_offload_context as get_cpu_offload_context
    from te_fl.pytorch.autograd.offload import mark_not_offload as mark_not_offload
    from te_fl.pytorch.compile.graph import make_graphed_callables as make_graphed_callables
    from te_fl.pytorch.fp8.availability import get_cudnn_version as get_cudnn_version, get_default_recipe as get_default_recipe
    from te_fl.pytorch.fp8.availability import get_device_compute_capability as get_device_compute_capability, is_bf16_available as is_bf16_available
    from te_fl.pytorch.fp8.availability import is_fp8_available as is_fp8_available, is_fp8_block_scaling_available as is_fp8_block_scaling_available
    from te_fl.pytorch.fp8.availability import is_mxfp8_available as is_mxfp8_available, is_nvfp4_available as is_nvfp4_available
    from te_fl.pytorch.fp8.availability import torch_version as torch_version
    from te_fl.pytorch.fp8.float8_tensor import Float8Tensor as Float8Tensor, QuantizedTensor as QuantizedTensor
    from te_fl.pytorch.fp8.block_quantizers import HybridQuantizer as HybridQuantizer, IdentityQuantizer as IdentityQuantizer
    from te_fl.pytorch.fp8.block_quantizers import MXFP8Quantizer as MXFP8Quantizer, NVFP4Quantizer as NVFP4Quantizer
    from te_fl.pytorch.fp8.quantizers import Float8BlockQuantizer as Float8BlockQuantizer, Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer
    from te_fl.pytorch.fp8.quantizers import Float8Quantizer as Float8Quantizer, Quantizer as Quantizer
    from te_fl.pytorch.fp8.roles import DelayedScalingRequest as DelayedScalingRequest, QuantizerRequest as QuantizerRequest
    from te_fl.pytorch.fp8.roles import QuantizerRole as QuantizerRole
    from te_fl.pytorch.functions.cross_entropy import parallel_cross_entropy as parallel_cross_entropy
    from te_fl.pytorch.functions.expert_parallel import moe_combine as moe_combine, moe_dispatch as moe_dispatch
    from te_fl.pytorch.functions.expert_parallel import start_moe_combine as start_moe_combine, start_moe_dispatch as start_moe_dispatch
    from te_fl.pytorch.functions.permutation import moe_permute as moe_permute, moe_permute_and_pad_with_probs as moe_permute_and_pad_with_probs
    from te_fl.pytorch.functions.permutation import moe_permute_with_probs as moe_permute_with_probs, moe_sort_chunks_by_index as moe_sort_chunks_by_index
    from te_fl.pytorch.functions.permutation import moe_sort_chunks_by_index_with_probs as moe_sort_chunks_by_index_with_probs, moe_unpermute as moe_unpermute
    from te_fl.pytorch.functions.rope import RotaryPositionEmbedding as RotaryPositionEmbedding
    from te_fl.pytorch.functions.weights import deinterleave_glu_tensor as deinterleave_glu_tensor, interleave_glu_tensor as interleave_glu_tensor
    from te_fl.pytorch.modules.grouped_linear import GroupedLinear as GroupedLinear
    from te_fl.pytorch.modules.inference import InferenceParams as InferenceParams
    from te_fl.pytorch.modules.moe_layer import MoELayer as MoELayer
    from te_fl.pytorch.modules.padding import Fp8Padding as Fp8Padding, Fp8Unpadding as Fp8Unpadding
    from te_fl.pytorch.runtime.constants import CPLoadBalancingStrategy as CPLoadBalancingStrategy, DType as DType
    from te_fl.pytorch.runtime.export import onnx_export as onnx_export
    from te_fl.pytorch.runtime.rng import CudaRNGStatesTracker as CudaRNGStatesTracker

_read_variables()
_same_modules.add()

_LATER = ("ops", "optimizers")
# Names that Transformer Engine does not have, with their modules; imported on first access.
_OWN = {"MoELayer": "te_fl.pytorch.modules.moe_layer",
        **dict.fromkeys(("moe_combine", "moe_dispatch", "start_moe_combine", "start_moe_dispatch"), "te_fl.pytorch.functions.expert_parallel")}


def __getattr__(name: str):
    # Imports less common names on first access, from the module that docs/transformer-engine.md lists.
    if name in _LATER:
        return importlib.import_module(f"te_fl.pytorch.{name}")
    home = _OWN.get(name) or (None if name.startswith("_") else _table.home("transformer_engine.pytorch", name))
    if home is None:
        raise AttributeError(f"te_fl.pytorch has no {name!r}{'' if name.startswith('_') else _find_replacement(name)}; docs/transformer-engine.md lists "
                             "what there is")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def _find_replacement(name: str) -> str:
    if name in _known_names.NAMES["transformer_engine.pytorch"].split():
        return f", which Transformer Engine has; {_table.way_out('transformer_engine.pytorch', name)}"
    return did_you_mean(name, __dir__())


def __dir__():
    served = {name for home, names in _table.SERVED.items() if home.startswith("te_fl.pytorch") for name in names.split()}
    return sorted({*globals(), *_LATER, *_OWN, *served})
