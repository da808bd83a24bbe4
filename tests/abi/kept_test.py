#!/usr/bin/env python3
"""te-fl refuses a plugin that was built for ABI 1.0, a release that was withdrawn; the error says what to do.

usage: kept_test.py KEPT PROGRAMS [TE_FL]
"""
import os
import pathlib
import subprocess
import sys
import unittest

from hosts import Meeting, kept, sha256, skip_elsewhere

KEPT, PROGRAMS = (pathlib.Path(a) for a in sys.argv[1:3])
TE_FL = sys.argv[3] if len(sys.argv) > 3 else None
del sys.argv[1:]

WORDS = ("the plugin speaks ABI 1.0", "speaks 0.9", "1.0 was withdrawn", "rule R2", "rebuild the plugin with this te-fl's header")


class Kept(unittest.TestCase):
    def test_it_is_what_was_kept(self):
        want, name = (KEPT / "1.0" / "SHA256SUMS").read_text().split()
        self.assertEqual(name, "null.so")
        self.assertEqual(sha256(KEPT / "1.0" / name), want)

    def test_it_is_refused_with_what_to_do(self):
        met = Meeting(PROGRAMS, "0.9", kept(KEPT, "null"), "vendor.null")
        self.assertEqual((met.code, met.state, met.ops), (1, "failed", {}), met.text)
        for word in WORDS:
            self.assertIn(word, met.status)
        self.assertIn(met.reason, met.status)

    @unittest.skipIf(TE_FL is None, "te-fl is not part of this build")
    def test_doctor_and_check_say_so(self):
        for command in (["doctor"], ["check", str(kept(KEPT, "null"))]):
            with self.subTest(command[0]):
                run = subprocess.run([TE_FL, *command], capture_output=True, text=True, timeout=60,
                                     env={**os.environ, "TE_FL_PLUGIN_MODULES": str(kept(KEPT, "null"))})
                self.assertNotEqual(run.returncode, 0)
                self.assertIn("1.0 was withdrawn", run.stdout + run.stderr)


if __name__ == "__main__":
    skip_elsewhere()
    unittest.main()
