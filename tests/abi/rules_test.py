#!/usr/bin/env python3
"""plugin.h, the table in docs/abi-rules.md, the sources and docs/adding-a-backend.md name the same set of rules.

usage: rules_test.py SOURCE_DIR
"""
import pathlib
import re
import sys
import unittest

SOURCE = pathlib.Path(sys.argv.pop(1))
HEADER = (SOURCE / "include/te_fl/plugin.h").read_text()
TABLE = (SOURCE / "docs/abi-rules.md").read_text()
GUIDE = (SOURCE / "docs/adding-a-backend.md").read_text()


def number(rule):
    return int(rule[1:])


def rules_in(text):
    return set(re.findall(r"\bR\d+\b", text))


class Rules(unittest.TestCase):
    stated = re.findall(r"^ \*  (R\d+) ", HEADER, re.M)
    rows = {row[0]: row for row in ([cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines()
                                    if re.match(r"\| R\d+ \|", line))}

    def test_the_numbers_have_no_gap(self):
        self.assertEqual([number(r) for r in self.stated], list(range(1, len(self.stated) + 1)))
        self.assertGreaterEqual(len(self.stated), 20)

    def test_the_table_has_a_full_row_for_each(self):
        self.assertEqual(list(self.rows), self.stated)
        for rule, row in self.rows.items():
            self.assertEqual(len(row), 5, rule)
            self.assertTrue(all(row), f"{rule} has an empty cell")

    def test_who_enforces_a_rule_exists(self):
        names = {path.stem for path in (SOURCE / "tests").rglob("*.*")} | {path.stem for path in (SOURCE / "bench").rglob("*.*")}
        names |= set(re.findall(r"add_test\(NAME (\w+)", "".join(p.read_text() for p in (SOURCE / "tests").rglob("CMakeLists.txt"))))
        for rule, row in self.rows.items():
            for name in re.findall(r"`(\w+)`", row[4]):
                self.assertIn(name, names, f"{rule}: {row[4]}")

    def test_what_is_quoted_is_stated(self):
        quoted = {}
        for folder in ("core", "policy", "plugins", "registry", "nn", "tools", "backends", "tests", "include", "examples", "docs"):
            for path in (SOURCE / folder).rglob("*"):
                if path.suffix in (".cpp", ".hpp", ".h", ".c", ".cu", ".cuh", ".md", ".py"):
                    for rule in re.findall(r"\brules? (R\d+)\b", path.read_text(errors="replace")):
                        quoted.setdefault(rule, path)
        self.assertGreater(len(quoted), 10)
        for rule, path in quoted.items():
            self.assertIn(rule, self.stated, path)

    def test_the_guide_names_every_rule_that_te_fl_check_enforces(self):
        certificate = GUIDE[GUIDE.index("| check | what is done"):]
        certificate = rules_in(certificate[:certificate.index("\n\n")])
        enforced = {rule for rule, row in self.rows.items() if "te-fl check" in row[4]}
        for path in [*(SOURCE / "tools/te-fl").glob("check*.cpp"), *(SOURCE / "conformance/check").glob("*.cpp")]:
            enforced |= rules_in("".join(re.findall(r'"(?:[^"\\\n]|\\.)*"', path.read_text())))
        self.assertEqual(sorted(enforced, key=number), sorted(certificate, key=number))


if __name__ == "__main__":
    unittest.main()
