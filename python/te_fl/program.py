"""The program te-fl that comes with the package, and what it says."""

from __future__ import annotations

import json
import os
import subprocess

from te_fl import missing

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def program() -> str:
    """Its path; FileNotFoundError that tells how to get it."""
    path = os.path.join(_FOLDER, "bin", "te-fl")
    if not os.access(path, os.X_OK):
        raise FileNotFoundError(f"the program te-fl is not at {path}: {missing.advice('te-fl')}")
    return path


def ask(*words: str, library_folders=()) -> object:
    """The JSON that `te-fl WORDS --json` prints; RuntimeError with its text if that is no JSON. The folders are where a
    framework's packages keep the libraries that it has loaded before te_fl asks for them; te-fl, in a process of its own, must be
    told."""
    environment = dict(os.environ)
    path = [p for p in [environment.get("LD_LIBRARY_PATH", ""), *library_folders] if p]
    if path:
        environment["LD_LIBRARY_PATH"] = ":".join(path)
    run = subprocess.run([program(), *words, "--json"], capture_output=True, text=True, env=environment)
    try:
        return json.loads(run.stdout)
    except ValueError:
        raise RuntimeError(f"te-fl {' '.join(words)} ended with status {run.returncode} and said: {run.stderr.strip() or run.stdout.strip()}")
