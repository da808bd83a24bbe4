#!/usr/bin/env python3
"""Tests tools/modulegen.py: nn/modules.yaml has the arguments of Transformer Engine's modules, and the generated files agree with it."""

import inspect
import json
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import modulegen  # noqa: E402
import yaml  # noqa: E402

FACTS = json.loads((ROOT / "tests/python/transformer_engine_facts.json").read_text())
SMALL = {
    "arguments": {"size": {"type": "int", "say": "of x"}, "cap": {"type": "float", "default": "0.0", "say": "the bound"},
                  "kind": {"type": "str", "default": '"a"', "choice": ["a", "b"], "say": "one of CHOICE", "refused": "c"}},
    "groups": {"both": "cap kind"}}
FILE = '''class M:
    """A module.

    size: of something else.

    More of it.
    """

    def __init__(self, size) -> None:
        # A comment.
        self.size = size
'''


def module(arguments, **more):
    return modulegen.Module("M", {"class": "te_fl.pytorch.m", "arguments": arguments, **more}, SMALL)


class Specification(unittest.TestCase):
    def test_arguments_and_defaults_are_transformer_engines(self):
        specification = yaml.safe_load(modulegen.SPECIFICATION.read_text())
        for name, entry in specification["modules"].items():
            own = modulegen.Module(name, entry, specification).defaults
            theirs = FACTS["transformer_engine.pytorch." + name]["methods"]["__init__"]
            with self.subTest(module=name):
                self.assertEqual([n for n in own if n != "device"], [n for n, _, kind in theirs if n != "device" and kind != "**"])
                for argument, default, _ in theirs:
                    if argument in own and argument != "device":
                        value = own[argument]
                        self.assertEqual(value if value is None else eval(value), default if default is None else eval(default), argument)

    def test_what_is_committed_is_what_is_written(self):
        self.assertEqual([str(path) for path, text in modulegen.results().items() if path.read_text() != text], [])

    def test_an_argument_that_is_not_described_is_refused(self):
        with self.assertRaisesRegex(SystemExit, "'sise'"):
            module("sise")
        with self.assertRaisesRegex(SystemExit, "'argments'"):
            module("size", argments="")


class Written(unittest.TestCase):
    def test_a_constructor_and_its_docstring(self):
        text = modulegen.with_constructor(FILE, module("size @both", tells=["size cap kind", "= The end."]))
        scope = {}
        exec(text, scope)
        self.assertEqual(str(inspect.signature(scope["M"])), "(size: int, cap: float = 0.0, kind: str = 'a') -> None")
        self.assertEqual(inspect.getdoc(scope["M"]), "A module.\n\nsize: of x. cap: the bound. kind: one of a, b. The end.\n\nMore of it.")
        self.assertIn("        # A comment.\n        self.size = size\n", text)
        self.assertEqual(modulegen.with_constructor(text, module("size @both", tells=["size cap kind", "= The end."])), text)

    def test_defaults_of_a_module_take_the_place_of_the_common_one(self):
        self.assertEqual(module("size cap=1.0").parameters(), ["self", "size: int", "cap: float = 1.0"])

    def test_checks_and_refused_values(self):
        self.assertEqual(module("size @both").rules(), [("choice", ("kind",), ("a", "b"))])
        self.assertEqual(module("size @both", unchecked=["kind"]).rules(), [])
        self.assertEqual(module("size @both").refused(), {"kind": "c"})
        self.assertEqual(module("size").refused(), {})


if __name__ == "__main__":
    unittest.main()
