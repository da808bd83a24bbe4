#!/usr/bin/env python3
"""Generates from nn/modules.yaml every description of a module's arguments that several places share:
  python/src/torch/layer_options.hpp                 the C++ readers of te_fl::nn's options
  python/te_fl/pytorch/runtime/argument_rules.py     the rules that refuse.check() checks, by module
  python/te_fl/pytorch/modules/*.py                  the signature of each constructor, and the arguments in its class's docstring
  python/te_fl/compat/table.py                       the arguments that are refused, for docs/transformer-engine.md and the tests

usage: tools/modulegen.py [--check]

--check writes nothing; exits 1 and prints the names of files that are out of date. Needs Python 3.9 and PyYAML.
"""
import argparse
import ast
import pathlib
import sys
import textwrap

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
SPECIFICATION = ROOT / "nn/modules.yaml"
READERS = ROOT / "python/src/torch/layer_options.hpp"
RULES = ROOT / "python/te_fl/pytorch/runtime/argument_rules.py"
CLASSES = ROOT / "python/te_fl/pytorch/modules"
TABLE = ROOT / "python/te_fl/compat/table.py"
NOTE = "Written by tools/modulegen.py from nn/modules.yaml; do not edit."
WIDTH = 140  # line length of the generated Python


class Module:
    """A module of the specification: its arguments with types, defaults and descriptions."""

    def __init__(self, name, entry, specification):
        self.name, self.entry, self.known = name, entry, specification["arguments"]
        unknown = set(entry) - {"class", "arguments", "types", "required", "keywords", "says", "tells", "unchecked", "forward_refused"}
        if unknown:
            raise SystemExit(f"nn/modules.yaml: {name} has the key {sorted(unknown)[0]!r}, which means nothing")
        words = []
        for word in entry["arguments"].split():
            words += specification["groups"][word[1:]].split() if word.startswith("@") else [word]
        self.defaults = {}
        for word in words:
            argument, _, default = word.partition("=")
            if argument not in self.known:
                raise SystemExit(f"nn/modules.yaml: {name} has the argument {argument!r}, which `arguments` does not describe")
            self.defaults[argument] = default or (None if argument in entry.get("required", ()) else self.known[argument].get("default"))
        self.home = entry["class"]
        self.file = CLASSES / (self.home.rpartition(".")[2] + ".py")

    def parameters(self):
        """Returns the parameters of the Python constructor."""
        types = self.entry.get("types", {})
        rows = ["self"]
        for argument, default in self.defaults.items():
            row = f"{argument}: {types.get(argument, self.known[argument]['type'])}"
            rows.append(row if default is None else f"{row} = {default}")
        return rows + (["**kwargs: Any"] if "keywords" in self.entry else [])

    def told(self):
        """Returns the second paragraph of the module's docstring; None if the docstring has only one."""
        if "tells" not in self.entry:
            return None
        sentences = []
        for item in self.entry["tells"]:
            sentences += [item[2:]] if item.startswith("= ") else [self.describe_argument(argument) for argument in item.split()]
        return " ".join(sentences)

    def describe_argument(self, argument):
        entry = self.known[argument]
        text = self.entry.get("says", {}).get(argument, entry["say"]).replace("CHOICE", ", ".join(map(str, entry.get("choice", ()))))
        return f"{', '.join([argument, *entry.get('with', ())])}: {text}."

    def rules(self):
        """Returns the rows for refuse.check(): (kind of check, names of the arguments it reads, further values that it needs ...)."""
        found = []
        for argument, entry in self.known.items():
            if argument not in self.defaults or argument in self.entry.get("unchecked", ()):
                continue
            if "rule" in entry:
                kind, *names = entry["rule"].split()
                found.append((kind, tuple(names)))
            if "choice" in entry:
                found.append(("choice", (argument,), tuple(entry["choice"])))
            if "way_out" in entry:
                found.append(("off", (argument,), entry["way_out"]))
        return found

    def refused(self):
        named = set(self.defaults) | set(self.entry.get("keywords", ()))
        return {argument: entry["refused"] for argument, entry in self.known.items() if argument in named and "refused" in entry}


def wrapped(items, first, rest):
    """Wraps comma-separated items into lines of WIDTH; the first line begins with `first`, the others with `rest`."""
    lines, line = [], first
    for i, item in enumerate(items):
        item += "," if i + 1 < len(items) else ""
        if line not in (first, rest) and len(line) + 1 + len(item) > WIDTH:
            lines.append(line)
            line = rest
        line += item if line in (first, rest) else " " + item
    return "\n".join(lines + [line])


def readers(specification):
    out = [f"// {NOTE}", "#pragma once", "", '#include "te_fl/nn/modules/grouped_linear.hpp"', '#include "te_fl/nn/modules/linear.hpp"',
           '#include "te_fl/nn/modules/mlp.hpp"', '#include "te_fl/nn/modules/moe_layer.hpp"',
           '#include "te_fl/nn/modules/norm.hpp"', '#include "te_fl/nn/modules/transformer.hpp"', "",
           "// Each function hands the name and the member of each option that Python may set to `fields`.", "namespace te_fl::python {", ""]
    for options, members in specification["native"].items():
        out += ["template <class Fields>", f"void read(Fields& fields, nn::{options}& o) {{"]
        for member in members.split():
            out.append(f"  read(fields, o.{member[1:]});" if member.startswith("@") else f'  fields("{member}", o.{member});')
        out += ["}", ""]
    return "\n".join(out + ["}  // namespace te_fl::python", ""])


def rules(modules):
    out = [f'"""The checks that te_fl.pytorch.runtime.refuse.check() makes of each module\'s arguments.\n\n{NOTE}\n"""', "from typing import Any, Dict, Tuple", "", "RULES: Dict[str, Tuple[Tuple[Any, ...], ...]] = {"]
    for module in modules:
        out.append(f'    "{module.name}": (')
        out += [f"        {call!r}," for call in module.rules()]
        out.append("    ),")
    return "\n".join(out + ["}", ""])


def with_constructor(text, module):
    """Returns a Python file's text with the module's signature and argument list replaced by those of the specification."""
    lines = text.splitlines(keepends=True)
    place = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == module.name)
    init = next(node for node in place.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    head = "    def __init__("
    signature = wrapped(module.parameters(), head, " " * len(head)) + ") -> None:\n"
    lines[init.lineno - 1:init.body[0].lineno - 1] = [signature] + leading_comments(lines, init)
    told = module.told()
    if told is not None:
        doc = place.body[0]
        paragraphs = "".join(lines[doc.lineno - 1:doc.end_lineno]).split("\n\n")
        ends = paragraphs[1].rstrip().endswith('"""')
        paragraphs[1] = textwrap.fill(told, WIDTH, initial_indent="    ", subsequent_indent="    ", break_long_words=False,
                                      break_on_hyphens=False) + ('\n    """\n' if ends else "")
        lines[doc.lineno - 1:doc.end_lineno] = ["\n\n".join(paragraphs)]
    return "".join(lines)


def leading_comments(lines, function):
    """Returns the comments between a function's signature and its first statement."""
    found = []
    for line in reversed(lines[function.lineno - 1:function.body[0].lineno - 1]):
        if not line.strip().startswith("#"):
            break
        found.insert(0, line)
    return found


def with_refused(text, modules):
    begin, end = "    # By tools/modulegen.py, from nn/modules.yaml:\n", "    # By hand:\n"
    rows = {}
    for module in modules:
        rows[f"{module.home}.{module.name}"] = module.refused()
        rows[f"{module.home}.{module.name}.forward"] = module.entry.get("forward_refused", {})
    out = []
    for name, refused in sorted(rows.items()):
        if refused:
            items = [f'"{argument}": {value!r}'.replace("'", '"') for argument, value in refused.items()]
            out.append(wrapped(items, f'    "{name}": {{', " " * 8) + "},\n")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + "".join(out) + end + after


def results():
    """Returns {generated file: its text}."""
    specification = yaml.safe_load(SPECIFICATION.read_text())
    modules = [Module(name, entry, specification) for name, entry in specification["modules"].items()]
    texts = {READERS: readers(specification), RULES: rules(modules), TABLE: with_refused(TABLE.read_text(), modules)}
    for module in modules:
        texts[module.file] = with_constructor(texts.get(module.file) or module.file.read_text(), module)
    return texts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [path for path, text in results().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is not what nn/modules.yaml says: run tools/modulegen.py' if check else 'written'}")
        if not check:
            path.write_text(results()[path])
    print(f"modulegen: {len(results())} files, {len(stale)} stale")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
