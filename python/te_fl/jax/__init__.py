"""te-fl's ops in JAX: differentiable functions, FP8 with explicit state, and Flax modules (te_fl.jax.flax, which needs flax).

Names, arguments and defaults are Transformer Engine's; docs/jax.md lists what is supported. Each op is one XLA FFI call on the CPU and on CUDA, and XLA's
own operations (te_fl.reference_xla) on platforms that no plugin of te-fl serves. It works under jit, grad, vmap, scan, remat and shard_map.
"""

from __future__ import annotations

import importlib
import re

from te_fl.frameworks import require


def _check_versions() -> None:
    """Refuses a missing or too old JAX, and an incompatible FFI version; the error names the versions."""
    require("jax")
    import jax

    try:
        with open(f"{jax.ffi.include_dir()}/xla/ffi/api/c_api.h", encoding="utf-8") as header:
            text = header.read()
    except OSError:
        return  # XLA itself refuses handlers with an unknown version
    found = [int(n) for n in re.findall(r"#define XLA_FFI_API_M(?:AJOR|INOR) (\d+)", text)]
    if len(found) == 2 and (found[0] != 0 or found[1] < 3):
        raise ImportError(f"te_fl.jax speaks version 0.3 of XLA's FFI, and the jaxlib of JAX {jax.__version__} has {found[0]}.{found[1]}: "
                          "it takes JAX 0.10 or newer whose FFI is still of version 0", name="jax")


_check_versions()

from te_fl.compat.variables import read_variables  # noqa: E402
from te_fl.jax import activation, attention, dense, layernorm, layernorm_dense, layernorm_mlp, ops, quantize, sharding, softmax  # noqa: E402
from te_fl.jax._call import follow_policy, register_targets  # noqa: E402
# The form `import X as X` marks a name as public for type checkers.
from te_fl.jax.quantize import NVTE_FP8_COLLECTION_NAME as NVTE_FP8_COLLECTION_NAME, autocast as autocast  # noqa: E402
from te_fl.jax.quantize import fp8_autocast as fp8_autocast, update_collections as update_collections  # noqa: E402
from te_fl.jax.sharding import MeshResource as MeshResource  # noqa: E402

register_targets()
follow_policy()
read_variables()

__all__ = ["NVTE_FP8_COLLECTION_NAME", "MeshResource", "activation", "attention", "autocast", "dense", "flax", "fp8_autocast", "layernorm",
           "layernorm_dense", "layernorm_mlp", "ops", "quantize", "sharding", "softmax", "update_collections"]


def __getattr__(name: str):
    if name == "flax":
        return importlib.import_module("te_fl.jax.flax")
    raise AttributeError(f"module 'te_fl.jax' has no attribute {name!r}; it has {', '.join(__all__)}")
