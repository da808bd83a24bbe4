"""Runs the program te-fl that is part of the package."""

from __future__ import annotations

import json
import os
import subprocess

from te_fl import _native, frameworks, missing

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def program() -> str:
    """The program's path; FileNotFoundError, with a remedy, if it is missing."""
    path = os.path.join(_FOLDER, "bin", "te-fl")
    if not os.access(path, os.X_OK):
        raise FileNotFoundError(f"the program te-fl is not at {path}: {missing.advice('te-fl')}")
    return path


def run_here(words: list) -> int:
    """Runs a command of the program in this process, where implementations in Python and devices of PyTorch take part. Returns the exit status."""
    from te_fl import _check_worker
    if _wants_torch(words):
        from te_fl import torch_device
        device = torch_device.default()
        if device is not None:
            _native.device_name(torch_device.native_name(device))  # makes the device, with the ops by PyTorch
    return _check_worker.program(words)


def _wants_torch(words: list) -> bool:
    """True if PyTorch is installed and the command may concern a device that is PyTorch's."""
    if frameworks.installed("torch") is None or frameworks.refusal("torch"):
        return False
    if words[0] in ("info", "ops", "replay", "tune"):
        return True
    return any(word != "cpu" for option, word in zip(words, words[1:]) if option == "--device") or any(
        word.startswith("--device=") and word != "--device=cpu" for word in words)


def ask(*words: str, library_folders=()) -> object:
    """Runs `te-fl WORDS --json` and returns the parsed JSON; RuntimeError with the output if it is not JSON. library_folders: folders of frameworks'
    libraries. In this process a framework has loaded those libraries already; the separate process te-fl needs the paths.
    """
    environment = dict(os.environ)
    path = [p for p in [environment.get("LD_LIBRARY_PATH", ""), *library_folders] if p]
    if path:
        environment["LD_LIBRARY_PATH"] = ":".join(path)
    run = subprocess.run([program(), *words, "--json"], capture_output=True, text=True, env=environment)
    try:
        return json.loads(run.stdout)
    except ValueError:
        raise RuntimeError(f"te-fl {' '.join(words)} ended with status {run.returncode} and said: {run.stderr.strip() or run.stdout.strip()}")
