#!/usr/bin/env python3
"""Times process start: `te-fl info` with the built-in backends, and the time that libte_fl.so adds to a program that links with it.

usage: bench/bench_startup.py [--build build/release] [--repeat 40] [--json FILE]

Programs run alternately (A B A B); figures are medians of wall time, the spread is the interquartile range. Each plugin's own
time is that of `te-fl info` with the plugin less that of `te-fl info` without it. Exits 1 if a median misses its target.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

INFO_TARGET_MS, LOAD_TARGET_MS = 30.0, 5.0
EMPTY = "int main() { return 0; }\n"


def wall_ms(command, env):
    start = time.perf_counter()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return 1e3 * (time.perf_counter() - start)


def summary(times):
    q = statistics.quantiles(times, n=4)
    return {"median_ms": q[1], "best_ms": min(times), "iqr_ms": q[2] - q[0], "runs": len(times)}


def compile_pair(build, folder, cxx):
    """Compiles one empty program twice, without and with libte_fl.so among its needed libraries."""
    source = folder / "empty.cpp"
    source.write_text(EMPTY)
    lib = build / "lib"
    plain, linked = folder / "plain", folder / "linked"
    subprocess.run([cxx, "-O2", source, "-o", plain], check=True)
    subprocess.run([cxx, "-O2", source, "-o", linked, "-Wl,--no-as-needed", f"-L{lib}", "-lte_fl", f"-Wl,-rpath,{lib}"], check=True)
    return plain, linked


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=root / "build/release")
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--cxx", default=os.environ.get("CXX", "c++"))
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if options.repeat < 2:
        parser.error(f"--repeat {options.repeat}: it must be at least 2")
    build = options.build.resolve()
    te_fl = build / "bin/te-fl"
    if not te_fl.exists():
        parser.error(f"--build {options.build}: there is no bin/te-fl in it; build first")
    # An empty folder replaces every folder that te-fl searches for manifests, so that no plugin is found.
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        bare = {k: v for k, v in os.environ.items() if not k.startswith("TE_FL_")}
        bare.update(TE_FL_PLUGIN_PATH="", XDG_DATA_HOME=scratch)
        plain, linked = compile_pair(build, folder, options.cxx)
        programs = {"te-fl info, built-in backends": [str(te_fl), "info"], "empty program": [str(plain)],
                    "empty program with libte_fl.so": [str(linked)]}
        times = {name: [] for name in programs}
        for _ in range(options.repeat):
            for name, command in programs.items():
                times[name].append(wall_ms(command, bare))
        result = {name: summary(t) for name, t in times.items()}
        added = [b - a for a, b in zip(times["empty program"], times["empty program with libte_fl.so"])]
        result["libte_fl.so adds"] = summary(added)
        for plugin in sorted((build / "plugins").glob("libte_fl_*.so")):
            env = dict(bare, TE_FL_PLUGIN_MODULES=str(plugin))
            pairs = [wall_ms([str(te_fl), "info"], env) - wall_ms([str(te_fl), "info"], bare) for _ in range(options.repeat)]
            result[f"plugin {plugin.name} adds"] = summary(pairs)
    print("| what | median ms | best ms | interquartile range | target |\n|---|---|---|---|---|")
    targets = {"te-fl info, built-in backends": INFO_TARGET_MS, "libte_fl.so adds": LOAD_TARGET_MS}
    for name, r in result.items():
        target = f"{targets[name]:.0f} ms" if name in targets else ""
        print(f"| {name} | {r['median_ms']:.2f} | {r['best_ms']:.2f} | {r['iqr_ms']:.2f} | {target} |")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(result[name]["median_ms"] <= limit for name, limit in targets.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
