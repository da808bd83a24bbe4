"""What te-fl serves of Transformer Engine's names is there, with the parameters and defaults of Transformer Engine's own."""

import dataclasses
import importlib
import inspect
import json
import os
import pathlib
import subprocess
import sys
import unittest

from te_fl.compat import known_names, table
from te_fl.errors import Unsupported

ROOT = pathlib.Path(__file__).resolve().parents[2]
FACTS = json.loads((ROOT / "tests/python/transformer_engine_facts.json").read_text())
KINDS = {inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional", inspect.Parameter.POSITIONAL_ONLY: "positional",
         inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.KEYWORD_ONLY: "keyword", inspect.Parameter.VAR_KEYWORD: "**"}
# Facts about Transformer Engine's own machinery, which te-fl's classes have no reason to repeat.
METHODS = ("__init__", "forward", "step", "zero_grad")


def has(module):
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] == "te_fl":
            raise
        return False
    return True


def served():
    """(Transformer Engine's qualified name, te-fl's module, name) of what this interpreter's frameworks allow."""
    for qualified in FACTS:
        module, _, name = qualified.rpartition(".")
        home = table.home(module, name)
        if has(home):
            yield qualified, importlib.import_module(home), name


def parameters(function):
    """As tools/transformer_engine_names.py writes them, with values for defaults."""
    rows = [(p.name, p.default, KINDS[p.kind]) for p in inspect.signature(function).parameters.values()]
    return [row for i, row in enumerate(rows) if not (i == 0 and row[0] in ("self", "cls", "ctx"))]


def default(text, module):
    """The value of a default's text, in the module that serves the name."""
    if text is None:
        return inspect.Parameter.empty
    return eval(text, {"os": os, **{n: importlib.import_module(n) for n in ("torch", "jax") if has(n)}, **vars(module)})


class Names(unittest.TestCase):
    def test_every_served_name_is_there(self):
        for home, names in table.SERVED.items():
            if names and has(home):
                module = importlib.import_module(home)
                for name in names.split():
                    with self.subTest(name=f"{home}.{name}"):
                        self.assertTrue(hasattr(module, name))

    def test_every_served_name_is_one_of_transformer_engines(self):
        known = {(module, name) for module, names in known_names.NAMES.items() for name in names.split()}
        homes = {(table.home(module, name), name) for module, name in known}
        for home, names in table.SERVED.items():
            for name in names.split():
                self.assertIn((home, name), homes)

    def test_parameters_and_defaults(self):
        checked = 0
        for qualified, module, name in served():
            own, facts = getattr(module, name), FACTS[qualified]
            pairs = [(own, facts["parameters"])] if "parameters" in facts else \
                [(own if method == "__init__" else getattr(own, method), rows) for method, rows in facts["methods"].items()
                 if method in METHODS]
            for function, rows in pairs:
                with self.subTest(name=qualified, function=getattr(function, "__qualname__", name)):
                    mine = [row for row in parameters(function) if row[0] != "device"]
                    theirs = [(n, default(text, module), kind) for n, text, kind in rows if n != "device"]
                    self.assertEqual(mine, theirs)
                    checked += 1
        self.assertGreater(checked, 10)

    def test_what_partly_served_names_refuse(self):
        for qualified, arguments in table.PARTLY.items():
            home, _, name = qualified.rpartition(".")
            if not has(home):
                continue
            module = importlib.import_module(home)
            own = getattr(module, name)
            known = inspect.signature(own).parameters
            for argument, value in arguments.items():
                with self.subTest(name=qualified, argument=argument):
                    self.assertIn(argument, known)
                    if name in SAMPLES:
                        value = eval(value, vars(module)) if isinstance(value, str) and value.startswith("torch.") else value
                        with self.assertRaisesRegex(Unsupported, argument):
                            own(*SAMPLES[name](module), **{argument: value})

    def test_recipes_that_cannot_be_used(self):
        from te_fl.common import recipe
        for name in table.UNUSABLE:
            kind = getattr(recipe, name)
            required = {f.name: print for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
            with self.assertRaisesRegex(Unsupported, name):
                recipe.native_of(kind(**required))

    def test_the_page_is_as_the_table_says(self):
        subprocess.run([sys.executable, ROOT / "tools/transformer_engine_names.py", "--check"], check=True)


# Arguments that a name needs besides the one that it refuses.
SAMPLES = {
    "FusedAdam": lambda m: ([m.torch.nn.Parameter(m.torch.zeros(2))],),
    "FusedSGD": lambda m: ([m.torch.nn.Parameter(m.torch.zeros(2))], 0.1),
    "FusedScaleMaskSoftmax": lambda m: (m.attention_mask_func,),
}
