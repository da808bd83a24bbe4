#!/usr/bin/env python3
"""Tests bench/gpu/layer_floor.py on hand-made rows."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

BENCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench", "gpu")
sys.path.insert(0, BENCH)
import layer_floor  # noqa: E402


def rows():
    made = []
    for dtype, us in (("bf16", 1000.0), ("fp8", 600.0)):
        for kind in ("forward", "dgrad", "wgrad"):
            for name in ("qkv", "proj", "fc1", "fc2"):
                made.append({"part": "gemm", "name": f"{dtype} {kind} {name}", "us": us, "of_best": 1.05})
    made[0]["of_best"] = 0.9  # a second algorithm takes 900
    for name, us in (("bf16 forward full", 500.0), ("bf16 backward full", 1500.0), ("fp8 both full", 1650.0)):
        made.append({"part": "attention", "name": name, "us": us, "of_cudnn": 1.0})
    for speed in (2000.0, 2500.0, 2600.0):
        made.append({"part": "op", "name": f"at {speed}", "us": 1.0, "copy_gb_s": speed})
    for name, us in (("quickstart eager", 20000.0), ("quickstart none", 15000.0), ("quickstart delayed cached", 11000.0),
                     ("quickstart delayed", 11500.0), ("quickstart delayed+attention cached", 10500.0),
                     ("quickstart block cached", 13000.0), ("quickstart causal eager", 19000.0),
                     ("quickstart causal delayed cached", 10000.0), ("small eager", 1000.0), ("small none", 300.0)):
        made.append({"part": "layer", "name": name, "us": us})
    return made


class LayerFloor(unittest.TestCase):
    def test_sums_what_the_run_measured(self):
        found = layer_floor.floors(rows())
        # The rows have no measured causal attention and no block-scaled (128) GEMMs, so these two layers are absent.
        self.assertEqual(list(found), ["quickstart none", "quickstart delayed cached", "quickstart delayed",
                                       "quickstart delayed+attention cached"])
        self.assertEqual(found["quickstart none"]["products"], 11900.0)
        self.assertEqual(found["quickstart delayed"]["products"], 7200.0)
        self.assertEqual(found["quickstart none"]["attention"], 2000.0)
        self.assertEqual(found["quickstart delayed+attention cached"]["attention"], 1650.0)
        # A matrix of 8192 x 4096 has 2^25 elements. Bytes per element: 2 x 4 for the norms, 2 x 8 for the norms' gradients; the bias gradients read 5
        # such matrices at 2 bytes.
        self.assertAlmostEqual(found["quickstart none"]["rest"], 2**25 * (8 + 16 + 10) / 2500e9 * 1e6)
        # Casts read and write as much as 6 matrices at 4 bytes, and GELU's gradient on 4 matrices' worth at 6 bytes.
        cached = 2**25 * (8 + 16 + 24 + 24) / 2500e9 * 1e6
        self.assertAlmostEqual(found["quickstart delayed cached"]["rest"], cached)
        self.assertAlmostEqual(found["quickstart delayed"]["rest"], cached + 12 * 2**24 * 4 / 2500e9 * 1e6)

    def test_knows_blocks(self):
        blocks = [{**r, "name": r["name"].replace("fp8", "block")} for r in rows() if r["name"].startswith("fp8 ") and r["part"] == "gemm"]
        found = layer_floor.floors(rows() + blocks)["quickstart block cached"]
        self.assertEqual(found["products"], 7200.0)
        self.assertAlmostEqual(found["rest"], 2**25 * (8 + 16 + 24 + 16 + 24) / 2500e9 * 1e6)

    def test_leaves_out_what_it_lacks(self):
        without = [r for r in rows() if r["name"] != "fp8 wgrad qkv"]
        self.assertEqual(list(layer_floor.floors(without)), ["quickstart none"])
        refused = [{"part": "gemm", "name": "fp8 wgrad qkv", "error": "no"}] + without
        self.assertEqual(list(layer_floor.floors(refused)), ["quickstart none"])

    def run_on(self, text):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(text)
            file.flush()
            return subprocess.run([sys.executable, os.path.join(BENCH, "layer_floor.py"), file.name], capture_output=True, text=True)

    def test_prints_a_table(self):
        run = self.run_on(json.dumps({"rows": rows()}))
        self.assertEqual(run.returncode, 0, run.stderr)
        line = [part for part in run.stdout.splitlines() if part.startswith("quickstart none")][0].split()
        floor = 11900 + 2000 + 2**25 * 34 / 2500e9 * 1e6
        self.assertEqual(line[2:], ["11900", "2000", "456", f"{floor:.0f}", "15000", f"{15000 / floor:.3f}", f"{floor / 20000:.3f}"])

    def test_says_what_is_wrong_with_a_file(self):
        for text, wanted in (("{", "bench_gpu.py --json"), ("{}", "bench_gpu.py --json"), ('{"rows": []}', "--only ops,gemm,attention,layers")):
            run = self.run_on(text)
            self.assertNotEqual(run.returncode, 0)
            self.assertIn(wanted, run.stderr)


if __name__ == "__main__":
    unittest.main()
