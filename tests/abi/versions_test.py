#!/usr/bin/env python3
"""Older and newer plugins and hosts meet: they work together, or the reason says why not.

usage: versions_test.py KEPT PROGRAMS PLUGINS FAULT_PLUGINS [TE_FL]
"""
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import unittest

from hosts import Meeting, kept

KEPT, PROGRAMS, PLUGINS, FAULT = (pathlib.Path(a) for a in sys.argv[1:5])
TE_FL = sys.argv[5] if len(sys.argv) > 5 else None
del sys.argv[1:]

NOW = "1.0"
# Plugins by the ABI that they speak. "-1.1" and "-2.0": built with the headers of tests/abi/later_header.py.
GOOD, DEVICE, SMALL = FAULT / "good.so", FAULT / "device.so", FAULT / "smaller_structs.so"
GOOD_11, DEVICE_11, NEEDS_11 = PLUGINS / "good-1.1.so", PLUGINS / "device-1.1.so", PLUGINS / "needs_its_own-1.1.so"
MORE_OPS = PLUGINS / "newer_minor-1.1.so"  # says 1.2, and has an op that no host here knows
GOOD_20, GOOD_01 = PLUGINS / "good_of_2-2.0.so", FAULT / "older_major.so"
NEEDS_13 = FAULT / "needs_newer_host.so"

# Refused: host, plugin, words of the reason.
REFUSED = [
    ("1.0", NEEDS_11, ["needs a host of ABI 1.1 or newer", "speaks 1.0", "rule R2", "use a newer te-fl"]),
    ("1.0", NEEDS_13, ["needs a host of ABI 1.3 or newer", "speaks 1.0", "rule R2"]),
    ("1.0", GOOD_20, ["the plugin speaks ABI 2.0", "speaks 1.0", "rule R2", "use a newer te-fl, or rebuild"]),
    ("1.0", GOOD_01, ["the plugin speaks ABI 0.1", "speaks 1.0", "rule R2", "rebuild the plugin"]),
    ("1.1", NEEDS_13, ["needs a host of ABI 1.3 or newer", "speaks 1.1", "rule R2"]),
    ("1.1", GOOD_20, ["the plugin speaks ABI 2.0", "speaks 1.1", "rule R2", "use a newer te-fl, or rebuild"]),
    ("1.1", GOOD_01, ["the plugin speaks ABI 0.1", "speaks 1.1", "rule R2", "rebuild the plugin"]),
    ("2.0", GOOD, ["the plugin speaks ABI 1.0", "speaks 2.0", "rule R2", "rebuild the plugin"]),
    ("2.0", GOOD_11, ["the plugin speaks ABI 1.1", "speaks 2.0", "rule R2", "rebuild the plugin"]),
    ("2.0", GOOD_01, ["the plugin speaks ABI 0.1", "speaks 2.0", "rule R2", "rebuild the plugin"]),
]
# Served: host, plugin, the plugin's ABI, the device of its relu.
SERVED = [
    ("1.0", GOOD, "1.0", "cpu"),
    ("1.0", GOOD_11, "1.1", "cpu"),
    ("1.0", DEVICE_11, "1.1", "ext:fault:0"),
    ("1.0", MORE_OPS, "1.2", "cpu"),
    ("1.1", GOOD, "1.0", "cpu"),
    ("1.1", SMALL, "1.0", "cpu"),
    ("1.1", DEVICE, "1.0", "ext:fault:0"),
    ("1.1", GOOD_11, "1.1", "cpu"),
    ("1.1", DEVICE_11, "1.1", "ext:fault:0"),
    ("1.1", NEEDS_11, "1.1", "cpu"),
    ("2.0", GOOD_20, "2.0", "cpu"),
]


def te_fl(*arguments, **env):
    run = subprocess.run([TE_FL, *arguments], capture_output=True, text=True, timeout=60, env={**os.environ, **env})
    return run.returncode, run.stdout + run.stderr


class Versions(unittest.TestCase):
    def test_those_that_cannot_work_together_say_why(self):
        for host, plugin, words in REFUSED:
            with self.subTest(host=host, plugin=plugin.name):
                met = Meeting(PROGRAMS, host, plugin)
                self.assertEqual((met.host, met.code, met.state), (host, 1, "failed"), met.text)
                for word in words:
                    self.assertIn(word, met.status, met.text)
                self.assertIn(met.reason, met.status)

    def test_the_others_serve_and_go(self):
        for host, plugin, abi, device in SERVED:
            with self.subTest(host=host, plugin=plugin.name):
                met = Meeting(PROGRAMS, host, plugin, "vendor.fault")
                self.assertEqual((met.host, met.code, met.state, met.abi), (host, 0, "active", abi), met.text)
                self.assertEqual(met.ops, {("relu: vendor.fault", device): "OK"}, met.text)
                self.assertEqual(met.end, "deactivated")

    def test_an_op_of_a_later_te_fl_is_left_out_and_named(self):
        for host, words in (("1.0", "this te-fl speaks 1.0 (rule R20)"), ("1.1", "this te-fl speaks 1.1 (rule R20)")):
            met = Meeting(PROGRAMS, host, MORE_OPS, "vendor.fault")
            self.assertEqual(met.state, "active", met.text)
            for word in ("relu_of_a_later_te_fl", "of ABI 1.2", words):
                self.assertIn(word, met.reason)
        self.assertEqual(Meeting(PROGRAMS, "1.1", GOOD_11).reason, "")

    def test_the_kept_plugins_on_a_later_host(self):
        null = kept(KEPT, "null")
        if null is None:
            self.skipTest("the kept plugins are for another processor")
        met = Meeting(PROGRAMS, "1.1", null, "vendor.null")
        self.assertEqual((met.state, met.abi, met.ops), ("active", "1.0", {("relu: vendor.null", "cpu"): "OK"}), met.text)
        met = Meeting(PROGRAMS, "1.1", kept(KEPT, "fault"), "vendor.wrong.right", "vendor.wrong.far_right")
        self.assertEqual(set(met.ops.values()), {"OK"}, met.text)
        self.assertEqual(len(met.ops), 2, met.text)
        met = Meeting(PROGRAMS, "2.0", null)
        self.assertIn("the plugin speaks ABI 1.0", met.status)


@unittest.skipIf(TE_FL is None, "te-fl is not built")
class Doctor(unittest.TestCase):
    def test_gives_the_same_reasons(self):
        for host, plugin, words in REFUSED:
            if host != NOW:
                continue
            with self.subTest(plugin=plugin.name):
                code, text = te_fl("doctor", TE_FL_PLUGIN_MODULES=str(plugin))
                line = next(l for l in text.splitlines() if l.startswith("problem  plugin"))
                self.assertNotEqual(code, 0, text)
                self.assertIn(Meeting(PROGRAMS, host, plugin).reason, line)
                for word in words:
                    self.assertIn(word, line)

    def test_says_what_was_left_out(self):
        code, text = te_fl("doctor", TE_FL_PLUGIN_MODULES=str(MORE_OPS))
        self.assertEqual(code, 0, text)
        self.assertRegex(text, r"ok +plugin newer_minor: active, 1 ops, ABI 1\.2")
        self.assertRegex(text, r"note +plugin newer_minor: left out, .*relu_of_a_later_te_fl")

    def test_check_names_it_too(self):
        code, text = te_fl("check", str(MORE_OPS), "--quick", "--jobs", "1")
        self.assertIn("left out, being unknown to this te-fl", text)
        self.assertIn("relu_of_a_later_te_fl", text)

    def test_manifests_of_other_versions(self):
        for abi, state, words in (("0.1", "failed", "its manifest says plugin ABI 0.1"),
                                  ("2.0", "failed", "its manifest says plugin ABI 2.0"), ("1.7", "active", "")):
            with tempfile.TemporaryDirectory() as folder, self.subTest(abi=abi):
                manifest = {"file_format_version": "1.0", "name": "good", "vendor": "fault", "library_path": str(GOOD),
                            "arch": platform.machine(), "abi": abi, "probe": {"always": True}}
                pathlib.Path(folder, "good.json").write_text(json.dumps(manifest))
                code, text = te_fl("doctor", TE_FL_PLUGIN_PATH=folder)
                line = next(l for l in text.splitlines() if "plugin good" in l)
                self.assertIn(state, line)
                self.assertIn(words, line)
                if words:
                    self.assertNotEqual(code, 0)
                    self.assertIn("rule R2", line)


if __name__ == "__main__":
    unittest.main()
