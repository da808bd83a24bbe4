#!/usr/bin/env python3
"""Tests te-fl check: each check finds the mistake that its faulty implementation makes. usage: check_test.py TE_FL WRONG.so WRONG_FILE.so
WRONG_DEVICE.so AUTHOR.so NULL.so WRONG_RANKS.so DEVICE_RANKS.so"""
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ET

TE_FL, WRONG, WRONG_FILE, WRONG_DEVICE, AUTHOR, NULL, WRONG_RANKS, DEVICE_RANKS = sys.argv[1:9]
del sys.argv[1:]

# Expected failures: NAME of the implementation vendor.wrong.NAME -> (the check that fails, words of its message). Every implementation of
# wrong_plugin.cpp is listed here or in RIGHT.
CAUGHT = {
    "a_little": ("result", "tolerance"),
    "one_element": ("result", "tolerance"),
    "unwritten": ("result", "output"),
    "late_refusal": ("result", "was written although the call was refused"),
    "late_failure": ("result", "the last block failed"),
    "throws": ("result", "exception"),
    "negative": ("result", "status -1 (0xffffffff)"),
    "clean_success": ("status", "status 65536 (0x10000), TE_FL_OK marked with TE_FL_CLEAN"),
    "unknown_bits": ("status", "status 131072 (0x20000), which is no te_fl_code"),
    "hangs": ("result", "did not return within 1 s"),
    "crashes": ("result", "the process died: SIGABRT"),
    "hangs_at_128": ("result", "did not return within 1 s"),
    "reads_past": ("guard", "bytes behind the end of input"),
    "leaks": ("leak", "the heap"),
    "wrong_later": ("leak", "right at first, and wrong in call "),
    "says_nothing": ("describe", "its describe() wrote nothing (rule R31)"),
    "throws_words": ("describe", "describe() threw an exception (rule R5)"),
    "dies_saying": ("describe", "the process died: SIGABRT"),
    "writes_saying": ("describe", "wrote to a tensor; it must change nothing (rule R31)"),
    "reads_before": ("guard", "bytes before the start of input"),
    "overruns": ("result", "output: bytes outside its memory were written, the nearest one byte 0 behind the end of its 924 bytes (rule R11)"),
    "writes_input": ("result", "input is an input and was written, first in byte 0 (rule R11)"),
    "no_nan": ("result", "expected nan"),
    "prints": ("printing", "wrote to stdout or stderr, the last in \""),
    "asks": ("settings", "it asked the host for TE_FL_WRONG_UNROLL"),
    "beyond_310000": ("result", "was not written"),
    "beyond_two_million": ("speed", "of 4194304"),
    "not_in_place": ("result", "output"),
    "strides": ("strided", "gaps between their rows"),
    "other_bits": ("determinism", "two calls with the same inputs differ"),
    "shared_scratch": ("concurrent", "8 threads"),
    "rounding_mode": ("environment", "rounding mode"),
    "stale_pointer": ("lifecycle", "was written after the plugin was deactivated"),
    "stray_thread": ("lifecycle", "threads of the plugin run on"),
    "far_host_access": ("result", "memory of the device"),
    "far_other_stream": ("stream", "ctx->stream"),
    "far_leak": ("leak", "the device's used memory"),
    "far_late_failure": ("result", "a kernel that ran before has failed"),
    "far_reads_past": ("guard", "it reads outside of input, byte 7 behind its end: the results change with what lies there"),
    "far_reads_before": ("guard", "it reads outside of input, byte 5 before its start: the results change with what lies there"),
    "far_reads_bits": ("guard", "it reads outside of input, byte 3 behind its end: the results change with what lies there"),
    "far_writes_far": ("guard", "output: bytes outside its memory were written, the nearest one byte 400 behind the end of its 924 bytes (rule R11)"),
}
# Expected failures of the faulty devices of wrong_device.cpp: device index -> (the failing step of the device section, words of its message).
DEVICES = {
    1: ("device/fill", "left other memory"),
    2: ("device/allocation", "64 bytes behind a multiple of 256"),
    3: ("device/copy within", "bytes are wrong"),
    4: ("device/default stream", "after copy() had returned"),
    5: ("device/streams", "after synchronize()"),
    6: ("device/streams", "memory that was freed on its stream"),
    7: ("device/the host waits for an event", "synchronize_event() returned before the work"),
    8: ("device/a stream waits for an event", "wait_event() did not make the stream wait"),
    9: ("device/a stream waits for an event", "wait_event() did not make the stream wait"),
    10: ("device/fill", "did not return within 2 s"),
    11: ("device/copy within", "Device::copy("),
    12: ("device/questions", "is_capturing() says that a stream is captured"),
    13: ("device/an event is polled", "query_event() reported an event as done before the work"),
    14: ("device/timed events", "ns passed on the host"),
    15: ("device/leak", "the used memory grows by"),
}
RIGHT = ("right", "says", "library_thread", "far_right", "far_leaking_device", "attention")


def check(plugin, *options):
    """Runs te-fl check; returns its exit code, its output and the contents of the files that it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        names = {kind: os.path.join(folder, "out." + kind) for kind in ("json", "junit", "html")}
        files = [word for kind, path in names.items() for word in ("--" + kind, path)]
        run = subprocess.run([TE_FL, "check", plugin, "--jobs", "1", *options, *files],
                             capture_output=True, text=True, timeout=120)
        written = {kind: pathlib.Path(path).read_text() for kind, path in names.items() if os.path.exists(path)}
    return run.returncode, run.stdout + run.stderr, written


def of(name):
    options = ["--impl", "vendor.wrong." + name, "--time-limit", "1" if name.startswith("hangs") else "30"]
    # Selects the checks to run: all for a correct implementation and for a lifecycle fault, otherwise only the check that finds the fault. Also all
    # for one_element, whose whole reports a test compares, and for beyond_two_million.
    if name in RIGHT or CAUGHT[name][0] == "lifecycle":
        part = ["--quick"]
    elif name in ("hangs_at_128", "beyond_310000"):
        part = ["--case", "relu/sweep/"]
    else:
        part = [] if name in ("one_element", "beyond_two_million") else ["--case", "relu/"]
    return check(WRONG, *options, *part)


def of_device(index):
    device = f"ext:wrong_device:{index}"
    return check(WRONG_DEVICE, "--device", device, "--case", "device/", "--time-limit", "2" if index == 10 else "30")


class Catches(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            names = [*CAUGHT, *RIGHT]
            cls.runs = dict(zip(names, pool.map(of, names)))
            cls.device_runs = dict(enumerate(pool.map(of_device, range(len(DEVICES) + 1))))

    def failures(self, name):
        code, text, files = self.runs[name]
        self.assertIn("json", files, text)
        return [r for r in json.loads(files["json"])["results"] if r["result"] == "fail"]

    def test_every_mistake_is_found_by_its_check(self):
        for name, (kind, words) in CAUGHT.items():
            with self.subTest(name):
                code, text, _ = self.runs[name]
                self.assertEqual(code, 1, text)
                found = [f["check"] + ": " + f["message"] for f in self.failures(name)]
                self.assertTrue(any(f.startswith(kind + ":") and words in f for f in found), found)

    def test_right_ones_pass(self):
        for name in RIGHT:
            with self.subTest(name):
                code, text, files = self.runs[name]
                self.assertEqual(code, 4, text)
                self.assertRegex(text, "no certificate: [1-9][0-9]* passed, 0 failed")
                self.assertIn("not everything was checked: --quick, --impl vendor.wrong." + name, text)
                data = json.loads(files["json"])
                self.assertEqual((data["certified"], data["verdict"]), (False, "no certificate"))
                self.assertIn("no certificate", files["html"])

    def test_only_a_whole_run_is_a_certificate(self):
        code, text, files = check(NULL)
        self.assertEqual(code, 0, text)
        self.assertIn("\ncertified: ", text)
        data = json.loads(files["json"])
        self.assertEqual((data["certified"], data["verdict"], data["left_out"]), (True, "certified", []))
        self.assertIn("<strong>certified", files["html"])
        self.assertTrue([r for r in data["results"] if r["check"] == "sweep" and r["cases"] > 300])
        code, text, files = check(AUTHOR, "--quick")
        self.assertEqual(code, 4, text)
        steps = {r["case"]: r["result"] for r in json.loads(files["json"])["results"] if r["check"] == "device"}
        self.assertEqual(steps["device/fill"], "pass")
        self.assertEqual(steps["device/streams"], "not supported")  # this device makes no streams
        self.assertRegex(files["html"], r'device/streams</td><td class="none">')
        for options in (["--op", "relu"], ["--case", "relu/f32/7x33"]):
            with self.subTest(options):
                code, text, files = check(NULL, *options)
                self.assertEqual(code, 4, text)
                self.assertNotRegex(text, "(?m)^certified")
                self.assertIn(options[0] + " " + options[1], text)
                self.assertFalse(json.loads(files["json"])["certified"])
        # The ops of this plugin run on its own device only.
        _, text, files = check(NULL, "--device", "cpu", "--quick")
        self.assertEqual(json.loads(files["json"])["left_out"], ["--quick"], text)
        # The report must not show a check as passed that did not run.
        self.assertIn("speed", json.loads(files["json"])["not_run"])
        self.assertIn('<td class="none">not run: --quick</td>', files["html"])

    def test_collectives_are_run_by_processes_too(self):
        case = "broadcast/2ranks/"
        code, text, files = check(WRONG_RANKS, "--case", case)
        self.assertEqual(code, 1, text)
        results = json.loads(files["json"])["results"]
        by_threads = [r["result"] for r in results if r["check"] == "result"]
        self.assertTrue(by_threads)
        self.assertEqual(set(by_threads), {"pass"}, text)
        failed = [r for r in results if r["result"] == "fail"]
        self.assertTrue(failed)
        for f in failed:
            self.assertEqual((f["check"], f["op"], f["impl"]), ("processes", "broadcast", "vendor.wrong_ranks"), failed)
            self.assertIn("the other ranks did not connect to this process", f["message"])
            self.assertIn(case, f["case"])
        # Every case of two ranks ran in separate processes, and the printed command reproduces a failure.
        self.assertEqual(sum(r["cases"] for r in results if r["check"] == "processes"),
                         sum(r["cases"] for r in results if r["check"] == "result" and "/fuzz/" not in r["case"]))
        again = subprocess.run(failed[0]["reproduce"].replace("te-fl", TE_FL, 1), shell=True, capture_output=True, text=True, timeout=60)
        self.assertEqual(again.returncode, 1, again.stdout)

    def test_processes_that_die_leave_or_have_nothing_to_run_are_reported(self):
        for fault, words in (("crash", "the process of rank 1 ended by SIGABRT"), ("leave", "the process of rank 0 ended before the others had run all cases")):
            with self.subTest(fault):
                os.environ["WRONG_RANKS"] = fault
                try:
                    code, text, files = check(WRONG_RANKS, "--case", "broadcast/2ranks/")
                finally:
                    del os.environ["WRONG_RANKS"]
                self.assertEqual(code, 1, text)
                failed = [r for r in json.loads(files["json"])["results"] if r["result"] == "fail"]
                self.assertEqual([f["check"] for f in failed], ["processes"], failed)
                self.assertIn(words, failed[0]["message"])
                self.assertTrue(failed[0]["case"].startswith("broadcast/2ranks/"), failed)
        _, text, files = check(NULL, "--quick")
        self.assertIn("processes: not run: the plugin has no collectives", text)
        _, text, files = check(WRONG_RANKS, "--case", "broadcast/1ranks/")
        self.assertIn("processes: not run: no case of several ranks was chosen", text)

    def test_ranks_have_streams_of_their_own_devices(self):
        _, text, files = check(DEVICE_RANKS, "--op", "broadcast", "--case", "broadcast/2ranks/", "--quick")
        results = json.loads(files["json"])["results"]
        self.assertEqual([r for r in results if r["result"] == "fail" and r["check"] != "processes"], [], text)
        self.assertTrue([r for r in results if r["check"] == "stream" and r["result"] == "pass"], text)

    def test_a_leaking_device_is_no_ops_fault(self):
        _, text, files = self.runs["far_leaking_device"]
        found = [r for r in json.loads(files["json"])["results"] if r["check"] == "leak"]
        self.assertEqual([r["result"] for r in found], ["not supported"], text)
        self.assertIn("placed there without a call", found[0]["message"])

    def test_every_fault_of_a_device_is_found(self):
        for index, (step, words) in DEVICES.items():
            with self.subTest(step, index=index):
                code, text, files = self.device_runs[index]
                self.assertEqual(code, 1, text)
                failed = [f for f in json.loads(files["json"])["results"] if f["result"] == "fail"]
                self.assertTrue(all(f["check"] == "device" for f in failed), failed)
                # A device that does not wait for its work can fail in the first step that reads memory back if the machine is busy; te-fl check then
                # skips the remaining steps.
                at_once = index == 5 and failed and failed[0]["case"] == "device/allocation"
                self.assertTrue(at_once or any(f["case"] == step and words in f["message"] for f in failed), failed)
                if index not in (4, 5, 6, 8, 9, 11, 12):  # most faults fail exactly one step
                    self.assertEqual([f["case"] for f in failed], [step])
        # Running the failed step alone finds the fault again.
        failed = [f for f in json.loads(self.device_runs[1][2]["json"])["results"] if f["case"] == "device/fill"]
        command = failed[0]["reproduce"].replace("te-fl", TE_FL, 1)
        again = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
        self.assertEqual(again.returncode, 1, command + again.stdout)
        self.assertIn("left other memory", again.stdout)

    def test_a_right_device_passes_and_is_no_certificate_without_ops(self):
        code, text, files = self.device_runs[0]
        self.assertEqual(code, 4, text)
        self.assertIn("no op case ran", text)
        data = json.loads(files["json"])
        steps = {r["case"]: r["result"] for r in data["results"] if r["check"] == "device"}
        self.assertEqual(set(steps.values()), {"pass"}, steps)
        self.assertTrue({step for step, _ in DEVICES.values()} <= set(steps), steps)
        self.assertEqual(data["devices"], [{"name": "ext:wrong_device:0", "chip": "far", "driver": ""}])

    def test_it_stops_at_the_first_failure(self):
        code, text, files = check(WRONG, "--impl", "vendor.wrong.one_element", "--stop")
        self.assertEqual(code, 1, text)
        data = json.loads(files["json"])
        self.assertEqual(len([r for r in data["results"] if r["result"] == "fail"]), 1, text)
        self.assertEqual({part: why for part, why in data["not_run"].items() if why == "--stop"},
                         {"lifecycle": "--stop", "processes": "--stop", "speed": "--stop"})
        # Without a failure it is a whole run.
        code, text, files = check(NULL, "--stop")
        self.assertEqual(code, 0, text)

    def test_mistyped_choices_name_the_nearest(self):
        case = "relu/f32/7x33/out=f32"
        for options, words in (
                (["--op", "rleu"], "did you mean 'relu'?"),
                (["--op", "gelu"], "the plugin does not implement it; it implements relu"),
                (["--case", case.replace("33", "34")], f"did you mean '{case}'?"),
                (["--op", "relu", "--case", "nothing like it"], "no case of relu has this in its name; one of them is"),
                (["--impl", "vendor.nul"], "did you mean 'vendor.null'?"),
                (["--family", "activatoin"], "did you mean 'activation'?"),
                (["--device", "cpuu"], "did you mean 'cpu'?")):
            with self.subTest(options):
                code, text, files = check(NULL, *options)
                self.assertEqual(code, 2, text)
                self.assertIn(options[-2] + " " + options[-1] + ": ", text)
                self.assertIn(words, text)
                self.assertEqual(files, {})

    def test_a_crash_or_hang_loses_its_case_only(self):
        for name in ("crashes", "hangs", "far_host_access"):
            with self.subTest(name):
                results = json.loads(self.runs[name][2]["json"])["results"]
                passed = [r for r in results if r["result"] == "pass" and r["check"] == "result"]
                self.assertGreater(len(passed), 5)
                lost = [r for r in results if r["result"] == "fail" and r["check"] == "result"]
                self.assertTrue(all("/17/" in r["case"] for r in lost), lost)

    def test_a_crash_says_where(self):
        crashed = [f for f in self.failures("crashes") if "/17/" in f["case"]]
        self.assertRegex(crashed[0]["message"], r"died: SIGABRT in .*crashes\(.*\+0x[0-9a-f]+ \(wrong\.so\)")
        read = [f for f in self.failures("reads_past") if f["check"] == "guard"]
        self.assertRegex(read[0]["message"], r"SIGSEGV at address 0x[0-9a-f]+, [0-9]+ bytes behind the end of input, "
                                             r"which has [0-9]+ bytes: .* in .*sum_of\(")

    def test_a_difference_has_its_place_and_number(self):
        matrix = [f for f in self.failures("one_element") if re.search(r"/130x257/", f["case"])]
        self.assertRegex(matrix[0]["message"], r"output\[129,254\]: got .*; 1 of 33410 elements is wrong")
        self.assertRegex(self.failures("a_little")[0]["message"], r"; [1-9][0-9]+ of [0-9]+ elements are wrong")

    def test_the_command_reproduces(self):
        found = self.failures("one_element")[0]
        command = found["reproduce"].replace("te-fl", TE_FL, 1)
        again = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
        self.assertEqual(again.returncode, 1, command + again.stdout)
        self.assertIn(found["message"], again.stdout)

    def test_drawn_attention_shapes(self):
        # The implementation is wrong for odd head sizes under causal masks. No fixed conformance case has such a shape; a randomly drawn case finds
        # the fault.
        options = ["--impl", "vendor.wrong.attention_odd_heads", "--case", "fused_attn_fwd/fuzz/", "--seed", "9"]
        code, text, files = check(WRONG, *options)
        self.assertEqual(code, 1, text)
        failed = [r for r in json.loads(files["json"])["results"] if r["result"] == "fail"]
        self.assertTrue(failed)
        for f in failed:
            self.assertIn("/fuzz/", f["case"])
            self.assertIn("causal", f["case"])
            self.assertIn("tolerance", f["message"])
        command = failed[0]["reproduce"].replace("te-fl", TE_FL, 1)
        self.assertIn("--seed 9", command)
        again = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
        self.assertEqual(again.returncode, 1, command + again.stdout)
        self.assertIn(failed[0]["message"], again.stdout)

    def test_the_files(self):
        _, _, files = self.runs["one_element"]
        data = json.loads(files["json"])
        suites = ET.fromstring(files["junit"])
        self.assertEqual(int(suites.get("failures")), data["failed"])
        self.assertEqual(len(list(suites.iter("failure"))), data["failed"])
        self.assertEqual(len(list(suites.iter("testcase"))), len(data["results"]))
        self.assertIn("not certified", files["html"])
        self.assertNotIn("http", files["html"])  # the page loads nothing from other hosts
        self.assertRegex(data["date"], r"^20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        self.assertIn("plugin ABI", data["te_fl"])
        self.assertIn(os.uname().nodename, data["host"])
        self.assertEqual(data["options"], "--impl vendor.wrong.one_element --seed 1 --time-limit 30 --jobs 1")
        for fact in ("date", "te_fl", "host", "options"):
            self.assertIn(data[fact], files["html"])
        refused = [r["message"] for r in data["results"] if r["result"] == "not supported"]
        self.assertTrue(refused and all(refused))
        self.assertIn("<h2>Not supported</h2>", files["html"])
        for reason in set(refused):
            self.assertIn(reason.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;"),
                          files["html"])
        for failure in self.failures("one_element"):
            self.assertIn(failure["case"].replace(">", "&gt;"), files["html"])

    def test_the_plugins_file_and_structs(self):
        code, text, files = check(WRONG_FILE, "--impl", "vendor.wrong.right", "--quick")
        self.assertEqual(code, 1, text)
        failed = {r["case"]: r["message"] for r in json.loads(files["json"])["results"] if r["result"] == "fail"}
        self.assertIn("wrong_helper", failed["exports"])
        symbols = subprocess.run(["nm", "-D", WRONG_FILE], capture_output=True, text=True, check=True).stdout
        if " u " in symbols:  # only some compilers emit such symbols
            self.assertIn("Unique", failed["unique symbols"])
        self.assertIn("executable stack", failed["executable stack"])
        self.assertIn("--build-id", failed["build id"])
        self.assertIn("te_fl_plugin_header is not zero", failed["header"])
        self.assertIn("behind the struct_size", failed["ext:wrong:0"])

    def test_no_plugin_at_all(self):
        code, text, _ = check("/nowhere/libacme.so")
        self.assertEqual(code, 2, text)
        self.assertIn("no such file", text.lower())
        code, text, _ = check(__file__)
        self.assertEqual(code, 1, text)
        for wrong in ([], [NULL, "--builtin", "cpu"]):
            run = subprocess.run([TE_FL, "check", *wrong], capture_output=True, text=True, timeout=60)
            self.assertEqual(run.returncode, 2, run.stdout + run.stderr)
        run = subprocess.run([TE_FL, "check", "--builtin", "cpuu"], capture_output=True, text=True, timeout=60)
        self.assertEqual(run.returncode, 2, "a name that is none")
        self.assertIn("the built-in backends are", run.stdout + run.stderr)

    def test_the_same_seed_draws_the_same_cases(self):
        drawn = []
        for seed in ("7", "7", "8"):
            code, text, files = check(NULL, "--seed", seed, "--quick", "--case", "fuzz")
            self.assertEqual(code, 4, text)
            drawn.append(sorted(r["case"] for r in json.loads(files["json"])["results"] if "/fuzz/" in r["case"]))
        self.assertTrue(drawn[0])
        self.assertEqual(drawn[0], drawn[1])
        self.assertNotEqual(drawn[0], drawn[2])


if __name__ == "__main__":
    unittest.main()
