#!/usr/bin/env python3
"""Tests tools/check_comments.py: which comments and names it refuses and which it accepts."""

import os
import sys
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(ROOT, "tools"))
from check_comments import is_fragment, find_problems, find_types  # noqa: E402


class Sentences(unittest.TestCase):
    def test_clauses_without_a_main_verb_are_refused(self):
        for text in ("What a block holds.", "Whether the device is lost.", "Of one stream: the plans.", "The same for 16 bits.", "Why it is refused.",
                     "Which angles each token takes", "That it holds", "Who is inside", "How large the cache is.", "Where row r begins.",
                     "what it is, and more", "What is freed here is the old plan."):
            self.assertTrue(is_fragment(text), text)

    def test_sentences_and_questions_are_left_alone(self):
        for text in ("Frees the old plan.", "True if the device is lost.", "Where no GPU is, nothing runs.", "When it is full, the oldest goes.",
                     "What if both are null? Then nothing is copied.", "Offsets of rows.", "The samest of all", "Of-the-shelf", ""):
            self.assertFalse(is_fragment(text), text)

    def test_a_phrase_behind_code_completes_its_line(self):
        self.assertEqual(find_problems("a.hpp", "int64_t rows;  // of one output\nint n;  // that exist\n")[0], [])
        self.assertEqual([p.line for p in find_problems("a.hpp", "int a;\nint rows;  // what it is\n")[0]], [2])


class Files(unittest.TestCase):
    def lines(self, path, text):
        return [p.line for p in find_problems(path, text)[0]]

    def test_a_block_is_looked_at_by_its_first_line(self):
        self.assertEqual(self.lines("a.cpp", "// Frees all\n// what it holds.\n\n// What it holds.\nint a;  // one\n        // of two\n"), [4])
        self.assertEqual(self.lines("a.cu", "/* What it holds. */\n"), [1])
        self.assertEqual(self.lines("a.cpp", "// Blocks.\nint a;\n// What is next.\nint b;\n"), [3])

    def test_text_in_quotes_is_no_comment(self):
        self.assertEqual(self.lines("a.cpp", 'auto a = "// What said";\nauto b = R"(\n// What given\n)";\n'), [])

    def test_python(self):
        text = '"""What a file holds."""\n\n\n# Whether it runs.\ndef f(said):\n    """Why not."""\n    return "What"\n'
        self.assertEqual(self.lines("a.py", text), [1, 4, 5, 6])
        self.assertEqual(self.lines("a.py", '#!/usr/bin/env python3\n"""Holds all."""\nx = 1  # of two\n'), [])

    def test_names(self):
        self.assertEqual(self.lines("a.cpp", "int given = 0;\nstruct What {};\nint was_given, forgiven, what;\n// nobody said\nvoid f() { x.finish(); }\n"),
                         [1, 2, 5])

    def test_types_that_are_one_in_the_tree(self):
        self.assertEqual(find_types("a.hpp", "struct Call;\nstruct Call {\n};\nclass Decision final : public Base {\n};\nenum class Candidate : int { kA };\n"
                                           "struct CallMemo {};\nvoid f(const struct Call& c) {}\n"),
                         [(2, "Call"), (4, "Decision"), (6, "Candidate")])
        self.assertEqual(find_types("a.py", "class Call:\n    pass\n\n\nclass Caller(Call):\n    pass\n"), [(1, "Call")])


if __name__ == "__main__":
    unittest.main()
