#!/usr/bin/env python3
"""Checks that a wheel runs on other Linux machines: each library that its files need is in the wheel and on a run path, or is a library
that every distribution has by the manylinux rules. Also finds the manylinux tag that its symbol versions allow.

usage: check_wheel.py WHEEL [--out FOLDER]
  --out FOLDER  writes a copy with that tag in its name and metadata, as PyPI wants it
"""
import argparse
import base64
import csv
import hashlib
import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

# Libraries that PEP 600 lets a wheel expect from every distribution: those of auditwheel's list that te-fl may need. The list's other libraries (X11,
# GLib) would be a mistake in te-fl's wheel.
EVERYWHERE = {"libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libgcc_s.so.1", "libstdc++.so.6"}
EVERYWHERE_PATTERN = re.compile(r"ld-linux(-x86-64|-aarch64)?\.so\.[12]")
# The newest libstdc++ that a machine with a given glibc certainly has: (glibc's minor version, N of GLIBCXX_3.4.N).
LIBSTDCXX_OF_GLIBC = ((17, 19), (28, 24), (31, 28), (34, 29), (35, 30), (38, 32), (39, 33))


def dynamic_section(path):
    """Returns the names of needed libraries, the folders of the run path, and the versions of glibc and libstdc++ that a file requires."""
    text = subprocess.run(["readelf", "-dVW", path], capture_output=True, text=True, check=True).stdout
    run_path = re.search(r"\((?:RUNPATH|RPATH)\)\s+Library r\w+path: \[(.*)\]", text)
    return (re.findall(r"\(NEEDED\)\s+Shared library: \[(.*)\]", text), run_path.group(1).split(":") if run_path else [],
            [int(n) for n in re.findall(r"\bGLIBC_2\.(\d+)", text)], [int(n) for n in re.findall(r"\bGLIBCXX_3\.4\.(\d+)", text)])


def is_elf(path):
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def inspect(root):
    """Returns the errors of an unpacked wheel, and the minor version of glibc that it requires."""
    wrong, glibc, libstdcxx = [], 17, 0
    binaries = sorted(p for p in root.rglob("*") if p.is_file() and is_elf(p))
    if not binaries:
        wrong.append("it holds no library at all; was it packed from a build of te-fl?")
    for path in binaries:
        name = path.relative_to(root)
        needed, run_path, versions, cxx_versions = dynamic_section(path)
        glibc, libstdcxx = max([glibc, *versions]), max([libstdcxx, *cxx_versions])
        folders = [pathlib.Path(os.path.normpath(f.replace("$ORIGIN", str(path.parent)))) for f in run_path]
        for folder, text in zip(folders, run_path):
            if not text.startswith("$ORIGIN") or not folder.is_relative_to(root):
                wrong.append(f"{name} looks for libraries in '{text}', outside the wheel; a run path begins with $ORIGIN")
        for library in needed:
            if library in EVERYWHERE or EVERYWHERE_PATTERN.fullmatch(library) or any((f / library).is_file() for f in folders):
                continue
            there = [str(p.relative_to(root)) for p in root.rglob(library)]
            if there:
                wrong.append(f"{name} needs {library}, which is in the wheel as {there[0]}, where its run path {run_path} does not lead")
            else:
                wrong.append(f"{name} needs {library}, which not every Linux has and the wheel does not bring: link it statically or let "
                             "cmake/bundle.cmake.in copy it")
    for minor, newest in LIBSTDCXX_OF_GLIBC:
        if newest >= libstdcxx and minor >= glibc:
            return wrong, minor
    wrong.append(f"it asks for GLIBC_2.{glibc} and GLIBCXX_3.4.{libstdcxx}, newer than this script knows: add them to LIBSTDCXX_OF_GLIBC")
    return wrong, glibc


def retag(wheel, platform, folder):
    """Copies the wheel with another platform tag in its name, its metadata and its RECORD of hashes."""
    stem, _, old = wheel.stem.rpartition("-")
    target = folder / f"{stem}-{platform}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename.endswith(".dist-info/WHEEL"):
                data = re.sub(rf"(?m)^(Tag: .*)-{re.escape(old)}$", rf"\1-{platform}", data.decode()).encode()
                digest = "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                changed = [entry.filename, digest, str(len(data))]
            elif entry.filename.endswith(".dist-info/RECORD"):  # RECORD is the last file of a wheel
                rows = [changed if row[0] == changed[0] else row for row in csv.reader(io.StringIO(data.decode()))]
                text = io.StringIO()
                csv.writer(text, lineterminator="\n").writerows(rows)
                data = text.getvalue().encode()
            out.writestr(entry, data)
    return target


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        with zipfile.ZipFile(options.wheel) as archive:
            archive.extractall(root)
        wrong, glibc = inspect(root)
    for line in wrong:
        print(f"{options.wheel.name}: {line}", file=sys.stderr)
    if wrong:
        return 1
    architecture = re.fullmatch(r"(?:many)?linux_(?:2_\d+_)?(\w+)", options.wheel.stem.rpartition("-")[2])
    if not architecture:
        sys.exit(f"{options.wheel.name}: its platform is not Linux, so the manylinux rules say nothing of it")
    platform = f"manylinux_2_{glibc}_{architecture.group(1)}"
    print(f"{options.wheel.name}: complete, {platform}")
    if options.out:
        print(f"wrote {retag(options.wheel, platform, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
