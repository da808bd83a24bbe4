"""`python -m te_fl doctor` and `info`: report on te-fl, its plugins, and the Python environment."""

from __future__ import annotations

import glob
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from typing import NamedTuple, Optional

import te_fl
from te_fl import frameworks, program, torch_node


class Finding(NamedTuple):
    """One line of the report, as in the program te-fl. level: ok, note (works with restrictions) or problem (broken)."""

    level: str
    what: str
    disables: str = ""
    remedy: str = ""


def _library_folders() -> list:
    """The library folders of NVIDIA's PyPI packages, from which PyTorch and JAX load libraries."""
    return sorted(f for path in sys.path if path for f in glob.glob(os.path.join(path, "nvidia", "*", "lib")) if os.path.isdir(f))


def _packages() -> dict:
    """Versions of frameworks and related packages by name; None: not installed."""
    names = ("torch", "jax", "jaxlib", "flax", "triton", "numpy", "transformer_engine")
    return {name: frameworks.installed(name) for name in names}


def _check_package() -> list:
    own, library = te_fl.__version__, te_fl.info()["version"]
    where = f"te_fl {own} in {os.path.dirname(te_fl.__file__)}"
    python = f"{platform.python_implementation()} {platform.python_version()} on {platform.platform()}"
    if own != library:
        return [Finding("problem", f"{where}: its library is version {library}", "nothing of it can be relied on",
                        "install it again: pip install --force-reinstall te-fl")]
    return [Finding("ok", f"{where}; {python}")]


def _check_runtime() -> list:
    """The findings of the program te-fl, and the states of Python plugins in this process, which that program cannot load."""
    try:
        found = [Finding(f["level"], f["what"], f["disables"], f["remedy"])
                 for f in program.ask("doctor", library_folders=_library_folders())]
    except (FileNotFoundError, RuntimeError) as error:
        return [Finding("problem", str(error), "what the runtime itself finds is not known")]
    for p in te_fl.info()["plugins"]:
        if not p["path"] or ".so" in os.path.basename(p["path"]):
            continue
        found = [f for f in found if not f.what.startswith(f"plugin {p['name']}: ")]
        if p["state"] == "active":
            found.append(Finding("ok", f"plugin {p['name']}: active, {len(p['ops'])} implementations in Python, {p['path']}"))
        else:
            found.append(Finding("problem" if p["state"] == "failed" else "note", f"plugin {p['name']}: {p['state']} ({p['origin']}): {p['reason']}",
                                 "its implementations; others run"))
    return found


def _driver() -> Optional[str]:
    """The version of NVIDIA's driver, as the kernel module reports it."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            version = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", file.readline())
    except OSError:
        return None
    return version.group(1) if version else "of an unknown version"


def _nvcc() -> Optional[str]:
    path = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if not path:
        return None
    text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"release ([\d.]+)", text)
    return f"{version.group(1) if version else 'of an unknown version'}, {path}"


def _library(soname: str) -> Optional[str]:
    """The path of an NVIDIA library, from a PyPI package or the dynamic linker's cache."""
    for folder in _library_folders():
        if os.path.exists(os.path.join(folder, soname)):
            return os.path.join(folder, soname)
    ldconfig = shutil.which("ldconfig", path=os.environ.get("PATH", "") + ":/sbin:/usr/sbin")
    cache = subprocess.run([ldconfig, "-p"], capture_output=True, text=True).stdout if ldconfig else ""
    entry = re.search(rf"^\s*{re.escape(soname)} .*=> (.*)$", cache, re.M)
    return entry.group(1) if entry else None


def _check_cuda() -> list:
    """Findings that need no CUDA plugin. The plugin's own findings (driver, devices, libraries) are part of _check_runtime()."""
    nvcc, found = _nvcc(), []
    if nvcc:
        found.append(Finding("ok", f"CUDA Toolkit: nvcc {nvcc}"))
    else:
        found.append(Finding("note", "CUDA Toolkit: no nvcc on PATH or in /usr/local/cuda/bin",
                             "only building te-fl's CUDA plugin from source; nothing is compiled at run time"))
    if any(p["name"] == "cuda" for p in te_fl.info()["plugins"]):
        return found
    driver = _driver()
    if driver:
        found.append(Finding("note", f"NVIDIA driver {driver}, but this te_fl has no CUDA plugin: it was built where no nvcc was",
                             "te-fl's ops on NVIDIA GPUs; tensors of theirs are refused",
                             "install a released wheel, or the CUDA Toolkit 12.9 or newer and then te_fl from source (docs/install.md)"))
    else:
        found.append(Finding("note", "no CUDA plugin in this te_fl, and no NVIDIA driver on this machine",
                             "te-fl's ops on NVIDIA GPUs; the host runs all calls"))
    for name, soname, use in (("cuDNN", "libcudnn.so.9", "fast attention on NVIDIA GPUs"),
                              ("NCCL", "libnccl.so.2", "communication between NVIDIA GPUs, which no op does yet")):
        path = _library(soname)
        found.append(Finding("ok", f"{name}: {path}; only the CUDA plugin uses it") if path else
                     Finding("note", f"{name}: no {soname}", f"with a CUDA plugin: {use}"))
    return found


def _torch_node() -> list:
    """Reports whether te_fl.pytorch's autograd node is compiled for the installed PyTorch."""
    there, what = torch_node.installed(), "te_fl.pytorch's autograd node in C++"
    if there is None:
        return []
    if not os.path.exists(torch_node.path(there[1])):
        return [Finding("note", f"{what}: not built for PyTorch {there[1]}", "a part of small layers' speed; the node in Python is used",
                        torch_node.COMMAND)]
    off = "" if torch_node.wanted() else ", and switched off by TE_FL_TORCH_NODE"
    return [Finding("ok", f"{what}: built for PyTorch {there[1]}{off}")]


def _check_frameworks() -> list:
    found, versions = [], _packages()
    for package, name in frameworks.NAMES.items():
        version, module = versions[package], {"torch": "te_fl.pytorch", "jax": "te_fl.jax"}[package]
        wrong = frameworks.refusal(package)
        if version is None:
            found.append(Finding("note", f"{name}: not installed", module, f"pip install '{package}>={frameworks.MINIMUM[package]}'"))
        elif wrong:
            found.append(Finding("note", wrong, f"{module}, which refuses this version when it is imported",
                                 f"pip install --upgrade '{package}>={frameworks.MINIMUM[package]}'"))
        else:
            found.append(Finding("ok", f"{name}: {version} ({frameworks.MINIMUM[package]} or newer is needed)"))
            if package == "torch":
                found.extend(_torch_node())
                missing = frameworks.flaggems_missing()
                found.append(Finding("note", missing.partition(" (")[0], "te_fl.flaggems: implementations by Triton kernels on accelerators",
                                     frameworks.FLAGGEMS_COMMAND)
                             if missing else Finding("ok", f"FlagGems: {frameworks.installed('flag_gems')} ({frameworks.FLAGGEMS} is tested)"))
    others = [f"{name} {versions[name]}" for name in ("jaxlib", "flax", "triton", "numpy") if versions[name]]
    if others:
        found.append(Finding("ok", "beside them: " + ", ".join(others)))
    finder = sys.modules.get("te_fl.compat.finder")
    if finder and finder.status()["active"]:
        other = f", and passes over the one in {finder.status()['other']}" if finder.status()["other"] else ""
        found.append(Finding("ok", f"import transformer_engine gives te-fl, as version {finder.status()['version']}{other}"))
    elif versions["transformer_engine"]:
        found.append(Finding("note", f"NVIDIA's transformer_engine {versions['transformer_engine']} is installed too: importing that name "
                             "gives it, unless te_fl.as_transformer_engine() or TE_FL_AS_TRANSFORMER_ENGINE=1 comes first"))
    return found


_COLOURS = {"ok": "32", "note": "33", "problem": "31"}


def _print(findings: list) -> None:
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for f in findings:
        mark = f"{f.level:<7}"
        print(f"\033[{_COLOURS[f.level]}m{mark}\033[0m" if colour else mark, f.what, sep="  ")
        if f.disables:
            print(f"         without it: {f.disables}")
        if f.remedy:
            print(f"         to mend it: {f.remedy}")


def doctor(as_json: bool = False) -> int:
    """Prints what is available, what is missing, and the consequences. Returns 1 if something is broken; a missing GPU does not count."""
    findings = [*_check_package(), *_check_runtime(), *_check_cuda(), *_check_frameworks()]
    problems = any(f.level == "problem" for f in findings)
    if as_json:
        print(json.dumps([f._asdict() for f in findings], indent=2))
    else:
        _print(findings)
        print("\nThere are problems; see above." if problems else "\nNo problems.")
    return int(problems)


def info(as_json: bool = False) -> int:
    """`te-fl info`, with information about Python."""
    packages = {name: version for name, version in _packages().items() if version}
    python = {"version": platform.python_version(), "platform": platform.platform(), "package": os.path.dirname(te_fl.__file__),
              "packages": packages}
    if as_json:
        print(json.dumps({**program.ask("info", library_folders=_library_folders()), "python": python}, indent=2))
        return 0
    code = program.run_here(["info"])
    print(f"\nPython {python['version']} on {python['platform']}, te_fl in {python['package']}")
    if packages:
        print("  " + ", ".join(f"{name} {version}" for name, version in packages.items()))
    return code
