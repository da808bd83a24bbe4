"""Tests how the Python package reads TE_FL_ variables: as te-fl's C++ code does."""

import contextlib
import os
import pathlib
import random
import re
import subprocess
import sys
import unittest
from unittest import mock

import te_fl
from te_fl import _native, program
from te_fl.errors import InvalidArgument, NotFound

PACKAGE = pathlib.Path(te_fl.__file__).parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py") if path.is_file()}
VARIABLES = dict(re.findall(r'^(\w+) = "(TE_FL_\w+)"$', "\n".join(SOURCES.values()), re.M))
NAMES = sorted({VARIABLES.get(name, name.strip("\"'")) for text in SOURCES.values() for name in re.findall(r"_native\.setting\(([^)]*)\)", text)})
VALUES = ("", " ", "0", "1", " 1 ", "00012", "true", "Yes", " OFF", "no", "cpu", "maybe", "-1", "1.5", "86400001", "7\t", "on on")


@contextlib.contextmanager
def environment(**values):
    """Yields the error of te_fl.reload() with these variables; None if there is none."""
    refusal = None
    try:
        with mock.patch.dict(os.environ, values):
            try:
                te_fl.reload()
            except InvalidArgument as error:
                refusal = error
            yield refusal
    finally:
        te_fl.reload()


def read(name):
    """Returns the setting, or the text of its error."""
    try:
        return _native.setting(name)
    except InvalidArgument as error:
        return str(error)


class Settings(unittest.TestCase):
    def test_every_setting_that_python_reads_has_the_meaning_of_its_manifest(self):
        self.assertGreater(len(NAMES), 5)
        draw = random.Random(7)
        types = {row["name"]: row["type"] for row in program.ask("env")}
        for _ in range(12):
            values = {name: draw.choice(VALUES) for name in NAMES}
            with self.subTest(values), environment(**values) as refusal:
                rows = {row["name"]: row["value"] for row in program.ask("env")}
                for name in NAMES:
                    found = read(name)
                    if str(found).startswith("INVALID_ARGUMENT: "):
                        self.assertIn(found.removeprefix("INVALID_ARGUMENT: "), str(refusal))
                        self.assertIn(f"{name}={values[name].strip()} is not accepted", found)
                    elif found is None:
                        self.assertEqual((values[name].strip(), rows[name]), ("", ""))  # a variable without a default
                    else:
                        self.assertIs(type(found), {"bool": bool, "int": int}.get(types[name], str))
                        self.assertEqual(str(int(found)) if isinstance(found, bool) else str(found), rows[name])

    def test_wrong_values_are_wrong_for_each_setting_alone(self):
        with environment(TE_FL_TP_OVERLAP="maybe", TE_FL_COMM_TIMEOUT_MS="0", TE_FL_VALIDATE="on"):
            self.assertIn("TE_FL_TP_OVERLAP=maybe is not accepted: it must be 0, 1,", read("TE_FL_TP_OVERLAP"))
            self.assertIn("TE_FL_COMM_TIMEOUT_MS=0 is not accepted: it must be a whole number from 1 to", read("TE_FL_COMM_TIMEOUT_MS"))
            self.assertIs(read("TE_FL_VALIDATE"), True)
        self.assertIs(read("TE_FL_TP_OVERLAP"), False)
        self.assertEqual(read("TE_FL_COMM_TIMEOUT_MS"), 600000)

    def test_a_setting_without_value_is_none_and_an_unknown_one_an_error(self):
        self.assertIsNone(_native.setting("TE_FL_MAX_STAGED_BYTES"))
        self.assertIsNone(_native.setting("TE_FL_PREFER"))
        with environment(TE_FL_PREFER="VENDOR", TE_FL_ALLOW_VENDORS=""):
            self.assertEqual(_native.setting("TE_FL_PREFER"), "vendor")
            self.assertEqual(_native.setting("TE_FL_ALLOW_VENDORS"), "")
        with self.assertRaisesRegex(NotFound, "did you mean 'TE_FL_STRICT'"):
            _native.setting("TE_FL_STRIKT")

    def test_reading_one_leaves_the_others_to_the_program(self):
        """The interpreter's start reads TE_FL_INSIDE_TRANSFORMER_ENGINE; a program may set variables until its first op."""
        done = subprocess.run([sys.executable, "-c", "import os, te_fl\nassert te_fl._native.setting('TE_FL_PREFER') is None\n"
                               "os.environ['TE_FL_PREFER'] = 'reference'\nassert te_fl._native.setting('TE_FL_PREFER') == 'reference'\n"
                               "print(te_fl.policy_text())"], capture_output=True, text=True)
        self.assertIn("reference", done.stdout, done.stderr)

    def test_no_module_reads_the_environment_by_itself(self):
        """compat/variables.py needs to know whether a variable is set at all, and writes it."""
        read_by_hand = re.compile(r"environ(?:\.get\(|\[)\W*TE_?FL_\w+.*")
        found = {path: hits for path, text in SOURCES.items() if (hits := read_by_hand.findall(text))}
        self.assertEqual(list(found), ["compat/variables.py"], found)


if __name__ == "__main__":
    unittest.main()
