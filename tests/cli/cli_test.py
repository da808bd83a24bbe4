#!/usr/bin/env python3
"""The te-fl command as its user types it. usage: cli_test.py PATH_OF_TE_FL"""
import json
import os
import pty
import subprocess
import sys
import tempfile
import unittest

TE_FL = sys.argv.pop(1)


def run(*arguments, **env):
    return subprocess.run([TE_FL, *arguments], capture_output=True, text=True, timeout=60, env={**os.environ, **env})


def terminal(*arguments, **env):
    """Standard output of a run on a terminal."""
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
        for word in ("reference", "cpu", "active", "plugin ABI 1.0"):
            self.assertIn(word, text)
        data = json.loads(self.ok("info", "--json"))
        self.assertEqual({p["name"]: p["state"] for p in data["plugins"]}["reference"], "active")
        self.assertEqual(data["devices"][0]["device"], "cpu")
        self.assertIsNone(data["devices"][0]["copy_bandwidth"])  # nobody measures the host's
        self.assertEqual(data["staging"], {"strict": False, "max_bytes": None})
        self.assertIn("copies, of any size", text)
        self.assertIn("up to 4096 bytes a call", self.ok("info", TE_FL_MAX_STAGED_BYTES="4096"))
        self.assertIn("Staging: forbidden", self.ok("info", TE_FL_MAX_STAGED_BYTES="0"))

    def test_ops(self):
        data = json.loads(self.ok("ops", "--json"))
        by_name = {d["op"]: [i["impl_id"] for i in d["implementations"]] for d in data}
        self.assertEqual(len(by_name), 73)
        for name, impls in by_name.items():
            self.assertIn("reference.host", impls, name)
        self.assertIn("layernorm_fwd", self.ok("ops", "norm"))
        self.assertNotIn("gelu", self.ok("ops", "norm"))
        self.assertEqual(len(self.ok("ops", "--names").split()), 73)
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

    def test_explain_for_a_device_that_is_not_here(self):
        text = self.fails(3, "if the device were here, but there is no device vulkan:3; present: cpu", "explain", "gelu", "--device",
                          "vulkan:3")
        self.assertIn("te-fl doctor", text)
        result = json.loads(run("explain", "gelu", "--device", "vulkan:3", "--json").stdout)
        self.assertEqual([result["device"], result["device_present"]], ["vulkan:3", False])
        here = self.ok("explain", "gelu")
        self.assertNotIn("if the device were here", here)
        self.assertTrue(json.loads(self.ok("explain", "gelu", "--json"))["device_present"])

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
        self.assertEqual(listed, set(self.ok("ops", "--names").split()))

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
            self.assertIn("fingerprint", json.loads(self.ok("info", "--fingerprint", "--json")))

    def test_trace_tune_policy_and_summary(self):
        with tempfile.TemporaryDirectory() as folder:
            trace, policy = os.path.join(folder, "run.json"), os.path.join(folder, "policy.json")
            bench = ("bench", "gelu", "--dtype", "bf16", "--shape", "16x64", "--seconds", "0.01")
            result = run(*bench, TE_FL_TRACE=trace, TEFL_LOG_LEVEL="DEBUG", TE_FL_VERIFY="1", TE_FL_VERIFY_DIR="")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("gelu by default.cpu:", result.stderr)
            self.assertIn("0 differed", result.stderr)
            with open(trace) as text:
                self.assertTrue(any(e.get("name") == "gelu" for e in json.load(text)["traceEvents"]))
            self.assertIn("TE_FL_POLICY_FILE", self.ok("tune", trace, "--out", policy, "--seconds", "0.01"))
            text = self.ok("explain", "gelu", "--dtype", "bf16", TE_FL_POLICY_FILE=policy)
            self.assertIn("place 1 of the policy's list", text)
            self.fails(2, "neither a trace", "tune", policy)

    def test_replay_of_another_file(self):
        self.fails(1, "is not a saved call", "replay", TE_FL)

    def test_completion(self):
        for shell in ("bash", "zsh", "fish"):
            self.assertIn("te-fl", self.ok("completion", shell))
        script = (f'PATH="{os.path.dirname(TE_FL)}:$PATH"; source <(te-fl completion bash); '
                  'COMP_WORDS=(te-fl explain gel); COMP_CWORD=2; _te_fl; echo "${COMPREPLY[@]}"')
        out = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
        self.assertEqual(out.stdout.strip(), "gelu", out.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
