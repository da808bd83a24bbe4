"""Tests plugins written in Python: modules of TE_FL_PLUGIN_MODULES, packages with an entry point, and te-fl check of such a plugin."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest

import numpy  # noqa: F401  (the modules below need it)

import te_fl

ACME = """
import numpy as np
import te_fl

def relu(input, output):
    np.maximum(input, 0, out=output)

def impl(impl_id="vendor.acme", fn=relu, **options):
    return te_fl.OpImpl("relu", impl_id, te_fl.BackendImplKind.VENDOR, fn, "acme", 1000, tensors="numpy", **options)
"""
CALL = """
import numpy as np, te_fl
x, y = np.array([-1, 2], np.float32), np.zeros(2, np.float32)
try: te_fl.ops.relu(input=x, output=y)
except te_fl.Error as error: print("ERROR", error)
print([u["impl_id"] for u in te_fl.usage()])
for p in te_fl.info()["plugins"]:
    if p["origin"] != "built-in" and not p["path"].endswith(".so"): print(p["name"], p["state"], p["origin"], p["reason"], p["ops"], p["version"])
"""
PACKAGE = pathlib.Path(os.path.abspath(te_fl.__file__)).parent
NULL = PACKAGE.parents[1] / "plugins" / "libte_fl_null.so"
TOOL = next((str(p) for p in (PACKAGE.parents[1] / "bin" / "te-fl", PACKAGE / "bin" / "te-fl", shutil.which("te-fl")) if p is not None and os.path.exists(p)), None)


class Modules(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def distribution(self, name, module, entry="acme", version="2.5"):
        """Writes the metadata files that pip writes for an installed package."""
        info = f"{name}-{version}.dist-info"
        self.write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        self.write(f"{info}/entry_points.txt", f"[te_fl.plugin]\n{entry} = {module}\n")

    def environment(self, **variables):
        path = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TE_FL_", "TEFL_"))}
        return {**kept, "PYTHONPATH": path, **variables}

    def run_python(self, code=CALL, **variables):
        found = subprocess.run([sys.executable, "-c", code], env=self.environment(**variables), capture_output=True, text=True, timeout=120)
        self.assertEqual(found.returncode, 0, found.stderr)
        return found

    def test_a_module_is_loaded_by_the_first_op(self):
        self.write("acme.py", ACME + "__version__ = '1.2'\ndef register(registry): registry.register_impl(impl())\n")
        found = self.run_python("import sys, te_fl\nprint('acme' in sys.modules)\n" + CALL, TE_FL_PLUGIN_MODULES="acme")
        self.assertEqual(found.stdout, "False\n['vendor.acme']\nacme active TE_FL_PLUGIN_MODULES  ['relu: vendor.acme'] 1.2\n", found.stderr)

    def test_register_may_take_no_registry(self):
        self.write("acme.py", ACME + "def register(): te_fl.OpRegistry.instance().register_impl(impl())\n")
        self.assertIn("acme active", self.run_python(TE_FL_PLUGIN_MODULES="acme").stdout)

    def test_its_owner_is_the_module(self):
        self.write("acme.py", ACME + "def register(registry): registry.register_impl(impl())\n")
        code = CALL + "print([c['owner'] for c in te_fl.explain('relu', input=x, output=y)['candidates'] if c['chosen']])"
        self.assertIn("['acme']", self.run_python(code, TE_FL_PLUGIN_MODULES="acme").stdout)

    def test_a_broken_module_is_reported_once_and_breaks_nothing(self):
        self.write("broken.py", "import te_fl\nraise OSError('no such chip')\n")
        found = self.run_python(CALL * 2, TE_FL_PLUGIN_MODULES="broken")
        self.assertIn("['default.cpu']", found.stdout)
        self.assertIn("broken failed TE_FL_PLUGIN_MODULES OSError: no such chip", found.stdout)
        self.assertEqual(found.stderr.count("no such chip"), 1, found.stderr)
        for part in ("plugin module broken", "OSError: no such chip", "leave it out of TE_FL_PLUGIN_MODULES"):
            self.assertIn(part, found.stderr)

    def test_strict_insists_on_what_was_named(self):
        self.write("broken.py", "raise OSError('no such chip')\n")
        found = self.run_python(TE_FL_PLUGIN_MODULES="broken", TE_FL_STRICT="1")
        self.assertIn("ERROR FAILED_PRECONDITION", found.stdout)
        self.assertIn("broken: OSError: no such chip (named in TE_FL_PLUGIN_MODULES, and TE_FL_STRICT is set", found.stdout)

    def test_names_that_are_nothing(self):
        found = self.run_python(TE_FL_PLUGIN_MODULES="xyzzy,xyzzy.plover")
        for name in ("xyzzy", "xyzzy.plover"):
            self.assertIn(f"plugin module {name} (TE_FL_PLUGIN_MODULES) was not loaded: there is no module '{name}', and no manifest", found.stderr)

    def test_a_module_that_lacks_what_it_imports_is_there(self):
        self.write("needy.py", "import xyzzy\n")
        found = self.run_python(TE_FL_PLUGIN_MODULES="needy")
        self.assertIn("ModuleNotFoundError: No module named 'xyzzy'", found.stderr)
        self.assertNotIn("no manifest", found.stderr)

    def test_a_module_may_decline(self):
        self.write("acme.py", "def register(registry): raise NotImplementedError('no chip here')\n")
        found = self.run_python(TE_FL_PLUGIN_MODULES="acme", TE_FL_STRICT="1")
        self.assertIn("acme skipped TE_FL_PLUGIN_MODULES no chip here", found.stdout)
        self.assertNotIn("ERROR", found.stdout)

    def test_what_it_registered_before_it_failed_is_taken_out(self):
        self.write("acme.py", ACME + "def register(registry):\n    registry.register_impl(impl())\n    raise ValueError('halfway')\n")
        found = self.run_python(TE_FL_PLUGIN_MODULES="acme")
        self.assertIn("['default.cpu']", found.stdout)
        self.assertIn("ValueError: halfway", found.stdout)

    def test_a_module_without_register(self):
        self.write("acme.py", "x = 1\n")
        self.assertIn("has neither register() nor te_fl_library", self.run_python(TE_FL_PLUGIN_MODULES="acme").stderr)

    def test_ops_may_be_called_while_it_loads(self):
        self.write("acme.py", ACME + "out = np.zeros(2, np.float32)\nte_fl.ops.relu(input=np.ones(2, np.float32), output=out)\n"
                   "def register(registry): registry.register_impl(impl())\n")
        found = self.run_python(TE_FL_PLUGIN_MODULES="acme")
        self.assertIn("acme active", found.stdout)
        self.assertIn("vendor.acme", found.stdout)
        found = self.run_python("import acme\n" + CALL, TE_FL_PLUGIN_MODULES="acme")  # the op that acme calls while being imported would load acme
        self.assertIn("it is being imported still", found.stdout)

    def test_threads_that_come_first_together(self):
        self.write("acme.py", ACME + "import time\ntime.sleep(0.3)\ndef register(registry): registry.register_impl(impl())\n")
        code = """
import threading, numpy as np, te_fl
def work():
    x, y = np.array([-1, 2], np.float32), np.zeros(2, np.float32)
    te_fl.ops.relu(input=x, output=y)
threads = [threading.Thread(target=f) for f in (work, te_fl.info, te_fl.usage, te_fl.policy_text, work)]
for t in threads: t.start()
for t in threads: t.join()
print([(u["impl_id"], u["calls"]) for u in te_fl.usage()])
"""
        self.assertEqual(self.run_python(code, TE_FL_PLUGIN_MODULES="acme").stdout, "[('vendor.acme', 2)]\n")

    def test_packages_are_found_by_their_entry_points(self):
        self.write("acme.py", ACME + "def register(registry): registry.register_impl(impl())\n")
        self.distribution("acme-ops", "acme")
        found = self.run_python()
        self.assertEqual(found.stdout, "['vendor.acme']\nacme active entry point acme = acme of acme-ops 2.5  ['relu: vendor.acme'] 2.5\n",
                         found.stderr)
        twice = self.run_python(TE_FL_PLUGIN_MODULES="acme")  # the module is also loaded only once
        self.assertIn("acme active TE_FL_PLUGIN_MODULES", twice.stdout)
        self.assertEqual(twice.stdout.count("vendor.acme']"), 2)
        for skip in ("acme", "*"):
            self.assertEqual(self.run_python(TE_FL_SKIP_MODULES=skip).stdout, "['default.cpu']\n")

    def test_an_entry_point_may_name_the_function(self):
        self.write("acme.py", ACME + "def enlist(registry): registry.register_impl(impl())\n")
        self.distribution("acme-ops", "acme:enlist")
        self.assertIn("acme active", self.run_python().stdout)

    def test_a_broken_package_says_how_to_silence_it(self):
        self.write("acme.py", "1/0\n")
        self.distribution("acme-ops", "acme")
        found = self.run_python(TE_FL_STRICT="1")  # no setting names the plugin
        self.assertIn("['default.cpu']", found.stdout)
        self.assertIn("ZeroDivisionError: division by zero; to do without it, uninstall the package, or name the module in TE_FL_SKIP_MODULES",
                      found.stderr)

    @unittest.skipUnless(NULL.exists(), "the null plugin is not built")
    def test_a_module_may_bring_a_shared_library(self):
        rows = "print([p['state'] for p in te_fl.info()['plugins'] if p['name'] == 'null'])"
        self.write("path.py", f"te_fl_library = {str(NULL)!r}\n")
        self.write("function.py", f"import pathlib\ndef te_fl_library(): return pathlib.Path({str(NULL)!r})\n")
        for module in ("path", "function"):
            found = self.run_python(CALL + rows, TE_FL_PLUGIN_MODULES=module, TE_FL_PLUGIN_PATH="")
            self.assertIn(f"{module} active", found.stdout)
            self.assertIn("['active']", found.stdout)
        self.write("absent.py", "te_fl_library = '/nowhere/libacme.so'\n")
        found = self.run_python(CALL, TE_FL_PLUGIN_MODULES="absent")
        self.assertIn("absent failed TE_FL_PLUGIN_MODULES te_fl.errors.NotFound", found.stdout)

    def test_load_plugin_takes_a_module(self):
        self.write("acme.py", ACME + "def register(registry): registry.register_impl(impl())\n")
        code = """
import te_fl
print(te_fl.load_plugin("acme"))
for name in ("acme", "xyzzy"):
    try: te_fl.load_plugin(name)
    except te_fl.Error as error: print(type(error).__name__, error)
"""
        lines = self.run_python(code).stdout.splitlines()
        self.assertEqual(lines[0], "acme")
        self.assertTrue(lines[1].startswith("AlreadyExists"), lines)
        self.assertTrue(lines[2].startswith("NotFound") and "there is no module 'xyzzy'" in lines[2], lines)

    @unittest.skipUnless(TOOL and (PACKAGE / "_check_worker.abi3.so").exists(), "te-fl is not here")
    def test_te_fl_check_certifies_a_module(self):
        good = ACME + "def register(registry): registry.register_impl(impl(supported_dtypes=('f32',), devices=('cpu',), deterministic=True))\n"
        self.write("acme.py", good)
        self.write("wrong.py", good.replace("np.maximum(input, 0, out=output)", "np.maximum(input, 1e-3, out=output)"))
        self.write("refuses.py", "def register(registry): raise NotImplementedError('no chip here')\n")

        def check(module, *options):
            return subprocess.run([TOOL, "check", module, "--python", sys.executable, "--jobs", "2", *options], env=self.environment(),
                                  capture_output=True, text=True, timeout=300)
        found = check("acme")
        self.assertEqual(found.returncode, 0, found.stdout + found.stderr)
        self.assertRegex(found.stdout, r"relu +vendor.acme +[1-9][0-9]* +0 ")
        self.assertIn("\ncertified: ", found.stdout)
        found = check("wrong", "--quick")
        self.assertEqual(found.returncode, 1, found.stdout + found.stderr)
        self.assertIn(f"te-fl check wrong --python {sys.executable} --op relu", found.stdout)
        self.assertIn("no chip here", check("refuses").stdout)
        found = check("xyzzy")
        self.assertEqual(found.returncode, 2, found.stdout + found.stderr)
        self.assertIn("there is no module 'xyzzy'", found.stderr)
        self.assertEqual(check("./acme.py").returncode, 2)


if __name__ == "__main__":
    unittest.main()
