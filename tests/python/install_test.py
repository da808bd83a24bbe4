"""Tests the installed package: importing te_fl imports few modules and does little, the package contains all its files, and `python -m te_fl doctor`
works."""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from importlib import metadata

import te_fl
from te_fl import frameworks

PACKAGE = os.path.dirname(os.path.abspath(te_fl.__file__))
FRAMEWORKS = ("torch", "jax", "jaxlib", "flax", "triton", "numpy", "transformer_engine")
# Modules that may import a framework, because they are made for it. te_fl.torch_* have functions for PyTorch's devices and tensors; te_fl.reference_torch,
# te_fl.reference_xla and te_fl.flaggems are the ops by PyTorch, XLA and FlagGems. The modules listed after them are used by NVIDIA's transformer_engine
# package, which has already imported PyTorch.
FOR_FRAMEWORKS = ("te_fl.pytorch", "te_fl.jax", "te_fl.torch_device", "te_fl.torch_streams", "te_fl.torch_mxfp8", "te_fl.torch_nvfp4", "te_fl.torch_exchange", "te_fl.torch_tensors", "te_fl.torch_metadata", "te_fl.reference_torch", "te_fl.reference_xla",
                  "te_fl.flaggems", "te_fl.plugin_core", "te_fl.transformer_engine_torch", "te_fl.inside.host_", "te_fl.inside.other_", "te_fl.inside.emulation", "te_fl.multi_tensor", "te_fl.remainders",
                  "te_fl.attention_logits", "te_fl.packed_sequences")


def run(code, **environment):
    """Runs code in a fresh interpreter; returns its output."""
    found = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True)
    if found.returncode:
        raise AssertionError(found.stderr)
    return found.stdout


def list_modules(folder):
    """Lists every module of the package by file names, since importing modules would change what the test measures."""
    for where, _, names in os.walk(folder):
        parts = ["te_fl", *os.path.relpath(where, folder).split(os.sep)]
        for name in names:
            if name.endswith(".py") and name != "__main__.py":
                yield ".".join(p for p in (*parts, name[:-3]) if p not in (".", "__init__"))


def doctor(*words, **environment):
    found = subprocess.run([sys.executable, "-m", "te_fl", *words], env={**os.environ, **environment}, capture_output=True, text=True)
    return found.returncode, found.stdout, found.stderr


class Importing(unittest.TestCase):
    def test_nothing_imports_an_unrequested_framework(self):
        modules = [m for m in list_modules(PACKAGE) if not m.startswith(FOR_FRAMEWORKS)]
        self.assertIn("te_fl", modules)
        self.assertIn("te_fl.ops", modules)
        for module in modules:
            brought = run(f"import sys; before = set(sys.modules); import {module}\n"
                          f"print(*({{m.split('.')[0] for m in set(sys.modules) - before}} & {set(FRAMEWORKS)!r}))")
            self.assertEqual(brought.split(), [], f"{module} imports them")

    def test_an_import_starts_no_program_and_writes_no_file(self):
        code = """if True:
            import os, sys
            seen = []
            def watch(event, args):
                if event.startswith(("subprocess.", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.fork", "os.mkdir", "socket.")):
                    seen.append((event, args))
                if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                    seen.append((event, args))
            sys.addaudithook(watch)
            import te_fl
            print(seen)"""
        self.assertEqual(run(code, PYTHONDONTWRITEBYTECODE="1").strip(), "[]")

    def test_an_import_is_small(self):
        # Import time is tested by the modules that `import te_fl` loads: only the package's own modules and their requirements are allowed.
        added = set(run("import sys; before = set(sys.modules); import te_fl\nprint(*(set(sys.modules) - before))").split())
        heavy = {"asyncio", "ctypes", "email", "importlib.metadata", "inspect", "json", "logging", "subprocess", "tempfile", "unittest"}
        self.assertEqual({m for m in added if m in heavy or m.split(".")[0] in heavy}, set())

    def test_a_plugin_is_not_loaded_by_the_import(self):
        maps = run("import te_fl; print(open('/proc/self/maps').read())")
        self.assertIn("libte_fl.so", maps)
        self.assertNotIn("libte_fl_", maps)
        self.assertNotIn("libdnnl", maps)


class NotBuilt(unittest.TestCase):
    def test_a_missing_module_says_what_to_build(self):
        with tempfile.TemporaryDirectory() as folder:
            package = os.path.join(folder, "python", "te_fl")
            os.makedirs(package)
            for name in ("__init__.py", "missing.py", "errors.py"):
                os.symlink(os.path.join(PACKAGE, name), os.path.join(package, name))
            code = "try:\n    import te_fl\nexcept ImportError as error:\n    print(error)"
            for marker, expected in (("CMakeLists.txt", f"pip install {folder}"), ("CMakeCache.txt", f"cmake --build {folder} --target te_fl_python")):
                open(os.path.join(folder, marker), "w").close()
                self.assertIn(expected, run(code, PYTHONPATH=os.path.dirname(package)))


class Installed(unittest.TestCase):
    """Tests of an installed wheel; the build tree has no package metadata."""

    def setUp(self):
        try:
            self.distribution = metadata.distribution("te-fl")
        except metadata.PackageNotFoundError:
            self.skipTest("te_fl is not installed: it is the build tree's")
        if not PACKAGE.startswith(str(self.distribution.locate_file("")).rstrip("/") + "/"):
            self.skipTest(f"te_fl is the build tree's, at {PACKAGE}")
        self.files = {str(f) for f in self.distribution.files}

    def test_one_wheel_for_every_python_and_framework(self):
        self.assertIn("Tag: cp310-abi3-", self.distribution.read_text("WHEEL"))
        self.assertEqual([r for r in self.distribution.requires or [] if "extra ==" not in r], [])
        self.assertEqual(self.distribution.metadata["Requires-Python"], ">=3.10")
        self.assertEqual(self.distribution.version, te_fl.__version__)
        self.assertEqual(te_fl.info()["version"], te_fl.__version__)

    def test_every_file_of_the_package_is_there(self):
        source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python", "te_fl")
        for folder, _, names in os.walk(source):
            for name in names:
                if name.endswith((".py", ".pyi", ".typed")):
                    self.assertIn(os.path.join("te_fl", os.path.relpath(os.path.join(folder, name), source)).replace("/./", "/"), self.files)
        for part in ("_native.abi3.so", "bin/te-fl", "include/te_fl/plugin.h", "include/te_fl/ops/gemm.h", "lib/cmake/te_fl/te_flConfig.cmake",
                     "lib/cmake/te_fl/plugin.map", "docs/adding-a-backend.md", "share/te_fl/conformance/expected_unsupported.txt", "launch.py"):
            self.assertIn("te_fl/" + part, self.files)
        sources = [f for f in self.files if f.endswith((".cpp", ".hpp", ".a")) and not f.startswith("te_fl/include/")]
        self.assertEqual({f.split("te_fl/", 1)[-1] for f in sources},
                         # build-node compiles these sources
                         {f"pytorch/autograd/{name}" for name in ("layer_call.hpp", "node.cpp", "node_objects.hpp", "plain_forward.hpp")})

    def test_a_backend_builds_against_it(self):
        with tempfile.TemporaryDirectory() as folder:
            def te_fl_says(*words):
                found = subprocess.run([sys.executable, "-m", "te_fl", *words], cwd=folder, capture_output=True, text=True)
                self.assertEqual(found.returncode, 0, found.stdout + found.stderr)
                return found.stdout

            te_fl_says("new-backend", "acme", "acme")
            environment = {k: v for k, v in os.environ.items() if k not in ("TE_FL_PREFIX", "CMAKE_PREFIX_PATH")}
            for words in (("-S", "acme", "-B", "build"), ("--build", "build")):
                made = subprocess.run(["cmake", *words], cwd=folder, env=environment, capture_output=True, text=True)
                self.assertEqual(made.returncode, 0, made.stdout + made.stderr)
            with open(os.path.join(folder, "build", "CMakeCache.txt")) as cache:
                self.assertIn(f"TE_FL:FILEPATH={PACKAGE}/bin/te-fl\n", cache.read())
            plugin = os.path.join(folder, "build", "libte_fl_acme.so")
            tally = te_fl_says("conformance", "--plugin", plugin, "--impl", "vendor.acme", "--op", "relu", "--reduced")
            self.assertRegex(tally, "[1-9][0-9]* passed, 0 failed")

    def test_launch_starts_ranks(self):
        rank = "import os; print(os.environ['TE_FL_RANK'], os.environ['TE_FL_WORLD_SIZE'])"
        done = subprocess.run([sys.executable, "-m", "te_fl", "launch", "-n", "2", "--", sys.executable, "-c", rank], capture_output=True, text=True)
        self.assertEqual([done.returncode, sorted(done.stdout.splitlines())], [0, ["[0] 0 2", "[1] 1 2"]], done.stderr)
        self.assertIn("te-fl launch -n 4 -- PROGRAM", subprocess.run([sys.executable, "-m", "te_fl", "--help"], capture_output=True, text=True).stdout)

    def test_minimum_versions_are_those_of_the_extras(self):
        extras = " ".join(r for r in self.distribution.requires)
        for package, least in frameworks.MINIMUM.items():
            self.assertIn(f"{package}>={least}", extras)

    def test_libraries_are_the_packages_own(self):
        # The process must map the wheel's libraries, not those of the build tree or the system that happen to be on this machine.
        maps = run("""if True:
            import numpy, te_fl
            x, d = numpy.ones((64, 64), "f4"), numpy.zeros((64, 64), "f4")
            with te_fl.policy(per_op={"generic_gemm": ["impl:default.cpu"]}):
                te_fl.ops.generic_gemm(a=x, b=x, d=d)  # opens oneDNN, which opens OpenMP
            print(open('/proc/self/maps').read())""")
        mapped = {line.split()[-1] for line in maps.splitlines() if "/" in line}
        ours = {m for m in mapped if re.search(r"/(libte_fl|libhwy|libdnnl|libgomp|_native)", m)}
        for part in ("libte_fl.so", "libdnnl.so", "libgomp.so"):
            self.assertTrue(any(part in m for m in ours), part)
        self.assertEqual({m for m in ours if not os.path.realpath(m).startswith(os.path.realpath(PACKAGE) + "/")}, set())


class Doctor(unittest.TestCase):
    def findings(self, **environment):
        code, out, err = doctor("doctor", "--json", **environment)
        found = json.loads(out)
        for f in found:
            self.assertEqual(set(f), {"level", "what", "disables", "remedy"})
        return code, found

    def one(self, findings, part):
        (found,) = [f for f in findings if part in f["what"]]
        return found

    def old(self, package, version):
        """Returns a search path that contains a package of this version whose import fails."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        os.makedirs(os.path.join(folder.name, f"{package}-{version}.dist-info"))
        with open(os.path.join(folder.name, f"{package}-{version}.dist-info", "METADATA"), "w") as file:
            file.write(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        with open(os.path.join(folder.name, f"{package}.py"), "w") as file:
            file.write("raise SystemExit('the doctor imports no framework')\n")
        return os.pathsep.join(p for p in (folder.name, os.environ.get("PYTHONPATH")) if p)

    def test_nothing_is_broken_here(self):
        code, found = self.findings()
        self.assertEqual((code, [f for f in found if f["level"] == "problem"]), (0, []))
        self.assertEqual(self.one(found, "a 2x2 product on the host")["level"], "ok")
        self.assertIn(te_fl.__version__, self.one(found, f" in {PACKAGE}; ")["what"])
        for plugin in te_fl.info()["plugins"]:
            self.one(found, f"plugin {plugin['name']}: {plugin['state']}")
        self.one(found, "CUDA Toolkit: ")

    def test_the_text_says_the_same(self):
        code, text, _ = doctor("doctor")
        self.assertEqual(code, 0, text)
        self.assertIn("No problems.", text)
        for f in self.findings()[1]:
            self.assertIn(re.sub(r"[\d.]+ (GB/s|GiB)", "", f["what"])[:40], text)

    def test_a_broken_setting_is_a_problem(self):
        code, found = self.findings(TE_FL_PREFER="vendr")
        self.assertEqual(code, 1)
        self.assertTrue([f for f in found if f["level"] == "problem" and "TE_FL_PREFER" in f["what"] and "vendor" in f["what"]])
        code, text, _ = doctor("doctor", TE_FL_PREFER="vendr")
        self.assertEqual(code, 1)
        self.assertIn("There are problems", text)

    def test_a_plugin_that_does_not_load_is_a_problem(self):
        code, found = self.findings(TE_FL_PLUGIN_MODULES="/nowhere/libacme.so")
        self.assertEqual(code, 1)
        self.assertTrue([f for f in found if f["level"] == "problem" and "/nowhere/libacme.so" in f["what"]])

    def test_plugins_in_python_are_reported_as_this_process_has_them(self):
        with tempfile.TemporaryDirectory() as folder:
            for name, body in (("acme_good", "te_fl.OpRegistry.instance().register_impl(te_fl.OpImpl('relu', 'vendor.acme', "
                                "te_fl.BackendImplKind.VENDOR, lambda **a: None, 'acme'))"), ("acme_bad", "raise ValueError('no chip')")):
                with open(os.path.join(folder, f"{name}.py"), "w") as file:
                    file.write(f"import te_fl\n\n\ndef register():\n    {body}\n")
            path = os.pathsep.join(p for p in (folder, os.environ.get("PYTHONPATH")) if p)
            code, found = self.findings(PYTHONPATH=path, TE_FL_PLUGIN_MODULES="acme_good")
            told = self.one(found, "plugin acme_good: ")
            self.assertEqual((code, told["level"]), (0, "ok"), told)
            self.assertIn("1 implementations in Python, " + os.path.join(folder, "acme_good.py"), told["what"])
            code, found = self.findings(PYTHONPATH=path, TE_FL_PLUGIN_MODULES="acme_bad")
            told = self.one(found, "plugin acme_bad: ")
            self.assertEqual((code, told["level"]), (1, "problem"), told)
            self.assertIn("no chip", told["what"])

    def test_an_old_framework_is_refused_by_name_and_version(self):
        for package, name, version, module in (("torch", "PyTorch", "2.4.1+cpu", "te_fl.pytorch"), ("jax", "JAX", "0.9.12", "te_fl.jax")):
            path, least = self.old(package, version), frameworks.MINIMUM[package]
            code, found = self.findings(PYTHONPATH=path)
            told = self.one(found, f"{name} {version} is installed; te_fl needs {least} or newer")
            self.assertEqual((code, told["level"]), (0, "note"))
            self.assertIn(module, told["disables"])
            self.assertIn(f"pip install --upgrade '{package}>={least}'", told["remedy"])

    def test_a_module_for_a_framework_refuses_an_old_one_and_names_a_missing_one(self):
        code = "try: {}\nexcept ImportError as e: print(e.name, e)"
        for package, name, version in (("torch", "PyTorch", "2.4.1+cpu"), ("jax", "JAX", "0.9.12")):
            path, least = self.old(package, version), frameworks.MINIMUM[package]
            require = f"from te_fl import frameworks; frameworks.require({package!r})"
            with open(os.path.join(path.split(os.pathsep)[0], f"{package}.py"), "w") as file:
                file.write(f"__version__ = {version!r}\n")
            text = run(code.format(require), PYTHONPATH=path)
            self.assertIn(f"{package} {name} {version} is installed; te_fl needs {least} or newer", text)
            with open(os.path.join(path.split(os.pathsep)[0], f"{package}.py"), "w") as file:
                file.write(f"raise ModuleNotFoundError('none', name={package!r})\n")
            text = run(code.format(require), PYTHONPATH=path)
            self.assertIn(f"{package} {name} is not installed; te_fl needs {least} or newer (pip install '{package}>={least}')", text)

    def test_te_fl_pytorch_refuses_an_old_pytorch(self):
        path = self.old("torch", "2.4.1")
        with open(os.path.join(path.split(os.pathsep)[0], "torch.py"), "w") as file:
            file.write("__version__ = '2.4.1'\n")
        text = run("try: import te_fl.pytorch\nexcept ImportError as e: print(e)", PYTHONPATH=path)
        self.assertIn("PyTorch 2.4.1 is installed; te_fl needs 2.7 or newer", text)

    def test_versions_are_numbers_and_not_text(self):
        for package, version in (("torch", "2.7.0"), ("torch", "2.11.0"), ("torch", "2.100"), ("torch", "3.0a1"), ("jax", "0.10"), ("jax", "1.0.0rc1")):
            text = run(f"from te_fl import frameworks; print(frameworks.refusal({package!r}))", PYTHONPATH=self.old(package, version))
            self.assertEqual(text.strip(), "None", version)
        for package, version in (("torch", "2.6.9"), ("torch", "2.2"), ("jax", "0.9")):
            text = run(f"from te_fl import frameworks; print(frameworks.refusal({package!r}))", PYTHONPATH=self.old(package, version))
            self.assertIn(version, text)

    def test_nvidias_package_beside_it_is_named(self):
        _, found = self.findings(PYTHONPATH=self.old("transformer_engine", "2.20.2"))
        self.assertEqual(self.one(found, "transformer_engine 2.20.2 is installed too")["level"], "note")

    def test_info_reports_python_too(self):
        code, text, _ = doctor("info", "--json")
        told = json.loads(text)
        self.assertEqual(code, 0)
        self.assertEqual((told["version"], told["python"]["package"]), (te_fl.__version__, PACKAGE))
        code, text, _ = doctor("info")
        self.assertEqual(code, 0)
        self.assertIn(PACKAGE, text)
        self.assertIn("Plugins", text)

    def test_other_commands_are_the_programs(self):
        code, text, _ = doctor("explain", "gelu", "--dtype", "f32")
        self.assertEqual(code, 0)
        self.assertIn("default.cpu", text)
        code, _, error = doctor("expain")
        self.assertEqual(code, 2)
        self.assertIn("did you mean 'explain'", error)


if __name__ == "__main__":
    unittest.main()
