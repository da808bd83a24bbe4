#!/usr/bin/env python3
"""Tests tools/check_wheel.py on hand-made wheels whose library is bundled, missing or unreachable, and the platform tag that it gives them."""

import base64
import hashlib
import os
import subprocess
import sys
import tempfile
import unittest
import zipfile

TOOL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools", "check_wheel.py")


class CheckWheel(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = folder.name

    def compile(self, name, *options, source="int f(void) { return 1; }"):
        path = os.path.join(self.root, name)
        subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", *options, "-o", path], input=source, text=True, check=True)
        return path

    def module_and_helper(self, run_path):
        """Builds a module that needs libhelper.so.7, a library that no distribution provides."""
        helper = self.compile("libhelper.so.7", "-Wl,-soname,libhelper.so.7")
        options = [f"-Wl,-rpath,{run_path}", "-Wl,--enable-new-dtags"] if run_path else []
        return self.compile("_m.abi3.so", helper, *options, source="int f(void); int g(void) { return f(); }"), helper

    def wheel(self, files):
        path = os.path.join(self.root, "m-1.0-cp311-abi3-linux_x86_64.whl")
        tag = b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-abi3-linux_x86_64\n\n"
        with zipfile.ZipFile(path, "w") as archive:
            for name, source in files.items():
                archive.write(source, name)
            archive.writestr("m-1.0.dist-info/WHEEL", tag)
            archive.writestr("m-1.0.dist-info/RECORD", "m-1.0.dist-info/WHEEL,sha256=old,1\nm-1.0.dist-info/RECORD,,\n")
        return path

    def told(self, wheel, *options):
        run = subprocess.run([sys.executable, TOOL, wheel, *options], capture_output=True, text=True)
        return run.returncode, run.stdout + run.stderr

    def test_a_library_that_is_brought_along_and_found(self):
        module, helper = self.module_and_helper("$ORIGIN/lib")
        code, text = self.told(self.wheel({"m/_m.abi3.so": module, "m/lib/libhelper.so.7": helper}))
        self.assertEqual(code, 0, text)
        self.assertRegex(text, r"complete, manylinux_2_\d+_x86_64")

    def test_a_library_that_is_missing(self):
        module, _ = self.module_and_helper("$ORIGIN/lib")
        code, text = self.told(self.wheel({"m/_m.abi3.so": module}))
        self.assertEqual(code, 1)
        self.assertIn("m/_m.abi3.so needs libhelper.so.7, which not every Linux has and the wheel does not bring", text)

    def test_a_library_that_is_there_and_out_of_reach(self):
        module, helper = self.module_and_helper("$ORIGIN")
        code, text = self.told(self.wheel({"m/_m.abi3.so": module, "m/lib/libhelper.so.7": helper}))
        self.assertEqual(code, 1)
        self.assertIn("in the wheel as m/lib/libhelper.so.7, where its run path ['$ORIGIN'] does not lead", text)

    def test_a_run_path_that_leaves_the_wheel(self):
        for path in ("/opt/build/lib", "$ORIGIN/../../..", ":"):
            module, helper = self.module_and_helper(path)
            code, text = self.told(self.wheel({"m/_m.abi3.so": module, "m/libhelper.so.7": helper}))
            self.assertEqual(code, 1, path)
            self.assertIn("outside the wheel; a run path begins with $ORIGIN", text)

    def test_a_wheel_without_a_library(self):
        code, text = self.told(self.wheel({}))
        self.assertEqual(code, 1)
        self.assertIn("holds no library at all", text)

    def test_the_copy_with_its_tag(self):
        module, helper = self.module_and_helper("$ORIGIN")
        out = os.path.join(self.root, "out")
        code, text = self.told(self.wheel({"m/_m.abi3.so": module, "m/libhelper.so.7": helper}), "--out", out)
        self.assertEqual(code, 0, text)
        (name,) = os.listdir(out)
        self.assertRegex(name, r"^m-1.0-cp311-abi3-manylinux_2_\d+_x86_64.whl$")
        with zipfile.ZipFile(os.path.join(out, name)) as archive:
            metadata = archive.read("m-1.0.dist-info/WHEEL")
            record = archive.read("m-1.0.dist-info/RECORD").decode().splitlines()
        self.assertIn(f"Tag: {name[len('m-1.0-'):-len('.whl')]}\n".encode(), metadata)
        digest = base64.urlsafe_b64encode(hashlib.sha256(metadata).digest()).rstrip(b"=").decode()
        self.assertEqual(record, [f"m-1.0.dist-info/WHEEL,sha256={digest},{len(metadata)}", "m-1.0.dist-info/RECORD,,"])


if __name__ == "__main__":
    unittest.main()
