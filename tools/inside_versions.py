#!/usr/bin/env python3
"""Records the functions that each version of NVIDIA's Python package calls, and tries each version on te-fl.
usage: tools/inside_versions.py download FOLDER          the pure packages from PyPI, unpacked into FOLDER/VERSION
       tools/inside_versions.py facts FOLDER [SOURCES]   writes tests/python/transformer_engine_torch_versions.json; SOURCES/VERSION.h: the
                                                         extensions.h of the extension's source distribution, for the names of parameters
       tools/inside_versions.py try FOLDER PYTHON        runs tests/python/inside_trial.py for each version and prints the table of
                                                         docs/inside-transformer-engine.md; PYTHON: an interpreter with PyTorch and te_fl
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
VERSIONS = ("2.20.2", "2.19.0", "2.18.0", "2.17.1", "2.17.0", "2.16.1", "2.16.0", "2.15.0", "2.14.1", "2.14.0")
FACTS = ROOT / "tests/python/transformer_engine_torch_versions.json"
# Rows of the table: the feature's name for users -> prefixes of the trial's cases that test it.
ROWS = {"Linear, LayerNormLinear": ("Linear ", "LayerNormLinear"), "LayerNormMLP": ("LayerNormMLP",), "GroupedLinear": ("GroupedLinear",),
        "DotProductAttention": ("DotProductAttention",), "TransformerLayer": ("TransformerLayer",), "te.ops.Sequential": ("te.ops",),
        "checkpoint": ("checkpoint",), "quantized_model_init": ("quantized_model_init",), "FusedAdam": ("FusedAdam",),
        "moe_permute, router": ("moe_permute", "router"), "parallel_cross_entropy": ("parallel_cross_entropy",), "RoPE, softmax": ("rope", "softmax"), "MXFP8, NVFP4 quantizers": ("MXFP8", "NVFP4")}


def download(folder):
    for version in VERSIONS:
        wheels = folder / "wheels"
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"transformer_engine=={version}", "-d", wheels], check=True)
        with zipfile.ZipFile(next(wheels.glob(f"transformer_engine-{version}-*.whl"))) as wheel:
            wheel.extractall(folder / version)


def _calls(folder):
    """Returns {function: its call forms [[positional arguments, names of the keyword arguments], ..]} of a version."""
    sys.path.insert(0, str(ROOT / "python/te_fl/inside"))  # imports only this module, so te_fl need not be built
    import calls
    uses = calls.of_package(folder / "transformer_engine")
    forms = {name: sorted([n, sorted(keywords)] for n, keywords in found) for name, found in sorted(uses.calls.items())}
    return forms, sorted(uses.names)


def _parameters(header):
    """Returns {function: the names of its parameters} from a C++ header."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header, flags=re.S)
    found = {}
    for name, arguments in re.findall(r"[\w>&\*]\s+(\w+)\(([^;{}]*?)\)\s*;", text):
        flat = re.sub(r"<[^<>]*>", "", re.sub(r"<[^<>]*>", "", re.sub(r"\([^()]*\)", "", arguments)))
        found[name] = [re.sub(r"\s*=.*", "", part, flags=re.S).split()[-1].strip("&*") for part in flat.split(",") if part.split()]
    return found


def facts(folder, sources=None):
    """Builds the facts of all versions, newest first; a version's entry omits the facts that are equal in the next newer version."""
    record, newer, newest = {}, {}, {}
    for version in VERSIONS:
        forms, names = _calls(folder / version)
        entry = {"calls": {name: found for name, found in forms.items() if newer.get(name) != found}, "uncalled": sorted(set(newer) - set(forms))}
        entry["names"] = sorted(set(names) - set(forms))
        newer = forms
        if sources is not None:
            parameters = _parameters((sources / f"{version}.h").read_text())
            newest = newest or parameters
            entry["parameters"] = {n: p for n, p in sorted(parameters.items()) if n in names and newest.get(n, p) != p}
        record[version] = entry
    FACTS.write_text("{\n" + ",\n".join(f'"{v}": {{\n' + ",\n".join(f' "{k}": {json.dumps(x)}' for k, x in e.items()) + "}" for v, e in record.items()) + "\n}\n")


def trial(folder, python, *only):
    """Runs tests/python/inside_trial.py for a version and returns its output."""
    result = subprocess.run([python, ROOT / "tests/python/inside_trial.py", folder, *only], capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{folder}: {result.stderr}")
    return json.loads(result.stdout)


def _describe_cases(cases, base, prefixes):
    """Returns the text of a table cell: "yes" if all cases of the trial give the same numbers as with the newest version, otherwise the cases that
    fail or differ."""
    mine = {name: found for name, found in cases.items() if name.startswith(prefixes)}
    refused = [name for name, found in mine.items() if isinstance(found, str)]
    other = [name for name, found in mine.items() if name not in refused and found != base[name]]
    return "yes" if not refused + other else "; ".join([f"not {n.split()[-1]}" for n in refused] + [f"{n.split()[-1]} by its own numbers" for n in other])


def table(folder, python):
    found = {version: trial(folder / version, python)["cases"] for version in VERSIONS}
    groups = []  # adjacent versions with equal cells share a column
    for version in VERSIONS:
        column = [_describe_cases(found[version], found[VERSIONS[0]], prefixes) for prefixes in ROWS.values()]
        if groups and groups[-1][1] == column:
            groups[-1][0].append(version)
        else:
            groups.append(([version], column))
    print("| | " + " | ".join(v[0] if len(v) == 1 else f"{v[-1]} to {v[0]}" for v, _ in groups) + " |\n|" + "---|" * (len(groups) + 1))
    for i, row in enumerate(ROWS):
        print(f"| {row} | " + " | ".join(column[i] for _, column in groups) + " |")


if __name__ == "__main__":
    commands = {"download": (download, 1, 1), "facts": (facts, 1, 2), "try": (table, 2, 2)}
    name, *rest = sys.argv[1:] or ["--help"]
    if name not in commands or not commands[name][1] <= len(rest) <= commands[name][2]:
        raise SystemExit(__doc__)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    commands[name][0](*(pathlib.Path(each) for each in rest))
