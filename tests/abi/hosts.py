"""Helpers of the ABI version tests: run the host programs built from tests/abi/meet.cpp and parse their output."""
import hashlib
import pathlib
import platform
import subprocess
import sys

KEPT_FOR = "x86_64"


def kept(folder, name):
    """Returns the path of a plugin built for ABI 1.0, a release that was withdrawn; None on a processor for which there is none."""
    return pathlib.Path(folder) / "1.0" / f"{name}.so" if platform.machine() == KEPT_FOR else None


def skip_elsewhere():
    if platform.machine() != KEPT_FOR:
        print(f"skipped: the kept plugins are for {KEPT_FOR}, and this is {platform.machine()}")
        sys.exit(77)


def sha256(path):
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


class Meeting:
    """Runs the host of ABI `version`, which loads a plugin and calls its implementations `impls` of relu."""

    def __init__(self, programs, version, plugin, *impls):
        run = subprocess.run([str(pathlib.Path(programs) / f"abi_meet_{version}"), str(plugin), *impls],
                             capture_output=True, text=True, timeout=60)
        self.code, self.text = run.returncode, run.stdout + run.stderr
        lines = [line.split("|") for line in run.stdout.splitlines()]
        self.host = next((line[1] for line in lines if line[0] == "host"), "")
        plugin_line = next((line for line in lines if line[0] == "plugin"), ["", "", "", "", ""])
        self.name, self.state, self.abi, self.reason = plugin_line[1], plugin_line[2], plugin_line[3], "|".join(plugin_line[4:])
        self.status = next(("|".join(line[1:]) for line in lines if line[0] == "status"), "")
        self.ops = {(line[1], line[2]): "|".join(line[3:]) for line in lines if line[0] == "op"}
        self.end = next((line[1] for line in lines if line[0] == "end"), "")
