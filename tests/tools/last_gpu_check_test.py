#!/usr/bin/env python3
"""Tests tools/last_gpu_check.py: its report on the last stored GPU check, and that it never fails."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

TOOL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools", "last_gpu_check.py")


class LastGpuCheck(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.root = self.folder.name

    def tearDown(self):
        self.folder.cleanup()

    def write(self, path, text=""):
        path = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)

    def git(self, *words, root=None):
        return subprocess.run(["git", "-C", root or self.root, "-c", "user.name=t", "-c", "user.email=t@t.invalid", *words],
                              check=True, capture_output=True, text=True).stdout.strip()

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-qm", "x")
        return self.git("rev-parse", "--short", "HEAD")

    def told(self, root=None):
        run = subprocess.run([sys.executable, TOOL, root or self.root], capture_output=True, text=True)
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        return run.stdout

    def repository(self):
        """Makes a repository in which CUDA files changed after the checked commit; returns that commit."""
        self.git("init", "-q")
        self.write("backends/cuda/gemm.cu", "1")
        self.write("backends/cpu/gemm.cpp", "1")
        first = self.commit()
        self.write("bench/results/2026-01-02-h100-gpu_check.json", json.dumps({"device": "GPU", "rows": []}))
        self.write("bench/results/2025-12-31-h100-gpu_check.json", json.dumps({"device": "GPU", "commit": "abcdef0", "rows": []}))
        self.write("bench/results/README.md", f"| file | date, commit |\n|---|---|\n| 2026-01-02-h100-gpu_check.json | 2026-01-02, {first}; GPU |\n")
        self.commit()
        return first

    def test_names_the_commit_and_what_has_changed(self):
        first = self.repository()
        self.assertEqual(self.told(), f"last GPU check: bench/results/2026-01-02-h100-gpu_check.json, of {first}; no CUDA file has changed since\n")
        self.write("backends/cuda/gemm.cu", "2")
        self.write("backends/cpu/gemm.cpp", "2")
        self.commit()
        self.write("backends/cuda/new.cu", "not yet committed")
        self.assertIn(f"of {first}; CUDA files changed since (2):\n  backends/cuda/gemm.cu\n  backends/cuda/new.cu\n", self.told())

    def test_a_moved_file_has_not_changed(self):
        self.git("init", "-q")
        body = "".join(f"int value_{i} = {i};\n" for i in range(20))
        self.write("backends/cuda/norm.cu", '#include "norm.cuh"\n// What norm.cuh serves.\n' + body)
        self.write("backends/cuda/gemm.cu", '#include "device.hpp"\nconst char* kWhere = "https://one";\n' + body.upper())
        self.write("tests/backends/cuda/norm_test.py", body.replace("value", "test"))
        first = self.commit()
        self.write("bench/results/2026-01-02-h100-gpu_check.json", json.dumps({"commit": first}))
        os.makedirs(os.path.join(self.root, "backends/cuda/norm"))
        os.makedirs(os.path.join(self.root, "tests/tools"))
        self.git("mv", "backends/cuda/norm.cu", "backends/cuda/norm/norm.cu")
        self.git("mv", "tests/backends/cuda/norm_test.py", "tests/tools/norm_test.py")
        self.git("mv", "backends/cuda/gemm.cu", "backends/cuda/norm/gemm.cu")
        self.write("backends/cuda/norm/norm.cu", '#include "norm/norm.cuh"\n// What norm/norm.cuh serves.\n' + body)
        self.write("backends/cuda/norm/gemm.cu", '#include "device/device.hpp"\nconst char* kWhere = "https://two";\n' + body.upper())
        self.commit()
        self.assertIn("CUDA files changed since (1):\n  backends/cuda/norm/gemm.cu\n", self.told())
        self.write("backends/cuda/norm/norm.cu", '#include "norm/norm.cuh"\n' + body.replace("19;", "20;"))
        self.git("rm", "-q", "tests/tools/norm_test.py")
        self.assertIn("since (3):\n  backends/cuda/norm/gemm.cu\n  backends/cuda/norm/norm.cu\n  tests/backends/cuda/norm_test.py\n", self.told())

    def test_the_check_says_its_commit_itself(self):
        self.repository()
        second = self.git("rev-parse", "--short", "HEAD")
        self.write("bench/results/2026-01-03-h100-gpu_check.json", json.dumps({"device": "GPU", "commit": second, "rows": []}))
        self.assertIn(f"2026-01-03-h100-gpu_check.json, of {second}; no CUDA", self.told())

    def test_a_shallow_clone_is_no_failure(self):
        first = self.repository()
        self.write("backends/cuda/gemm.cu", "2")
        self.commit()
        with tempfile.TemporaryDirectory() as folder:
            clone = os.path.join(folder, "clone")
            self.git("clone", "-q", "--depth", "1", "file://" + self.root, clone)
            self.assertIn(f"of {first}; what has changed since is not known", self.told(clone))

    def test_nothing_is_no_failure(self):
        self.assertIn("none is kept", self.told())
        self.write("bench/results/2026-01-02-h100-gpu_check.json", "half a file {")
        self.assertIn("of an unknown commit; what has changed since is not known", self.told())


if __name__ == "__main__":
    unittest.main()
