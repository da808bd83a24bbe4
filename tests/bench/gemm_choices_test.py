"""Tests how the benchmarks' tools read files of measured GEMM algorithms (TE_FL_CUDA_GEMM_FILE); needs neither a GPU nor PyTorch."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

BENCH = os.path.join(os.path.dirname(__file__), "..", "..", "bench", "gpu")
sys.path.insert(0, BENCH)
from gemm_choices import Choices, table  # noqa: E402

FORWARD = ("generic_gemm m=8192 n=16384 k=4096 a=f8e4m3 b=f8e4m3 d=bf16 trans_a=0 trans_b=1 align=256 fast bias")
FIELDS = dict(a="f8e4m3", b="f8e4m3", d="bf16", trans_a=0, trans_b=1)


def choice(problem, **more):
    return {"device": "GPU", "problem": problem, "cublaslt": 130100, "us": 820.0, "heuristic_us": 1000.0, "candidates": 170,
            "algorithm": [0] * 8, **more}


class Files(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "choices.json")
        self.write([choice(FORWARD + " residual"), choice(FORWARD, config="id 66 tile 29", different=3)])

    def tearDown(self):
        self.folder.cleanup()

    def write(self, choices, version=1):
        with open(self.path, "w") as file:
            json.dump({"format": version, "choices": choices}, file)

    def test_finds_the_one_product(self):
        choices = Choices(self.path)
        found = choices.find("GPU", 130100, 8192, 16384, 4096, ["bias"], **FIELDS)
        self.assertEqual(found["config"], "id 66 tile 29")
        for device, library, m, flags, fields in (
                ("another GPU", 130100, 8192, ["bias"], FIELDS), ("GPU", 130101, 8192, ["bias"], FIELDS),
                ("GPU", 130100, 819, ["bias"], FIELDS), ("GPU", 130100, 8192, [], FIELDS),
                ("GPU", 130100, 8192, ["bias", "accumulate"], FIELDS),
                ("GPU", 130100, 8192, ["bias"], {**FIELDS, "a": "f8e5m2"})):
            self.assertIsNone(choices.find(device, library, m, 16384, 4096, flags, **fields))

    def test_distinguishes_blocks_from_tensors(self):
        blocks = FORWARD.replace("fast bias", "scaling=2,3 split bias")
        self.write([choice(blocks, config="blocks"), choice(FORWARD, config="tensors")])
        for scaling, config in (("", "tensors"), ("2,3", "blocks")):
            self.assertEqual(Choices(self.path).find("GPU", 130100, 8192, 16384, 4096, ["bias"], scaling, **FIELDS)["config"], config)
        self.assertIsNone(Choices(self.path).find("GPU", 130100, 8192, 16384, 4096, ["bias"], "2,2", **FIELDS))

    def test_goes_by_the_power_limit(self):
        self.write([choice(FORWARD, config="700", power_limit_w=700), choice(FORWARD, config="350", power_limit_w=350)])
        for limit, config in ((700, "700"), (350, "350"), (0, "700")):
            self.assertEqual(Choices(self.path).find("GPU", 130100, 8192, 16384, 4096, ["bias"], power_limit=limit, **FIELDS)["config"], config)
        self.assertIsNone(Choices(self.path).find("GPU", 130100, 8192, 16384, 4096, ["bias"], power_limit=500, **FIELDS))
        self.write([choice(FORWARD, config="unknown"), choice(FORWARD, config="350", power_limit_w=350)])
        for limit, config in ((350, "350"), (500, "unknown")):
            self.assertEqual(Choices(self.path).find("GPU", 130100, 8192, 16384, 4096, ["bias"], power_limit=limit, **FIELDS)["config"], config)

    def test_a_file_that_is_not_there_holds_nothing(self):
        self.assertEqual(Choices(self.path + ".none").all, [])

    def test_another_format_is_refused(self):
        self.write([], version=2)
        with self.assertRaisesRegex(ValueError, "\"format\" is 2"):
            Choices(self.path)

    def test_in_use_is_what_the_variable_names(self):
        os.environ["TE_FL_CUDA_GEMM_FILE"] = self.path
        try:
            self.assertEqual(len(Choices.in_use().all), 2)
        finally:
            del os.environ["TE_FL_CUDA_GEMM_FILE"]
        self.assertIsNone(Choices.in_use())

    def test_the_table(self):
        lines = table(Choices(self.path).all)
        self.assertEqual(len(lines), 3)
        self.assertRegex(lines[1], r"^8192x16384x4096 nt f8e4m3 f8e4m3 -> bf16 fast bias residual +1000.0 +820.0 +0.820 +170 +0$")
        self.assertRegex(lines[2], r"^8192x16384x4096 nt .* fast bias +1000.0 +820.0 +0.820 +170 +3  id 66 tile 29$")

    def test_tune_gemm_lists_the_file(self):
        run = subprocess.run([sys.executable, os.path.join(BENCH, "tune_gemm.py"), "--file", self.path, "--list"],
                             capture_output=True, text=True, check=True)
        self.assertEqual(run.stdout.splitlines(), table(Choices(self.path).all))


if __name__ == "__main__":
    unittest.main()
