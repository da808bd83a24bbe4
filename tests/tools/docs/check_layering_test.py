#!/usr/bin/env python3
"""Tests tools/check_layering.py: which includes and names it refuses and which it accepts."""

import os
import sys
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")
sys.path.insert(0, os.path.join(ROOT, "tools"))
import check_layering  # noqa: E402
import python_components  # noqa: E402


class Layering(unittest.TestCase):
    def problems(self, path, text):
        return list(check_layering.find_problems(path, text, ["gelu", "layernorm_fwd"], ["cuda", "opencl"]))

    def refused(self, path, target, why=""):
        found = self.problems(path, f'#include "{target}"\n')
        self.assertEqual(len(found), 1, f"{path} includes {target}: {found}")
        self.assertIn(target, found[0])
        self.assertIn(why, found[0])

    def taken(self, path, target):
        self.assertEqual(self.problems(path, f'#include "{target}"\n'), [])

    def test_vendors_and_packages_belong_in_manifests(self):
        manifests = [{"name": "chip", "vendor": "maker", "vendor_aliases": ["mk"],
                      "packages": [{"soname": "libchiprt.so.2", "apt": "chip-rt or chiprt4 (both of one version)", "pypi": "makert"}]},
                     {"packages": [{"soname": "libfab.so", "note": "it is part of Fab's toolkit"}]}]
        words = check_layering.manifest_words(manifests)
        self.assertEqual(words, {"chip", "maker", "mk", "libchiprt.so", "chip-rt", "chiprt4", "makert", "libfab.so", "fab"})

        def found(path, text):
            return list(check_layering.find_problems(path, text, ["gelu"], ["chip"], words))

        for literal in "maker", "Maker", "mk", "of chip", "libchiprt.so.2", "install chip-rt", "install makert", "FAB's":
            for component in "policy", "plugins", "registry", "dispatch", "core/base":
                self.assertEqual(len(found(component + "/x.cpp", f'f("{literal}");\n')), 1, literal)
        for text in "// maker\n", 'f(1 ? "makers" : "chip:0");\n', "/* mk */ f('\"');\n":
            self.assertEqual(found("policy/x.cpp", text), [], text)
        self.assertEqual(found("backends/chip/x.cpp", 'f("maker");\n'), [])

    def test_the_words_of_the_shipped_manifests(self):
        words = check_layering.manifest_words(check_layering.shipped_manifests())
        self.assertLessEqual({"nvidia", "cuda", "opencl", "libcudnn.so", "libnccl2", "hipblas", "libascendcl.so", "huawei"}, words)
        for path, allowed in check_layering.ALLOWED_WORDS.items():  # every exception in ALLOWED_WORDS must still be needed
            with open(os.path.join(ROOT, path)) as file:
                found = "\n".join(check_layering.words_known("x", file.read(), words)).lower()
            for word in allowed:
                self.assertIn(f"manifest: {word} in", found, path)

    def test_the_binding_has_mutexes_that_forks_know(self):
        for text in ("std::mutex a;", "std::shared_mutex a;", "std::recursive_mutex a;", "std::timed_mutex a;", "std::condition_variable a;", "std::once_flag a;"):
            found = self.problems("python/src/torch/layer.cpp", text)
            self.assertEqual(len(found), 1, text)
            self.assertIn("python/src/py/mutex.hpp", found[0])
            for path in "python/src/py/mutex.hpp", "core/base/lock_level.hpp":
                self.assertEqual(self.problems(path, text), [])
        self.assertEqual(self.problems("python/src/torch/layer.cpp", "#include <mutex>\nMutex a{AtFork::kTaken};\nconst std::lock_guard lock(a);"), [])

    def test_components_include_what_is_below(self):
        self.taken("core/tensor/tensor.cpp", "core/device/allocations.hpp")
        self.taken("plugins/activate.cpp", "registry/registry_impl.hpp")
        self.taken("nn/fp8/autocast.cpp", "dispatch/call.hpp")
        self.taken("dispatch/watch/verify.cpp", "dispatch/staging/staging_plan.hpp")

    def test_no_component_includes_what_is_above(self):
        self.refused("core/base/log.cpp", "core/device/device_list.hpp", "core/base may include only")
        self.refused("core/device/allocations.cpp", "core/tensor/tensor_access.hpp")
        self.refused("registry/op_registry.cpp", "plugins/activate.hpp")
        self.refused("registry/op_registry.cpp", "dispatch/call.hpp")
        self.refused("plugins/plugins.cpp", "dispatch/manager_impl.hpp")
        self.refused("dispatch/run.cpp", "nn/fp8/autocast.hpp")
        self.refused("policy/select.cpp", "backends/cpu/gemm.hpp")
        self.refused("nn/modules/linear.cpp", "tests/support/expect.hpp")
        self.refused("nn/base/tensor_ops.cpp", "te_fl/nn/autograd/parameter.hpp", "nn/base may include only")
        self.refused("include/te_fl/nn/autograd/tape.hpp", "te_fl/nn/modules/module.hpp", "nn/autograd may include only")

    def test_a_public_header_is_an_arrow_to_its_component(self):
        self.taken("plugins/activate.cpp", "te_fl/op_registry.hpp")
        self.refused("plugins/plugins.cpp", "te_fl/op_manager.hpp", "plugins may include only")
        self.refused("core/device/allocations.cpp", "te_fl/tensor.hpp")
        self.refused("nn/modules/linear.cpp", "te_fl/te_fl.hpp")
        self.refused("include/te_fl/status.hpp", "te_fl/device.hpp")
        self.refused("include/te_fl/policy.hpp", "policy/select.hpp", "public headers only")
        self.taken("include/te_fl/te_fl.hpp", "te_fl/op_manager.hpp")

    def test_a_public_header_without_a_component_is_refused(self):
        self.refused("examples/custom_op.cpp", "te_fl/unheard_of.hpp", "PUBLIC")

    def test_every_public_header_has_a_component(self):
        folder = os.path.join(ROOT, "include")
        for where, _, names in os.walk(folder):
            for name in names:
                path = os.path.relpath(os.path.join(where, name), folder)
                self.assertTrue(check_layering.find_component(path), path)

    def test_units_form_no_ring(self):
        texts = {"nn/fp8/a.cpp": '#include "nn/fp8/b.hpp"\n', "include/te_fl/nn/fp8/a.hpp": "", "nn/fp8/b.hpp": '#include "nn/base/c.hpp"\n'}
        self.assertEqual(check_layering.rings(texts), [])
        texts["nn/fp8/b.cpp"] = '#include "te_fl/nn/fp8/a.hpp"\n'  # a header and its source count as one unit
        self.assertEqual(check_layering.rings(texts), [["nn/fp8/a", "nn/fp8/b"]])

    def test_dispatch_reaches_its_interceptors_by_their_doors(self):
        self.taken("dispatch/run.cpp", "dispatch/watch/watch.hpp")
        self.refused("dispatch/run.cpp", "dispatch/watch/verify.hpp")
        self.taken("dispatch/attempt.cpp", "dispatch/staging/staged_call.hpp")
        self.refused("dispatch/run.cpp", "dispatch/staging/staging_plan.hpp")
        self.refused("dispatch/staging/staged_call.cpp", "dispatch/watch/watch.hpp")

    def test_a_backend_sees_its_folder_and_the_abi(self):
        self.taken("backends/reference/plugin.cpp", "te_fl/backend.hpp")
        self.taken("backends/reference/plugin.cpp", "te_fl/ops/gemm.h")
        self.refused("backends/reference/plugin.cpp", "te_fl/op_manager.hpp", "a backend may include only")
        self.refused("backends/reference/plugin.cpp", "core/base/text.hpp")
        self.assertEqual(len(self.problems("backends/cpu/gemm.cpp", "#include <cuda_runtime.h>\n")), 1)
        self.assertEqual(self.problems("backends/cuda/gemm.cpp", "#include <cuda_runtime.h>\n"), [])

    def test_the_certificate_covers_the_public_interface(self):
        self.taken("conformance/cases/gemm.cpp", "te_fl/te_fl.hpp")
        self.taken("conformance/cases/gemm.cpp", "bench/cases/case.hpp")
        self.taken("tools/te-fl/check.cpp", "conformance/check/check.hpp")
        self.taken("python/src/plugins/check.cpp", "conformance/check/check.hpp")
        self.refused("conformance/check/worker.cpp", "plugins/preflight.hpp", "the certificate may include only")
        self.refused("conformance/run.cpp", "tests/support/expect.hpp", "the certificate may include only")
        self.refused("conformance/check/worker.cpp", "tools/te-fl/commands.hpp", "the certificate may include only")
        self.refused("nn/modules/linear.cpp", "conformance/compare.hpp", "nn/modules may include only")
        self.refused("backends/cpu/gemm.cpp", "conformance/compare.hpp", "a backend may include only")

    def test_the_package_includes_no_program(self):
        self.refused("python/src/plugins/check.cpp", "tools/te-fl/commands.hpp", "the package may include nothing")

    def test_ops_and_plugins_have_no_names_below_nn(self):
        for text in ('find("gelu")', "op::layernorm_fwd", "te_fl_gelu_args a;", 'get("TE_FL_CUDA_GEMM_FILE")',
                     '"libte_fl_opencl.so"', '"cuda.json"', "// see backends/cuda"):
            self.assertEqual(len(self.problems("dispatch/run.cpp", text)), 1, text)
            self.assertEqual(self.problems("nn/modules/linear.cpp", text), [], text)
        for text in ('get("TE_FL_SKIP_CUDA")', '"a gelu that is written"', '"policy.json"', "TE_FL_DEVICE_CUDA"):
            self.assertEqual(self.problems("plugins/discovery.cpp", text), [], text)


class Python(unittest.TestCase):
    def problems(self, allowed=None, **texts):
        return list(python_components.module_problems({name.replace("__", "."): text for name, text in texts.items()}, allowed or {}))

    def refused(self, part, **texts):
        found = self.problems(**texts)
        self.assertEqual(len(found), 1, found)
        self.assertIn(part, found[0])

    LOW = {"te_fl__pytorch__runtime__device": "import torch\n"}

    def test_a_component_imports_what_is_below(self):
        self.assertEqual(self.problems(te_fl__pytorch__fp8__scopes="from te_fl.pytorch.runtime.device import default_device\n", **self.LOW), [])
        self.assertEqual(self.problems(te_fl__pytorch__fp8__scopes="from te_fl.pytorch.runtime import device\nfrom te_fl import _native\n", **self.LOW), [])

    def test_no_component_imports_what_is_above(self):
        self.refused("pytorch/runtime imports te_fl.pytorch.modules.linear of pytorch/modules", te_fl__pytorch__modules__linear="",
                     te_fl__pytorch__runtime__device="from te_fl.pytorch.modules.linear import Linear\n")
        self.refused("which is above it", te_fl="", te_fl__pytorch__fp8__scopes="import te_fl\n")
        self.refused("there is no te_fl.pytorch.fp8.gone", te_fl__pytorch__modules__linear="import te_fl.pytorch.fp8.gone\n")

    def test_modules_form_no_ring(self):
        self.refused("te_fl.ops > te_fl.policy > te_fl.ops", te_fl__ops="from te_fl import policy\n", te_fl__policy="from te_fl.ops import call\n")

    def test_a_function_imports_what_is_named_with_the_reason(self):
        code = "def late():\n    import jax\n    from te_fl.pytorch.runtime import device\n"
        found = self.problems(te_fl__pytorch__fp8__scopes=code, **self.LOW)
        self.assertEqual(["jax" in found[0], "runtime.device" in found[1], len(found)], [True, True, 2])
        allowed = {("te_fl.pytorch.fp8.scopes", "jax"): "why", ("te_fl.pytorch.fp8.scopes", "te_fl.pytorch.runtime.device"): "why"}
        self.assertEqual(self.problems(allowed, te_fl__pytorch__fp8__scopes=code, **self.LOW), [])
        self.assertIn("does not import it", self.problems(allowed, **self.LOW)[0])
        self.refused("no check can see", te_fl__ops="from importlib import import_module\nfound = import_module('te_fl.pytorch')\n")

    def test_what_only_type_checkers_read_is_no_arrow(self):
        self.assertEqual(self.problems(te_fl__pytorch__modules__linear="", te_fl__pytorch__runtime__device=(
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from te_fl.pytorch.modules.linear import Linear\n")), [])

    def test_the_sources_of_the_binding_have_components_too(self):
        found = list(python_components.source_problems({"py/errors.hpp": "", "torch/layer.cpp": '#include "py/errors.hpp"\n', "module.cpp": '#include "torch/layer.cpp"\n'}))
        self.assertEqual(found, [])
        found = list(python_components.source_problems({"ops/call.hpp": "", "py/errors.cpp": '#include "ops/call.hpp"\n'}))
        self.assertIn("py may include only py", found[0])
        found = list(python_components.source_problems({"py/a.hpp": '#include "py/b.hpp"\n', "py/a.cpp": "", "py/b.hpp": "", "py/b.cpp": '#include "py/a.hpp"\n'}))
        self.assertIn("py/a > py/b > py/a", found[0])


if __name__ == "__main__":
    unittest.main()
