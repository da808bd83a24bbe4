#!/usr/bin/env python3
"""Runs the tests of te_fl.pytorch on one wheel with several versions of Python and PyTorch, and prints a table of what passed.

usage: torch_versions.py WHEEL [--only TORCH] [--tests NAME..] [--folder FOLDER] [--keep]
  --only     one PyTorch version of the matrix
  --tests    files or folders of tests/python, without the ending .py; default: all for PyTorch and those that need no framework
  --folder   for the environments, 2 GB each; default: a temporary folder
  --keep     keeps the environments, and uses those that exist

Interpreters come from the path (python3.10) or from pyenv; a row without one is skipped. PyPI's PyTorch is built for CUDA, and its NVIDIA libraries take
4 GB more, of which a host without a GPU calls no function. Libraries without contents take their places, so the tests run on the CPU.
"""

import argparse
import collections
import glob
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
# The oldest Python and PyTorch that te-fl supports, and the newest; PyTorch 2.9.
MATRIX = (("3.10", "2.7.0"), ("3.12", "2.9.1"), ("3.13", "2.15.0"), ("3.14", "2.15.0"))
NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "numpy", "setuptools", "sympy", "typing-extensions")
# These tests need other packages, or compare with figures of one PyTorch version.
OTHERS = {"modules_test", "ops_test", "recipe_test", "registration_test", "settings_test"}
LONGEST = 1500  # seconds for one test; the longest takes a fifth
NVIDIA = re.compile(r"_*(cu|nv|nccl)")


def run(*command, **options):
    return subprocess.run([str(part) for part in command], check=True, text=True, **options)


def read(*command):
    return run(*command, capture_output=True).stdout


def find_interpreter(version):
    """Returns the first interpreter of this version that runs: a shim of pyenv's on the path may have none behind it."""
    choices = [shutil.which(f"python{version}"), *sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python")))]
    return next((path for path in choices if path and subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0), None)


def read_library(path):
    """Returns the NVIDIA libraries that a library needs, {symbol version: library}, and its undefined and defined symbols as (name, version)."""
    needed = set(re.findall(r"\(NEEDED\).*\[(lib(?:cu|nv|nccl).*)\]", read("readelf", "-dW", path)))
    versions, undefined, defined, library = {}, set(), set(), ""
    for line in read("readelf", "-VW", path).splitlines():
        file, name = re.search(r"File: (\S+)", line), re.search(r"Name: (\S+)\s+Flags", line)
        library = file.group(1) if file else "" if "Version definition" in line or "Version symbols" in line else library
        if name and library:
            versions[name.group(1)] = library
    for line in read("nm", "-D", "--with-symbol-versions", path).splitlines():
        name, _, version = line.split()[-1].partition("@")
        (undefined if line.split()[-2] in "Uwv" else defined).add((name, version.lstrip("@")))
    return needed, versions, undefined, defined


def stand_in_for_nvidia(folder):
    """Compiles the NVIDIA libraries that PyTorch's libraries in `folder` need. Each function of theirs returns 100, which is cudaErrorNoDevice."""
    needed, versions, undefined, defined = set(), {}, set(), set()
    for path in folder.glob("*.so*"):
        for all_of, found in zip((needed, versions, undefined, defined), read_library(path)):
            all_of.update(found)
    known = {name for name, _ in defined}
    missing = {(name, version) for name, version in undefined if name not in known}
    unversioned = {name for name, version in missing if not version and NVIDIA.match(name)}
    for library in (library for library in needed if not (folder / library).exists()):  # a wheel may contain some of them
        by_version = collections.defaultdict(set)
        for name, version in missing:
            if version and versions.get(version) == library:
                by_version[version].add(name)
        names = set().union(*by_version.values(), unversioned if library.startswith("libcudart") else ())
        script = folder / "versions.map"
        script.write_text("".join(f"{version} {{ {'; '.join(sorted(of))}; }};\n" for version, of in by_version.items()))
        run("cc", "-w", "-shared", "-fPIC", "-fno-builtin", "-o", folder / library, f"-Wl,-soname,{library}",
            *([f"-Wl,--version-script={script}"] if by_version else []), "-xc", "-", input="".join(f"int {name}(void) {{ return 100; }}\n" for name in names))


def make_environment(interpreter, torch, wheel, folder):
    """Returns the environment's interpreter."""
    python = folder / "bin/python"
    if not python.exists():
        run(interpreter, "-m", "venv", folder)
        install = (python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check")
        run(*install, "--no-deps", f"torch=={torch}")
        run(*install, *NEEDS)
        stand_in_for_nvidia(next(folder.glob("lib/python*/site-packages/torch/lib")))
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", "--no-deps", "--no-index", "--force-reinstall", wheel)
    return python


def run_tests(python, path, environment):
    """Returns (passed, failed, skipped) and the output."""
    process = subprocess.Popen([python, ROOT / "tests/python/run.py", path], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
    try:
        output = process.communicate(timeout=LONGEST)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that the test has started
        return (0, 1, 0), f"{process.communicate()[0]}\nThe test did not end within {LONGEST} s."
    ran = re.search(r"^Ran (\d+) tests?", output, re.M)
    if ran is None:
        return (0, 0, 1) if process.returncode == 77 else (0, 1, 0), output
    counts = {kind: int(count) for kind, count in re.findall(r"(failures|errors|skipped)=(\d+)", output)}
    failed, skipped = counts.get("failures", 0) + counts.get("errors", 0), counts.get("skipped", 0)
    return (max(0, int(ran.group(1)) - failed - skipped), failed + (process.returncode != 0 and failed == 0), skipped), output


def try_version(version, torch, options, folder):
    """Returns the row of the table, and True unless a test failed."""
    interpreter = find_interpreter(version)
    if interpreter is None:
        return f"| {version} | {torch} | skipped: there is no Python {version} | | | |", True
    begun = time.monotonic()
    python = make_environment(interpreter, torch, options.wheel.resolve(), folder)
    environment = {**{name: value for name, value in os.environ.items() if not name.startswith(("TE_FL_", "NVTE_", "PYTHON"))},
                   "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0", "NVIDIA_STAND_INS": "1"}
    run(python, "-m", "te_fl", "info", env=environment, stdout=subprocess.DEVNULL)
    total = [0, 0, 0]
    for name in options.tests or sorted({p.stem for p in (ROOT / "tests/python").glob("torch_*_test*")} | OTHERS):
        path = ROOT / "tests/python" / name
        counts, output = run_tests(python, path if path.is_dir() else path.with_suffix(".py"), environment)
        print(f"Python {version}, PyTorch {torch}: {name}: {counts[0]} passed, {counts[1]} failed, {counts[2]} skipped", flush=True)
        total = [a + b for a, b in zip(total, counts)]
        if counts[1]:
            print(output, flush=True)
    return f"| {version} | {torch} | {total[0]} | {total[1]} | {total[2]} | {time.monotonic() - begun:.0f} s |", total[1] == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("--only", choices=sorted({torch for _, torch in MATRIX}))
    parser.add_argument("--tests", nargs="+")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    rows, passed = ["| Python | PyTorch | passed | failed | skipped | time |", "|---|---|---|---|---|---|"], True
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        for version, torch in MATRIX:
            if options.only in (None, torch):
                folder = (options.folder if options.keep and options.folder else pathlib.Path(temporary)) / f"torch-{torch}-python-{version}"
                row, well = try_version(version, torch, options, folder)
                rows, passed = [*rows, row], passed and well
                if not options.keep:
                    shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(rows))
    if not any(re.search(r"\| \d+ s \|$", row) for row in rows):
        print("torch_versions.py: none of these versions of Python is here, so nothing was tested", file=sys.stderr)
        return 1
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
