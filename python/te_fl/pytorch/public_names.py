"""Public module names of te_fl.pytorch, which leave out the subpackage: te_fl.pytorch.attention is the file modules/attention.py.

Programs import modules by public name, and pickles of whole modules contain these names, so a file may move between subpackages.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, Optional

PACKAGE = "te_fl.pytorch"
# Ordered from low to high; a subpackage imports only from the subpackages before it.
SUBPACKAGES = {
    "runtime": "argument_rules constants device dtypes export random refuse registry rng traced",
    "distributed": "amax_reduction collectives communicator rank_helpers same_call",
    "fp8": "availability codes extra_state float8_tensor global_state master_weights quantization quantized_gather quantizers scale_functions sharded_weights sharding shards weight_cache",
    "autograd": "call checkpoint delayed_wgrad given_memory offload once saved_parts torch_checkpoint",
    "functions": "activation cross_entropy divided_cross_entropy framework_helpers function general_gemm kv_cache permutation rope router softmax weights",
    "modules": "attention base cached_attention fused_layer grouped_linear inference layer_in_parts layers linear mlp multihead_attention norm own_classes padding transformer transformer_call",
    "ops": "",  # this subpackage's only public module is the package itself
    "optimizers": "",  # this subpackage's only public module is the package itself
    "compile": "compiled compiled_scopes graph graph_state",
}
_PLACES = {f"{PACKAGE}.{name}": f"{PACKAGE}.{subpackage}.{name}" for subpackage, names in SUBPACKAGES.items() for name in names.split()}


class _PublicNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a module by its public name; the public name and the real name give the same module object."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Optional[importlib.machinery.ModuleSpec]:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in _PLACES else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(_PLACES[spec.name])
        spec.loader_state = module.__spec__  # the import system will replace __spec__, so the original is kept
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = module.__spec__.loader_state


def install_public_names() -> None:
    """Makes public module names importable. Modules that are already loaded are registered at once: a later import would overwrite a function of the
    same name, such as te_fl.pytorch.checkpoint, with the module.
    """
    package = sys.modules[PACKAGE]
    for public, place in _PLACES.items():
        module = sys.modules.get(place)
        if module is not None:
            sys.modules[public] = module
            package.__dict__.setdefault(public.rpartition(".")[2], module)
    sys.meta_path.append(_PublicNames())
