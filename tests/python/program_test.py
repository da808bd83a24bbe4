"""Tests the command te-fl with implementations in Python: a logged replay line, explain, ops, info --fingerprint and tune; and which modules are trusted."""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import unittest

import te_fl

MODULE = """
import numpy as np
import te_fl
def relu(input, output):
    np.maximum(input, 0, out=output)
    output *= np.float32(1.01)
def register(registry):
    registry.register_impl(te_fl.OpImpl(op_name="relu", impl_id="vendor.wrong", kind=te_fl.BackendImplKind.VENDOR, fn=relu, vendor="wrong",
                                        supported_dtypes=("f32",), devices=("cpu",), tensors="numpy"))
"""
CALL = """
import numpy as np
import te_fl
x = np.linspace(-1, 1, 4096, dtype=np.float32)
with te_fl.policy(prefer="vendor"):
    te_fl.ops.relu(input=x, output=np.empty_like(x))
"""


class Program(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        (self.folder / "wrong_relu.py").write_text(MODULE)
        package = str(pathlib.Path(te_fl.__file__).parent.parent)
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]), "TE_FL_PLUGIN_PATH": ""}
        self.named = {"PYTHONPATH": os.pathsep.join([str(self.folder), self.environment["PYTHONPATH"]]), "TE_FL_PLUGIN_MODULES": "wrong_relu"}

    def run_words(self, *words, **settings):
        return subprocess.run([str(w) for w in words], capture_output=True, text=True, cwd=self.folder, env={**self.environment, **settings})

    def te_fl(self, *words, **settings):
        return self.run_words(sys.executable, "-m", "te_fl", *words, **self.named, **settings)

    def test_commands_have_it(self):
        self.assertRegex(self.te_fl("explain", "relu", "--set", "TE_FL_PREFER=vendor").stdout, r"-> +vendor\.wrong(.|\n)*TE_FL_VERIFY tolerates")
        self.assertIn("vendor.wrong", self.te_fl("ops", "relu").stdout)
        self.assertIn("op relu vendor.wrong", self.te_fl("info", "--fingerprint").stdout)

    def test_the_logged_line_replays_the_call(self):
        done = self.run_words(sys.executable, "-c", CALL, TE_FL_VERIFY="1", TE_FL_VERIFY_DIR=str(self.folder / "cases"),
                              TE_FL_TRACE=str(self.folder / "run.json"), **self.named)
        line = re.search(r"`([^`]*te-fl replay [^`]*)`", done.stderr)
        self.assertIsNotNone(line, done.stderr)
        program = self.folder / "te-fl"  # as pip installs it
        program.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -m te_fl \"$@\"\n")
        program.chmod(0o755)
        pasted = self.run_words("sh", "-c", line[1], PATH=f"{self.folder}:{os.environ['PATH']}")
        self.assertEqual(pasted.returncode, 1, pasted.stderr)
        self.assertRegex(pasted.stdout, r"relu on vendor\.wrong(.|\n)*against the saved results: agrees(.|\n)*against the reference: differs")
        tuned = self.te_fl("tune", "run.json", "--seconds", "0.01", TE_FL_PREFER="vendor")
        self.assertEqual(tuned.returncode, 0, tuned.stderr)
        self.assertIn("impl:vendor.wrong", tuned.stdout)

    def test_a_folder_that_others_may_write_to(self):
        self.folder.chmod(0o777)
        found = self.te_fl("info")
        self.assertRegex(found.stdout + found.stderr, rf"wrong_relu(.|\n)*{re.escape(str(self.folder))} can be written by everybody")
        self.assertNotIn("vendor.wrong", self.te_fl("ops", "relu").stdout)


if __name__ == "__main__":
    unittest.main()
