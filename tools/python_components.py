"""Checks the components of python/: the imports in python/te_fl and the includes in python/src. tools/check_layering.py prints the violations.

Every import counts, at the top of a module or in a function. Imports go from a higher to a lower component, modules form no cycle, and a function
imports only modules that FUNCTION_IMPORTS lists with the reason.
"""
import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# The components of python/te_fl from the lowest up, by prefixes of module names; the longest matching prefix decides.
COMPONENTS = [
    ("native", ["te_fl._native", "te_fl._check_worker"]),
    ("base", ["te_fl.errors", "te_fl.tensors", "te_fl.missing", "te_fl.frameworks", "te_fl.torch_streams", "te_fl.torch_exchange", "te_fl.remainders", "te_fl.attention_logits", "te_fl.attention_shapes", "te_fl.packed_sequences"]),
    ("ops", ["te_fl.ops", "te_fl.policy", "te_fl.registration", "te_fl._modules", "te_fl.program", "te_fl.torch_node", "te_fl.torch_tensors", "te_fl.torch_metadata", "te_fl.specification", "te_fl.torch_device", "te_fl.reference_torch", "te_fl.flaggems", "te_fl.multi_tensor", "te_fl.torch_mxfp8", "te_fl.tex_form", "te_fl.tex_results"]),
    ("common", ["te_fl.common", "te_fl.torch_nvfp4"]),
    ("compat", ["te_fl.compat"]),
    ("jax", ["te_fl.jax", "te_fl.reference_xla"]),
    *[(f"pytorch/{component}", [f"te_fl.pytorch.{component}"]) for component in
      ("runtime", "distributed", "fp8", "autograd", "functions", "modules", "ops", "optimizers", "compile")],
    ("pytorch", ["te_fl.pytorch"]),
    ("transformer_engine_torch", ["te_fl.transformer_engine_torch"]),
    ("plugin_core", ["te_fl.plugin_core"]),
    ("inside", ["te_fl.inside", "te_fl.transformer_engine_plugin", "te_fl.transformer_engine_fl_backend"]),
    ("te_fl", ["te_fl"]),
    ("programs", ["te_fl.doctor", "te_fl.__main__", "te_fl._check"]),
]
# The folders of python/src, and the folders that each may include besides itself; module.cpp, the entry point of the extension module, may include
# all.
SOURCES = {"py": set(), "ops": {"py"}, "torch": {"py", "ops"}, "jax": {"py", "ops"}, "plugins": {"py", "ops"}}

# Imports that are allowed inside functions: (module, module that its function imports) -> the reason why the import is not at the top of the file. A
# module of te_fl that is imported so must also be of the same or a lower layer (COMPONENTS), as for imports at the top.
FUNCTION_IMPORTS = {
    ("te_fl", "te_fl._modules"): "importing te_fl loads no plugin",
    ("te_fl", "te_fl.registration"): "importing te_fl takes no longer for those who register nothing",
    ("te_fl.reference_torch", "te_fl.reference_torch.compiled"): "it imports PyTorch's compiler, which takes seconds and is of no use without Triton",
    ("te_fl.program", "te_fl._check_worker"): "only commands that run in this process need it",
    ("te_fl.program", "te_fl.torch_device"): "it imports PyTorch, which only commands about devices need",
    ("te_fl", "te_fl.compat.finder"): "only as_transformer_engine() needs it",
    ("te_fl", "te_fl.inside"): "only inside_transformer_engine() needs it",
    ("te_fl.inside.package", "te_fl.inside.host_device"): "it imports PyTorch, which is not to be imported before the program does",
    ("te_fl.inside.package", "te_fl.inside.other_device"): "it imports PyTorch, which is not to be imported before the program does",
    ("te_fl.inside.package", "te_fl.inside.host_kernels"): "it imports PyTorch, which is not to be imported before the program does",
    ("te_fl.inside.package", "te_fl.inside.calls"): "only a version that te-fl does not know needs it",
    ("te_fl.inside.package", "te_fl.transformer_engine_torch.absent"): "it imports PyTorch, which is not to be imported before the program does",
    ("te_fl.inside.package", "te_fl.transformer_engine_torch.older"): "it imports PyTorch, which is not to be imported before the program does",
    ("te_fl.inside.package", "te_fl.transformer_engine_torch"): "it imports PyTorch, which is not to be imported before the program does",
    ("te_fl.inside.host_device", "torch._dynamo"): "it keeps the functions of torch.cuda that are there when it is imported",
    ("te_fl.inside.emulation", "torch._dynamo"): "it keeps the functions of torch.cuda that are there when it is imported",
    ("te_fl.inside.emulation", "torch._dynamo.variables"): "it keeps the functions of torch.cuda that are there when it is imported",
    ("te_fl.transformer_engine_torch.schemes", "transformer_engine.pytorch.tensor"): "the package imports this module",
    ("te_fl.pytorch.distributed.peer_copies", "torch.distributed._symmetric_memory"): "PyTorch may change it, and only TE_FL_TP_OVERLAP needs it",
    ("te_fl.pytorch.compile.compiled", "torch._inductor.codegen.common"): "only another vendor's device needs it",
    ("te_fl.errors", "difflib"): "importing te_fl needs none of it",
    ("te_fl.registration", "te_fl.torch_streams"): "it imports PyTorch, which is optional",
    ("te_fl.registration", "te_fl.torch_metadata"): "it imports PyTorch, which is optional",
    ("te_fl.registration", "numpy"): "it is optional, and only implementations whose functions get arrays need it",
    ("te_fl", "te_fl.torch_device"): "it imports PyTorch, which is optional, and only devices without a plugin need it",
    ("te_fl.flaggems", "flag_gems"): "it is optional, and importing it takes a second",
    ("te_fl.flaggems", "te_fl.flaggems.kernels"): "it imports FlagGems",
    ("te_fl.flaggems", "te_fl.flaggems.fused"): "it imports FlagGems",
    ("te_fl.jax._joined", "flax.linen.fp8_ops"): "Flax is optional, and only accumulating() needs it",
    ("te_fl.jax", "jax"): "JAX is optional, and a missing one is to be refused by te_fl's message",
}
# Modules that import by a name that is data: a user's module name, or a module that is imported when an attribute is first read.
BY_NAME = {"te_fl._modules", "te_fl.tex_form", "te_fl.plugin_core", "te_fl.plugin_core.discovery", "te_fl.plugin_core.registry", "te_fl.inside.package", "te_fl.inside.other_device", "te_fl.transformer_engine_fl_backend", "te_fl.compat.finder", "te_fl.compat.same_modules", "te_fl.frameworks", "te_fl.jax", "te_fl.pytorch", "te_fl.pytorch.compile"}


def module_name(path):
    parts = path.relative_to(ROOT / "python").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_component(module):
    """Returns the index in COMPONENTS of a module, and the component's name."""
    fits = [(len(start), at, component) for at, (component, starts) in enumerate(COMPONENTS) for start in starts
            if module == start or module.startswith(start + ".")]
    _, at, component = max(fits)
    return at, component


def imports(tree, known):
    """Lists (module, line, whether the import is in a function) for each import; `from PACKAGE import NAME` imports the module PACKAGE.NAME if it
    exists."""
    inside = {id(node) for function in ast.walk(tree) if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
              for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in inside
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else node.module, node.lineno, id(node) in inside


def only_for_types(tree):
    """Returns the lines of `if TYPE_CHECKING:` blocks, which never run."""
    return {line for node in ast.walk(tree) if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for line in range(node.lineno, node.end_lineno + 1)}


def find_cycle(arrows):
    """Returns a cycle of names, each importing the next, as a list whose last item is its first; None if there is no cycle."""
    done, way = set(), []

    def visit(name):
        if name in way:
            return way[way.index(name):] + [name]
        if name in done:
            return None
        way.append(name)
        for other in sorted(arrows.get(name, ())):
            found = visit(other)
            if found:
                return found
        way.pop()
        done.add(name)
        return None

    return next((ring for ring in map(visit, sorted(arrows)) if ring), None)


def module_problems(texts, allowed=None):
    """Returns the problems of modules, given as {name: text}."""
    allowed = FUNCTION_IMPORTS if allowed is None else allowed
    known, arrows, used = {*texts, "te_fl._native", "te_fl._check_worker"}, {}, set()
    for module, text in sorted(texts.items()):
        tree = ast.parse(text)
        typing = only_for_types(tree)
        at, component = find_component(module)
        if re.search(r"\bimport_module\(|\b__import__\(", text) and module not in BY_NAME:
            yield (f"{module}: imports by a name in a string, which no check can see; import at the top, or name the module in BY_NAME "
                   "(tools/python_components.py)")
        for target, line, in_function in imports(tree, known):
            if line in typing:
                continue
            if in_function:
                used.add((module, target))
                if (module, target) not in allowed:
                    yield (f"{module}:{line}: a function imports {target}: import it at the top, or name it with the reason in FUNCTION_IMPORTS "
                           "(tools/python_components.py)")
            if target != "te_fl" and not target.startswith("te_fl."):
                continue
            if target not in known:
                yield f"{module}:{line}: there is no {target}"
                continue
            other_at, other = find_component(target)
            if other_at > at:
                yield f"{module}:{line}: {component} imports {target} of {other}, which is above it"
            if target != module:
                arrows.setdefault(module, set()).add(target)
    ring = find_cycle(arrows)
    if ring:
        yield "modules in a ring: " + " > ".join(ring)
    for pair in sorted(set(allowed) - used):
        yield f"FUNCTION_IMPORTS (tools/python_components.py) names {pair[1]} in {pair[0]}, which does not import it in a function"


def source_problems(texts):
    """Returns the problems of python/src, given as {path below it: text}. A header and its source are one unit."""
    arrows = {}
    for path, text in sorted(texts.items()):
        component, unit = path.split("/")[0], path.rsplit(".", 1)[0]
        for target in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.M):
            if target not in texts:
                continue
            other = target.split("/")[0]
            if component in SOURCES and other != component and other not in SOURCES[component]:
                yield f"python/src/{path}: includes {target}: {component} may include only {', '.join(sorted({component, *SOURCES[component]}))}"
            if target.rsplit(".", 1)[0] != unit:
                arrows.setdefault(unit, set()).add(target.rsplit(".", 1)[0])
    ring = find_cycle(arrows)
    if ring:
        yield "units of python/src in a ring: " + " > ".join(ring)


def problems():
    modules = {module_name(p): p.read_text() for p in (ROOT / "python/te_fl").rglob("*.py")}
    for folder, package in (("torch", "te_fl.reference_torch"), ("xla", "te_fl.reference_xla"), ("flaggems", "te_fl.flaggems")):
        for p in (ROOT / "backends" / folder).glob("*.py"):
            modules[package if p.stem == "__init__" else f"{package}.{p.stem}"] = p.read_text()
    sources = {str(p.relative_to(ROOT / "python/src")): p.read_text() for p in (ROOT / "python/src").rglob("*.[chi]*")}
    return [*module_problems(modules), *source_problems(sources)], len(modules), len(sources)


if __name__ == "__main__":
    found, *_ = problems()
    print("\n".join(found))
    sys.exit(bool(found))
