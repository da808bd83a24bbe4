"""Tests te_fl.ops on NumPy arrays: values, errors, policies, quantised tensors, threads."""

import ctypes
import math
import os
import pickle
import subprocess
import sys
import threading
import unittest

import numpy as np

import te_fl


def erf_free_gelu(x):
    """Computes the tanh GELU formula of ops/activation.yaml in double precision."""
    x = x.astype(np.float64)
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class E4M3:
    """Wraps a NumPy array of bytes as FP8 codes, for which NumPy has no dtype."""

    def __init__(self, codes):
        self.codes, self.shape = codes, codes.shape

    def __dlpack__(self):
        capsule = self.codes.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # In DLTensor data, device and rank take 20 bytes and are followed by the dtype's code; 10 is kDLFloat8_e4m3fn.
        ctypes.c_uint8.from_address(pointer(capsule, b"dltensor") + 20).value = 10
        return capsule


class Elsewhere:
    """An array that claims to be on a GPU."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __dlpack__(self):
        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = 2  # kDLCUDA; device_type lies after the data pointer
        return capsule


class Calls(unittest.TestCase):
    def setUp(self):
        self.x = np.random.default_rng(1).standard_normal((5, 7)).astype(np.float32)
        self.y = np.zeros_like(self.x)

    def test_an_op_writes_its_output(self):
        self.assertIsNone(te_fl.ops.gelu(input=self.x, output=self.y))
        np.testing.assert_allclose(self.y, erf_free_gelu(self.x), atol=1e-6)

    def test_defaults_are_those_of_the_specification(self):
        # The defaults are 1 for generic_gemm's alpha and 1e-5 for layernorm_fwd's epsilon.
        d = np.zeros((5, 5), np.float32)
        te_fl.ops.generic_gemm(a=self.x, b=self.x, d=d, trans_b=True)
        np.testing.assert_allclose(d, self.x.astype(np.float64) @ self.x.astype(np.float64).T, atol=1e-5)
        gamma, z = np.ones(7, np.float32), np.zeros_like(self.x)
        mu, rsigma = np.zeros(5, np.float32), np.zeros(5, np.float32)
        constant = np.full((5, 7), 3, np.float32)
        te_fl.ops.layernorm_fwd(x=constant, gamma=gamma, z=z, mu=mu, rsigma=rsigma)
        np.testing.assert_allclose(rsigma, 1 / math.sqrt(1e-5), rtol=1e-6)

    def test_views_are_honoured(self):
        wide = np.zeros((5, 14), np.float32)
        te_fl.ops.strided_copy(input=self.x, output=wide[:, ::2])
        np.testing.assert_array_equal(wide[:, ::2], self.x)
        self.assertFalse(wide[:, 1::2].any())

    def test_lists_of_tensors(self):
        lists = [[np.ones(n, np.float32) for n in (3, 5)] for _ in range(2)]
        te_fl.ops.multi_tensor_scale(inputs=lists[0], outputs=lists[1], noop_flag=np.zeros(1, np.int32), scale=2.5)
        for t in lists[1]:
            np.testing.assert_array_equal(t, 2.5)

    def test_random_numbers_follow_seed_and_offset(self):
        ones, results = np.ones((64, 64), np.float32), []
        for seed, offset in ((1, 0), (1, 0), (2, 0), (1, 4096)):
            out, mask = np.zeros_like(ones), np.zeros(ones.size // 8, np.uint8)
            te_fl.ops.dropout_fwd(input=ones, output=out, mask=mask, p=0.5, seed=seed, offset=offset)
            results.append(out.tobytes())
        self.assertEqual(results[0], results[1])
        self.assertEqual(len(set(results)), 3)

    def test_random_numbers_from_memory(self):
        ones, results = np.ones((64, 64), np.float32), []
        for random in ({"seed": 3, "offset": 8192}, {"seed": np.array([3, 8192])}, {"seed": np.array([3, 0], np.uint64), "offset": 8192}):
            out, mask = np.zeros_like(ones), np.zeros(ones.size // 8, np.uint8)
            te_fl.ops.dropout_fwd(input=ones, output=out, mask=mask, p=0.5, **random)
            results.append(out.tobytes())
        self.assertEqual(len(set(results)), 1)
        for wrong in (np.zeros(3, np.int64), np.zeros(2, np.int32), np.zeros(4, np.int64)[::2], np.zeros((1, 2), np.int64)):
            with self.assertRaisesRegex(ValueError, r"'seed' is an int, or a contiguous int64 tensor \[2\] of seed and offset"):
                te_fl.ops.dropout_fwd(input=ones, output=out, mask=mask, p=0.5, seed=wrong)

    def test_quantised_outputs(self):
        x = np.array([[0.5, 1, -2, 448, 1000, 0]], np.float32)
        codes, columns = np.zeros((1, 6), np.uint8), np.zeros((6, 1), np.uint8)
        scale_inv, amax = np.zeros(1, np.float32), np.zeros(1, np.float32)
        q = te_fl.Quantized(E4M3(codes), columnwise_data=E4M3(columns), scale=np.full(1, 1, np.float32), scale_inv=scale_inv, amax=amax)
        te_fl.ops.quantize(input=x, output=q)
        # E4M3 codes: sign, four bits of exponent with bias 7, three bits of mantissa; 1000 saturates at 448.
        self.assertEqual(list(codes[0]), [0x30, 0x38, 0xC0, 0x7E, 0x7E, 0x00])
        self.assertEqual(columns.tobytes(), codes.tobytes())
        self.assertEqual((amax[0], scale_inv[0]), (1000, 1))

    def test_parts_on_two_devices_are_refused(self):
        x, codes, one = np.ones((1, 6), np.float32), np.full((1, 6), 9, np.uint8), np.ones(1, np.float32)
        for far in ("scale", "scale_inv", "amax", "columnwise_data", "data"):
            parts = dict(data=E4M3(codes), columnwise_data=E4M3(codes.reshape(6, 1)), scale=one, scale_inv=one, amax=one)
            parts[far] = Elsewhere(one if far in ("scale", "scale_inv", "amax") else codes if far == "data" else codes.reshape(6, 1))
            with self.assertRaisesRegex(te_fl.errors.InvalidArgument, "lies on another device than the other parts"):
                te_fl.ops.quantize(input=x, output=te_fl.Quantized(**parts))
        self.assertTrue((codes == 9).all())

    def test_calls_of_threads(self):
        failures = []

        def work(seed):
            x = np.random.default_rng(seed).standard_normal((33, 17)).astype(np.float32)
            y, expected = np.zeros_like(x), erf_free_gelu(x)
            for _ in range(200):
                te_fl.ops.gelu(input=x, output=y)
                if np.abs(y - expected).max() > 1e-6:
                    failures.append(seed)
        threads = [threading.Thread(target=work, args=(s,)) for s in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(failures, [])

    def test_a_forked_child_computes(self):
        te_fl.ops.gelu(input=self.x, output=self.y)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            other = np.zeros_like(self.x)
            te_fl.ops.gelu(input=self.x, output=other)
            os.write(write, b"1" if np.array_equal(other, self.y) else b"0")
            os._exit(0)
        os.waitpid(pid, 0)
        self.assertEqual(os.read(read, 1), b"1")


class Errors(unittest.TestCase):
    x = np.ones((2, 3), np.float32)

    def refused(self, kind, part, f, *args, **kwargs):
        with self.assertRaises(kind) as caught:
            f(*args, **kwargs)
        self.assertIn(part, str(caught.exception))

    def test_mistakes_of_calls_name_what_is_wrong(self):
        gelu, x = te_fl.ops.gelu, self.x
        self.refused(TypeError, "keyword arguments only", gelu, x, x)
        self.refused(TypeError, "no argument 'inptu'; it takes input, output", gelu, inptu=x)
        self.refused(te_fl.errors.InvalidArgument, "argument 'output' is missing", gelu, input=x)
        self.refused(te_fl.errors.InvalidArgument, "must be [2, 3]", gelu, input=x, output=np.ones(3, np.float32))
        self.refused(te_fl.errors.InvalidArgument, "dtype", gelu, input=x, output=np.ones((2, 3), np.int32))
        self.refused(TypeError, "does not support DLPack", gelu, input=3, output=x)
        self.refused(TypeError, "not a number", te_fl.ops.generic_gemm, a=x, b=x, d=x, alpha="1")
        self.refused(ValueError, "one of sbhd", te_fl.ops.fused_attn_fwd, q=x, k=x, v=x, o=x, layout="bshe")
        self.refused(ValueError, "does not fit in 32 bits", te_fl.ops.fused_attn_fwd, q=x, k=x, v=x, o=x, layout=1 << 40)

    def test_memory_that_may_not_be_written(self):
        fixed = np.ones((2, 3), np.float32)
        fixed.flags.writeable = False
        before = fixed.copy()
        with self.assertRaises((ValueError, BufferError)):
            te_fl.ops.gelu(input=self.x, output=fixed)
        np.testing.assert_array_equal(fixed, before)

    def test_misspelt_names(self):
        self.refused(AttributeError, "did you mean 'gelu'", lambda: te_fl.ops.gelo)
        self.refused(te_fl.errors.NotFound, "did you mean 'gelu'", te_fl.explain, "gelo")
        self.refused(te_fl.errors.InvalidArgument, "did you mean 'vendor'", te_fl.policy, prefer="vendr")
        self.refused(te_fl.errors.InvalidArgument, "did you mean 'gelu'", te_fl.policy, per_op={"gelo": "vendor"})
        self.refused(ValueError, "it is one of f64", te_fl.explain, "gelu", dtypes=["bf17"])
        self.refused(te_fl.errors.NotFound, "/nowhere.so", te_fl.load_plugin, "/nowhere.so")

    def test_each_error_begins_with_its_code_once_wherever_it_is_raised(self):
        def raised(f, *args, **kwargs):
            try:
                f(*args, **kwargs)
            except te_fl.Error as error:
                return error

        def refusing(**arguments):
            raise te_fl.errors.Unsupported("not today")

        registry = te_fl.OpRegistry()
        registry.register(te_fl.OpImpl("refused_op", "vendor.refusing", te_fl.BackendImplKind.VENDOR, refusing, vendor="acme"))
        for error in (raised(te_fl.ops.gelu, input=self.x), raised(te_fl.explain, "gelu", dtypes=["bf17"]), raised(te_fl.Quantized),
                      raised(te_fl.explain, "gelo"), raised(te_fl.OpManager(registry).call, "refused_op"),
                      *(kind("the text") for kind in te_fl.errors.BY_CODE.values())):
            for one in (error, pickle.loads(pickle.dumps(error))):
                with self.subTest(type(one)):
                    self.assertTrue(str(one).startswith(f"{type(one).code}: "), one)
                    self.assertEqual(sum(str(one).count(f"{code}: ") for code in te_fl.errors.BY_CODE), 1, one)

    def test_an_invalid_environment_fails_calls_and_not_the_import(self):
        code = "import numpy, te_fl\ntry: te_fl.ops.gelu(input=numpy.ones(3, 'f4'), output=numpy.ones(3, 'f4'))\nexcept te_fl.Error as e: print(e)"
        found = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TE_FL_PREFER": "vendr"}, capture_output=True, text=True)
        self.assertIn("TE_FL_PREFER", found.stdout, found.stderr)


class Choosing(unittest.TestCase):
    x = np.ones((2, 3), np.float32)

    def served(self):
        te_fl.reset_usage()
        te_fl.ops.gelu(input=self.x, output=np.zeros_like(self.x))
        return [u["impl_id"] for u in te_fl.usage() if u["op"] == "gelu"]

    def test_scopes_nest_and_end(self):
        outside = self.served()
        with te_fl.policy(per_op={"gelu": ["reference"]}):
            self.assertEqual(self.served(), ["reference.host"])
            with te_fl.policy(per_op={"gelu": ["impl:default.cpu"]}):
                self.assertEqual(self.served(), ["default.cpu"])
            self.assertEqual(self.served(), ["reference.host"])
        self.assertEqual(self.served(), outside)

    def test_a_scope_is_its_threads(self):
        seen = []
        with te_fl.policy(prefer="reference"):
            thread = threading.Thread(target=lambda: seen.append(te_fl.policy_text()))
            thread.start()
            thread.join()
            self.assertIn("reference", te_fl.policy_text())
        self.assertNotIn("reference", seen[0])

    def test_scopes_that_end_out_of_order_are_refused(self):
        outer, inner = te_fl.policy(prefer="reference"), te_fl.policy(strict=True)
        outer.__enter__()
        inner.__enter__()
        with self.assertRaisesRegex(te_fl.errors.FailedPrecondition, "innermost"):
            outer.__exit__()
        inner.__exit__()
        self.assertIn("reference", te_fl.policy_text())  # the scope whose exit was refused is still active, and can be ended
        outer.__exit__()
        self.assertNotIn("reference", te_fl.policy_text())

    def test_explain_has_reasons_and_runs_nothing(self):
        out = np.zeros_like(self.x)
        decision = te_fl.explain("gelu", input=self.x, output=out)
        self.assertFalse(out.any())
        self.assertEqual(decision["impl_id"], [c["impl_id"] for c in decision["candidates"] if c["chosen"]][0])
        self.assertTrue(all(c["reason"] for c in decision["candidates"]))
        described = te_fl.explain("gelu", device="cpu", dtypes=["f32"])
        self.assertEqual(described["impl_id"], decision["impl_id"])

    def test_explain_names_what_it_does_not_know(self):
        for dtypes, kind, text in (("bf16", TypeError, r"such as \['bf16'\]"), (["bf61"], ValueError, "did you mean 'bf16'")):
            with self.assertRaisesRegex(kind, text):
                te_fl.explain("gelu", dtypes=dtypes)

    def test_info_and_schema(self):
        self.assertIn("cpu", te_fl.info()["devices"])
        self.assertEqual([a["name"] for a in te_fl.schema("gelu")["args"]], ["input", "output"])
        self.assertIn("generic_gemm", dir(te_fl.ops))


if __name__ == "__main__":
    unittest.main()
