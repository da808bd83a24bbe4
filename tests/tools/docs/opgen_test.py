#!/usr/bin/env python3
"""Tests tools/op_spec.py: op ids are never reused, the rules between arguments, and the other errors of a specification."""

import os
import pathlib
import sys
import tempfile
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")
sys.path.insert(0, os.path.join(ROOT, "tools"))
import op_spec  # noqa: E402
import opgen  # noqa: E402

IDS = "# note\n0 first\n1 gone retired\n3 second\n"
OP = """
  - name: {name}
    id: {id}
    summary: S.
    formula: f
    source: s
{more}    args:
      - {{name: x, dtypes: [high], shape: "N", doc: "d"}}
      - {{name: y, role: out, optional: true, dtypes: [high], shape: "N", doc: "d"}}
      - {{name: flag, type: bool, doc: "d"}}
      - {{name: count, type: i64, doc: "d"}}
      - {{name: sizes, type: ints, optional: true, min: 0, max: 9, doc: "d"}}
"""


class Specification(unittest.TestCase):
    def load(self, ops, ids=IDS):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder)
            (path / "ids.txt").write_text(ids)
            text = "".join(OP.format(name=name, id=number, more="".join(f"    {line}\n" for line in more)) for name, number, *more in ops)
            (path / "family.yaml").write_text("family: family\nsummary: Family\nops:" + text)
            return op_spec.load(path)

    def refused(self, why, ops, ids=IDS):
        with self.assertRaises(op_spec.SpecError) as caught:
            self.load(ops, ids)
        self.assertIn(why, str(caught.exception))

    KEPT = [("first", 0), ("second", 3)]

    def test_the_catalogue_is_in_order(self):
        families, _, ids = op_spec.load()
        expected = {op.id: op.name for _, _, ops in families for op in ops}
        self.assertEqual({i: name for i, (name, retired) in ids.issued.items() if not retired}, expected)

    def test_gaps_are_allowed_and_new_ids_are_listed(self):
        _, _, ids = self.load([*self.KEPT, ("later", 9)])
        self.assertEqual(ids.text(), IDS + "9 later\n")

    def test_ids_follow_the_list_whatever_the_order_of_the_ops(self):
        families, _, _ = self.load([("second", 3), ("first", 0)])
        table = opgen.gen_table(families)
        self.assertIn("    0, 3,\n", table)
        self.assertLess(table.index("&k_first,"), table.index("&k_second,"))
        self.assertIn("OpId second{3};", opgen.gen_cpp(families))

    def test_no_id_is_given_twice(self):
        self.refused("id 0 is that of first; the next free one is 4", [*self.KEPT, ("other", 0)])
        self.refused("id 1 was gone's and is retired", [*self.KEPT, ("other", 1)])
        self.refused("id 3 is that of second in ops/ids.txt", [("first", 0), ("renamed", 3)])
        self.refused("id 2 must be greater than all in ops/ids.txt; the next free one is 4", [*self.KEPT, ("other", 2)])

    def test_no_id_changes_or_goes(self):
        self.refused("its id was 3 and is 4 now", [("first", 0), ("second", 4)])
        self.refused("second: has id 3 in ops/ids.txt and no entry", [("first", 0)])
        self.load([("first", 0)], IDS.replace("3 second", "3 second retired"))
        self.load([*self.KEPT, ("gone", 4)])  # a removed op's name may be reused, its id may not

    def test_the_list_itself(self):
        self.refused("appears twice", self.KEPT, IDS + "3 third\n")
        self.refused("must be greater than those before it", self.KEPT, IDS + "2 third\n")
        self.refused("a name has two ids", self.KEPT, IDS + "4 second\n")
        self.refused("is not 'ID NAME'", self.KEPT, IDS + "four second\n")

    def with_lines(self, *lines):
        return [("first", 0, *lines), ("second", 3)]

    def test_an_op_needs_an_id_and_a_known_class(self):
        self.refused("needs an id", [("first", "none"), ("second", 3)])
        self.refused("class 'other' is none of", self.with_lines("class: other"))
        families, _, _ = self.load(self.with_lines("class: collective"))
        self.assertIn("TE_FL_SCHEMA_COLLECTIVE", opgen.gen_table(families))

    def test_rules_resolve_groups(self):
        families, _, _ = self.load(self.with_lines('rules: ["flag excludes x is fp8", "y requires flag or count > 3"]'))
        self.assertEqual(families[0][2][0].rules, ["flag excludes x is f8e4m3|f8e5m2", "y requires flag or count > 3"])

    def test_rules_compare_sums_of_products_and_have_reasons(self):
        rules = ["count requires N multiple_of count (a reason)", "2 * N + count - 1 <= sum(sizes)", "sizes <= sizes", "x holds 1",
                 "y or flag (one of two)", "count fits x"]
        families, _, _ = self.load(self.with_lines(f"rules: {rules}"))
        self.assertEqual(families[0][2][0].rules, rules)

    def test_rules_name_what_is_there(self):
        self.refused("does not begin with an argument's name", self.with_lines("rules: [z requires x]"))
        self.refused("'f33' is none of x's", self.with_lines("rules: [flag requires x is f33]"))
        self.refused("'x' is neither a number, a scalar argument", self.with_lines("rules: [x < 3]"))
        self.refused("'M' is neither a number, a scalar argument", self.with_lines("rules: [M < 3]"))
        self.refused("is no sum of products", self.with_lines("rules: [N / 2 < 3]"))
        self.refused("must be 'NUMBER fits TENSOR'", self.with_lines("rules: [x fits y]"))
        self.refused("must be 'A holds B'", self.with_lines("rules: [x holds flag]"))
        self.refused("must be 'A requires B", self.with_lines("rules: [flag]"))
        self.refused("excludes takes one condition", self.with_lines("rules: [flag excludes x or y]"))

    def test_lists_of_integers(self):
        families, _, _ = self.load(self.KEPT)
        self.assertIn("  const int64_t* sizes TE_FL_INIT(NULL);\n  int64_t sizes_count TE_FL_INIT(0);", opgen.gen_header(*families[0]))
        self.assertIn("TE_FL_ARG_I64_LIST", opgen.gen_table(families))
        self.assertIn("offsetof(te_fl_first_args, sizes_count)", opgen.gen_table(families))
        self.assertIn("sizes: Optional[Sequence[int]] = None", opgen.gen_python(families))


if __name__ == "__main__":
    unittest.main()
