#!/usr/bin/env python3
"""Compares transformer_engine.jax with te_fl.jax: public names, members of classes, parameters, fields and their defaults.

The differences are written to docs/jax.md with their reasons from REASONS; a difference without a reason is an error, and so is a
reason without a difference. The program needs te_fl.jax and Flax, and Transformer Engine's names in tests/python/transformer_engine_jax_facts.json.

usage: transformer_engine_jax.py [--source DIR] [--check]
  --source DIR  first writes that facts file from a folder that has transformer_engine/ (imports and runs nothing there)
  --check       writes nothing; exits 1 if the page is out of date
"""
import argparse
import ast
import importlib
import inspect
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import transformer_engine_names as names_tool  # noqa: E402

ROOT = names_tool.ROOT
FACTS = ROOT / "tests/python/transformer_engine_jax_facts.json"
PAGE = ROOT / "docs/jax.md"
BEGIN, END = "<!-- Written by tools/transformer_engine_jax.py; do not edit. -->\n", "<!-- End of what is written. -->\n"
MODULES = ("transformer_engine.jax", *(f"transformer_engine.jax.{name}" for name in (
    "activation", "attention", "checkpoint_policies", "dense", "ep", "flax", "flax.module", "flax.transformer", "layernorm", "layernorm_dense",
    "layernorm_mlp", "moe", "permutation", "quantize", "router", "sharding", "softmax")))
# names of types that occur only in annotations; programs do not call them
TYPES = ("Array", "DType", "Initializer", "LogicalRules", "PRNGKey", "PrecisionLike", "Shape")

_OWN_STATE = "quantisers are te_fl.jax.quantize.create_set(recipe)'s trees of arrays, and what they write a Quantized"
_PACKED = "packed sequences (thd) are not supported"
_EXPERTS = "mixtures of experts are not supported in JAX"
# Reasons for differences. Keys: a name below transformer_engine.jax, a whole module, or "NAME: parameters" if only the parameters differ.
REASONS = {
    "attention.SequenceDescriptor.get_seqlens_and_offsets": _PACKED,
    "attention.SequenceDescriptor.seq_offsets": _PACKED,
    "attention.SequenceDescriptor.segment_ids": _PACKED,
    "attention.SequenceDescriptor.segment_pos": _PACKED,
    "attention.SequenceDescriptor.tree_flatten": "it is a NamedTuple, which JAX knows",
    "attention.SequenceDescriptor.tree_unflatten": "it is a NamedTuple, which JAX knows",
    "attention.fused_attn: parameters": "two more at the end: return_max_logit, which is refused, and transpose_batch_sequence",
    "attention.fused_attn_thd": _PACKED,
    "attention.is_fused_attn_kernel_available": "fused_attn computes what it does not refuse by name, on every device",
    "attention.run_length_fill": _PACKED,
    "attention.run_length_fill_flattened": _PACKED,
    "checkpoint_policies": "te-fl's ops are calls of XLA's FFI: name what is to be saved (ffn1, qkv_proj, context ..) to jax.checkpoint_policies.save_only_these_names",
    "dense.grouped_dense": "call dense once for each group",
    "ep": _EXPERTS,
    "flax.make_grouped_dense_cls": _EXPERTS,
    "flax.module.make_grouped_dense_cls": _EXPERTS,
    "flax.transformer.LoRAScope": "low_rank_adaptation_scope takes its names as text",
    "moe": _EXPERTS,
    "permutation": _EXPERTS,
    "quantize": _OWN_STATE,
    "router": _EXPERTS,
    "sharding.get_padded_spec": "give the entries of a PartitionSpec, and None for the other dimensions",
    "sharding.get_mesh_axis_rank_host": "take the index from mesh.devices",
}


def read_facts(folder):
    package = names_tool.Package(folder)
    found = {}
    for module in MODULES:
        found[module] = {}
        for name in package.names(module):
            definition = package.definition(module, name)
            node = definition and definition[1]
            if name in TYPES or f"{module}.{name}" in package.trees:
                continue
            found[module][name] = {} if node is None else {"parameters": names_tool.parameters(node)} if isinstance(node, ast.FunctionDef) \
                else {"members": members(node)}
    return found


def members(node):
    """Returns {public member of a class: a method's parameters, a field's default as text, or None}."""
    made = {}
    for n in node.body:
        if isinstance(n, ast.FunctionDef):
            is_property = any(ast.unparse(d) == "property" for d in n.decorator_list)
            made[n.name] = None if is_property else {"parameters": names_tool.parameters(n)}
        elif isinstance(n, ast.AnnAssign):
            made[n.target.id] = {"default": n.value and ast.unparse(n.value)}
        elif isinstance(n, ast.Assign):
            made.update({t.id: None for t in n.targets if isinstance(t, ast.Name)})
    return {name: fact for name, fact in made.items() if not name.startswith("_") or name in ("__call__", "__init__")}


def plain(text):
    """Evaluates a default that is a literal; returns ... for others, which are compared only for presence."""
    try:
        return text and ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return ...


def own_parameters(function):
    kinds = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    rows = [(p.name, p.default, kinds.get(p.kind)) for p in inspect.signature(function).parameters.values()]
    return [row for i, row in enumerate(rows) if not (i == 0 and row[0] in ("self", "cls"))]


def same_parameters(function, rows):
    """Returns True if both have the same names in the same order with equal defaults; only literal defaults are compared."""
    own = own_parameters(function)
    if [name for name, _, _ in own] != [name for name, _, _ in rows]:
        return False
    for (_, default, _), (_, text, _) in zip(own, rows):
        value = plain(text)
        if (text is None) != (default is inspect.Parameter.empty) and value is not ...:
            if not (text is None and default is inspect.Parameter.empty):
                return False
        elif text is not None and value is not ... and default != value:
            return False
    return True


def compared(home, name, fact):
    """Returns how te-fl's version of a supported name differs from Transformer Engine's, as suffixes of the name: "" if the name is missing, ".MEMBER" for a
    missing member, ": parameters" or ".MEMBER: parameters" for different parameters."""
    if not hasattr(home, name):
        return [""]
    own = getattr(home, name)
    if "parameters" in fact:
        return [] if same_parameters(own, fact["parameters"]) else [": parameters"]
    found = []
    for member, of in fact.get("members", {}).items():
        if member == "__init__":
            continue  # te-fl's objects of this class come from functions, not from its constructor
        fields = getattr(own, "__dataclass_fields__", {})
        if not hasattr(own, member) and member not in fields:
            found.append(f".{member}")
        elif of and "parameters" in of and callable(getattr(own, member)) and not same_parameters(getattr(own, member), of["parameters"]):
            found.append(f".{member}: parameters")
        elif of and "default" in of and member in fields and plain(of["default"]) is not ... and of["default"] is not None \
                and fields[member].default != plain(of["default"]):
            found.append(f".{member}: default")
    return found


def differences(facts):
    """Returns the differences by name; a module with a reason of its own counts as one difference."""
    table = names_tool.load(ROOT / "python/te_fl/compat/table.py")
    found = []
    for module, names in facts.items():
        short = module.removeprefix("transformer_engine.jax").lstrip(".")
        for name, fact in names.items():
            home = table.home(module, name)
            where = importlib.import_module(home) if home else object()
            for what in compared(where, name, fact):
                full = f"{short}.{name}{what}" if short else f"{name}{what}"
                found.append(short if short in REASONS else full)
    return sorted(set(found))


def section(found):
    rows = "".join(f"| `{name}` | {REASONS[name]} |\n" for name in found)
    return f"{BEGIN}| below `transformer_engine.jax` | |\n|---|---|\n{rows}{END}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.source:
        facts = read_facts(options.source)
        FACTS.write_text("{\n" + ",\n".join(f"{json.dumps(m)}: {{\n" + ",\n".join(f"{json.dumps(n)}: {json.dumps(f)}" for n, f in sorted(names.items())) + "\n}"
                                             for m, names in sorted(facts.items())) + "\n}\n")
    found = differences(json.loads(FACTS.read_text()))
    wrong = [f"{name} differs from Transformer Engine's, and REASONS in {__file__} has no reason" for name in found if name not in REASONS]
    wrong += [f"{name} differs from Transformer Engine's no more: take it out of REASONS in {__file__}" for name in REASONS if name not in found]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    text = PAGE.read_text()
    new = text[:text.index(BEGIN)] + section(found) + text[text.index(END) + len(END):]
    if new == text:
        return 0
    print(f"{PAGE.relative_to(ROOT)} {'differs; run this without --check' if options.check else 'written'}")
    if not options.check:
        PAGE.write_text(new)
    return 1 if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
