#!/usr/bin/env python3
"""Prints the commit of the last GPU check stored in bench/results, and the CUDA files whose code has changed since.
usage: tools/last_gpu_check.py [ROOT]     (default: this repository)

Moving or renaming a file does not count as a change, nor does editing its comments or its includes.
Always exits 0: for a shallow clone, or a folder that is no git repository, it only prints a message."""
import json
import pathlib
import re
import subprocess
import sys

CUDA = ("backends/cuda/", "tests/backends/cuda/", "tools/gpu_check.sh")
C_LIKE = (".c", ".cpp", ".h", ".hpp", ".cu", ".cuh")
NO_CODE = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.S)  # matches quoted text as well, so that comment signs in it are skipped


def git(root, *words):
    """Runs git; returns the lines of its output, or None if git fails or is missing."""
    try:
        run = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    except OSError:
        return None
    return run.stdout.splitlines() if run.returncode == 0 else None


def find_commit(root, file):
    """Returns the commit of a stored check: the commit named in the file, or in the list of results, or the commit that added the file. Returns "" if
    none is known."""
    try:
        commit = json.loads(file.read_text()).get("commit", "")
        if commit:
            return commit
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


def code(name, text):
    """Returns the part of a file's text that determines its behaviour; for C-like languages the text without comments, includes and line breaks."""
    if not name.endswith(C_LIKE):
        return text
    text = re.sub(r"^\s*#\s*include\b.*$", "", text, flags=re.M)
    return NO_CODE.sub(lambda m: m.group(0) if m.group(0)[0] == '"' else " ", text).split()


def changed_since(root, commit):
    """Returns the CUDA files whose code differs from that at `commit`; None if git cannot tell."""
    entries = git(root, "diff", "--name-status", "-z", "--find-renames", "-l0", commit)
    if entries is None:
        return None
    words = iter("".join(entries).split("\0")[:-1])
    changed = set(git(root, "ls-files", "--others", "--exclude-standard") or [])
    for status in words:
        old = next(words)
        new = next(words) if status[0] == "R" else old
        if status[0] in "RM" and (old.startswith(CUDA) or new.startswith(CUDA)):
            before = "\n".join(git(root, "show", f"{commit}:{old}") or [])
            if code(old, before) == code(new, "\n".join((root / new).read_text(errors="replace").splitlines())):
                continue
        changed |= {new if new.startswith(CUDA) else old}
    return sorted(name for name in changed if name.startswith(CUDA))


def report(root):
    kept = sorted((root / "bench/results").glob("*gpu_check*.json"))
    if not kept:
        return ["last GPU check: none is kept in bench/results"]
    commit = find_commit(root, kept[-1])
    head = f"last GPU check: bench/results/{kept[-1].name}, of {commit or 'an unknown commit'}"
    changed = changed_since(root, commit) if commit else None
    if changed is None:
        return [f"{head}; what has changed since is not known: this is no git repository, or a shallow one without that commit"]
    if not changed:
        return [f"{head}; no CUDA file has changed since"]
    return [f"{head}; CUDA files changed since ({len(changed)}):", *("  " + name for name in changed)]


if __name__ == "__main__":
    print("\n".join(report(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent))))
