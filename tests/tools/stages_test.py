"""Tests tools/lib/stages.sh and te_fl_unity of tools/lib/build.sh on small tables of stages and folders that the tests write, and that
CONTRIBUTING.md's table lists every stage of tools/test.sh."""
import pathlib
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = """text
| stage | cold | warm | what it does |
|---|---|---|---|
| format | 1 | 1 | clang-format |
| asan-build | 280 | 5 | |
| ctest | 500 | 500 | |

| other | 5 | | |
"""


def shell(program, *arguments):
    return subprocess.run(["bash", "-euc", program, "_", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


class Stages(unittest.TestCase):
    def slow(self, *times, table=TABLE):
        with tempfile.NamedTemporaryFile("w", suffix=".md") as file:
            file.write(table)
            file.flush()
            return shell('. tools/lib/stages.sh; te_fl_slow_stages "$@"', file.name, *times).replace(file.name, "FILE").splitlines()

    def test_what_took_half_as_long_again_is_named(self):
        self.assertEqual(self.slow("asan-build 421", "ctest 750"),
                         ["asan-build took 421 s, 1.5 times the 280 s that FILE has for it on two idle cores with no cache"])
        self.assertEqual(self.slow("asan-build 420", "ctest 20"), [])

    def test_seconds_of_a_short_stage_are_no_warning(self):
        self.assertEqual(self.slow("format 6"), [])
        self.assertEqual(len(self.slow("format 7")), 1)

    def test_a_stage_that_the_table_lacks(self):
        for name in ("other", "fuzz", "stage"):
            self.assertEqual(self.slow(f"{name} 3"), [f"{name} is not in the table of stages in FILE: add what it takes"])

    def test_the_table_of_contributing_has_every_stage(self):
        stages = re.findall(r"^ *(?:\[[^]]*\] \|\| )?stage ([a-z-]+) ", (ROOT / "tools/test.sh").read_text(), re.M)
        self.assertIn("tsan-tests", stages)
        self.assertIn("wheel", stages)
        named = shell('. tools/lib/stages.sh; te_fl_slow_stages CONTRIBUTING.md "$@"', *(f"{stage} 0" for stage in [*stages, "ctest", "total"]))
        self.assertEqual(named, "")


class Unity(unittest.TestCase):
    def test_a_new_folder_is_united_and_another_keeps_its_setting(self):
        with tempfile.TemporaryDirectory() as folder:
            def setting():
                return shell('. tools/lib/build.sh; te_fl_unity "$1"', folder).strip()
            self.assertEqual(setting(), "-DTE_FL_UNITY=ON")
            for cache, expected in (("TE_FL_UNITY:BOOL=ON\n", "ON"), ("TE_FL_UNITY:BOOL=OFF\n", "OFF"), ("CMAKE_BUILD_TYPE:STRING=Release\n", "OFF")):
                pathlib.Path(folder, "CMakeCache.txt").write_text(cache)
                self.assertEqual(setting(), "-DTE_FL_UNITY=" + expected)


if __name__ == "__main__":
    unittest.main()
