#!/usr/bin/env python3
"""Checks who includes whom, and that no op and no plugin's setting is known by name below nn. Prints every violation; exits 1 on any."""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = ["core", "policy", "plugins", "registry", "nn"]  # each may include those before it
NEUTRAL = {"core", "policy", "plugins", "registry"}      # rooms that may not know an op by name
DEVICE_HEADERS = {"cuda": re.compile(r"^(cuda|cublas|cudnn|nccl|nvToolsExt|nvtx)"), "opencl": re.compile(r"^(CL/|clblast)")}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)


def tracked():
    out = subprocess.run(["git", "ls-files", "*.c", "*.cpp", "*.h", "*.hpp", "*.cu", "*.cuh"], cwd=ROOT, check=True,
                         capture_output=True, text=True).stdout
    return [pathlib.PurePosixPath(p) for p in out.split()]


def op_names():
    text = (ROOT / "core/generated/op_table.cpp").read_text()
    return re.findall(r"^const te_fl_op_schema k_(\w+) =", text, re.M)


def include_problem(path, target):
    room = path.parts[0]
    head = target.split("/")[0]
    if room == "include":
        return None if head == "te_fl" else "a public header may include public headers only"
    if room in ROOMS:
        allowed = ROOMS[: ROOMS.index(room) + 1] + ["te_fl"]
        if head in ROOMS + ["backends", "examples", "tools", "bench", "tests"] and head not in allowed:
            return f"{room} may include only {', '.join(allowed)}"
        return None
    if room == "backends":
        own = ROOT / "backends" / path.parts[1]
        if head == "te_fl" or (own / target).exists() or (ROOT / path).parent.joinpath(target).exists():
            return None
        return "a backend may include only te_fl/ and its own folder"
    return None


def main():
    problems = []
    names = "|".join(map(re.escape, op_names()))
    by_name = re.compile(rf'"(?:{names})"|\bops?::(?:{names})\b|\bte_fl_(?:{names})_args\b')
    plugins = "|".join(sorted(p.name.split(".")[0].upper() for p in ROOT.glob("backends/*/*.json.in")))
    of_plugins = re.compile(rf"\bTE_FL_(?:{plugins})_\w+")
    files = tracked()
    for path in files:
        text = (ROOT / path).read_text(errors="replace")
        backend = path.parts[1] if path.parts[0] == "backends" else ""
        for kind, target in INCLUDE.findall(text):
            for owner, pattern in DEVICE_HEADERS.items():
                if pattern.match(target) and backend != owner and path.parts[0] != "bench" and path.parts[:3] != ("tests", "backends", owner):
                    problems.append(f"{path}: includes {target}, which belongs to backends/{owner}")
            if kind == '"' or target.startswith("te_fl/"):
                why = include_problem(path, target)
                if why:
                    problems.append(f"{path}: includes {target}: {why}")
        if path.parts[0] in NEUTRAL and "generated" not in path.parts:
            for match in by_name.finditer(text):
                problems.append(f"{path}: knows an op by name: {match.group(0)}")
            for match in of_plugins.finditer(text):
                problems.append(f"{path}: knows a plugin's setting by name: {match.group(0)}")
    print("\n".join(problems) or f"layering: {len(files)} files clean")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
