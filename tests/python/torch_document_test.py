"""Tests that docs/pytorch.md's programs print the page's output, and that examples/pytorch's programs learn."""

import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys
import unittest

import torch

from forkserver import PYTHON

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Document(unittest.TestCase):
    def test_the_page(self):
        page = (ROOT / "docs" / "pytorch.md").read_text()
        programs = re.findall(r"```python\n(.*?)```", page, re.S)
        printed = re.search(r"```text\n(\(16, 2.*?)```", page, re.S).group(1)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            for program in programs:
                exec(compile(program, "docs/pytorch.md", "exec"), {})
        self.assertEqual(out.getvalue(), printed)

    def test_the_readme(self):
        program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
        names, out = {}, io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(program, "README.md", "exec"), names)
        self.assertEqual(names["x"].grad.shape, (8, 1, 768))
        self.assertRegex(out.getvalue(), "^op +implementation +calls +staged\n")

    def test_the_example(self):
        run = subprocess.run([*PYTHON, str(ROOT / "examples" / "pytorch" / "quickstart.py"), "--device", "cpu", "--steps", "61"],
                             capture_output=True, text=True, timeout=300)
        self.assertEqual(run.returncode, 0, run.stderr)
        losses = [float(n) for n in re.findall(r"loss ([0-9.]+)", run.stdout)]
        self.assertLess(losses[-1], 0.7 * losses[0], run.stdout)
        self.assertIn("ops run by default.cpu", run.stdout)

    def test_the_example_of_several_ranks(self):
        def losses(ranks, *arguments):
            run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                                  str(ROOT / "examples" / "pytorch" / "parallel_gpt.py"), "--device", "cpu", "--steps", "51", *arguments],
                                 capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
            self.assertEqual(run.returncode, 0, run.stderr)
            self.assertIn("by torch.distributed:gloo", run.stdout)
            return [float(n) for n in re.findall(r"loss ([0-9.]+)", run.stdout)]

        alone, several = losses(1), losses(2, "--tp", "2")
        self.assertLess(alone[-1], 0.7 * alone[0])
        for a, b in zip(alone, several, strict=True):
            self.assertAlmostEqual(a, b, delta=3e-4)

    def test_recipes_of_the_examples(self):
        """Both examples accept the recipe names that the tools pass (tools/ranks_check.py)."""
        for ranks in (1, 2):
            run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                                  str(ROOT / "examples" / "pytorch" / "parallel_gpt.py"), "--device", "cpu", "--steps", "2", "--tp", str(ranks),
                                  "--recipe", "block"], capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
            self.assertEqual(run.returncode, 0, run.stderr)
            self.assertRegex(run.stdout, "loss [0-9.]+")
        tool = (ROOT / "tools" / "ranks_check.py").read_text()
        asked = set(re.findall(r'"(\w+)"', re.search(r"for recipe in \(([^)]*)\)", tool).group(1)))
        for example in ("quickstart.py", "parallel_gpt.py"):
            text = (ROOT / "examples" / "pytorch" / example).read_text()
            self.assertLessEqual(asked, set(re.findall(r'"(\w+)": (?:None|recipe)', text)), example)

    def test_a_misspelt_recipe(self):
        run = subprocess.run([*PYTHON, str(ROOT / "examples" / "pytorch" / "quickstart.py"), "--recipe", "delayd"],
                             capture_output=True, text=True, timeout=300)
        self.assertEqual(run.returncode, 2)
        self.assertIn("invalid choice: 'delayd'", run.stderr)


if __name__ == "__main__":
    unittest.main()
