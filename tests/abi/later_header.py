#!/usr/bin/env python3
"""Writes plugin.h as a later version could have it: another version number, and new members at the end of every struct that may grow (rule R3),
MINOR times in 2.x and once in 3.0.

usage: later_header.py PLUGIN_H OUT MAJOR MINOR
"""
import pathlib
import re
import sys

STRUCT = re.compile(r"typedef struct (te_fl_\w+) \{\n(.*?)\n\} \1;", re.S)
# te_fl_extension is the first member of other structs, so it cannot get new members at its end.
FIXED = ("te_fl_extension",)


def grown(match, times):
    name, body = match.groups()
    if "uint32_t struct_size" not in body or name in FIXED:
        return match.group(0)
    # te_fl_tensor grows by 16 bytes, as the host reads tensors in units of 16 bytes.
    members = "\n".join(f"  uint64_t later{i} TE_FL_INIT(0);" for i in range(times * (2 if name == "te_fl_tensor" else 1)))
    return f"typedef struct {name} {{\n{body}\n{members}\n}} {name};"


def main():
    source, out, major, minor = sys.argv[1:]
    text = pathlib.Path(source).read_text()
    for name, value in (("MAJOR", major), ("MINOR", minor)):
        text, count = re.subn(rf"(#define TE_FL_ABI_{name}) \d+u", rf"\1 {value}u", text)
        assert count == 1, name
    times = int(minor) if int(major) == 2 else 1
    text, count = STRUCT.subn(lambda match: grown(match, times), text)
    assert count > 20, count
    path = pathlib.Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    main()
