#!/usr/bin/env python3
"""Tests the te-fl command line as a user types it. usage: cli_test.py TE_FL ONE_CALL FAR_PLUGIN"""
import json
import os
import pathlib
import platform
import pty
import stat
import subprocess
import sys
import tempfile
import unittest

TE_FL, ONE_CALL, FAR = (sys.argv.pop(1) for _ in range(3))
os.environ["TE_FL_PLUGIN_PATH"] = ""  # ignores the plugins next to libte_fl in the build tree


def run(*arguments, **env):
    return subprocess.run([TE_FL, *arguments], capture_output=True, text=True, errors="replace", timeout=200, env={**os.environ, **env})


def program(*arguments, **env):
    """Runs a user's program (one_call.cpp)."""
    return subprocess.run([ONE_CALL, *arguments], capture_output=True, text=True, timeout=200, env={**os.environ, **env})


def terminal(*arguments, **env):
    """Runs te-fl with a terminal as standard output; returns the output."""
    master, slave = pty.openpty()
    subprocess.run([TE_FL, *arguments], stdout=slave, stderr=subprocess.DEVNULL, timeout=60, env={**os.environ, **env})
    os.close(slave)
    out = b""
    try:
        while chunk := os.read(master, 65536):
            out += chunk
    except OSError:
        pass
    return out


# These ops need several ranks; none of the commands tested here times them.
COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "moe_dispatch", "moe_combine", "broadcast", "send",
               "recv", "barrier"}


class Commands(unittest.TestCase):
    def ok(self, *arguments, **env):
        result = run(*arguments, **env)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout

    def fails(self, code, expected, *arguments, **env):
        result = run(*arguments, **env)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        self.assertIn(expected, result.stdout + result.stderr)
        return result.stdout + result.stderr

    def test_info(self):
        text = self.ok("info")
        for word in ("reference", "cpu", "active", "plugin ABI 0.9"):
            self.assertIn(word, text)
        data = json.loads(self.ok("info", "--json"))
        self.assertEqual({p["name"]: p["state"] for p in data["plugins"]}["reference"], "active")
        self.assertEqual({p["name"]: p["comms"] for p in data["plugins"]}["reference"], ["threads"])
        self.assertRegex(text, r"\n +reference .* threads ")
        self.assertEqual(data["devices"][0]["device"], "cpu")
        self.assertIsNone(data["devices"][0]["copy_bandwidth"])  # te-fl info does not measure the host's copy bandwidth
        self.assertEqual(data["staging"], {"strict": False, "max_bytes": None})
        self.assertIn("copies, of any size", text)
        self.assertIn("up to 4096 bytes a call", self.ok("info", TE_FL_MAX_STAGED_BYTES="4096"))
        self.assertIn("Staging: forbidden", self.ok("info", TE_FL_MAX_STAGED_BYTES="0"))

    def test_info_says_what_makes_calls_fail_and_what_is_not_there(self):
        with tempfile.TemporaryDirectory() as folder:
            broken = os.path.join(folder, "policy.json")
            pathlib.Path(broken).write_text('{"te_fl_policy": 1,')
            for variable, value, words in (("TE_FL_PER_OP", "gelu", "TE_FL_PER_OP"), ("TE_FL_POLICY_FILE", broken, "is not JSON"),
                                           ("TE_FL_PLUGIN_PATH", folder + "/plugnis", "plugnis: the folder does not exist")):
                for options in ([], ["--json"]):
                    with self.subTest(variable, options=options):
                        result = run("info", *options, **{variable: value})
                        self.assertEqual(result.returncode, 1, result.stdout)
                        self.assertIn(words, result.stderr)
            # In strict mode (TE_FL_STRICT=1) a call fails if a plugin folder is absent.
            result = run("explain", "gelu", TE_FL_PLUGIN_PATH=folder + "/plugnis", TE_FL_STRICT="1")
            self.assertNotEqual(result.returncode, 0, result.stdout)
            self.assertIn("plugnis", result.stderr)

    def test_pipes_and_full_devices_are_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            pipe = os.path.join(folder, "pipe.so")
            os.mkfifo(pipe)
            for command in (["replay", pipe], ["tune", pipe]):
                with self.subTest(command):
                    self.fails(2, "is a device, a pipe or a socket", *command)
            self.assertIn("is a device, a pipe or a socket", run("info", TE_FL_PLUGIN_MODULES=pipe).stdout)
            result = run("tune", "absent.json", "--out", "/dev/full")
            self.assertNotEqual(result.returncode, 0)
            self.assertIn("/dev/full (--out): it is a device, a pipe or a socket", result.stderr)
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/full").st_mode))
        for command in ("ops", "info", "env", "--help", "--version", "ops --help", "quarantine clear --help", "conformance --help", "bench --list",
                        "completion bash"):
            for output in ("> /dev/full", ">&-"):
                with self.subTest(command, output=output):
                    result = subprocess.run(["sh", "-c", f'"$0" {command} {output}', TE_FL], stderr=subprocess.PIPE, text=True, timeout=60)
                    self.assertEqual(result.returncode, 1)
                    self.assertIn("standard output cannot be written", result.stderr)

    def test_a_plugin_listed_twice_is_there_once(self):
        plugins = json.loads(run("info", "--json", TE_FL_PLUGIN_MODULES=FAR + "," + FAR).stdout)["plugins"]
        self.assertEqual([p["state"] for p in plugins if "far" in p["path"]], ["active"])

    def test_ops(self):
        data = json.loads(self.ok("ops", "--json"))
        by_name = {d["op"]: [i["impl_id"] for i in d["implementations"]] for d in data}
        ids = pathlib.Path(__file__).resolve().parents[3] / "ops/ids.txt"
        catalogue = [words[1] for words in map(str.split, ids.read_text().splitlines())
                     if words and words[0] != "#" and "retired" not in words]
        self.assertEqual(sorted(by_name), sorted(catalogue))
        for name, impls in by_name.items():
            self.assertIn("reference.host", impls, name)
        self.assertIn("layernorm_fwd", self.ok("ops", "norm"))
        self.assertNotIn("gelu", self.ok("ops", "norm"))
        self.assertEqual(sorted(self.ok("ops", "--names").split()), sorted(catalogue))
        self.fails(2, "layernorm_fwd", "ops", "layernorm_fwdd")

    def test_explain(self):
        first = json.loads(self.ok("explain", "gelu", "--dtype", "bf16", "--json"))
        self.assertEqual(first["impl_id"], "default.cpu")
        second = json.loads(self.ok("explain", "gelu", "--dtype", "bf16", "--json", "--set", "TE_FL_PREFER=reference"))
        self.assertEqual(second["impl_id"], "reference.host")
        for c in first["candidates"]:
            self.assertTrue(c["reason"], c)
        fp64 = self.ok("explain", "gelu", "--dtype", "bf16,f8e4m3", "--scaling", "mxfp8")
        self.assertIn("default.cpu", fp64)

    def test_explain_says_which_kernel_would_run(self):
        text = self.ok("explain", "generic_gemm", "--dtype", "bf16", "--shape", "64x48x32")
        self.assertIn("call: case 'bf16' of te-fl bench, 64x48x32", text)
        self.assertRegex(text, "runs default.cpu: oneDNN's (BF16|FP32) product, then one pass into d: ")
        result = json.loads(self.ok("explain", "generic_gemm", "--case", "f32", "--shape", "8x8x8", "--json"))
        self.assertEqual((result["case"], result["extents"], result["impl_id"]), ("f32", [8, 8, 8], "default.cpu"))
        self.assertEqual(result["runs"], "oneDNN's FP32 product, written to d: the operands are not exact in BF16")
        self.assertNotIn("runs_not_said", result)
        silent = self.ok("explain", "gelu", "--dtype", "f32", "--shape", "4x8")
        self.assertIn("runs default.cpu, which does not say which kernel: it has no describe()", silent)
        self.assertNotIn("runs", json.loads(self.ok("explain", "gelu", "--json")))
        for shape in ("4x8x2", "4x8x"):
            self.fails(2, "gelu takes 2 extents, rows, cols", "explain", "gelu", "--shape", shape)
        self.fails(2, "no case of gelu matches --dtype 'i32'", "explain", "gelu", "--dtype", "i32", "--shape", "4x8")
        self.fails(2, "--shape and --case ask about a call of `te-fl bench --list`", "explain", "gelu", "--scaling", "tensor", "--shape",
                   "4x8")

    def test_explain_for_a_device_that_is_not_here(self):
        text = self.fails(3, "No implementation runs this call here: there is no device vulkan:3; present: cpu", "explain", "gelu", "--device",
                          "vulkan:3")
        self.assertIn("te-fl doctor", text)
        result = json.loads(run("explain", "gelu", "--device", "vulkan:3", "--json").stdout)
        self.assertEqual([result["device"], result["device_present"]], ["vulkan:3", False])
        here = self.ok("explain", "gelu")
        self.assertNotIn("On a machine with", here)
        self.assertTrue(json.loads(self.ok("explain", "gelu", "--json"))["device_present"])

    def test_explain_for_a_host_that_cannot_be(self):
        self.assertNotIn("chosen: ", self.fails(2, "there is no device cpu:1; present: cpu", "explain", "gelu", "--device", "cpu:1"))

    def test_explain_under_settings_that_fail_every_call(self):
        wrong = "there is no op 'gelo'; did you mean 'gelu'?"
        self.assertNotIn("chosen: ", self.fails(2, wrong, "explain", "gelu", TE_FL_VERIFY="0.5:gelo"))
        self.fails(2, wrong, "explain", "gelu", "--set", "TE_FL_VERIFY=0.5:gelo")
        self.fails(2, "/absent/t", "explain", "gelu", TE_FL_TRACE="/absent/t")
        self.ok("explain", "gelu", TE_FL_VERIFY="0.5:gelu")

    def test_explain_without_candidate(self):
        self.fails(3, "No implementation", "explain", "gelu", "--dtype", "f32", "--set", "TE_FL_PER_OP=gelu=vendor:acme")

    def test_env(self):
        names = [v["name"] for v in json.loads(self.ok("env", "--json"))]
        for name in ("TE_FL_PREFER", "TE_FL_STRICT", "TE_FL_PER_OP", "TE_FL_PLUGIN_MODULES", "TEFL_LOG_LEVEL", "TE_FL_NUM_THREADS"):
            self.assertIn(name, names)
        origin = {v["name"]: v for v in json.loads(self.ok("env", "--json", TE_FL_PREFER="vendor"))}["TE_FL_PREFER"]
        self.assertEqual(origin["value"], "vendor")
        self.assertIn("environment", origin["origin"])

    def test_doctor(self):
        self.assertIn("No problems", self.ok("doctor"))
        json.loads(self.ok("doctor", "--json"))
        self.fails(1, "TE_FL_PREFER", "doctor", TE_FL_PERFER="vendor")
        self.fails(1, "/absent/libacme.so", "doctor", TE_FL_PLUGIN_MODULES="/absent/libacme.so")

    def test_bench(self):
        rows = json.loads(self.ok("bench", "gelu", "--impl", "all", "--dtype", "f32", "--shape", "64x256", "--seconds", "0.02", "--json"))
        self.assertEqual(sorted(r["impl"] for r in rows), ["default.cpu", "reference.host"])
        for r in rows:
            self.assertEqual(r["bytes"], 2 * 64 * 256 * 4)
            self.assertGreater(r["time_us"], 0)
            self.assertAlmostEqual(r["GB_per_s"], r["bytes"] / r["time_us"] / 1e3, delta=1e-6 * r["GB_per_s"])
            self.assertAlmostEqual(r["floor_us"], r["bytes"] / r["copy_GB_per_s"] / 1e3, delta=1e-6 * r["floor_us"])
        product = json.loads(self.ok("bench", "generic_gemm", "--dtype", "f32", "--shape", "64x128x32", "--seconds", "0.02", "--peak",
                                     "0.001", "--json"))[0]
        self.assertEqual(product["operations"], 2 * 64 * 128 * 32)
        self.assertEqual(product["floor_is"], "operations")
        self.assertAlmostEqual(product["floor_us"], product["operations"] / 1e3)
        self.assertIn("two synchronisations", self.ok("bench", "add", "--dtype", "bf16", "--shape", "8x8", "--seconds", "0.02"))
        self.assertIn("not measured", self.fails(3, "mxfp8", "bench", "quantize", "--case", "mxfp8", "--impl", "default.cpu"))
        listed = {line.split()[0] for line in self.ok("bench", "--list").splitlines()[1:]}
        self.assertEqual(listed, set(self.ok("ops", "--names").split()) - COLLECTIVES)

    def test_bench_usage_errors(self):
        self.fails(2, "gelu", "bench", "gelo")
        self.fails(2, "rows, cols", "bench", "gelu", "--shape", "12")
        self.fails(2, "rows, cols", "bench", "gelu", "--shape", "0x12")
        self.fails(2, "fixed", "bench", "fused_amax_and_scale_update_after_reduction", "--shape", "12")
        self.fails(2, "default.cpu", "bench", "gelu", "--impl", "default.cqu")
        self.fails(2, "'bf16'", "bench", "gelu", "--dtype", "bf61")
        self.fails(2, "cuda:9", "bench", "gelu", "--device", "cuda:9:9")
        self.fails(1, "no device", "bench", "gelu", "--device", "cuda:9")
        self.fails(2, "--list", "bench")
        for shape in ("8x8x", "x8x8", "8xx8", "8x8 "):
            self.fails(2, "rows, cols", "bench", "gelu", "--shape", shape)
        for command in ("bench", "explain"):
            self.fails(2, "--shape: it is empty; give extents", command, "gelu", "--shape", "")
        for option in ("--seconds", "--peak"):
            for value in ("nan", "-nan"):
                self.fails(2, option, "bench", "gelu", "--shape", "8x8", f"{option}={value}")
        self.fails(2, "--seconds", "tune", "absent", "--seconds", "nan")
        self.fails(2, "--time-limit", "check", "--builtin", "cpu", "--time-limit", "nan")

    def test_what_no_call_could_have_is_a_usage_error(self):
        for shape in ("4294967296x4294967296", "9223372036854775807x2"):
            for command in ("bench", "explain"):
                self.fails(2, "above 2^59", command, "gelu", "--shape", shape)
        for command, option in (("explain", "--dtype"), ("explain", "--scaling"), ("bench", "--impl")):
            for words in ("bf16,,f32", ",f32", "f32,", ""):
                self.fails(2, "has an empty name", command, "gelu", option, words)
                self.fails(2, "has an empty name", command, "gelu", f"{option}={words}")
        self.fails(2, "there is no benchmark of 'nosuch'", "bench", "--list", "nosuch")
        self.fails(2, "no case of gelu matches --case 'nosuch'", "bench", "gelu", "--list", "--case", "nosuch")
        self.assertEqual({row["op"] for row in json.loads(self.ok("bench", "gelu", "--list", "--json"))}, {"gelu"})

    def test_usage_errors_name_the_nearest(self):
        self.fails(2, "explain", "explian", "gelu")
        self.fails(2, "gelu", "explain", "gelo")
        self.fails(2, "bf16", "explain", "gelu", "--dtype", "bf61")
        self.fails(2, "mxfp8", "explain", "gelu", "--scaling", "mxfp")
        self.fails(2, "cuda:9", "explain", "gelu", "--device", "cuda:9:9")
        self.fails(2, "TE_FL_PREFER", "explain", "gelu", "--set", "TE_FL_PERFER=vendor")
        self.fails(2, "VAR=VALUE", "explain", "gelu", "--set", "TE_FL_PREFER")
        self.fails(2, "", "info", "--jsno")
        self.fails(2, "", "completion", "tcsh")
        self.fails(2, "", )

    def test_a_part_of_a_name_names_the_nearest(self):
        self.assertIn("no op's name contains 'nrom'; did you mean 'norm'? (`te-fl ops --names` lists all)", self.fails(2, "", "ops", "nrom"))
        self.fails(2, "did you mean 'gelu'?", "ops", "gelo")
        self.assertIn("'qqqqqqqq' (`te-fl", self.fails(2, "", "ops", "qqqqqqqq"))

    def test_check_of_a_name_that_is_none(self):
        text = self.fails(2, "no manifest has the name 'nosuch'", "check", "nosuch")
        self.assertNotIn("certified", text)
        self.fails(2, "--builtin NAME checks a backend that is part of te-fl", "check", "cpu")

    def test_misspelt_arguments_name_the_nearest(self):
        for words, nearest in ((("explain", "gelu", "--dtpye", "f32"), "'--dtpye'; did you mean '--dtype'?"),
                               (("env", "--jsn"), "'--jsn'; did you mean '--json'?"),
                               (("quarantine", "lst"), "'lst'; did you mean 'list'?"),
                               (("info", "everything"), "'everything' (te-fl info --help lists all)")):
            self.fails(2, f"unknown argument {nearest}", *words)

    def test_usage_errors_name_the_command(self):
        for words, text in ((("trace",), "te-fl: unknown command 'trace' (te-fl --help lists all)"),
                            (("infos",), "te-fl: unknown command 'infos'; did you mean 'info'? (te-fl --help lists all)"),
                            (("tune",), "te-fl: tune: files is required (te-fl tune --help lists all)"),
                            (("merge-traces", "a.json"), "te-fl: merge-traces: --out is required (te-fl merge-traces --help lists all)"),
                            (("fingerprint", "diff"), "te-fl: fingerprint diff: files is required"),
                            (("quarantine",), "te-fl: quarantine: it requires one of its commands: list, clear (te-fl quarantine --help"),
                            ((), "te-fl: it requires one of its commands: info, "),
                            (("explain", "gelu", "--dtype"), "te-fl: explain: --dtype requires a value"),
                            (("check", "--builtin", "cpu", "--seed", "abc"), "te-fl: check: --seed does not take the value 'abc'"),
                            (("check", "--builtin", "cpu", "--jobs", "0"), "te-fl: check: --jobs: '0' is not a number from 1 to 256"),
                            (("completion", "fissh"), "te-fl: completion: shell: 'fissh' is not bash, zsh or fish; did you mean 'fish'?"),
                            (("bench", "gelu", "--dtype", "bf17"), "no case of gelu matches --dtype 'bf17'; there are"),
                            (("conformance", "--op", "gelo"), "--op gelo: the table has no such name, did you mean 'gelu'?"),
                            (("conformance", "--fuzz", "some"), "--fuzz some: the seed is a whole number"),
                            (("conformance", "--plugn", "x"), "unknown option --plugn, did you mean '--plugin'?")):
            self.assertIn(text, self.fails(2, "", *words))
        started = run("check", "nomodule", "--python", "nopython")
        self.assertIn("with --python nopython: No such file", started.stdout + started.stderr)

    def test_invalid_variables_never_abort(self):
        self.fails(1, "TE_FL_PREFER", "env", TE_FL_PERFER="vendor")
        self.fails(1, "vendor", "env", TE_FL_PREFER="vedor")
        self.fails(1, "true", "env", TE_FL_STRICT="ture")
        self.fails(1, "TE_FL_MAX_STAGED_BYTES=1G is not accepted", "env", TE_FL_MAX_STAGED_BYTES="1G")
        self.fails(1, "gelu", "env", TE_FL_PER_OP="gelo=reference")
        self.fails(1, "reference", "env", TE_FL_PER_OP="gelu=refrence")
        absent = run("explain", "gelu", "--dtype", "f32", TE_FL_ALLOW_VENDORS="absent")
        self.assertEqual(absent.returncode, 0, absent.stderr)

    def test_colours_only_on_a_terminal(self):
        self.assertNotIn("\033", self.ok("info"))
        self.assertIn(b"\033[", terminal("info"))
        self.assertNotIn(b"\033[", terminal("info", NO_COLOR="1"))

    def test_json_is_utf8_whatever_it_is_about(self):
        """Environment variables and paths may hold any bytes; invalid UTF-8 becomes U+FFFD in the JSON output."""
        path = b"/absent/\xff/x"
        for command, env in ((("env", "--json"), {"TE_FL_TRACE": path}), (("doctor", "--json"), {"TE_FL_TRACE": path}),
                             (("info", "--fingerprint", "--json"), {"TE_FL_POLICY_FILE": path}),
                             (("explain", "gelu", "--json"), {"TE_FL_PLUGIN_PATH": path}),
                             (("info", "--json"), {"TE_FL_PLUGIN_MODULES": path})):
            result = run(*command, **env)
            self.assertIn(result.returncode, (0, 1), result.stderr)
            json.loads(result.stdout)
            if command[0] != "explain":
                self.assertIn("/absent/\ufffd/x", result.stdout)
        failed = run("replay", path, "--json")
        self.assertEqual([failed.returncode, json.loads(failed.stdout)["file"]], [2, "/absent/\ufffd/x"])

    def test_help_and_version(self):
        self.assertIn("Examples", self.ok("--help"))
        self.assertIn("Exit codes", self.ok("--help"))
        self.assertRegex(self.ok("--version"), r"te-fl \d+\.\d+\.\d+")

    def test_fingerprint(self):
        with tempfile.TemporaryDirectory() as folder:
            files = [os.path.join(folder, name) for name in ("a", "b", "c")]
            for file, env in zip(files, ({}, {}, {"TE_FL_STRICT": "1"})):
                with open(file, "w") as out:
                    out.write(self.ok("info", "--fingerprint", **env))
            self.assertIn("the same", self.ok("fingerprint", "diff", files[0], files[1]))
            self.fails(1, "policy: pure priority in the first, strict=1 in the second", "fingerprint", "diff", files[0], files[2])
            self.fails(2, "cannot read", "fingerprint", "diff", files[0], os.path.join(folder, "none"))
            text = self.fails(2, f"cannot read {folder}: Is a directory", "fingerprint", "diff", folder, files[0])
            self.assertIn("files are compared that `te-fl info --fingerprint` printed", text)
            self.fails(2, "is not what", "fingerprint", "diff", "/dev/zero", files[0])
            with open(files[0]) as piped:
                result = subprocess.run([TE_FL, "fingerprint", "diff", files[1], "/dev/stdin"], stdin=piped,
                                        capture_output=True, text=True, timeout=60)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("fingerprint", json.loads(self.ok("info", "--fingerprint", "--json")))

    def test_the_summary_has_the_rank(self):
        for env, words in (({}, "te-fl summary of the run:"), ({"RANK": "3"}, "te-fl summary of the run of rank 3:"),
                           ({"TE_FL_RANK": "7", "RANK": "3"}, "te-fl summary of the run of rank 7:")):
            result = program("gelu", TE_FL_USAGE="1", **env)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn(words + "\n  gelu by default.cpu: 3 calls", result.stderr)

    def test_fingerprints_of_many_ranks(self):
        with tempfile.TemporaryDirectory() as folder:
            files = [os.path.join(folder, f"rank{i}") for i in range(5)]
            for i, file in enumerate(files):
                with open(file, "w") as out:
                    out.write("fingerprint = %d\nabi = 0.9\ndevice cpu = %s\n%s" % (i, "old" if i == 3 else "new", "op x = 1\n" if i != 1 else ""))
            text = self.fails(1, "", "fingerprint", "diff", *files)
            self.assertEqual(text, f"device cpu: 'new' in 4 of 5\n  'old' in {files[3]}\nop x: '1' in 4 of 5\n  absent in {files[1]}\n"
                                   f"2 of 5 files differ from the rest: {files[1]} {files[3]}\n")
            found = run("fingerprint", "diff", *files, "--json")
            self.assertEqual([found.returncode, json.loads(found.stdout)], [1, {
                "same": False, "files": 5, "differ": [files[1], files[3]], "differences": [
                    {"key": "device cpu", "most": "new", "others": [{"value": "old", "files": [files[3]]}]},
                    {"key": "op x", "most": "1", "others": [{"value": None, "files": [files[1]]}]}]}])
            self.assertEqual(self.ok("fingerprint", "diff", files[0], files[2], files[4]), "all 3 are the same\n")
            self.fails(2, "at least two files", "fingerprint", "diff", files[0])

    def test_doctor_names_what_a_policy_names_in_vain(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "policy.json")
            def doctor(policy):
                with open(path, "w") as out:
                    json.dump({"te_fl_policy": 1, **policy}, out)
                return run("doctor", TE_FL_POLICY_FILE=path)
            wrong = doctor({"per_op": {"gelu": ["impl:default.cqu"]}})
            self.assertEqual(wrong.returncode, 1, wrong.stdout)
            self.assertIn("problem  policy: the list of op gelu names 'default.cqu'; did you mean 'default.cpu'?, which is not registered for op 'gelu'",
                          wrong.stdout)
            signature = {"op": "gelu", "dtypes": ["f32"], "use": ["impl:vendor.gone", "reference"]}
            note = doctor({"per_signature": [signature]})
            self.assertEqual(note.returncode, 0, note.stdout)
            self.assertIn("note     policy: a list of one signature of op gelu on cpu names 'vendor.gone', which is not registered for op 'gelu'", note.stdout)
            self.assertNotIn("names '", doctor({"per_op": {"gelu": ["impl:default.cpu"]}}).stdout)

    def test_trace_tune_policy_and_summary(self):
        with tempfile.TemporaryDirectory() as folder:
            trace, policy = os.path.join(folder, "run.json"), os.path.join(folder, "policy.json")
            result = program("gelu", TE_FL_TRACE=trace, TEFL_LOG_LEVEL="DEBUG", TE_FL_VERIFY="1", TE_FL_VERIFY_DIR="")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("gelu by default.cpu:", result.stderr)
            self.assertIn("0 differed", result.stderr)
            with open(trace) as text:
                self.assertTrue(any(e.get("name") == "gelu" for e in json.load(text)["traceEvents"]))
            self.assertIn("TE_FL_POLICY_FILE", self.ok("tune", trace, "--out", policy, "--seconds", "0.01"))
            with open(policy) as text:
                self.assertEqual(json.load(text)["te_fl_policy"], 1)
            self.fails(2, "neither a trace", "tune", policy)

    def test_merging_what_is_no_trace_says_so_without_a_librarys_names(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "wrong.json")
            for text in ("", "{", "[]", "{}", '{"otherData": 1e999}', '{"otherData": {"began_us": "x"}}', '{"otherData": {"began_us": 1, "process": []}}'):
                pathlib.Path(path).write_text(text)
                self.assertNotIn("json.exception", self.fails(2, "is no trace of TE_FL_TRACE", "merge-traces", path, "--out", path + ".out"))

    def test_traces_of_ranks_lie_side_by_side_in_one_file(self):
        with tempfile.TemporaryDirectory() as folder:
            trace, merged = os.path.join(folder, "run.json"), os.path.join(folder, "all.json")
            for rank in ("1", "0", "2"):  # the runs are sequential, and the trace must show their order in time
                self.assertEqual(program("gelu", TE_FL_TRACE=trace, RANK=rank, WORLD_SIZE="3").returncode, 0)
            files = [trace, trace + ".rank2", trace + ".rank1"]
            self.assertEqual(sorted(os.listdir(folder)), ["run.json", "run.json.rank1", "run.json.rank2"])
            self.assertIn("of 3 processes, from rank 0 to rank 2", self.ok("merge-traces", *files, "--out", merged))
            with open(merged) as text:
                content = json.load(text)
            names = {e["pid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"}
            self.assertEqual([names[pid] for pid in (1, 3, 5)], [f"rank {rank}: calls by thread" for rank in range(3)])
            calls = [e for e in content["traceEvents"] if e["name"] == "gelu"]
            by_time = [e["pid"] for e in sorted(calls, key=lambda e: e["ts"])]
            self.assertEqual(by_time, sorted(by_time, key=[3, 1, 5].index), "by one clock")
            self.assertEqual({e["args"]["call"] for e in calls}, set(range(len(content["te_fl_calls"]))))
            begun = []
            for file in (trace + ".rank1", trace):
                with open(file) as text:
                    one = json.load(text)
                begun.append(one["otherData"]["began_us"] + next(e["ts"] for e in one["traceEvents"] if e["name"] == "gelu"))
            shown = {e["pid"]: e["ts"] for e in reversed(calls)}
            self.assertAlmostEqual(shown[1] - shown[3], begun[1] - begun[0], places=0)
            text = self.ok("tune", merged, "--seconds", "0.01")
            self.assertIn("te_fl_policy", text)
            self.fails(2, "made it of several", "merge-traces", merged, "--out", merged)
            self.fails(2, "are both of rank 0", "merge-traces", trace, trace, "--out", merged)
            self.fails(2, "cannot read", "merge-traces", os.path.join(folder, "none"), "--out", merged)
            self.fails(2, "it is no regular file", "merge-traces", folder, "--out", merged)
            self.fails(1, "it is no regular file", "merge-traces", trace, "--out", folder)
            self.fails(2, "--out", "merge-traces", trace)
            for content in ("{", "{}", '{"otherData": {"process": 1}, "traceEvents": [], "te_fl_calls": []}',
                            '{"otherData": {"process": 1, "began_us": 1}, "traceEvents": [1], "te_fl_calls": []}'):
                with open(files[1], "w") as out:
                    out.write(content)
                self.fails(2, "run.json.rank2 is no trace of TE_FL_TRACE", "merge-traces", *files, "--out", merged + ".none")
            self.assertEqual(sorted(os.listdir(folder)), ["all.json", "run.json", "run.json.rank1", "run.json.rank2"])
            program("gelu", TE_FL_TRACE=os.path.join(folder, "at-%r.json"), TE_FL_RANK="7", RANK="0")
            self.assertIn("at-7.json", os.listdir(folder))

    def test_the_header_of_explain_is_about_its_op(self):
        with tempfile.TemporaryDirectory() as folder:
            policy = os.path.join(folder, "policy.json")
            lists = [{"op": op, "dtypes": ["bf16"], "use": ["impl:default.cpu", "default", "vendor", "reference"]}
                     for op in self.ok("ops", "--names").split()]
            with open(policy, "w") as out:
                json.dump({"te_fl_policy": 1, "per_signature": lists}, out)
            text = self.ok("explain", "gelu", "--dtype", "bf16", TE_FL_POLICY_FILE=policy)
            self.assertIn("place 1 of the policy's list", text)
            header = text.splitlines()[0]
            self.assertLess(len(header), 200, header)
            self.assertIn("per_signature=gelu@cpu:bf16:none=impl:default.cpu", header)
            self.assertIn(f"and {len(lists) - 1} lists of other ops", header)

    def test_commands_leave_watching_to_programs(self):
        """te-fl commands ignore a program's TE_FL_TRACE and TE_FL_VERIFY: reading a trace must not overwrite it, and timed calls must not be
        verified."""
        with tempfile.TemporaryDirectory() as folder:
            trace = os.path.join(folder, "run.json")
            self.assertEqual(program("gelu", TE_FL_TRACE=trace).returncode, 0)
            with open(trace) as text:
                before = text.read()
            watched = {"TE_FL_TRACE": trace, "TE_FL_VERIFY": "1", "TE_FL_VERIFY_DIR": os.path.join(folder, "cases")}
            for command in (("doctor",), ("tune", trace, "--seconds", "0.01"), ("bench", "add", "--shape", "8x8", "--seconds", "0.01"),
                            ("explain", "gelu"), ("info",)):
                result = run(*command, **watched)
                self.assertEqual(result.returncode, 0, result.stderr)
                with open(trace) as text:
                    self.assertEqual(text.read(), before, command)
                self.assertNotIn("TE_FL_VERIFY checked", result.stderr)
            shown = {v["name"]: v for v in json.loads(self.ok("env", "--json", **watched))}["TE_FL_TRACE"]
            self.assertEqual([shown["value"], shown["origin"]], [trace, "environment (TE_FL_TRACE)"])
            # te-fl doctor finds each setting that would make a program's calls fail.
            self.fails(1, "is not a share of calls", "doctor", TE_FL_VERIFY="much")
            self.fails(1, os.path.join(folder, "none", "run.json"), "doctor", TE_FL_TRACE=os.path.join(folder, "none", "run.json"))

    def test_a_trace_that_cannot_be_written_is_found_at_the_first_call(self):
        with tempfile.TemporaryDirectory() as folder:
            for path in (os.path.join(folder, "none", "run.json"), folder):
                result = program("gelu", TE_FL_TRACE=path)
                self.assertEqual(result.returncode, 1, result.stderr)
                self.assertIn(f"the trace {path} cannot be written (TE_FL_TRACE)", result.stderr)
            self.assertEqual(os.listdir(folder), [])

    def test_a_device_is_known_without_an_op(self):
        result = program("to", "ext:far:0", TE_FL_PLUGIN_MODULES=FAR)
        self.assertEqual(result.stdout, "3 on ext:far:0\n", result.stderr)
        self.assertIn("present: cpu", program("to", "ext:far:0").stderr)

    def test_plugins_wait_until_their_device_is_requested(self):
        with tempfile.TemporaryDirectory() as folder:
            def manifest(**more):
                with open(os.path.join(folder, "far.json"), "w") as out:
                    json.dump({"file_format_version": "1.0", "name": "far", "vendor": "far", "library_path": FAR,
                               "arch": platform.machine(), "abi": json.loads(self.ok("info", "--json"))["abi"], **more}, out)
            manifest()
            self.assertIn("far.so", program("host", TE_FL_PLUGIN_PATH=folder).stdout)
            manifest(load_for=["ext:far"])
            self.assertNotIn("far.so", program("host", TE_FL_PLUGIN_PATH=folder).stdout)
            self.assertIn("far.so", program("host", TE_FL_PLUGIN_PATH=folder, TE_FL_PLUGIN_MODULES="far").stdout)
            self.assertEqual(program("to", "ext:far:0", TE_FL_PLUGIN_PATH=folder).stdout, "3 on ext:far:0\n")
            self.assertIn("no device ext:other:0", program("to", "ext:other:0", TE_FL_PLUGIN_PATH=folder).stderr)
            self.assertRegex(self.ok("info", TE_FL_PLUGIN_PATH=folder), "far .*active")
            self.assertIn("vendor.far", self.ok("explain", "add", "--device", "ext:far:0", TE_FL_PLUGIN_PATH=folder))
            self.assertIn("op add vendor.far", self.ok("info", "--fingerprint", TE_FL_PLUGIN_PATH=folder))
            manifest(load_for=["ext:far:0"])
            self.assertIn("types of devices without their numbers", self.ok("info", TE_FL_PLUGIN_PATH=folder))

    def test_loading_is_quiet(self):
        for command in ("info", "ops"):
            result = run(command, TE_FL_PLUGIN_MODULES=FAR)
            self.assertEqual([result.returncode, result.stderr], [0, ""])
        self.assertIn("plugin far 1.0.0", run("info", TE_FL_PLUGIN_MODULES=FAR, TEFL_LOG_LEVEL="DEBUG").stderr)

    def test_a_requested_plugin_that_is_missing(self):
        for modules, why in (("/absent/libacme.so", "/absent/libacme.so"), ("./libacme.so", "is a relative path")):
            self.assertEqual(program("gelu", TE_FL_PLUGIN_MODULES=modules).returncode, 0)
            strict = program("gelu", TE_FL_PLUGIN_MODULES=modules, TE_FL_STRICT="1")
            self.assertEqual(strict.returncode, 1)
            self.assertIn("named in TE_FL_PLUGIN_MODULES, and TE_FL_STRICT is set", strict.stderr)
            self.assertIn(why, strict.stderr)
            self.fails(1, "problem  plugin", "doctor", TE_FL_PLUGIN_MODULES=modules)
        self.fails(1, "is the name of no manifest", "doctor", TE_FL_PLUGIN_MODULES="acme")
        # te-fl ignores a word that looks like the name of a Python module; Python programs import it.
        self.ok("doctor", TE_FL_PLUGIN_MODULES="acme.te_fl")
        for modules in ("acme.te_fl", "acme", FAR):
            result = program("gelu", TE_FL_PLUGIN_MODULES=modules, TE_FL_STRICT="1")
            self.assertEqual(result.returncode, 0, result.stderr)

    def test_explain_refuses_what_no_call_could_be(self):
        self.fails(1, "op 'gelu' takes no tensor of dtype i32; its tensors are f32|f16|bf16", "explain", "gelu", "--dtype", "i32")
        self.fails(1, "takes no tensor of dtype f8e4m3 without a scaling mode", "explain", "gelu", "--dtype", "f8e4m3")
        self.ok("explain", "gelu", "--dtype", "bf16,f8e4m3", "--scaling", "tensor")
        self.ok("explain", "embedding_fwd", "--dtype", "i32,f32")
        text = self.fails(3, "it would be a candidate if there were a ext:far:7 here", "explain", "add", "--dtype", "f32", "--device", "ext:far:7",
                          TE_FL_PLUGIN_MODULES=FAR)
        self.assertNotIn("chosen: ", text)
        self.assertNotIn("would run this call", text)
        self.assertRegex(text, r"No implementation runs this call here: there is no device ext:far:7; present: .*\nOn a machine with ext:far:7, 'vendor.far' would be "
                               r"the first that is asked\.\n$")
        shaped = self.fails(3, "The extents were not looked at: their call needs memory of the device.", "explain", "add", "--dtype", "f32",
                            "--device", "ext:far:7", "--shape", "4x4", TE_FL_PLUGIN_MODULES=FAR)
        self.assertTrue(shaped.startswith(text), shaped)
        self.assertIn("On a machine with ext:nowhere:0, only copies in host memory could be used",
                      self.fails(3, "there is no device ext:nowhere:0", "explain", "add", "--device", "ext:nowhere:0"))
        self.assertIn("chosen: priority", self.ok("explain", "add", "--dtype", "f32", "--device", "ext:far:0", TE_FL_PLUGIN_MODULES=FAR))
        entry = json.loads(run("explain", "add", "--dtype", "f32", "--device", "ext:far:7", "--json", TE_FL_PLUGIN_MODULES=FAR).stdout)
        self.assertEqual([entry["impl_id"], [c for c in entry["candidates"] if c["accepted"]]], ["", []])

    def test_errors_of_settings_begin_with_the_mistake(self):
        for env, first in (({"TE_FL_PER_OP": "gelo=reference"}, "TE_FL_PER_OP=gelo=reference: there is no op 'gelo'; did you mean 'gelu'?"),
                           ({"TE_FL_PREFER": "vedor"}, "TE_FL_PREFER=vedor is not accepted"),
                           ({"TE_FL_PERFER": "vendor"}, "environment variable TE_FL_PERFER is unknown"),
                           ({"TE_FL_POLICY_FILE": "/absent/policy"}, "the policy file /absent/policy cannot be read")):
            for result in (run("explain", "gelu", **env), program("gelu", **env)):
                self.assertEqual(result.returncode, 1)
                self.assertIn(first, result.stderr.splitlines()[0])

    def test_quarantine(self):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "quarantine.json")
            entry = {"op": "gelu", "impl": "vendor.acme", "owner": "acme", "build": "1", "chip": "", "driver": "", "dtypes": ["f32"],
                     "scalings": ["none"], "reason": "it is wrong", "case": "/x/a.call",
                     "replay": "TE_FL_PLUGIN_MODULES=/x/acme.so te-fl replay /x/a.call"}
            self.assertIn("nothing is quarantined", self.ok("quarantine", "list", TE_FL_QUARANTINE_FILE=file))
            with open(file, "w") as out:
                json.dump({"te_fl_quarantine": 1, "entries": [entry, {**entry, "op": "relu"}, {**entry, "impl": "vendor.other"}]}, out)
            env = {"TE_FL_QUARANTINE_FILE": file}
            self.assertRegex(self.ok("quarantine", "list", **env), "gelu +vendor.acme +acme +f32 +none .*it is wrong")
            self.assertIn(entry["replay"], self.ok("quarantine", "list", **env))
            self.assertIn("Quarantine: 3 in " + file, self.ok("info", **env))
            self.assertIn("quarantine: vendor.acme of acme is not used for relu", run("doctor", **env).stdout)
            listed = lambda: [(e["op"], e["impl_id"]) for e in json.loads(self.ok("quarantine", "list", "--json", **env))["entries"]]
            self.assertEqual(len(listed()), 3)
            self.fails(2, "needs an op", "quarantine", "clear", **env)
            self.fails(2, "no entry is about tanh", "quarantine", "clear", "tanh", **env)
            self.fails(2, "no entry is about gelo; did you mean 'gelu'?; `te-fl quarantine list`", "quarantine", "clear", "gelo", **env)
            self.fails(2, "no entry is about relu and vendor.acne; did you mean 'vendor.acme'?", "quarantine", "clear", "relu", "--impl", "vendor.acne", **env)
            self.assertIn("1 entry", self.ok("quarantine", "clear", "gelu", "--impl", "vendor.acme", **env))
            self.assertEqual(listed(), [("relu", "vendor.acme"), ("gelu", "vendor.other")])
            self.assertEqual(json.loads(self.ok("quarantine", "clear", "--all", "--json", **env)), {"cleared": 2})
            self.assertEqual(listed(), [])

    def test_json_of_lists_failures_and_differences(self):
        cases = json.loads(self.ok("bench", "--list", "--json"))
        self.assertEqual({c["op"] for c in cases}, set(self.ok("ops", "--names").split()) - COLLECTIVES)
        gelu = next(c for c in cases if c["op"] == "gelu")
        self.assertEqual([gelu["axes"], len(gelu["extents_on_host"])], ["rows, cols", 2])
        failed = run("replay", "/absent/x.call", "--json")
        self.assertEqual([failed.returncode, json.loads(failed.stdout)["error"]["code"]], [2, "NOT_FOUND"])
        with tempfile.TemporaryDirectory() as folder:
            files = [os.path.join(folder, name) for name in ("a", "b")]
            for file, env in zip(files, ({}, {"TE_FL_STRICT": "1"})):
                with open(file, "w") as out:
                    out.write(self.ok("info", "--fingerprint", **env))
            differs = run("fingerprint", "diff", *files, "--json")
            self.assertEqual([differs.returncode, json.loads(differs.stdout)["same"]], [1, False])
            self.assertIn("strict=1", " ".join(json.loads(differs.stdout)["differences"]))
            self.assertEqual(json.loads(self.ok("fingerprint", "diff", files[0], files[0], "--json")), {"same": True, "differences": []})

    def test_a_file_that_is_not_there_is_a_usage_error(self):
        self.fails(2, "/absent/x", "replay", "/absent/x")
        self.fails(2, "/absent/x", "tune", "/absent/x")
        self.fails(2, "/absent/x", "fingerprint", "diff", "/absent/x", "/absent/x")
        text = self.fails(2, "te-fl: /absent/x.so does not exist", "check", "/absent/x.so")
        self.assertIn("the library that the plugin was built to", text)
        self.fails(2, "te-fl: /tmp is a folder", "check", "/tmp")
        self.fails(1, "is a text file", "check", __file__)  # the file is readable but not a plugin
        self.fails(2, "is not a saved call", "replay", TE_FL)
        for kind, path in (("a folder", "/tmp"), ("a device", "/dev/null")):
            self.fails(2, f"{path} is {kind}", "replay", path)
            self.assertIn(kind, json.loads(run("replay", path, "--json").stdout)["error"]["message"])
        # te-fl tune refuses the output path before it times anything.
        self.fails(2, "cannot write /absent/policy.json (--out)", "tune", TE_FL, "--out", "/absent/policy.json")

    def test_every_command_has_help_of_its_own(self):
        for command in ("info", "fingerprint", "ops", "explain", "env", "doctor", "bench", "check", "new-backend", "replay", "tune", "merge-traces",
                        "quarantine", "completion"):
            text = self.ok(command, "--help")
            examples = text[text.index("Examples:"):text.index("Exit codes:")].splitlines()[1:]
            for line in filter(None, examples):
                self.assertIn(f"te-fl {command}", line)

    def complete(self, *words, **env):
        kind, *found = self.ok("__complete", *words, **env).splitlines()
        return kind, found

    def test_completion_knows_what_te_fl_knows(self):
        self.assertIn("quarantine", self.complete("")[1])
        self.assertEqual(self.complete("explain", "gel"), ("words", ["gelu"]))
        self.assertEqual(self.complete("bench", "gelu", "--impl", "")[1], ["default.cpu", "reference.host", "all"])
        self.assertEqual(self.complete("explain", "add", "--device", "", TE_FL_PLUGIN_MODULES=FAR)[1], ["cpu", "ext:far:0", "ext:far:1"])
        self.assertEqual(self.complete("explain", "gelu", "--dtype", "bf16,f3")[1], ["bf16,f32"])
        self.assertEqual(self.complete("explain", "gelu", "--scaling", "mx")[1], ["mxfp8"])
        self.assertEqual(self.complete("explain", "gelu", "--set", "TE_FL_PREFER_")[1], ["TE_FL_PREFER_VENDOR="])
        self.assertEqual(self.complete("check", "--op", "rel")[1], ["relu"])
        self.assertIn("--quick", self.complete("check", "--")[1])
        self.assertNotIn("--worker", self.complete("check", "--")[1])
        self.assertEqual(self.complete("quarantine", "c")[1], ["clear"])
        self.assertEqual(self.complete("quarantine", "clear", "gel")[1], ["gelu"])
        self.assertEqual(self.complete("replay", "")[0], "files")
        self.assertEqual(self.complete("tune", "run.json", "--out", "")[0], "files")
        self.assertEqual(self.complete("new-backend", "acme", "")[0], "folders")
        self.assertEqual(self.complete("nonsense", "x"), ("words", []))

    def test_completion(self):
        for shell in ("bash", "zsh", "fish"):
            self.assertIn("te-fl __complete", self.ok("completion", shell))
        for line, expected in (("te-fl explain gel", "gelu"), ("te-fl explain add --device ext:far:", "0 1"),
                               ("te-fl explain gelu --set TE_FL_STRIC", "TE_FL_STRICT=")):
            script = (f'PATH="{os.path.dirname(TE_FL)}:$PATH"; source <(te-fl completion bash); '
                      f'COMP_LINE="{line}"; COMP_POINT=${{#COMP_LINE}}; _te_fl; echo "${{COMPREPLY[@]}}"')
            out = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60,
                                 env={**os.environ, "TE_FL_PLUGIN_MODULES": FAR})
            self.assertEqual(out.stdout.strip(), expected, out.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
