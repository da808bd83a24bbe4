"""Tests bench/pytorch's scripts: a GPT of 3 million parameters learns in FP8 as well as without, with each recipe, and inference quantises weights
once."""

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import tempfile
import unittest

import torch

import te_fl

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "bench" / "pytorch"
TINY = ["--layers", "1", "--hidden", "32", "--heads", "2", "--length", "16", "--batch", "2"]


@unittest.skipUnless(SCRIPTS.exists(), "needs te-fl's bench folder")
class Script(unittest.TestCase):
    NAME: str

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.results = os.path.join(folder.name, "results.json")
        spec = importlib.util.spec_from_file_location(self.NAME, SCRIPTS / f"{self.NAME}.py")
        self.script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.script)

    def run_script(self, *arguments):
        """Returns the script's exit status and output."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                status = self.script.main([*arguments, "--json", self.results])
            except SystemExit as end:
                status = end.code
        return status, out.getvalue()

    def read_results(self):
        with open(self.results) as file:
            return json.load(file)


class Training(Script):
    NAME = "train_gpt"

    def test_fp8_learns_as_fp32(self):
        te_fl.reset_usage()
        status, output = self.run_script("--device", "cpu", "--recipes", "delayed,current,block", "--steps", "60", "--batch", "4",
                                         "--within", "0.02")
        self.assertEqual(status, 0, output)
        found = self.read_results()
        losses = {row["recipe"]: row["held_out_loss"] for row in found["rows"]}
        self.assertGreater(found["rows"][0]["parameters"], 3e6)
        # A byte's loss is 5.5 with uniform probabilities, and 3.2 with the byte frequencies of these sources.
        self.assertLess(losses["none"], 2.8, output)
        self.assertEqual(len(set(losses.values())), 4, output)  # each recipe computes in its own precision
        self.assertGreater(sum(row["calls"] for row in te_fl.usage() if row["op"] == "quantize"), 0)

    @unittest.skipUnless(torch.cuda.is_available(), "needs a GPU")
    def test_fp8_learns_as_bf16_on_a_gpu(self):
        status, output = self.run_script("--layers", "4", "--hidden", "512", "--heads", "8", "--steps", "200", "--within", "0.01")
        self.assertEqual(status, 0, output)

    def test_a_loss_that_is_too_far_is_its_exit_status(self):
        status, output = self.run_script("--device", "cpu", "--recipes", "current", "--steps", "2", "--within", "0", *TINY)
        self.assertEqual(status, 1)
        self.assertIn("further than 0.0% from the loss without FP8: current", output)

    def test_seeds_are_other_trainings_whose_mean_is_compared(self):
        arguments = ("--device", "cpu", "--recipes", "current", "--steps", "2", *TINY)
        self.assertEqual(self.run_script(*arguments)[0], 0)
        first = [row["held_out_losses"] for row in self.read_results()["rows"]]
        status, output = self.run_script(*arguments, "--seeds", "2")
        self.assertEqual(status, 0, output)
        for row, [alone] in zip(self.read_results()["rows"], first):
            losses = row["held_out_losses"]
            self.assertEqual(losses[0], alone)
            self.assertNotEqual(losses[0], losses[1])
            self.assertEqual(row["held_out_loss"], (losses[0] + losses[1]) / 2)
        status, output = self.run_script(*arguments, "--seeds", "0")
        self.assertEqual(status, 2)
        self.assertIn("--seeds is 0; it is the number of trainings of each kind, at least 1", output)

    def test_bad_arguments(self):
        status, output = self.run_script("--recipes", "delayd")
        self.assertEqual(status, 2)
        self.assertIn("--recipes has 'delayd'; they are delayed, current, block", output)
        short = self.results + ".text"
        pathlib.Path(short).write_text("too short")
        status, output = self.run_script("--device", "cpu", "--text", short, *TINY)
        self.assertIn("the text has 9 bytes; --length 16 needs more than 160", str(status))


class Serving(Script):
    NAME = "serving"

    def test_weights_are_quantised_once(self):
        status, output = self.run_script("--device", "cpu", "--layers", "2", "--hidden", "64", "--heads", "2", "--tokens", "4")
        self.assertEqual(status, 0, output)
        counts = {(row["recipe"], row["weights"]): row["quantisations"] for row in self.read_results()["rows"]}
        for name in ("delayed", "current", "block"):
            # A layer has four weights.
            self.assertEqual(counts[name, "each call"] - counts[name, "once"], 8, output)
        self.assertEqual(counts["none", "once"], 0)


if __name__ == "__main__":
    unittest.main()
