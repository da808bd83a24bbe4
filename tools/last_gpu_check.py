#!/usr/bin/env python3
"""Prints which commit the last kept GPU check (bench/results) was of, and the CUDA files that have changed since.
usage: tools/last_gpu_check.py [ROOT]     (default: this repository)

Always exits 0: a shallow clone, or a folder that is none, is told and no failure."""
import json
import pathlib
import re
import subprocess
import sys

CUDA = ["backends/cuda", "tests/backends/cuda", "tools/gpu_check.sh"]


def git(root, *words):
    """The lines that git prints; None if it fails or is not there."""
    try:
        run = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    except OSError:
        return None
    return run.stdout.splitlines() if run.returncode == 0 else None


def commit_of(root, file):
    """The commit that a kept check was of: its own word, the list of results, or the commit that brought it. "" if nobody knows."""
    try:
        said = json.loads(file.read_text()).get("commit", "")
        if said:
            return said
    except (OSError, ValueError, AttributeError):
        pass
    try:
        for line in (file.parent / "README.md").read_text().splitlines():
            found = re.search(r"\b[0-9a-f]{7,40}\b", line.split("|")[2]) if line.startswith(f"| {file.name} |") else None
            if found:
                return found.group(0)
    except OSError:
        pass
    return "".join((git(root, "log", "-1", "--format=%h", "--", str(file.relative_to(root))) or [""])[:1])


def report(root):
    kept = sorted((root / "bench/results").glob("*gpu_check*.json"))
    if not kept:
        return ["last GPU check: none is kept in bench/results"]
    commit = commit_of(root, kept[-1])
    head = f"last GPU check: bench/results/{kept[-1].name}, of {commit or 'an unknown commit'}"
    changed = git(root, "diff", "--name-only", commit, "--", *CUDA) if commit else None
    if changed is None:
        return [f"{head}; what has changed since is not known: this is no git repository, or a shallow one without that commit"]
    changed = sorted({*changed, *(git(root, "ls-files", "--others", "--exclude-standard", "--", *CUDA) or [])})
    if not changed:
        return [f"{head}; no CUDA file has changed since"]
    return [f"{head}; CUDA files changed since ({len(changed)}):", *("  " + name for name in changed)]


if __name__ == "__main__":
    print("\n".join(report(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent))))
