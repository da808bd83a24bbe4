#!/usr/bin/env python3
"""Plugins as they were built at the release of ABI 1.0: this te-fl loads and runs them, and te-fl check judges them rightly.

usage: kept_test.py KEPT PROGRAMS [TE_FL]
"""
import pathlib
import subprocess
import sys
import unittest

from hosts import Meeting, kept, sha256, skip_elsewhere

KEPT, PROGRAMS = (pathlib.Path(a) for a in sys.argv[1:3])
TE_FL = sys.argv[3] if len(sys.argv) > 3 else None
del sys.argv[1:]

# Of the fault plugin: implementation, the check that finds it, words of the finding.
CAUGHT = [
    ("a_little", "tolerance"),
    ("unwritten", "output"),
    ("late_refusal", "was written although the call was refused"),
    ("throws", "exception"),
    ("overruns", "bytes outside its memory were written"),
    ("leaks", "the heap"),
    ("shared_scratch", "8 threads"),
    ("rounding_mode", "rounding mode"),
    ("stale_pointer", "was written after the plugin was deactivated"),
    ("far_host_access", "memory of the device"),
    ("far_leak", "the device's used memory"),
]


class Kept(unittest.TestCase):
    def test_they_are_what_was_kept(self):
        lines = (KEPT / "1.0" / "SHA256SUMS").read_text().split()
        self.assertEqual(sorted(lines[1::2]), ["fault.so", "null.so"])
        for want, name in zip(lines[::2], lines[1::2]):
            self.assertEqual(sha256(KEPT / "1.0" / name), want, name)

    def test_null_loads_serves_and_goes(self):
        met = Meeting(PROGRAMS, "1.0", kept(KEPT, "null"), "vendor.null")
        self.assertEqual((met.code, met.name, met.state, met.abi, met.reason), (0, "null", "active", "1.0", ""), met.text)
        self.assertEqual(met.ops, {("relu: vendor.null", "cpu"): "OK"})
        self.assertEqual(met.end, "deactivated")

    def test_fault_loads_with_its_device_and_serves_there(self):
        met = Meeting(PROGRAMS, "1.0", kept(KEPT, "fault"), "vendor.wrong.right", "vendor.wrong.far_right",
                      "vendor.wrong.throws")
        self.assertEqual((met.code, met.name, met.state, met.abi), (0, "wrong", "active", "1.0"), met.text)
        self.assertEqual(met.ops.pop(("relu: vendor.wrong.right", "cpu")), "OK")
        self.assertEqual(met.ops.pop(("relu: vendor.wrong.far_right", "ext:wrong:0")), "OK")
        self.assertIn("rule R5", met.ops.pop(("relu: vendor.wrong.throws", "cpu")))
        self.assertEqual((met.ops, met.end), ({}, "deactivated"))


@unittest.skipIf(TE_FL is None, "te-fl check is not part of this build's tests")
class Checked(unittest.TestCase):
    def check(self, name, *options):
        run = subprocess.run([TE_FL, "check", str(kept(KEPT, name)), *options], capture_output=True, text=True,
                             timeout=120)
        return run.returncode, run.stdout + run.stderr

    def test_null_is_certified(self):
        code, text = self.check("null")
        self.assertEqual(code, 0, text)
        self.assertIn("certified:", text)

    def test_every_fault_is_found(self):
        for name, words in CAUGHT:
            with self.subTest(name):
                code, text = self.check("fault", "--impl", "vendor.wrong." + name, "--jobs", "1")
                self.assertEqual(code, 1, text)
                self.assertIn(words, text)

    def test_what_is_right_in_it_passes(self):
        for name in ("right", "far_right"):
            code, text = self.check("fault", "--quick", "--impl", "vendor.wrong." + name)
            self.assertEqual(code, 4, text)  # a part, which is no certificate
            self.assertIn(" 0 failed", text)


if __name__ == "__main__":
    skip_elsewhere()
    unittest.main()
