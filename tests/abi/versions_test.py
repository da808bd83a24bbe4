#!/usr/bin/env python3
"""Older and newer hosts load older and newer plugins: they work together, or the error gives the reason.

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

NOW = "0.9"
# Plugins, named by their ABI version. Those of 2.x and 3.0 are built with the headers of tests/abi/later_header.py.
GOOD, DEVICE, SMALL = FAULT / "good.so", FAULT / "device.so", FAULT / "smaller_structs.so"
GOOD_01, GOOD_010, NEEDS_012 = FAULT / "older_major.so", FAULT / "newer_minor.so", FAULT / "needs_newer_host.so"
GOOD_20, DEVICE_20, SMALL_20 = PLUGINS / "good-2.0.so", PLUGINS / "device-2.0.so", PLUGINS / "smaller_structs-2.0.so"
GOOD_21, DEVICE_21, GOOD_22 = PLUGINS / "good-2.1.so", PLUGINS / "device-2.1.so", PLUGINS / "good-2.2.so"
NEEDS_22, NEEDS_23 = PLUGINS / "needs_its_own-2.2.so", PLUGINS / "needs_newer_host-2.0.so"
MORE_OPS = PLUGINS / "newer_minor-2.1.so"  # claims 2.2, and has an op that no host here knows
GOOD_30 = PLUGINS / "good-3.0.so"

# Refused plugins: host version, plugin, parts of the error.
REFUSED = [
    ("0.9", NEEDS_012, ["needs a host of ABI 0.12 or newer", "speaks 0.9", "rule R2"]),
    ("0.9", GOOD_01, ["the plugin speaks ABI 0.1", "speaks 0.9", "before 2.0 both", "rule R2", "rebuild the plugin"]),
    ("0.9", GOOD_010, ["the plugin speaks ABI 0.10", "speaks 0.9", "before 2.0 both", "rule R2", "use a newer te-fl, or"]),
    ("0.9", GOOD_20, ["the plugin speaks ABI 2.0", "speaks 0.9", "rule R2", "use a newer te-fl, or rebuild"]),
    ("2.1", GOOD, ["the plugin speaks ABI 0.9", "speaks 2.1", "the major numbers", "rule R2", "rebuild the plugin"]),
    ("2.1", NEEDS_22, ["needs a host of ABI 2.2 or newer", "speaks 2.1", "rule R2", "use a newer te-fl"]),
    ("2.1", NEEDS_23, ["needs a host of ABI 2.3 or newer", "speaks 2.1", "rule R2"]),
    ("2.1", GOOD_30, ["the plugin speaks ABI 3.0", "speaks 2.1", "rule R2", "use a newer te-fl, or rebuild"]),
    ("3.0", GOOD, ["the plugin speaks ABI 0.9", "speaks 3.0", "rule R2", "rebuild the plugin"]),
    ("3.0", GOOD_21, ["the plugin speaks ABI 2.1", "speaks 3.0", "rule R2", "rebuild the plugin"]),
]
# Plugins that load and run: host version, plugin, the plugin's ABI version, the device of its relu.
SERVED = [
    ("0.9", GOOD, "0.9", "cpu"),
    ("0.9", SMALL, "0.9", "cpu"),
    ("0.9", DEVICE, "0.9", "ext:fault:0"),
    ("2.1", GOOD_20, "2.0", "cpu"),
    ("2.1", SMALL_20, "2.0", "cpu"),
    ("2.1", DEVICE_20, "2.0", "ext:fault:0"),
    ("2.1", GOOD_21, "2.1", "cpu"),
    ("2.1", DEVICE_21, "2.1", "ext:fault:0"),
    ("2.1", GOOD_22, "2.2", "cpu"),
    ("2.1", MORE_OPS, "2.2", "cpu"),
    ("3.0", GOOD_30, "3.0", "cpu"),
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

    def test_the_others_run_and_unload(self):
        for host, plugin, abi, device in SERVED:
            with self.subTest(host=host, plugin=plugin.name):
                met = Meeting(PROGRAMS, host, plugin, "vendor.fault")
                self.assertEqual((met.host, met.code, met.state, met.abi), (host, 0, "active", abi), met.text)
                self.assertEqual(met.ops, {("relu: vendor.fault", device): "OK"}, met.text)
                self.assertEqual(met.end, "deactivated")

    def test_an_op_of_a_later_te_fl_is_left_out_and_named(self):
        met = Meeting(PROGRAMS, "2.1", MORE_OPS, "vendor.fault")
        self.assertEqual(met.state, "active", met.text)
        for word in ("relu_of_a_later_te_fl", "of ABI 2.2", "this te-fl speaks 2.1 (rule R20)"):
            self.assertIn(word, met.reason)
        self.assertEqual(Meeting(PROGRAMS, "2.1", GOOD_21).reason, "")

    def test_the_withdrawn_plugin_is_refused_by_every_host(self):
        null = kept(KEPT, "null")
        if null is None:
            self.skipTest("the kept plugin is for another processor")
        for host in ("0.9", "2.1", "3.0"):
            met = Meeting(PROGRAMS, host, null)
            for word in ("the plugin speaks ABI 1.0", "speaks " + host, "1.0 was withdrawn", "rebuild the plugin"):
                self.assertIn(word, met.status)


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

    def test_manifests_of_other_versions(self):
        for abi, state, words in (("0.1", "failed", "its manifest says plugin ABI 0.1"), ("1.0", "failed", "1.0 was withdrawn"),
                                  ("0.10", "failed", "before 2.0 both"), ("2.0", "failed", "its manifest says plugin ABI 2.0"),
                                  ("0.9", "active", "")):
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
