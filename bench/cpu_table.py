#!/usr/bin/env python3
"""Prints the results of bench_cpu (JSON) as a Markdown table."""
import json
import sys


def cell(row, key, form):
    return form % row[key] if key in row else ""


def bound(row):
    """Returns what limits a row: "arithmetic" if its rate in memory is at least three quarters of its rate in cache."""
    if not row.get("in_cache_GB_per_s"):
        return ""
    return "arithmetic" if row["GB_per_s"] >= 0.75 * row["in_cache_GB_per_s"] else "memory"


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: cpu_table.py RESULTS.json")
    with open(sys.argv[1], encoding="utf-8") as file:
        rows = json.load(file)["benchmarks"]
    print("| op | us | GB/s | copy | of copy | in cache | bound | GFLOP/s | of oneDNN | x reference |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        name = row["name"].split("/iterations")[0].replace("/", " ", 1)
        if row.get("error_occurred"):
            print("| %s | not supported: %s | | | | | | | | |" % (name, row["error_message"]))
            continue
        print("| %s | %.1f | %s | %s | %s | %s | %s | %s | %s | %s |" % (
            name, row["best_us"], cell(row, "GB_per_s", "%.1f"), cell(row, "copy_GB_per_s", "%.1f"),
            cell(row, "of_copy", "%.2f"), cell(row, "in_cache_GB_per_s", "%.0f"), bound(row), cell(row, "GFLOP_per_s", "%.0f"),
            cell(row, "of_onednn", "%.2f"), cell(row, "times_reference", "%.0f")))


if __name__ == "__main__":
    main()
