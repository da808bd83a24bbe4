#!/usr/bin/env python3
"""Generates te-fl's lists of Transformer Engine's names, and docs/transformer-engine.md.

From the real package's Python files (names and signatures; nothing is imported or run):
  python/te_fl/compat/known_names.py         its modules and their public names
  tests/python/transformer_engine_facts.json the parameters and defaults of the names that te-fl supports
From these and python/te_fl/compat/table.py:
  docs/transformer-engine.md                 every name as supported, partly supported or refused

usage: transformer_engine_names.py [--source DIR | --download] [--check]
  --source DIR  a folder that has transformer_engine/, such as an unpacked wheel
  --download    fetches the wheel with pip
  --check       writes nothing; exits 1 if a file is out of date
"""
import argparse
import ast
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
VERSION = "2.20.2"
KNOWN = ROOT / "python/te_fl/compat/known_names.py"
FACTS = ROOT / "tests/python/transformer_engine_facts.json"
PAGE = ROOT / "docs/transformer-engine.md"
PAGE_MODULES = ("transformer_engine.pytorch", "transformer_engine.pytorch.distributed", "transformer_engine.pytorch.optimizers",
                "transformer_engine.pytorch.ops", "transformer_engine.pytorch.tensor.utils", "transformer_engine.jax", "transformer_engine.jax.flax", "transformer_engine.common.recipe")
LEFT_OUT = ("triton", "debug", "dynamo", "CuTeDSL", "setup", "triton_extensions", "custom_recipes", "linear_attention")
OLDER = ("transformer_engine.pytorch.cpu_offload_v1",)  # an older module that repeats names of other modules, with fewer parameters
METHODS = ("__init__", "forward", "step", "zero_grad", "setup", "__call__")


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Package:
    """The modules of a folder of Python files, as syntax trees."""

    def __init__(self, folder):
        self.trees = {}
        for path in sorted((folder / "transformer_engine").rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            parts = parts[:-1] if is_package else parts
            if not set(parts) & set(LEFT_OUT) and not any(p.startswith("_") for p in parts):
                self.trees[".".join(parts)] = (ast.parse(path.read_text()), is_package)

    def imports(self, module, stars=False):
        """Returns {name: (module, name there)} of the names that `module` imports from the package; with `stars` the modules from which it imports
        "*" instead."""
        tree, is_package = self.trees[module]
        found = {}
        for node in top_level(tree.body):
            if not isinstance(node, ast.ImportFrom):
                continue
            base = node.module or ""
            if node.level:
                parents = module.split(".") if is_package else module.split(".")[:-1]
                parents = parents[:len(parents) - node.level + 1]
                base = ".".join(parents + ([base] if base else []))
            if base.split(".")[0] in ("transformer_engine", "transformer_engine_torch"):
                for alias in node.names:
                    if (alias.name == "*") == stars:
                        found[base if stars else alias.asname or alias.name] = (base, alias.name)
        return found

    def names(self, module):
        """Returns the public names of a module: those that it defines, those of __all__, and, in a package, those that it imports from its
        modules."""
        tree, is_package = self.trees[module]
        names, taken, listed = set(), self.imports(module), False
        for node in top_level(tree.body):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                targets = {t.id for t in node.targets if isinstance(t, ast.Name)}
                listed = listed or "__all__" in targets
                names |= set(ast.literal_eval(node.value)) if "__all__" in targets and isinstance(node.value, ast.List) else targets
        if is_package and not listed or not names:  # some modules only re-export names of others
            names |= {name for name, (base, original) in taken.items() if f"{base}.{original}" not in self.trees}
            for base, original in self.stars(module):
                names |= set(self.names(base))
        return sorted(n for n in names if not n.startswith("_") and n != "load_framework_extension")

    def stars(self, module):
        return [target for target in self.imports(module, stars=True).values() if target[1] == "*" and target[0] in self.trees]

    def definition(self, module, name, seen=()):
        """Returns (module, class or function) of a name's definition; None if it is not in the Python sources."""
        if module not in self.trees or (module, name) in seen:
            return None
        for node in top_level(self.trees[module][0].body):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
                return module, node
        targets = [t for n, t in self.imports(module).items() if n == name] + [(base, name) for base, _ in self.stars(module)]
        found = (self.definition(*target, seen=(*seen, (module, name))) for target in targets)
        return next((f for f in found if f), None)


def top_level(body):
    """Yields the statements of a module, including those inside try and if."""
    for node in body:
        if isinstance(node, (ast.Try, ast.If)):
            yield from top_level(node.body)
        else:
            yield node


def parameters(function):
    """Returns [name, default as text or None, kind] of a function's parameters except self, cls and ctx."""
    a = function.args
    positional = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(positional) - len(a.defaults)) + a.defaults
    rows = [[p.arg, d and ast.unparse(d), "positional"] for p, d in zip(positional, defaults)]
    rows += [[a.vararg.arg, None, "*"]] if a.vararg else []
    rows += [[p.arg, d and ast.unparse(d), "keyword"] for p, d in zip(a.kwonlyargs, a.kw_defaults)]
    rows += [[a.kwarg.arg, None, "**"]] if a.kwarg else []
    return [row for i, row in enumerate(rows) if not (i == 0 and row[0] in ("self", "cls", "ctx"))]


def members(package, module, node):
    """Returns {name: kind} of a class's attributes, including those of its base classes: "plain" for attributes that objects store, "read" for
    properties and methods."""
    found = {}
    for base in node.bases:
        defined = package.definition(module, ast.unparse(base).split(".")[-1])
        if defined and isinstance(defined[1], ast.ClassDef) and defined[1] is not node:
            found.update(members(package, *defined))
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            settable = any(ast.unparse(d).endswith(".setter") for d in part.decorator_list)
            found[part.name] = "plain" if settable else "read"
            for target in written_to(part) if part.name == "__init__" else ():
                found.setdefault(target, "plain")
    return {name: kind for name, kind in sorted(found.items()) if not name.startswith("_")}


def written_to(function):
    """Returns the attributes of self that a function assigns."""
    for node in ast.walk(function):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else ():
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
                    yield one.attr


def read_facts(package, module, node):
    """Returns the parameters of a function or of a class's methods. For a Flax module the fields count as parameters of its constructor."""
    if isinstance(node, ast.FunctionDef):
        return {"parameters": parameters(node)}
    functions = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
    facts = {"methods": {name: parameters(functions[name]) for name in METHODS if name in functions}}
    if module.startswith("transformer_engine.jax.flax"):
        return {"fields": [[f.target.id, f.value and ast.unparse(f.value), "keyword"] for f in fields]}
    if "__init__" not in functions and fields and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
        facts["methods"]["__init__"] = [[f.target.id, f.value and ast.unparse(f.value), "positional"] for f in fields]
    if module.startswith("transformer_engine.pytorch"):
        facts["members"] = members(package, module, node)
    return facts


def read_package(folder, table):
    package = Package(folder)
    known = {module: package.names(module) for module in package.trees}
    served = {name for names in table.SERVED.values() for name in names.split()}
    facts, seen = {}, set()
    for module in sorted(known.keys() - set(OLDER), key=lambda m: (m not in PAGE_MODULES, m.count("."), m)):
        for name in known[module]:
            found = package.definition(module, name)
            if found and found not in seen and name in served and table.home(module, name):
                seen.add(found)
                facts[f"{module}.{name}"] = read_facts(package, *found)
    return known, facts


def known_text(known):
    lines = [f'"""Modules and public names of Transformer Engine {VERSION}. Written by tools/transformer_engine_names.py; do not edit."""',
             "", "NAMES = {"]
    for module, names in sorted(known.items()):
        text = " ".join(names)
        lines.append(f'    "{module}":')
        while len(text) > 120:
            cut = text.rindex(" ", 0, 120)
            lines.append(f'        "{text[:cut]} "')
            text = text[cut + 1:]
        lines.append(f'        "{text}",')
    return "\n".join(lines + ["}", ""])


def page_text(known, table):
    lines = ["# Transformer Engine's names", "",
             "<!-- Written by tools/transformer_engine_names.py from python/te_fl/compat/table.py and the names of Transformer Engine "
             f"{VERSION}; do not edit. -->", "", *table.INTRODUCTION.strip().splitlines(), ""]
    for module in PAGE_MODULES:
        names = [n for n in known[module] if f"{module}.{n}" not in known]
        served = [n for n in names if table.home(module, n)]
        lines += [f"## {module}", "", f"{len(served)} of {len(names)} names are supported.", "", "| name | te-fl | inside | |", "|---|---|---|---|"]
        for name in names:
            home, inside = table.home(module, name), table.inside(module, name)
            refused = [f"`{argument}`" for argument in table.PARTLY.get(f"{home}.{name}", ())] + \
                [f"{method}'s `{argument}`" for method in ("forward", "__call__")
                 for argument in table.PARTLY.get(f"{home}.{name}.{method}", ())]
            if home and f"{home}.{name}" in table.MADE_BY:
                lines.append(f"| {name} | partly: `{home}` | {inside} | {table.MADE_BY[f'{home}.{name}']} |")
            elif home and refused:
                lines.append(f"| {name} | partly: `{home}` | {inside} | refused: {', '.join(refused)} |")
            elif home:
                lines.append(f"| {name} | supported: `{home}` | {inside} | |")
            else:
                lines.append(f"| {name} | refused | {inside} | {table.way_out(module, name)} |")
        lines.append("")
    lines += ["## Members", "", *table.MEMBERS_INTRODUCTION.strip().splitlines(), "", "| members | why |", "|---|---|"]
    lines += [f"| {', '.join(f'`{name}`' for name in names.split())} | {reason} |" for names, reason in table.LACKING]
    return "\n".join([*lines, ""])


def source_folder(options, scratch):
    if options.download:
        wheel = f"transformer_engine=={VERSION}"
        subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", scratch, wheel], check=True)
        zipfile.ZipFile(next(pathlib.Path(scratch).glob("transformer_engine-*.whl"))).extractall(scratch)
        return pathlib.Path(scratch)
    return options.source


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=pathlib.Path)
    parser.add_argument("--download", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    table = load(ROOT / "python/te_fl/compat/table.py")
    texts = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = source_folder(options, scratch)
        if folder:
            known, facts = read_package(folder, table)
            texts[KNOWN] = known_text(known)
            texts[FACTS] = "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(facts[name])}" for name in sorted(facts)) + "\n}\n"
        else:
            known = {module: names.split() for module, names in load(KNOWN).NAMES.items()}
    texts[PAGE] = page_text(known, table)
    different = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in different:
        print(f"{path.relative_to(ROOT)} {'differs; run this without --check' if options.check else 'written'}")
        if not options.check:
            path.write_text(texts[path])
    return 1 if options.check and different else 0


if __name__ == "__main__":
    sys.exit(main())
