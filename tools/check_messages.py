#!/usr/bin/env python3
"""Checks that the sources print every message that docs/messages.md quotes, and that no message of the Python package begins with a status code, which
te_fl.errors adds.

In the first column of its tables, variable parts are written `...`, [..], 'x' in quotes or in CAPITALS; the words between them are searched
for in the string literals of the sources (adjacent literals joined).

usage: check_messages.py [SOURCE_DIR]
"""
import pathlib
import re
import sys

LITERALS = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
FOLDERS = ("core", "policy", "registry", "plugins", "dispatch", "nn", "tools/te-fl", "include/te_fl", "conformance")
PASTED = re.compile(r"""["'](%s): """ % "|".join(
    "INVALID_ARGUMENT UNSUPPORTED NOT_FOUND ALREADY_EXISTS OUT_OF_MEMORY FAILED_PRECONDITION INCOMPATIBLE BUSY TIMEOUT DEVICE_LOST DATA_LOSS INTERNAL "
    "COMM_FAILED".split()))
VARIES = re.compile(r"\.\.\.|\[\.\.\]|'[^']*'|\b[A-Z][A-Z_0-9]*\b|\(warning\)|\(one line per implementation follows\)|\(rule R\d+\)|`")


def literals(source):
    # Adjacent literals are joined into one string; any other token separates strings.
    out, last = [], 0
    for m in LITERALS.finditer(source):
        if out and source[last:m.start()].strip() == "":
            out[-1] += m.group(1)
        else:
            out.append(m.group(1))
        last = m.end()
    return out


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    printed = set()
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.[ch]pp")):
            printed.update(s.replace('\\"', '"') for s in literals(path.read_text()))
    printed = "\0".join(printed)
    wrong = checked = 0
    for number, line in enumerate((root / "docs/messages.md").read_text().splitlines(), 1):
        cells = [c.strip() for c in line.split("|")]
        if not line.startswith("|") or len(cells) < 4 or cells[1] == "message" or set(cells[1]) <= {"-"}:
            continue
        for fragment in VARIES.split(cells[1]):
            fragment = fragment.strip(" ;:,.()\"'")
            if len(fragment) < 4:
                continue
            checked += 1
            if fragment not in printed:
                wrong += 1
                print(f"docs/messages.md:{number}: no source prints '{fragment}'")
    for path in sorted((root / "python/te_fl").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if pasted := PASTED.search(line):
                wrong += 1
                print(f"{path.relative_to(root)}:{number}: the class of te_fl.errors adds '{pasted[1]}' to the text; leave it out")
    if checked < 40:
        print(f"docs/messages.md: only {checked} fragments of messages found: the tables have changed their form")
        wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
