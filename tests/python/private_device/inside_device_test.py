"""Tests te_fl.inside_transformer_engine(device=..) on another vendor's device: NVIDIA's package trains on the far device, with the numbers that it has on the
host. Each runs in a process of its own (inside_device.py)."""

import json
import os
import pathlib
import subprocess
import sys
import unittest

from forkserver import PYTHON

HERE = pathlib.Path(__file__).resolve().parent
if "FAR_ALONE" not in os.environ:
    raise unittest.SkipTest("FAR_ALONE is not set, with which te-fl makes the device from PyTorch's")
if not os.path.isdir(os.path.join(sys.prefix, "inside")):
    raise unittest.SkipTest("transformer_engine is not installed (tests/python/requirements-inside.txt)")


def run(*arguments, code=None):
    program = code or f"import runpy, sys\nsys.argv = {['inside_device.py', *arguments]!r}\nrunpy.run_path({str(HERE / 'inside_device.py')!r}, run_name='__main__')"
    return subprocess.run([*PYTHON, "-c", program], capture_output=True, text=True, timeout=600, cwd=HERE)


class InsideDevice(unittest.TestCase):
    def test_the_package_trains_there_as_on_the_host(self):
        results = []
        for device in ("far", "cpu"):
            done = run(device)
            self.assertEqual(done.returncode, 0, done.stderr[-3000:])
            results.append(json.loads(done.stdout.splitlines()[-1]))
        self.assertIn("te-fl answers for CUDA by", done.stderr)
        self.assertEqual(results[0]["ran"], ["reference.torch"])  # nothing was computed on copies in host memory
        for case, wanted in results[1]["cases"].items():
            with self.subTest(case):
                made = results[0]["cases"][case]
                self.assertNotIsInstance(made, str, made)
                self.assertNotIsInstance(wanted, str, wanted)
                self.assertEqual([len(t) for t in made], [len(t) for t in wanted])
                least = 0.05 * max(max(map(abs, t)) for t in wanted)  # some gradients, for example of a key's bias, are zero in exact arithmetic
                for i, (a, b) in enumerate(zip(made, wanted)):
                    error = max(abs(x - y) for x, y in zip(a, b)) / max(max(map(abs, b)), least)
                    self.assertLess(error, 5e-3, i)

    def test_a_device_that_is_not_there(self):
        start = "import torch, te_fl; te_fl.inside_transformer_engine(device='acme')"
        done = run(code=start)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("import the package of the device's vendor before this call", done.stderr)


if __name__ == "__main__":
    unittest.main()
