"""Runs a fixed part of the conformance table on reference.torch with the host's tensors. The part has cases of each op, drawn by a hash of their names.
Cases that it refuses are listed in conformance/expected_unsupported.txt."""

import json
import os
import pathlib
import tempfile
import unittest

import torch

from te_fl import _check_worker, reference_torch
from te_fl.registration import OpRegistry

CONFORMANCE = pathlib.Path(__file__).resolve().parents[2] / "conformance"


class Table(unittest.TestCase):
    def test_each_op(self):
        torch.set_num_threads(1)
        reference_torch.register(OpRegistry.instance())
        self.addCleanup(OpRegistry.instance().clear)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "results.json")
            code = _check_worker.conformance(["--impl", "reference.torch", "--reduced", "--json", path], str(CONFORMANCE))
            results = json.loads(pathlib.Path(path).read_text())
        self.assertEqual([f"{r['case']}: {r['message']}" for r in results if r["result"] == "fail"], [])
        self.assertEqual(code, 0)
        passed = {r["op"] for r in results if r["result"] == "pass"}
        self.assertEqual(sorted({i.op_name for i in reference_torch.implementations()} - passed), [])


if __name__ == "__main__":
    unittest.main()
