"""Tests the newcomer's path of docs/adding-a-backend.md: its commands, from an empty folder to a certificate and a device in PyTorch."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import te_fl

DOCUMENT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "adding-a-backend.md"
BLOCK = re.compile(r"<!-- tested-by: python_newcomer_test -->\n```sh\n(.*?)```", re.S)
PACKAGE = pathlib.Path(te_fl.__file__).resolve().parent


def has_torch():
    return subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode == 0


class Newcomer(unittest.TestCase):
    def test_the_commands_of_the_documentation(self):
        blocks = BLOCK.findall(DOCUMENT.read_text())
        self.assertEqual(len(blocks), 3, "the page has the project, the ops with the certificate, and PyTorch")
        if not (PACKAGE / "include" / "te_fl" / "plugin.h").exists():
            self.skipTest("the package of a build tree has no headers; tools/test.sh installs a wheel")
        if not shutil.which("cmake") or not shutil.which("c++"):
            self.skipTest("there is no cmake or no C++ compiler")
        with tempfile.TemporaryDirectory() as folder:
            bin_folder = pathlib.Path(folder, "bin")  # the commands te-fl and python3 as a user of the package has them
            bin_folder.mkdir()
            for name, words in (("te-fl", f'exec "{sys.executable}" -m te_fl "$@"'), ("python3", f'exec "{sys.executable}" "$@"')):
                bin_folder.joinpath(name).write_text(f"#!/bin/sh\n{words}\n")
                bin_folder.joinpath(name).chmod(0o755)
            environment = {k: v for k, v in os.environ.items() if not k.startswith("TE_FL_") and k not in ("CMAKE_PREFIX_PATH", "TEST_FORKSERVER")}
            environment["PATH"] = f"{bin_folder}:{environment['PATH']}"

            def commands(text, where):
                done = subprocess.run(["bash", "-ec", text], cwd=where, env=environment, capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                return done.stdout
            empty, project = pathlib.Path(folder, "empty"), pathlib.Path(folder, "empty", "acme")
            empty.mkdir()
            commands(blocks[0], empty)
            certificate = commands(blocks[1], project)
            self.assertRegex(certificate, r"(?m)^certified: [1-9][0-9]* passed, 0 failed")
            for op in ("relu", "silu", "srelu"):
                self.assertRegex(certificate, rf"\b{op}\b")
            if not has_torch():
                self.skipTest("PyTorch is not installed; the certificate is right")
            trained = commands(blocks[2], project)
            self.assertRegex(trained, r"loss on acme:0: [0-9.]+ -> [0-9.]+\n")
            self.assertRegex(trained, r"\nrelu by vendor\.acme: [1-9][0-9]* calls\n")

    def test_pytorch_needs_a_device(self):
        with tempfile.TemporaryDirectory() as folder:
            refused = subprocess.run([sys.executable, "-m", "te_fl", "new-backend", "acme", "acme", "--pytorch"], cwd=folder, capture_output=True, text=True)
            self.assertEqual(refused.returncode, 2, refused.stdout)
            self.assertIn("--pytorch makes the project's device one of PyTorch's; give --device too", refused.stderr)
            self.assertEqual(os.listdir(folder), [])


if __name__ == "__main__":
    unittest.main()
