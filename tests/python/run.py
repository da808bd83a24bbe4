"""usage: run.py FILE | FOLDER. Runs the tests of a file, or of the *_test.py of a folder in one process; exits 77, which means skipped, if an
imported library is not installed or a file raises unittest.SkipTest."""

import importlib.util
import pathlib
import sys
import unittest


def find_tests(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # makes objects of the file's classes picklable
    spec.loader.exec_module(module)
    return unittest.defaultTestLoader.loadTestsFromModule(module)


tests = pathlib.Path(sys.argv[1]).resolve()
try:
    if tests.is_dir():
        sys.path[:0] = [str(tests), str(tests.parent)]  # for modules shared by the folder's tests, and by all tests
        suite = unittest.TestSuite(find_tests(path, path.stem) for path in sorted(tests.glob("*_test.py")))
    else:
        suite = find_tests(tests, "tests")
except ModuleNotFoundError as error:
    if error.name.split(".")[0] == "te_fl":
        raise
    print(f"skipped: {error}")
    sys.exit(77)
except unittest.SkipTest as reason:
    print(f"skipped: {reason}")
    sys.exit(77)
result = unittest.TextTestRunner(verbosity=2).run(suite)
sys.exit(not result.wasSuccessful())
