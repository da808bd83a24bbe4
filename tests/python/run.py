"""usage: run.py FILE. Runs the tests of a file; exits 77, which means skipped, if a library that it imports is not installed or the file
raises unittest.SkipTest."""

import importlib.util
import sys
import unittest

spec = importlib.util.spec_from_file_location("tests", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module  # so that objects of its classes can be pickled
try:
    spec.loader.exec_module(module)
except ModuleNotFoundError as error:
    if error.name.split(".")[0] == "te_fl":
        raise
    print(f"skipped: {error}")
    sys.exit(77)
except unittest.SkipTest as reason:
    print(f"skipped: {reason}")
    sys.exit(77)
result = unittest.TextTestRunner(verbosity=2).run(unittest.defaultTestLoader.loadTestsFromModule(module))
sys.exit(not result.wasSuccessful())
