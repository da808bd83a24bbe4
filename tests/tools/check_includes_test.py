"""Tests tools/check_includes.py on small trees: which includes it reports and which it accepts."""
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import check_includes  # noqa: E402

HEADER = """#pragma once
#include <vector>
namespace te_fl {
struct Table { std::vector<int> rows; int width() const; };
enum class Kind { kNone, kSome };
using Rows = std::vector<int>;
int count_rows(const Table& table);
}
"""
USER = '#include "core/table.hpp"\nnamespace te_fl {\nint other(const Table& t) { return count_rows(t); }\n}\n'


def findings(**files):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = pathlib.Path(folder, name.replace("__", "/").replace("_cpp", ".cpp").replace("_hpp", ".hpp"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return check_includes.findings(folder)


class CheckIncludes(unittest.TestCase):
    def found(self, text, *parts):
        found = findings(core__table_hpp=HEADER, core__user_cpp=USER, core__one_cpp=text)
        self.assertEqual(len(found), 1, found)
        self.assertIn("core/one.cpp:", found[0])
        for part in parts:
            self.assertIn(part, found[0])

    def clean(self, text):
        self.assertEqual(findings(core__table_hpp=HEADER, core__user_cpp=USER, core__one_cpp=text), [])

    def test_a_type_without_its_header(self):
        self.found("namespace te_fl {\nint rows(const Table& t);\n}\n", "2: Table", "core/table.hpp")
        self.found("te_fl::Kind kind();\n", "Kind", "core/table.hpp")
        self.found("namespace te_fl {\nRows rows();\n}\n", "Rows")

    def test_a_function_without_its_header(self):
        self.found("namespace te_fl {\nint f() { return count_rows({}); }\n}\n", "count_rows")

    def test_a_name_of_the_standard_library(self):
        self.found("std::string name();\n", "std::string", "include <string>")
        self.found("#include <vector>\nint f(std::vector<int>& v) { return std::max(v[0], v[1]); }\n", "std::max", "<algorithm>")
        self.found("auto now() { return std::chrono::steady_clock::now(); }\n", "std::chrono::steady_clock", "<chrono>")
        self.found("int64_t f();\n", "fixed-width", "<cstdint>")

    def test_a_constant_and_a_function_of_the_system(self):
        table = HEADER.replace("using Rows", "constexpr int kMostRows = 8;\nusing Rows")
        found = findings(core__table_hpp=table, core__user_cpp=USER, core__one_cpp="int f() { return te_fl::kMostRows; }\n")
        self.assertEqual(len(found), 1, found)
        self.assertIn("kMostRows", found[0])
        self.found("int f() { return ::getpid(); }\n", "getpid", "<unistd.h>")
        self.found("char* f(const char* n) { return abi::__cxa_demangle(n, nullptr, nullptr, nullptr); }\n", "<cxxabi.h>")
        self.clean("struct Own { static int open(); };\nint Own::open() { return 1; }\n")

    def test_a_name_of_a_header_that_mentions_it_in_a_call_alone(self):
        caller = '#pragma once\n#include "core/table.hpp"\nnamespace te_fl {\ninline int twice(const Table& t) { return 2 * count_rows(t); }\n}\n'
        text = '#include "core/caller.hpp"\nnamespace te_fl {\nint f() { return twice({}); }\n}\n'
        self.assertEqual(findings(core__table_hpp=HEADER, core__caller_hpp=caller, core__user_cpp=USER, core__one_cpp=text), [])

    def test_a_header_is_held_to_it_too(self):
        found = findings(core__table_hpp=HEADER.replace("#include <vector>\n", ""), core__user_cpp="#include <vector>\n" + USER)
        self.assertEqual(len(found), 1, found)
        self.assertIn("core/table.hpp:", found[0])

    def test_what_others_include_counts(self):
        self.clean(USER + "te_fl::Rows rows(std::vector<int> v);\n")

    def test_members_parameters_and_forward_declarations(self):
        self.clean("struct Table;\nint f(const Table& t);\n")
        self.clean("struct Own { int count_rows(int); int g() { return count_rows(1); } };\n")
        self.clean("struct Own { int width; };\nint f(Own o) { return o.count_rows(); }\n")
        self.clean("template <class Table>\nint f(const Table& t);\n")

    def test_comments_and_text(self):
        self.clean('// A Table has count_rows(t) and std::string.\nconst char* text() { return "std::string Table"; }\n')

    def test_other_folders_cannot_leak(self):
        self.assertEqual(findings(core__table_hpp=HEADER, core__user_cpp=USER, tools__one_cpp="struct Options { int Table; };\n"), [])

    def test_every_name_of_the_table_is_known_once_as_a_name(self):
        for header, names in check_includes.STANDARD.items():
            self.assertEqual(len(names.split()), len(set(names.split())), header)


if __name__ == "__main__":
    unittest.main()
