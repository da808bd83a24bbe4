"""usage: megatron_lm_fl_tree.py, with MEGATRON_LM_FL_TREE=FOLDER. Looks up all names of Transformer Engine that the package megatron of a checkout of
Megatron-LM-FL asks for, with te-fl under Transformer Engine's names.

Prints how many of them te-fl supports, which it refuses when they are used, and which it does not have. Exits 1 if a name is missing that is not in MISSING
below, and 77, which means skipped, without MEGATRON_LM_FL_TREE. Nothing of the checkout is imported or run.
"""

import ast
import collections
import importlib
import os
import pathlib
import sys

import te_fl

te_fl.as_transformer_engine()
from te_fl.compat.finder import Refused  # noqa: E402

# Names that te-fl does not have, with the reason why the program does without.
MISSING = {
    "transformer_engine.common.recipe.Format.HIF8": "a format of Ascend's, which no Transformer Engine has; only fp8='hif8' asks for it",
    "transformer_engine.pytorch.attention._SplitAlongDim": "a name from before Transformer Engine 2.2; it is asked for in a try, with another way behind",
    "transformer_engine.pytorch.attention._SplitAlongDim.apply": "as _SplitAlongDim",
    "transformer_engine.pytorch.attention.apply_rotary_pos_emb": "asked for before Transformer Engine 2.3; behind that it is in attention.rope",
    "transformer_engine.pytorch.cpp_extensions.cast_to_fp8": "asked for before Transformer Engine 2.0",
    "transformer_engine.pytorch.float8_tensor.Float8Tensor.make_like": "for codes in a checkpoint that are not contiguous; te-fl's are",
    "transformer_engine.pytorch.fp8.FP8GlobalStateManager.add_fp8_tensors_to_global_buffer": "for CUDA graphs of its own, which te-fl refuses",
    "transformer_engine.pytorch.fp8.FP8GlobalStateManager.reduce_and_update_fp8_tensors": "for CUDA graphs of its own, which te-fl refuses",
    "transformer_engine.pytorch.module.base.get_workspace": "a name from before Transformer Engine 2.10; it is asked for in a try, with another way behind",
    "transformer_engine.pytorch.module.linear.general_gemm": "replaced for batch-invariant products if it is there; te-fl's Linear calls no such function",
    "transformer_engine.pytorch.module.layernorm_linear.general_gemm": "as in module.linear",
}


def imports(tree):
    """Yields (name in the file, full name) of what a file imports from Transformer Engine."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module.split(".")[0] in ("transformer_engine", "transformer_engine_torch"):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}", True
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in ("transformer_engine", "transformer_engine_torch"):
                    yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0], False


def asked(tree):
    """The full names that a file asks for: what it imports by name, and attributes of modules that it imports."""
    known = {}
    for name, full, by_name in imports(tree):
        known[name] = full
        if by_name:
            yield full
    for node in ast.walk(tree):
        parts, value = [], node
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        if parts and isinstance(value, ast.Name) and value.id in known:
            yield ".".join([known[value.id], *reversed(parts)])


def find(full):
    """Returns te-fl's object for a name; raises AttributeError if there is none."""
    parts = full.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if isinstance(found, Refused):
                return found
            found = getattr(found, part)
        return found
    raise AttributeError(full)


def main(tree):
    files = collections.defaultdict(set)
    for path in sorted((tree / "megatron").rglob("*.py")):
        for full in asked(ast.parse(path.read_text())):
            files[full].add(str(path.relative_to(tree)))
    supported, refused, missing = [], [], []
    for full in sorted(files):
        try:
            (refused if isinstance(find(full), Refused) else supported).append(full)
        except AttributeError:
            missing.append(full)
    print(f"{len(supported)} of {len(files)} names are supported")
    for full in refused:
        print(f"refused when used: {full} ({', '.join(sorted(files[full]))})")
    for full in missing:
        print(f"missing: {full} ({', '.join(sorted(files[full]))}): {MISSING.get(full, 'no reason is known')}")
    return any(full not in MISSING for full in missing)


if __name__ == "__main__":
    folder = os.environ.get("MEGATRON_LM_FL_TREE")
    if not folder:
        print("skipped: MEGATRON_LM_FL_TREE names no checkout of Megatron-LM-FL")
        sys.exit(77)
    sys.exit(main(pathlib.Path(folder)))
