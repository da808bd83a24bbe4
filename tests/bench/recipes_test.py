#!/usr/bin/env python3
"""Tests bench/recipes.py on a stub program that only writes train_gpt's results."""

import json
import os
import stat
import subprocess
import sys
import tempfile
import unittest

BENCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench")
sys.path.insert(0, BENCH)
import recipes  # noqa: E402

PROGRAM = """#!{python}
import json, sys
value = lambda name: sys.argv[sys.argv.index(name) + 1]
json.dump({{"recipe": value("--recipe"), "seed": int(value("--seed")), "device": value("--device"), "dtype": "bf16", "steps": 2,
           "seconds": 1.0, "training_loss": [3.0, 2.0], "validation_loss": 2.0, "usage": json.loads({usage!r})}},
          open(value("--json"), "w"))
"""


def served(op, impl, staged=0):
    return {"op": op, "impl": impl, "calls": 4, "staged_calls": staged, "staged_bytes": 0, "staged_us": 0, "staged_wait_us": 0}


OWN = [served("add", "vendor.cuda"), served("fused_attn_fwd", "vendor.cuda.cudnn")]


class Recipes(unittest.TestCase):
    def test_reports_which_implementation_ran(self):
        on = lambda device, usage: recipes.served_elsewhere({"device": device, "usage": usage})  # noqa: E731
        self.assertEqual(on("cuda:0", OWN), [])
        self.assertEqual(on("cpu", [served("add", "default.cpu")]), [])
        self.assertEqual(len(on("cuda:0", OWN + [served("silu", "default.cpu", 4)])), 1)
        self.assertIn("silu by default.cpu", on("cuda:0", [served("silu", "default.cpu", 4)])[0])
        self.assertEqual(len(on("cuda:1", [served("add", "vendor.cuda", 1)])), 1)  # simulates an op that ran on the host, on copies of the tensors
        self.assertEqual(len(on("cuda:0", [served("add", "vendor.cudax")])), 1)
        self.assertEqual(len(on("cuda:0", [])), 1)
        self.assertEqual(len(recipes.served_elsewhere({"device": "cuda:0"})), 1)

    def run_on(self, usage, device):
        with tempfile.TemporaryDirectory() as folder:
            program, results = os.path.join(folder, "train_gpt"), os.path.join(folder, "results.json")
            with open(program, "w") as file:
                file.write(PROGRAM.format(python=sys.executable, usage=json.dumps(usage)))
            os.chmod(program, os.stat(program).st_mode | stat.S_IXUSR)
            run = subprocess.run([sys.executable, os.path.join(BENCH, "recipes.py"), "--train-gpt", program, "--seeds", "2",
                                  "--json", results, "--", "--device", device], capture_output=True, text=True)
            with open(results) as file:
                return run, json.load(file)

    def refused(self, *arguments):
        run = subprocess.run([sys.executable, os.path.join(BENCH, "recipes.py"), *arguments], capture_output=True, text=True)
        self.assertEqual(run.returncode, 1)
        self.assertNotIn("Traceback", run.stderr)
        return run.stderr

    def test_says_what_is_wrong_before_it_runs(self):
        self.assertIn("/nonexistent/train_gpt is not there", self.refused("--train-gpt", "/nonexistent/train_gpt"))
        self.assertIn("cannot be written", self.refused("--train-gpt", sys.executable, "--json", "/nonexistent/results.json"))
        self.assertIn("ended with", self.refused("--train-gpt", "/bin/false"))

    def test_passes_and_keeps_the_usage(self):
        run, results = self.run_on(OWN, "cuda:0")
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertEqual(list(results), recipes.RECIPES)
        self.assertEqual([r["usage"] for runs in results.values() for r in runs], [OWN] * 8)

    def test_fails_where_another_implementation_runs(self):
        run, results = self.run_on(OWN + [served("silu", "default.cpu", 4)], "cuda:0")
        self.assertEqual(run.returncode, 1)
        self.assertEqual(run.stderr.count("silu by default.cpu, 4 calls, 4 of them on copies"), 8)
        self.assertEqual(len(results["block"][1]["usage"]), 3)

    def test_host_implementations_run_on_the_host(self):
        run, _ = self.run_on([served("silu", "default.cpu")], "cpu")
        self.assertEqual(run.returncode, 0, run.stderr)


if __name__ == "__main__":
    unittest.main()
