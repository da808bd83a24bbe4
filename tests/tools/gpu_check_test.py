#!/usr/bin/env python3
"""Tests which results make the rows of tools/gpu_check.sh fail. Stub programs that only print stand in for the real ones."""

import os
import stat
import subprocess
import tempfile
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")

NUMBERS = "4  4  1.5  0.1  0.0"
# A stub that prints the plugin's log line about the cuDNN that it opens.
WHICH_CUDNN = """
for folder in ${LD_LIBRARY_PATH//:/ }; do [ ! -e $folder/libcudnn.so.9 ] || break; done
[ ! -e $folder/libcudnn.so.9 ] || { cudnn=$(cat $folder/libcudnn.so.9); echo "INFO cuDNN $cudnn ($folder/libcudnn.so.9)"; }
"""
FAKES = {
    "path/nvidia-smi": 'echo "A GPU, 1, 1 MHz, 1 W"',
    "path/compute-sanitizer": """
tool=; [ "$1" != --tool ] || tool=$2
while [ $# -gt 0 ]; do case "${1##*/}" in conformance | gpu_collectives_test) break ;; esac; shift; done
[ $# -gt 0 ] || { echo "no program is named"; exit 2; }
"$@"; code=$?
case "$tool $*" in *"$REPORT"*) [ -z "$REPORT" ] || { echo "========= ERROR SUMMARY: 8 errors"; exit 99; } ;; esac
if [ "$tool" = racecheck ]; then echo "========= RACECHECK SUMMARY: 0 hazards displayed"; else echo "========= ERROR SUMMARY: 0 errors"; fi
exit $code""",
    # Two fake cuDNN libraries: one that the dynamic loader finds and one of a Python package.
    "path/ldconfig": 'echo "	libcudnn.so.9 (libc6,x86-64) => ${0%/path/*}/system/libcudnn.so.9"',
    "path/python3": 'case "$*" in *nvidia.cudnn*) echo "${0%/path/*}/pip/lib" ;; *) exit 1 ;; esac',
    "bin/conformance": WHICH_CUDNN + """
case "$*" in *vendor.cuda.cudnn*) [ "$cudnn" != "$WRONG" ] || { echo "2 passed, 1 failed, 0 not supported"; exit 1; } ;; esac
echo "3 passed, 0 failed, 0 not supported\"""",
    "bin/conformance_huge": WHICH_CUDNN + """
case "$*" in *"--op fused_attn_fwd"*) ;; *) echo "relu   one row   vendor.cuda          passed   0.1 s  " ;; esac
echo "fused_attn_fwd   bshd   ${HUGE:-vendor.cuda.cudnn}   passed  12.1 s  "
echo "2 passed, 0 failed, 0 ops without a case, tensors of 9 elements\"""",
    "bin/train_gpt": f"""
loss=5.5986; impl=vendor.cuda; rest=; staged=none
[ -z "$TE_FL_PREFER$TE_FL_DENY_VENDORS" ] || {{ impl=reference.host; rest="{NUMBERS}"; staged="4 calls"; }}
[ -z "$TE_FL_PREFER" ] || loss=${{LOSS:-5.5989}}
echo "step     1  loss $loss nats/byte  1 tokens/s"
echo "step     3  loss 4.8826 nats/byte  1 tokens/s"
echo "validation loss 4.8949 nats/byte (7.062 bits/byte) on held-out text"
echo "Implementations that ran"
echo "  add   $impl   4  $rest" | sed 's/ 4  4  4 / 4  4 /; s/ *$//'
[ -z "$TE_FL_PER_OP" ] || {{ echo "  layernorm_fwd  reference.host  {NUMBERS}"; staged="4 calls"; }}
echo "  staged to the host: $staged"
echo "trained 3 steps in 0.1 s\"""",
    "bin/nn_graphed_step_test": WHICH_CUDNN + 'echo "[  PASSED  ] 3 tests."',
    "bin/gpu_errors_test": 'echo "[  PASSED  ] 9 tests."',
    "bin/gpu_collectives_test": 'echo "[  PASSED  ] 1 test."',
    "bin/bench_collectives": 'echo "all_reduce 1024 9.1 8.8 1.03 0.01 0.30 0.25 1.02"; echo "all_gather 1024 9.1 8.8 1.03 0.01 0.30 1.25 1.02"',
}


class GpuCheck(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # A whole run of gpu_check.sh starts hundreds of programs, so the tests that need no special setup share one run.
        cls.whole = cls("setUp")
        cls.whole.setUp()
        cls.code, cls.rows = cls.whole.check()
        cls.logs = os.listdir(os.path.join(cls.whole.folder.name, "out"))

    @classmethod
    def tearDownClass(cls):
        cls.whole.tearDown()

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        for name, text in FAKES.items():
            path = os.path.join(self.folder.name, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write(f"#!/bin/bash\n{text}\n")
            os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)
        for folder, version in (("system", "9.14.0"), ("pip/lib", "9.19.0")):
            os.makedirs(os.path.join(self.folder.name, folder))
            with open(os.path.join(self.folder.name, folder, "libcudnn.so.9"), "w") as file:
                file.write(version)
        os.makedirs(os.path.join(self.folder.name, "plugins"))
        open(os.path.join(self.folder.name, "plugins", "libte_fl_cuda.so"), "w").close()

    def tearDown(self):
        self.folder.cleanup()

    def check(self, *options, **env):
        """Runs gpu_check.sh; returns its exit code and {row: (result, detail)}."""
        own = {**os.environ, "REPORT": "", "WRONG": "none", "LD_LIBRARY_PATH": "", **env, "PATH": os.path.join(self.folder.name, "path") + ":" + os.environ["PATH"]}
        run = subprocess.run([os.path.join(ROOT, "tools", "gpu_check.sh"), "--build", self.folder.name, "--out",
                              os.path.join(self.folder.name, "out"), *options], capture_output=True, text=True, env=own)
        lines = [line for line in run.stdout.splitlines() if not line.startswith("device: ")]
        return run.returncode, {line[:34].strip(): tuple((line[35:].split(" ", 1) + [""])[:2]) for line in lines}

    def failed(self, rows):
        return [name for name, (result, _) in rows.items() if result == "FAILED"]

    def test_passes(self):
        rows = self.rows
        self.assertEqual(self.failed(rows), [])
        self.assertEqual(self.code, 0)
        for name in ("conformance gemm", "more than 2^31 elements", "TE_FL_PREFER=reference", "compute-sanitizer initcheck",
                     "errors and bad input", "collectives under memcheck", "captured steps, bit by bit", "train_gpt block"):
            self.assertEqual(rows[name][0], "passed", rows)
        self.assertEqual(rows["benchmarks: collectives"], ("below", "  1 of 2 within 1 us of NCCL on the host"), rows)
        self.assertIn("losses within 0.00005", rows["TE_FL_PREFER=reference"][1])

    def test_every_family_of_ops(self):
        families = {os.path.splitext(name)[0] for name in os.listdir(os.path.join(ROOT, "ops")) if name.endswith(".yaml")} - {"collective"}
        self.assertEqual({name.removeprefix("conformance ") for name in self.rows if name.startswith("conformance ") and "," not in name}, families)
        # A row that covers the programs of several op families reads the log of each of them.
        for part in ("validate", "memcheck", "racecheck", "initcheck"):
            looked = {name.removeprefix(part + "-").removesuffix(".log").removesuffix("-f32") for name in self.logs if name.startswith(part + "-")}
            self.assertLessEqual(families, looked, part)

    def test_every_huge_case_is_the_plugins(self):
        code, rows = self.check(HUGE="default.cpu")
        self.assertEqual((code, self.failed(rows)), (1, ["more than 2^31 elements", "attention, 2^31, cuDNN 9.19.0"]))
        self.assertIn("1 of 2 failed or elsewhere", rows["more than 2^31 elements"][1])

    def test_every_cudnn_of_the_machine(self):
        rows = self.rows
        self.assertEqual(self.code, 0, rows)
        for name in ("attention on cuDNN 9.14.0", "attention on cuDNN 9.19.0", "attention, 2^31, cuDNN 9.19.0", "captured steps, cuDNN 9.19.0"):
            self.assertEqual(rows[name][0], "passed", rows)
        self.assertNotIn("attention, 2^31, cuDNN 9.14.0", rows)  # the row "more than 2^31 elements" already covers this cuDNN
        for name in ("more than 2^31 elements", "captured steps, bit by bit"):
            self.assertIn("cuDNN 9.14.0", rows[name][1])
        self.assertIn("0 of 1 failed or elsewhere; cuDNN 9.19.0", rows["attention, 2^31, cuDNN 9.19.0"][1])

    def test_either_cudnn_fails_the_check(self):
        for version in ("9.14.0", "9.19.0"):
            code, rows = self.check("--quick", WRONG=version)
            self.assertEqual((code, self.failed(rows)), (1, [f"attention on cuDNN {version}"]))

    def test_one_cudnn_runs_once(self):
        # Both search paths lead to the same cuDNN file.
        os.remove(os.path.join(self.folder.name, "pip/lib/libcudnn.so.9"))
        os.symlink("../../system/libcudnn.so.9", os.path.join(self.folder.name, "pip/lib/libcudnn.so.9"))
        _, rows = self.check("--quick")
        self.assertEqual([name for name in rows if "cuDNN" in name], ["attention on cuDNN 9.14.0"])
        # The dynamic loader searches LD_LIBRARY_PATH first.
        os.makedirs(os.path.join(self.folder.name, "mine"))
        with open(os.path.join(self.folder.name, "mine/libcudnn.so.9"), "w") as file:
            file.write("9.16.0")
        _, rows = self.check("--quick", LD_LIBRARY_PATH=os.path.join(self.folder.name, "mine"))
        self.assertEqual([name for name in rows if "cuDNN" in name], ["attention on cuDNN 9.16.0", "attention on cuDNN 9.14.0"])

    def test_losses_of_staged_runs(self):
        for loss in ("5.65", "nan"):
            code, rows = self.check("--staged", LOSS=loss)
            self.assertEqual((code, self.failed(rows)), (1, ["TE_FL_PREFER=reference"]), loss)

    def test_reports_of_a_sanitizer(self):
        code, rows = self.check(REPORT="generic_gemm/f32*f32")
        self.assertEqual((code, self.failed(rows)), (1, ["compute-sanitizer initcheck"]))
        self.assertEqual("gemm-f32", rows["compute-sanitizer initcheck"][1].strip())
        code, rows = self.check(REPORT="gpu_collectives_test")
        self.assertEqual((code, self.failed(rows)), (1, ["collectives under memcheck"]))

    def test_missing_programs(self):
        for program, row in (("conformance_huge", "more than 2^31 elements"), ("gpu_errors_test", "errors and bad input"),
                             ("nn_graphed_step_test", "captured steps, bit by bit")):
            os.remove(os.path.join(self.folder.name, "bin", program))
            code, rows = self.check()
            self.assertEqual(code, 1)
            self.assertEqual(rows[row][0], "FAILED")
            self.assertIn(f"bin/{program} is missing; build the target {program}", rows[row][1])


if __name__ == "__main__":
    unittest.main()
