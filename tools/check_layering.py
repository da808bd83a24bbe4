#!/usr/bin/env python3
"""Checks the includes between folders ("components"), that no unit of the library includes itself indirectly, and that no op, no plugin's setting or
file, no vendor and no package is named below nn, and that the Python binding has no mutex that a fork may leave locked. Prints every violation;
exits 1 on any. docs/architecture.md lists the components and their contents.

A unit is a header and its source: the files of a component with one base name, and in nn's subfolders also the public header of that name in the
corresponding folder below include/te_fl. Each public header of the other components is a unit of its own, below all of the sources."""
import json
import pathlib
import re
import subprocess
import sys

import python_components

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The components of libte_fl from the lowest up; each may include those before it. "abi" is the C ABI, which every component may include.
COMPONENTS = ["abi", "core/base", "core/device", "core/tensor", "core/op", "policy", "registry", "plugins",
         "dispatch", "dispatch/staging", "dispatch/watch", "comm",
         "nn/base", "nn/fp8", "nn/autograd", "nn/modules", "nn/optim", "nn/files"]
# (component, higher component) -> headers of the higher component that the lower component may include nevertheless: the few points at which
# dispatch calls its interceptors.
DOORS = {("dispatch", "dispatch/staging"): {"staged_call.hpp", "staging_pool.hpp"},
         ("dispatch", "dispatch/watch"): {"watch.hpp", "barred.hpp"}}
# The component of each public header; a folder means all headers in it. "backends": headers for backends only; "all": umbrella headers for
# programs.
PUBLIC = {
    "plugin.h": "abi", "export.hpp": "abi", "version.hpp": "abi", "ops/": "abi",
    "status.hpp": "core/base", "dtype.hpp": "core/base", "environment.hpp": "core/base", "log.hpp": "core/base",
    "numeric.hpp": "core/base", "numeric/": "core/base",
    "device.hpp": "core/device", "memory.hpp": "core/device", "result_memory.hpp": "core/tensor", "tensor.hpp": "core/tensor",
    "op_outputs.hpp": "core/op", "policy.hpp": "policy", "tex_names.hpp": "policy", "op_registry.hpp": "registry", "plugins.hpp": "plugins",
    "comm.hpp": "comm", "op_manager.hpp": "dispatch", "ops.hpp": "dispatch", "watch.hpp": "dispatch/watch", "wrap_quantized.hpp": "core/tensor",
    "nn/base/": "nn/base", "nn/fp8/": "nn/fp8", "nn/autograd/": "nn/autograd", "nn/modules/": "nn/modules", "nn/optim/": "nn/optim",
    "nn/files/": "nn/files", "nn.hpp": "all",
    "backend.hpp": "backends", "backend/": "backends", "attention.hpp": "backends", "attention/": "backends",
    "te_fl.hpp": "all",
}
BACKENDS_SEE = {"abi", "core/base", "backends"}  # components whose public headers backends may include
OTHERS = {"backends", "frontends", "conformance", "python", "examples", "tools", "bench", "tests"}  # folders that no component includes
NEUTRAL = {"core", "policy", "registry", "plugins", "dispatch", "comm"}  # components that may not name an op or a plugin
DEVICE_HEADERS = {"cuda": re.compile(r"^(cuda|cublas|cudnn|nccl|nvToolsExt|nvtx)"), "opencl": re.compile(r"^(CL/|clblast)")}
ORDINARY_WORDS = {"te-fl", "null"}  # words of the plugins' manifests that are ordinary words too
# Words of manifests that a file's string literals may contain, with the reason.
ALLOWED_WORDS = {
    "core/base/environment_table.cpp": {"cuda"},  # for TE_FL_SKIP_CUDA, the only setting whose name contains a plugin's name
    "plugins/discovery.cpp": {"cuda"},  # discovery skips the CUDA plugin if TE_FL_SKIP_CUDA is set
    "core/device/device.cpp": {"cuda", "opencl"},  # names of DLPack's device types
    "plugins/manifest.cpp": {"opencl"},  # a message gives this device type as an example
    "plugins/elf_inspect.cpp": {"nvidia", "amd"},  # names of the machine types of ELF files
    "plugins/soname_hints.cpp": {"libstdc++6", "libasan.so", "libtsan.so"},  # libraries in hints about compilers, which belong to no plugin
}
LITERAL = re.compile(r"//[^\n]*|/\*.*?\*/|'(?:[^'\\\n]|\\.)'|(\"(?:[^\"\\\n]|\\.)*\")", re.S)
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)


def tracked():
    out = subprocess.run(["git", "ls-files", "*.c", "*.cpp", "*.h", "*.hpp", "*.cu", "*.cuh"], cwd=ROOT, check=True,
                         capture_output=True, text=True).stdout
    return [pathlib.PurePosixPath(p) for p in out.split()]


def op_names():
    text = (ROOT / "core/op/generated/op_table.cpp").read_text()
    return re.findall(r"^const te_fl_op_schema k_(\w+) =", text, re.M)


def plugin_names():
    return sorted(p.name.split(".")[0] for p in ROOT.glob("backends/*/*.json.in"))


def manifest_words(manifests):
    """Returns vendors, their aliases, and plugins' names, sonames and packages from the manifests, in lower case. A word before 's in a note
    ("AMD's") counts as a vendor."""
    words = set()
    for manifest in manifests:
        words |= {manifest[key] for key in ("name", "vendor") if key in manifest} | set(manifest.get("vendor_aliases", []))
        for package in manifest.get("packages", []):
            words.add(package["soname"].split(".so")[0] + ".so")
            words |= set(re.findall(r"(\w+)'s\b", package.get("note", "")))
            for text in package.get("apt", ""), package.get("pypi", ""):
                names = re.findall(r"[a-z][\w.+-]*", text)  # a package name, or several package names between words that have neither digit nor dash
                words |= {name for name in names if len(names) == 1 or re.search(r"[-\d]", name)}
    return {word.lower() for word in words} - ORDINARY_WORDS


def shipped_manifests():
    paths = [*ROOT.glob("backends/*/*.json.in"), ROOT / "backends/packages.json"]
    return [json.loads(path.read_text()) for path in sorted(paths)]


def find_component(path):
    """Returns the component (folder of COMPONENTS) of a file or an include, given relative to the root; None if it is in no component, "" for a
    public header that PUBLIC does not list."""
    path = path.removeprefix("include/")
    if path.startswith("te_fl/"):
        name = path.removeprefix("te_fl/")
        folders = [name] + [str(folder) + "/" for folder in pathlib.PurePosixPath(name).parents]
        return next((PUBLIC[folder] for folder in folders if folder in PUBLIC), "")
    components = [component for component in COMPONENTS if path.startswith(component + "/")]
    return max(components, key=len, default=None)


def include_problem(path, target):
    """Returns the reason why the file at `path` may not include `target`; None if it may."""
    component, other = find_component(path), find_component(target)
    if "" in (component, other):
        return "a public header belongs to one component: give it one in PUBLIC (tools/check_layering.py)"
    if path.startswith("include/") and not target.startswith("te_fl/"):
        return "a public header may include public headers only"
    if path.startswith("backends/"):
        own = ROOT / "backends" / path.split("/")[1]
        seen = target.startswith("te_fl/") and other in BACKENDS_SEE
        if seen or (own / target).exists() or (ROOT / path).parent.joinpath(target).exists():
            return None
        return "a backend may include only its own folder and the public headers of " + ", ".join(sorted(BACKENDS_SEE))
    if path.startswith("conformance/") and not target.startswith(("te_fl/", "conformance/", "bench/cases/")):
        return "the certificate may include only public headers, conformance and bench/cases"
    if path == "python/src/plugins/check.cpp" and target == "tools/te-fl/program.hpp":
        return None  # the package runs the program's commands in its own process
    if path.startswith("python/") and target.startswith(("tools/", "tests/", "bench/", "examples/")):
        return "the package may include nothing of the programs and tests"
    if component in (None, "all"):
        return None
    if other is None:
        return f"{component} may include only components" if target.split("/")[0] in OTHERS | NEUTRAL | {"nn"} else None
    if component == "backends":
        return None if other in BACKENDS_SEE else "a header for backends may include only those of " + ", ".join(sorted(BACKENDS_SEE))
    allowed = COMPONENTS[: COMPONENTS.index(component) + 1]
    if other in allowed or target.removeprefix(other + "/") in DOORS.get((component, other), ()):
        return None
    return f"{component} may include only {', '.join(allowed)}"


def unit_of(path):
    """Returns the unit of a file or an include, given relative to the root: its component and its name up to the first dot. None outside of
    components."""
    component = find_component(path)
    if component not in COMPONENTS:
        return None
    public = path.removeprefix("include/").startswith("te_fl/") and not component.startswith("nn/")
    return f"{'te_fl' if public else component}/{pathlib.PurePosixPath(path).name.split('.')[0]}"


def rings(texts):
    """Returns every cycle of units in which each includes the next and the last the first, as a list that starts with the smallest name. texts: path
    -> text."""
    includes = {}
    for path, text in texts.items():
        unit = unit_of(path)
        others = {unit_of(target) for _, target in INCLUDE.findall(text)}
        includes.setdefault(unit, set()).update(others - {unit, None})
    includes.pop(None, None)
    found, done = [], set()

    def visit(unit, way):
        if unit in way:
            ring = way[way.index(unit):]
            first = ring.index(min(ring))
            found.append(ring[first:] + ring[:first])
        elif unit not in done:
            for other in sorted(includes.get(unit, ())):
                visit(other, way + [unit])
            done.add(unit)

    for unit in sorted(includes):
        visit(unit, [])
    return found


def names_known(text, ops, plugins):
    """Returns the ops and plugins that a file of a neutral component (NEUTRAL) mentions by name."""
    words = "|".join(map(re.escape, ops))
    for match in re.finditer(rf'"(?:{words})"|\bops?::(?:{words})\b|\bte_fl_(?:{words})_args\b', text):
        yield f"knows an op by name: {match.group(0)}"
    words = "|".join(map(re.escape, plugins))
    for match in re.finditer(rf"\bTE_FL_(?:{words.upper()})_\w+", text):
        yield f"knows a plugin's setting by name: {match.group(0)}"
    for match in re.finditer(rf"\blibte_fl_(?:{words})\b|\bbackends/(?:{words})\b|(?<![\w.])(?:{words})\.json\b", text):
        yield f"knows a plugin's file by name: {match.group(0)}"


def words_known(path, text, words):
    """Returns the words of manifests in the string literals of a neutral component's file. A device name such as "cuda:0" is not counted."""
    pattern = re.compile(r"(?<![\w-])(?:" + "|".join(map(re.escape, sorted(words, key=len, reverse=True))) + r")(?![\w-]|:\d)", re.I)
    for match in LITERAL.finditer(text):
        for word in pattern.findall(match.group(1) or ""):
            if word.lower() not in ALLOWED_WORDS.get(path, ()):
                yield f"knows a vendor, plugin or package by name, which belongs in a manifest: {word} in {match.group(1)}"


def mutexes_known(path, text):
    """Returns the uses of the standard library's mutexes in the Python binding; in a forked child such a mutex may stay locked forever."""
    if path.startswith("python/src/") and not path.startswith("python/src/py/mutex."):
        for match in re.finditer(r"\bstd::((?:recursive_|shared_)?(?:timed_)?mutex|condition_variable(?:_any)?|once_flag|call_once)\b", text):
            yield f"has std::{match.group(1)}, which a forked child may find taken: python/src/py/mutex.hpp has the binding's mutex"


def find_problems(path, text, ops, plugins, words=frozenset()):
    folders = path.split("/")
    backend = folders[1] if folders[0] == "backends" else ""
    for kind, target in INCLUDE.findall(text):
        for owner, pattern in DEVICE_HEADERS.items():
            if pattern.match(target) and backend != owner and folders[0] != "bench" and folders[:3] != ["tests", "backends", owner]:
                yield f"{path}: includes {target}, which belongs to backends/{owner}"
        if kind == '"' or target.startswith("te_fl/"):
            why = include_problem(path, target)
            if why:
                yield f"{path}: includes {target}: {why}"
    for what in mutexes_known(path, text):
        yield f"{path}: {what}"
    if folders[0] in NEUTRAL and "generated" not in folders:
        for what in names_known(text, ops, plugins):
            yield f"{path}: {what}"
        for what in words_known(path, text, words) if words else ():
            yield f"{path}: {what}"


def main():
    ops, plugins = op_names(), plugin_names()
    words = manifest_words(shipped_manifests())
    files = tracked()
    texts = {str(path): (ROOT / path).read_text(errors="replace") for path in files}
    problems = []
    for path, text in texts.items():
        problems += find_problems(path, text, ops, plugins, words)
    problems += ["a ring of units: " + " includes ".join(ring + ring[:1]) for ring in rings(texts)]
    of_python, modules, _ = python_components.problems()
    problems += of_python
    print("\n".join(problems) or f"layering: {len(files)} files and {modules} modules of Python clean")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
