"""Tests ops implemented in Python: the arguments they get, and that they are candidates like any others."""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import unittest

import numpy as np

import te_fl
from te_fl import BackendImplKind, OpImpl, OpManager, OpRegistry

DEFAULT, VENDOR, REFERENCE = BackendImplKind.DEFAULT, BackendImplKind.VENDOR, BackendImplKind.REFERENCE
X = np.array([[-1, 2, -3], [4, -5, 6]], np.float32)


def relu(input, output):
    np.maximum(input, 0, out=output)


class Registered(unittest.TestCase):
    """Registers implementations for one test, with the highest priority."""

    def setUp(self):
        self.registry = OpRegistry.instance()

    def add(self, op, fn, impl_id="vendor.acme", **options):
        options = {"kind": VENDOR, "vendor": "acme", "priority": 1000, "tensors": "numpy", **options}
        self.registry.register_impl(OpImpl(op, impl_id, fn=fn, **options))
        self.addCleanup(self.registry.unregister, op, impl_id)

    def served(self, call):
        te_fl.reset_usage()
        call()
        return [row["impl_id"] for row in te_fl.usage()]

    def relu(self, x=X):
        y = np.full_like(x, 9)
        te_fl.ops.relu(input=x, output=y)
        return y


class Candidates(Registered):
    def test_it_runs_and_is_explained(self):
        self.add("relu", relu)
        np.testing.assert_array_equal(self.relu(), np.maximum(X, 0))
        self.assertEqual(self.served(self.relu), ["vendor.acme"])
        decision = te_fl.explain("relu", input=X, output=X.copy())
        self.assertEqual(decision["runs"], f"Python function {__name__}.relu")
        mine = decision["candidates"][0]
        self.assertEqual((mine["impl_id"], mine["kind"], mine["vendor"], mine["owner"], mine["priority"], mine["chosen"]),
                         ("vendor.acme", "vendor", "acme", "python", 1000, True))

    def test_policies_choose_it_or_not(self):
        self.add("relu", relu, priority=0)  # priority 0 of kind VENDOR ranks below 150 of kind DEFAULT
        self.assertEqual(self.served(self.relu), ["default.cpu"])
        with te_fl.policy(prefer="vendor"):
            self.assertEqual(self.served(self.relu), ["vendor.acme"])
        with te_fl.policy(per_op={"relu": ["vendor:acme"]}):
            self.assertEqual(self.served(self.relu), ["vendor.acme"])
        with te_fl.policy(prefer="vendor", deny_vendors=["acme"]):
            self.assertEqual(self.served(self.relu), ["default.cpu"])
        with te_fl.policy(deterministic=True, prefer="vendor"):
            self.assertEqual(self.served(self.relu), ["default.cpu"])  # acme does not promise deterministic results
        self.registry.set_priority("relu", "vendor.acme", 2000)
        self.assertEqual(self.served(self.relu), ["vendor.acme"])

    def test_unsupported_calls_go_to_the_next_implementation(self):
        def not_implemented(input, output):
            raise NotImplementedError("not today")

        def unsupported(input, output):
            raise te_fl.errors.Unsupported("not today")
        for fn in (not_implemented, unsupported, lambda input, output: NotImplemented):
            with self.subTest(fn=fn):
                self.registry.register_impl(OpImpl("relu", "vendor.no", VENDOR, fn, "acme", 1000))
                try:
                    self.assertEqual(self.served(self.relu), ["default.cpu"])
                    with te_fl.policy(strict=True), self.assertRaises(te_fl.errors.Unsupported) as caught:
                        self.relu()
                    self.assertIn("vendor.no", str(caught.exception))
                finally:
                    self.registry.unregister("relu", "vendor.no")

    def test_static_constraints(self):
        self.add("relu", relu, supported_dtypes=("f32",))
        half = X.astype(np.float16)
        self.assertEqual(self.served(lambda: self.relu(half)), ["default.cpu"])
        reason = te_fl.explain("relu", input=half, output=half.copy())["candidates"]
        self.assertIn("f16", [c["reason"] for c in reason if c["impl_id"] == "vendor.acme"][0])
        self.assertEqual(self.served(self.relu), ["vendor.acme"])

    def test_a_host_device_is_not_cudas(self):
        self.add("relu", relu, devices=("cuda",))
        self.assertEqual(self.served(self.relu), ["default.cpu"])

    def test_supports_answers_with_a_reason(self):
        seen = []

        def supports(input):
            seen.append((input.shape, input.strides, input.dtype, input.device, input.ndim, input.contiguous, input.writable))
            return True if input.shape[0] == 2 else f"{input.shape[0]} rows"
        self.add("relu", relu, supports=supports, supports_tensors="te_fl")
        self.assertEqual(self.served(self.relu), ["vendor.acme"])
        self.assertEqual(seen[0], ((2, 3), (3, 1), "f32", "cpu", 2, True, False))
        three = np.ones((3, 3), np.float32)
        self.assertEqual(self.served(lambda: self.relu(three)), ["default.cpu"])
        candidates = te_fl.explain("relu", input=three, output=three.copy())["candidates"]
        self.assertEqual([c["reason"] for c in candidates if c["impl_id"] == "vendor.acme"], ["3 rows"])

    def test_supports_gets_what_its_function_gets(self):
        seen = {}

        def fn(input, output):
            seen["fn"] = (type(input), input.shape, input.dtype, input.strides, input.flags.c_contiguous)
            np.maximum(input, 0, out=output)

        def supports(input):
            seen["supports"] = (type(input), input.shape, input.dtype, input.strides, input.flags.c_contiguous)
            return input.dtype == np.float32 and not input.flags.writeable
        self.add("relu", fn, supports=supports, tensors="numpy")
        self.assertEqual(self.served(self.relu), ["vendor.acme"])
        self.assertEqual(seen["supports"], seen["fn"])
        self.assertEqual(seen["fn"][:3], (np.ndarray, (2, 3), np.dtype("float32")))

    def test_the_class_that_supports_gets_can_be_chosen(self):
        seen = []
        self.add("relu", relu, supports=lambda input: bool(seen.append(input.dtype) or True), tensors="numpy", supports_tensors="te_fl")
        self.relu()
        self.assertEqual(seen, ["f32"])
        with self.assertRaisesRegex(te_fl.errors.InvalidArgument, "supports_tensors is 'jax'; it is one of te_fl, torch, numpy, or None"):
            self.add("relu", relu, supports=lambda input: True, supports_tensors="jax")

    def test_supports_sees_no_memory(self):
        errors = []

        def supports(input):
            for look in (input.numpy, input.__dlpack__, lambda: memoryview(input)):
                try:
                    look()
                except BufferError as error:
                    errors.append(str(error))
            return False
        self.add("relu", relu, supports=supports, supports_tensors="te_fl")
        self.relu()
        self.assertEqual(len(errors), 3)
        self.assertTrue(all("R10" in e for e in errors))

    def test_a_supports_that_says_nothing_is_a_mistake(self):
        self.add("relu", relu, supports=lambda input: None)
        with self.assertRaisesRegex(te_fl.errors.Internal, "supports\\(\\) returned a NoneType"):
            self.relu()

    def test_availability_of_the_function(self):
        def fn(input, output):
            relu(input, output)
        available = [False]
        fn._is_available = lambda: available[0]
        self.add("relu", fn)
        self.assertEqual(self.served(self.relu), ["default.cpu"])
        available[0] = True
        self.assertEqual(self.served(lambda: self.relu(np.ones((7, 7), np.float32))), ["vendor.acme"])

    def test_aliases_need_in_place(self):
        self.add("relu", relu)
        x = X.copy()
        self.assertEqual(self.served(lambda: te_fl.ops.relu(input=x, output=x)), ["default.cpu"])
        self.add("relu", relu, "vendor.acme_in_place", in_place=True, priority=999)
        self.assertEqual(self.served(lambda: te_fl.ops.relu(input=x, output=x)), ["vendor.acme_in_place"])


class Handed(Registered):
    def test_views_of_numpy_are_written_and_inputs_are_not(self):
        seen = []

        def fn(input, output):
            seen.append((input.flags.writeable, output.flags.writeable, output.strides))
            output[...] = 7
        self.add("relu", fn)
        wide = np.zeros((2, 6), np.float32)
        te_fl.ops.relu(input=X, output=wide[:, ::2])
        self.assertEqual(seen, [(False, True, (24, 8))])
        np.testing.assert_array_equal(wide, [[7, 0, 7, 0, 7, 0]] * 2)

    def test_every_kind_of_argument(self):
        seen = {}

        def fn(inputs, outputs, noop_flag, scale):
            seen.update(inputs=[i.shape for i in inputs], noop_flag=noop_flag.shape, scale=scale)
            for i, o in zip(inputs, outputs):
                o[...] = i * scale
        self.add("multi_tensor_scale", fn)
        outputs = [np.zeros(n, np.float32) for n in (3, 5)]
        te_fl.ops.multi_tensor_scale(inputs=[np.ones(n, np.float32) for n in (3, 5)], outputs=outputs, noop_flag=np.zeros(1, np.int32), scale=2.5)
        self.assertEqual(seen, {"inputs": [(3,), (5,)], "noop_flag": (1,), "scale": 2.5})
        np.testing.assert_array_equal(np.concatenate(outputs), 2.5)

        def rope(input, freqs, output, start_positions, cu_seqlens, layout, interleaved, cp_size, cp_rank):
            seen.update(layout=layout, interleaved=interleaved, cp=(cp_size, cp_rank), start=start_positions, rank=freqs.ndim)
            output[...] = input
        self.add("fused_rope_forward", rope)
        x = np.ones((2, 1, 1, 4), np.float32)
        te_fl.ops.fused_rope_forward(input=x, freqs=np.zeros((2, 1, 1, 4), np.float32), output=x.copy(), layout="bshd", interleaved=True)
        self.assertEqual((seen["layout"], seen["interleaved"], seen["cp"], seen["start"], seen["rank"]), ("bshd", True, (1, 0), None, 4))

    def test_what_belongs_to_the_call(self):
        seen = []

        def fn(input, output, mask, p, seed, offset, stream, deterministic, capturing):
            seen.append((p, seed, offset, stream, deterministic, capturing))
        self.add("dropout_fwd", fn, deterministic=True)
        arguments = dict(input=np.ones((8, 8), np.float32), output=np.ones((8, 8), np.float32), mask=np.zeros(8, np.uint8), p=0.25)
        te_fl.ops.dropout_fwd(**arguments, seed=5, offset=12)
        with te_fl.policy(deterministic=True):
            te_fl.ops.dropout_fwd(**arguments, seed=5)
        self.assertEqual(seen, [(0.25, 5, 12, 0, False, False), (0.25, 5, 0, 0, True, False)])

    def test_keywords_at_large(self):
        seen = []
        self.add("relu", lambda **arguments: seen.append(sorted(arguments)))
        self.relu()
        self.assertEqual(seen, [["input", "output"]])

    def test_arguments_that_an_op_gained_later(self):
        def first(x, gamma, z, rsigma, epsilon, zero_centered_gamma):
            z[...] = 1

        def both(x, gamma, z, rsigma, epsilon, zero_centered_gamma, residual, sum):
            z[...] = 2
            if residual is not None:
                sum[...] = x + residual
        self.add("rmsnorm_fwd", first, "vendor.first")
        self.add("rmsnorm_fwd", both, "vendor.both", priority=900)
        a = dict(x=X, gamma=np.ones(3, np.float32), z=X.copy(), rsigma=np.zeros(2, np.float32))
        self.assertEqual(self.served(lambda: te_fl.ops.rmsnorm_fwd(**a)), ["vendor.first"])
        total = np.zeros_like(X)
        self.assertEqual(self.served(lambda: te_fl.ops.rmsnorm_fwd(**a, residual=X, sum=total)), ["vendor.both"])
        np.testing.assert_array_equal(total, 2 * X)

    def test_quantised_tensors_by_their_parts(self):
        seen = {}

        def fn(input, output):
            seen.update(scaling=output.scaling, shape=output.shape, columns=output.columnwise_data.shape, codes=output.data.dtype,
                        factor=output.scale_inv.shape, amax=output.amax.dtype, scale=output.scale.numpy()[0])
            output.amax.numpy()[0] = 42
        self.add("relu", fn, scalings=("none", "tensor"), tensors="te_fl")
        columns, codes = np.zeros((3, 2), np.uint8), np.zeros((2, 3), np.uint8)
        amax = np.zeros(1, np.float32)
        q = te_fl.Quantized(E4M3(codes), columnwise_data=E4M3(columns), scale=np.full(1, 3, np.float32), scale_inv=np.zeros(1, np.float32), amax=amax)
        te_fl.ops.relu(input=X, output=q)
        self.assertEqual(seen, {"scaling": "tensor", "shape": (2, 3), "columns": (3, 2), "codes": "f8e4m3", "factor": (1,), "amax": "f32",
                                "scale": 3})
        self.assertEqual(amax[0], 42)

    def test_unless_it_says_so_it_is_handed_no_quantised_tensor(self):
        self.add("relu", relu)
        q = te_fl.Quantized(E4M3(np.zeros((2, 3), np.uint8)), scale=np.ones(1, np.float32), scale_inv=np.zeros(1, np.float32))
        self.assertEqual(self.served(lambda: te_fl.ops.relu(input=X, output=q)), ["default.cpu"])

    def test_a_dtype_that_numpy_lacks_goes_to_the_next(self):
        self.add("relu", lambda input, output: self.fail("was run"))
        out = np.zeros((2, 3), np.uint16)
        self.assertEqual(self.served(lambda: te_fl.ops.relu(input=X, output=BF16(out))), ["default.cpu"])
        self.assertEqual(out[0, 1], 0x4000)  # 2.0 as the bits of an FP16 number

    def test_other_ops_run_inside(self):
        self.add("relu", lambda input, output: te_fl.ops.gelu(input=input, output=output), tensors="te_fl")
        expected = np.zeros_like(X)
        te_fl.ops.gelu(input=X, output=expected)
        np.testing.assert_array_equal(self.relu(), expected)


class Lifetime(Registered):
    def test_a_tensor_is_dead_after_its_call(self):
        kept = []
        self.add("relu", lambda input, output: kept.append(output), tensors="te_fl")
        self.relu()
        self.assertEqual(kept[0].shape, (2, 3))
        for look in (kept[0].numpy, kept[0].__dlpack__, lambda: memoryview(kept[0])):
            with self.assertRaisesRegex(BufferError, "'relu' that has ended"):
                look()

    def test_arrays_that_are_kept_are_detected(self):
        kept = []
        self.add("relu", lambda input, output: kept.append(output))
        with self.assertRaisesRegex(te_fl.errors.Internal, "keeps 1 arrays"):
            self.relu()
        kept.clear()

    def test_cycles_are_no_reason_to_complain(self):
        def fn(input, output):
            relu(input, output)
            loop = [output]
            loop.append(loop)
        self.add("relu", fn)
        np.testing.assert_array_equal(self.relu(), np.maximum(X, 0))

    def test_what_was_unregistered_is_let_go(self):
        gone = []

        class Function:
            def __call__(self, input, output):
                relu(input, output)

            def __del__(self):
                gone.append(True)
        self.registry.register_impl(OpImpl("relu", "vendor.gone", VENDOR, Function(), "acme", 1000, tensors="numpy"))
        self.assertEqual(self.served(self.relu), ["vendor.gone"])
        self.registry.unregister("relu", "vendor.gone")
        gc.collect()
        self.assertEqual(gone, [True])
        self.assertEqual(self.served(self.relu), ["default.cpu"])


class Failures(Registered):
    def test_exceptions_have_their_words_and_are_the_cause(self):
        def fn(input, output):
            return {}["absent"]
        self.add("relu", fn)
        with self.assertRaises(te_fl.errors.Internal) as caught:
            self.relu()
        self.assertIn("KeyError: 'absent' (registration_test.py:", str(caught.exception))
        self.assertIn(" in fn)", str(caught.exception))
        self.assertIsInstance(caught.exception.__cause__, KeyError)
        self.assertEqual(caught.exception.__cause__.__traceback__.tb_frame.f_code.co_name, "fn")

    def test_codes(self):
        for error, kind in ((MemoryError("no"), te_fl.errors.OutOfMemory), (te_fl.errors.InvalidArgument("no"), te_fl.errors.InvalidArgument),
                            (te_fl.errors.DataLoss("no"), te_fl.errors.DataLoss), (ValueError("no"), te_fl.errors.Internal)):
            with self.subTest(error=error):
                def fn(input, output, error=error):
                    raise error
                self.registry.register_impl(OpImpl("relu", "vendor.no", VENDOR, fn, "acme", 1000))
                try:
                    with self.assertRaises(kind) as caught:
                        self.relu()
                    self.assertIs(caught.exception.__cause__, error)
                finally:
                    self.registry.unregister("relu", "vendor.no")

    def test_an_older_exception_is_no_cause(self):
        def fn(input, output):
            raise NotImplementedError("the first")
        self.add("relu", fn)
        self.relu()  # another implementation runs the call
        with self.assertRaises(te_fl.errors.InvalidArgument) as caught:
            te_fl.ops.relu(input=X, output=np.zeros(3, np.float32))
        self.assertIsNone(caught.exception.__cause__)

    def test_results_are_written_not_returned(self):
        self.add("relu", lambda input, output: np.maximum(input, 0))
        with self.assertRaisesRegex(te_fl.errors.Internal, "returned a ndarray"):
            self.relu()

    def test_interrupts_pass_and_leave_no_lock(self):
        calls = []
        # Programs that a shell starts in the background ignore the signal.
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))

        def fn(input, output):
            calls.append(1)
            if len(calls) == 1:
                signal.raise_signal(signal.SIGINT)
            relu(input, output)
        self.add("relu", fn, thread_safe=False)
        with self.assertRaises(KeyboardInterrupt):
            self.relu()
        thread = threading.Thread(target=self.relu)
        thread.start()
        thread.join(30)
        self.assertEqual((thread.is_alive(), len(calls)), (False, 2))

    def test_it_cannot_be_removed_from_inside(self):
        def fn(input, output):
            self.registry.unregister("relu", "vendor.acme")
        self.add("relu", fn)
        with self.assertRaises(te_fl.errors.Busy):
            self.relu()

    def test_mistakes_of_registrations(self):
        def refused(kind, part, *args, **options):
            with self.assertRaisesRegex(kind, part):
                self.registry.register_impl(OpImpl(*args, **options))
        ok = lambda input, output: None  # noqa: E731
        refused(ValueError, "names its vendor", "relu", "vendor.x", VENDOR, ok)
        refused(te_fl.errors.InvalidArgument, "R16", "relu", "acme", VENDOR, ok, "acme")
        refused(TypeError, "cannot be called", "relu", "vendor.x", VENDOR, 3, "acme")
        refused(TypeError, "does not take 'output'", "relu", "vendor.x", VENDOR, lambda input: None, "acme")
        refused(TypeError, "takes 'inptu', which the op has not", "relu", "vendor.x", VENDOR, lambda inptu, output: None, "acme")
        refused(TypeError, "by position only", "relu", "vendor.x", VENDOR, lambda input, /, output: None, "acme")
        refused(TypeError, "supports takes 'x'", "relu", "vendor.x", VENDOR, ok, "acme", supports=lambda x: True)
        refused(ValueError, "dtype 'f33' is not known", "relu", "vendor.x", VENDOR, ok, "acme", supported_dtypes=("f33",))
        refused(ValueError, "device 'gpu' is not known", "relu", "vendor.x", VENDOR, ok, "acme", devices=("gpu",))
        refused(TypeError, "devices is a str", "relu", "vendor.x", VENDOR, ok, "acme", devices="cuda")
        refused(ValueError, "scaling 'int4' is not known", "relu", "vendor.x", VENDOR, ok, "acme", scalings=("int4",))
        refused(ValueError, "tensors is 'tf'", "relu", "vendor.x", VENDOR, ok, "acme", tensors="tf")
        refused(ValueError, "does not fit in 32 bits", "relu", "vendor.x", VENDOR, ok, "acme", 1 << 40)
        refused(ValueError, "several providers", "relu", "vendor.x", VENDOR, ok, "acme", devices=("ext:a", "ext:b"))
        with self.assertRaisesRegex(TypeError, "is a te_fl.OpImpl, not a dict"):
            self.registry.register_impl({})
        self.assertFalse([r for r in self.registry.snapshot() if r["owner"] == "python"])

    def test_duplicates_are_refused_and_all_or_none_are_registered(self):
        self.add("relu", relu)
        with self.assertRaises(te_fl.errors.AlreadyExists):
            self.registry.register_many([OpImpl("gelu", "vendor.acme", VENDOR, relu, "acme"), OpImpl("relu", "vendor.acme", VENDOR, relu, "acme")])
        with self.assertRaises(te_fl.errors.NotFound):
            self.registry.unregister("gelu", "vendor.acme")


class Registries(unittest.TestCase):
    def test_a_registry_of_its_own(self):
        registry = OpRegistry()
        self.assertEqual(registry.snapshot(), [])
        registry.register_impl(OpImpl("relu", "reference.mine", "reference", relu, tensors="numpy"))
        manager, y = OpManager(registry), np.zeros_like(X)
        self.assertIs(manager.registry, registry)
        manager.call("relu", input=X, output=y)
        np.testing.assert_array_equal(y, np.maximum(X, 0))
        self.assertEqual(manager.explain("relu", input=X, output=y)["impl_id"], "reference.mine")
        with self.assertRaises(te_fl.errors.Unsupported):
            manager.call("gelu", input=X, output=y)
        self.assertNotIn("reference.mine", [r["impl_id"] for r in OpRegistry.instance().snapshot()])
        registry.unregister_owner("python")
        self.assertEqual(registry.snapshot(), [])

    def test_the_process_s_manager(self):
        y = np.zeros_like(X)
        OpManager.instance().call("relu", input=X, output=y)
        np.testing.assert_array_equal(y, np.maximum(X, 0))

    def test_kinds(self):
        self.assertIs(BackendImplKind("flagos"), DEFAULT)
        self.assertEqual([str(k) for k in BackendImplKind], ["default", "vendor", "reference"])
        self.assertEqual(REFERENCE, "reference")


class OwnArguments(unittest.TestCase):
    """Tests an op that the catalogue does not have: its functions define its arguments and results."""

    def setUp(self):
        self.registry = OpRegistry()
        self.manager = OpManager(self.registry)

    def add(self, impl_id, fn, op="my_op", **options):
        kind = impl_id.partition(".")[0]
        self.registry.register(OpImpl(op, impl_id, kind, fn, "acme" if kind == "vendor" else None, **options))

    def test_objects_go_in_and_come_out(self):
        self.add("vendor.acme", lambda *args, **options: (args, options))
        token = object()
        self.assertEqual(self.manager.call("my_op", token, 2, op_name="x"), ((token, 2), {"op_name": "x"}))
        self.assertEqual(self.manager.call("my_op"), ((), {}))
        self.assertEqual([(row["impl_id"], row["calls"]) for row in self.manager.usage()], [("vendor.acme", 2)])
        with self.assertRaisesRegex(te_fl.errors.NotFound, "did you mean 'my_op'"):
            self.manager.call("my_opp")

    def test_the_policy_chooses(self):
        for kind in ("default", "vendor", "reference"):
            self.add(f"{kind}.acme", lambda kind=kind: kind)
        self.assertEqual(self.manager.call("my_op"), "default")
        for settings, expected in (({"prefer": "vendor"}, "vendor"), ({"prefer": "vendor", "deny_vendors": ["acme"]}, "default"),
                                   ({"per_op": {"my_op": ["reference"]}}, "reference"),
                                   ({"per_op": "my_op=vendor:acme|default"}, "vendor")):
            with self.subTest(settings=settings), te_fl.policy(**settings):
                self.assertEqual(self.manager.call("my_op"), expected)
                self.assertEqual(self.manager.resolve("my_op")(), expected)
                self.assertEqual(self.manager.get_selected_impl_id("my_op"), f"{expected}.acme")
        with te_fl.policy(deterministic=True), self.assertRaisesRegex(te_fl.errors.Unsupported, "deterministic"):
            self.manager.call("my_op")
        with self.assertRaisesRegex(te_fl.errors.InvalidArgument, "did you mean 'my_op'"):
            te_fl.policy(per_op={"my_pop": ["reference"]})
        self.registry.set_priority("my_op", "reference.acme", 900)
        self.assertEqual(self.manager.call("my_op"), "reference")
        self.assertEqual([impl.impl_id for impl in self.manager.resolve_candidates("my_op")],
                         ["reference.acme", "default.acme", "vendor.acme"])

    def test_refusals_go_on_and_failures_do_not(self):
        def fail(x):
            raise {0: NotImplementedError("not 0"), 1: KeyError("one")}[x]
        self.add("default.acme", fail)
        self.add("vendor.acme", lambda x: NotImplemented)
        self.add("reference.acme", lambda x: x + 10)
        self.assertEqual(self.manager.call("my_op", 0), 10)
        with te_fl.policy(strict=True), self.assertRaisesRegex(te_fl.errors.Unsupported, "not 0"):
            self.manager.call("my_op", 0)
        with self.assertRaisesRegex(te_fl.errors.Internal, "KeyError: 'one'") as caught:
            self.manager.call("my_op", 1)
        self.assertIsInstance(caught.exception.__cause__, KeyError)

    def test_supports_is_called_for_every_call(self):
        self.add("default.acme", lambda x: "large", supports=lambda x: x > 3 or f"{x} is small")
        self.add("reference.acme", lambda x: "any")
        self.assertEqual([self.manager.call("my_op", x) for x in (5, 2, 5, 3, 4)], ["large", "any", "large", "any", "large"])
        candidates = {c["impl_id"]: c for c in self.manager.explain("my_op", 2)["candidates"]}
        self.assertEqual(candidates["default.acme"]["reason"], "2 is small")
        self.assertTrue(candidates["reference.acme"]["chosen"])

    def test_tensors_among_the_objects(self):
        self.add("default.acme", lambda x: "f32 on the host", supported_dtypes=("float32",), devices=("cpu",))
        self.add("reference.acme", lambda x: "any")
        for x, expected in ((X, "f32 on the host"), ([X, X.astype(np.int32)], "f32 on the host"), (X.astype(np.float16), "any"),
                            ({"x": (X, X.astype(np.float64))}, "any"), (3, "f32 on the host")):
            self.assertEqual(self.manager.call("my_op", x), expected)
        self.add("vendor.acme", lambda x: "gpu", devices=("cuda",), priority=900)
        self.assertEqual(self.manager.call("my_op", X), "f32 on the host")
        for field, value in (("min_arch", 90), ("tensors", "torch"), ("scalings", ("none", "tensor")), ("in_place", True)):
            with self.assertRaisesRegex(ValueError, f"{field} describes tensors of the catalogue's ops"):
                self.add("vendor.other", lambda x: x, **{field: value})

    def test_calls_inside_calls_and_threads(self):
        def count(n):
            return 0 if n == 0 else 1 + self.manager.call("my_op", n - 1)
        self.add("default.acme", count)
        found = []
        threads = [threading.Thread(target=lambda n=n: found.extend((n, self.manager.call("my_op", n)) for _ in range(50))) for n in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(len(found), 300)
        self.assertTrue(all(n == result for n, result in found))

    def test_what_is_registered_can_be_looked_up(self):
        def fn():
            pass
        self.add("default.acme", fn)
        self.add("vendor.acme", fn, op="other_op")
        self.assertEqual(self.registry.list_operators(), ["my_op", "other_op"])
        self.assertIs(self.registry.get_implementation("my_op", "default.acme").fn, fn)
        self.assertIsNone(self.registry.get_implementation("my_op", "default.none"))
        self.assertEqual([i.impl_id for i in self.registry.snapshot().impls_by_op["other_op"]], ["vendor.acme"])
        self.registry.clear()
        self.assertEqual((self.registry.snapshot(), self.registry.get_implementations("my_op")), ([], []))
        with self.assertRaisesRegex(te_fl.errors.Unsupported, "registered: none"):
            self.manager.resolve("my_op")
        cpu = OpRegistry.instance().get_implementation("relu", "reference.host")
        y = np.zeros_like(X)
        te_fl.reset_usage()
        cpu.fn(input=X, output=y)  # an implementation in C++ can be called through fn too
        self.assertEqual([row["impl_id"] for row in te_fl.usage()], [cpu.impl_id])
        np.testing.assert_array_equal(y, np.maximum(X, 0))

    def test_the_catalogue_s_ops_stay_typed(self):
        self.add("vendor.acme", relu, op="relu", tensors="numpy")
        with self.assertRaisesRegex(TypeError, "'relu' is in the catalogue: it takes keyword arguments only"):
            self.manager.call("relu", X)

    def test_by_name_in_the_process(self):
        registry = OpRegistry.instance()
        registry.register(OpImpl("my_process_op", "default.acme", DEFAULT, lambda x: x * 2))
        self.addCleanup(registry.unregister, "my_process_op", "default.acme")
        self.assertEqual(te_fl.ops.my_process_op(4), 8)
        self.assertEqual(te_fl.explain("my_process_op", 4)["impl_id"], "default.acme")
        self.assertEqual(te_fl.explain("my_process_op")["impl_id"], "default.acme")
        self.assertEqual(te_fl.schema("my_process_op")["args"], [])
        with self.assertRaisesRegex(te_fl.errors.InvalidArgument, "is not a name"):
            self.add("default.acme", relu, op="my op")


class Processes(Registered):
    def test_a_vendor_s_package_for_transformer_engine_fl(self):
        plugin = """
from transformer_engine.plugin.core import BackendImplKind, OpImpl

def my_implementation(x):
    return x + 1

def register(registry):
    for op_name in ("my_op", "rleu"):
        registry.register(OpImpl(op_name=op_name, impl_id="vendor.my_vendor", kind=BackendImplKind.VENDOR, fn=my_implementation,
                                 vendor="my_vendor"))
    registry.register_impl(OpImpl(op_name="my_op", impl_id="reference.torch", kind=BackendImplKind.REFERENCE, fn=lambda x: -x))
"""
        code = ("import te_fl; te_fl.as_transformer_engine()\nfrom transformer_engine.plugin.core import OpManager\n"
                "print(OpManager.instance().call('my_op', 41)); te_fl.write_trace()")
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "my_plugin_module.py"), "w") as file:
                file.write(plugin)
            path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
            trace = os.path.join(folder, "trace.json")

            def message(**variables):
                done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                                      env={**os.environ, "PYTHONPATH": path, "TE_FL_PLUGIN_MODULES": "my_plugin_module", **variables})
                return done.stdout.strip() or done.stderr, done.stderr
            printed, warned = message(TE_FL_TRACE=trace)
            self.assertEqual(printed, "42", warned)
            self.assertIn("if it was to be 'relu', correct its name", warned)
            with open(trace) as file:
                self.assertIn("vendor.my_vendor", json.dumps(json.load(file)))
            self.assertEqual(message(TE_FL_PER_OP="my_op=reference")[0], "-41")
            self.assertIn("did you mean 'my_op'", message(TE_FL_PER_OP="my_oop=reference")[0])

    def test_calls_of_threads(self):
        self.add("relu", relu)
        failures = []

        def work(seed):
            x = np.random.default_rng(seed).standard_normal((33, 17)).astype(np.float32)
            y = np.zeros_like(x)
            for _ in range(200):
                te_fl.ops.relu(input=x, output=y)
                if not np.array_equal(y, np.maximum(x, 0)):
                    failures.append(seed)
        threads = [threading.Thread(target=work, args=(s,)) for s in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(failures, [])

    def test_registering_while_others_call(self):
        stop, failures = threading.Event(), []

        def work():
            while not stop.is_set():
                if not np.array_equal(self.relu(), np.maximum(X, 0)):
                    failures.append(1)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for _ in range(50):
            self.registry.register_impl(OpImpl("relu", "vendor.acme", VENDOR, relu, "acme", 1000, tensors="numpy"))
            self.registry.unregister("relu", "vendor.acme")
        stop.set()
        for t in threads:
            t.join()
        self.assertEqual(failures, [])

    def test_a_forked_child_computes(self):
        self.add("relu", relu)
        self.relu()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write, b"1" if np.array_equal(self.relu(), np.maximum(X, 0)) else b"0")
            os._exit(0)
        os.waitpid(pid, 0)
        self.assertEqual(os.read(read, 1), b"1")

    PREFIX = """
import atexit, threading, time, sys
import numpy as np, te_fl
from te_fl import BackendImplKind, OpImpl, OpRegistry
x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
def fn(input, output): output[...] = input * {factor}
OpRegistry.instance().register_impl(OpImpl("relu", "vendor.acme", BackendImplKind.VENDOR, fn, "acme", 1000, tensors="numpy"))
"""

    def run_python(self, code, factor=1, **environment):
        return subprocess.run([sys.executable, "-c", self.PREFIX.format(factor=factor) + code], capture_output=True, text=True, timeout=120,
                              env={**os.environ, **environment})

    def test_the_interpreter_ends_while_others_call(self):
        found = self.run_python("""
def last():
    te_fl.ops.relu(input=x, output=y)  # this thread still has the interpreter
    print("last", y[0])
atexit.register(last)
def work():
    mine = np.zeros(64, np.float32)
    while True:
        try: te_fl.ops.relu(input=x, output=mine)
        except te_fl.errors.FailedPrecondition: return
for _ in range(4): threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
""")
        self.assertEqual((found.returncode, found.stdout), (0, "last 1.0\n"), found.stderr)

    def test_results_are_verified(self):
        code = "te_fl.ops.relu(input=x, output=y); print(te_fl.verify_counts())"
        with tempfile.TemporaryDirectory() as folder:
            for factor, expected in ((1, "'differed': 0"), (2, "'differed': 1")):
                found = self.run_python(code, factor, TE_FL_VERIFY="1", TE_FL_VERIFY_DIR=folder)
                self.assertIn(expected, found.stdout, found.stderr)

    def test_calls_are_traced(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            found = self.run_python("te_fl.ops.relu(input=x, output=y); te_fl.write_trace()", TE_FL_TRACE=path)
            self.assertEqual(found.returncode, 0, found.stderr)
            with open(path) as file:
                self.assertIn("vendor.acme", json.dumps(json.load(file)))


class Codes:
    """Wraps a NumPy array of bytes as a dtype that NumPy lacks."""

    def __init__(self, codes):
        self.codes, self.shape = codes, codes.shape

    def __dlpack__(self):
        import ctypes
        capsule = self.codes.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # In DLTensor data, device and rank take 20 bytes and are followed by the dtype's code.
        ctypes.c_uint8.from_address(pointer(capsule, b"dltensor") + 20).value = self.CODE
        return capsule


class E4M3(Codes):
    CODE = 10  # kDLFloat8_e4m3fn


class BF16(Codes):
    CODE = 4  # kDLBfloat


class Crash(unittest.TestCase):
    """A Python implementation whose C code crashes is named, and Python's faulthandler prints its stacks as without te-fl."""

    CODE = """if True:
        import ctypes, faulthandler
        {before}
        import numpy as np
        import te_fl
        def relu(input, output):
            ctypes.string_at(0)
        te_fl.OpRegistry.instance().register_impl(te_fl.OpImpl("relu", "vendor.acme", te_fl.BackendImplKind.VENDOR, relu, "acme", 1000, tensors="numpy"))
        x = np.ones((2, 3), np.float32)
        {after}
        te_fl.ops.relu(input=x, output=x.copy())
        """
    LINE = (r"te-fl error: rank 5: SIGSEGV(?: at address 0x0)? in run\(\) of 'vendor.acme' \(plugin [^)]*\), op 'relu', with input f32\[2,3\] at 0x[0-9a-f]+, "
            r"output f32\[2,3\] at 0x[0-9a-f]+; thread [0-9]+; process [0-9]+; the signal is passed on \(TE_FL_CRASH_REPORT=0 leaves this line out\)\n")

    def crash(self, before="", after="", **environment):
        done = subprocess.run([sys.executable, "-c", self.CODE.format(before=before, after=after)], capture_output=True, text=True,
                              env={**os.environ, "RANK": "5", **environment})
        self.assertEqual(done.returncode, -signal.SIGSEGV, done.stderr)
        return done.stderr

    def test_the_implementation_is_named(self):
        text = self.crash()
        self.assertRegex(text, self.LINE)
        self.assertIn("SIGSEGV at address 0x0", text)  # not where another handler has raised the signal again
        self.assertEqual(text.count("te-fl error"), 1)

    def test_faulthandler_goes_on_working(self):
        for where in ("before", "after"):
            with self.subTest(where):
                text = self.crash(**{where: "faulthandler.enable()"})
                self.assertRegex(text, self.LINE)
                self.assertRegex(text, r"Fatal Python error: Segmentation fault(.|\n)*in relu")
                self.assertEqual(text.count("te-fl error"), 1)

    def test_the_setting_leaves_it_out(self):
        self.assertNotIn("te-fl", self.crash(TE_FL_CRASH_REPORT="0"))


if __name__ == "__main__":
    unittest.main()
