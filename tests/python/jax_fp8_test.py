"""Tests te_fl.jax under FP8 against the quantised computation in NumPy, and the FP8 state that functions take and return."""

import functools
import threading
import unittest

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import te_fl.jax as te
from te_fl.common import recipe
from te_fl.jax.quantize import Quantizer, create_set

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
RNG = np.random.default_rng(9)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def cast(x, scale, dtype):
    """Quantises x with a scale; returns the dequantised values in FP64."""
    scaled = np.clip(x * np.float32(scale), -LARGEST[dtype], LARGEST[dtype])
    return scaled.astype(dtype).astype(np.float64) / np.float64(np.float32(scale))


def current(x, dtype):
    return cast(x, np.float32(LARGEST[dtype]) / np.abs(x).max(), dtype)


def blocks(x, rows, columns, dtype, scale_of):
    """Quantises x with one scale per block; returns the dequantised values."""
    made = np.empty(x.shape)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            part = x[i:i + rows, j:j + columns]
            made[i:i + rows, j:j + columns] = cast(part, scale_of(np.abs(part).max()), dtype)
    return made


def power_of_two(amax):
    return 2.0 ** np.floor(np.log2(448.0 / amax))


def mx(amax):
    return 2.0 ** -np.ceil(np.log2(amax / 448.0))


class Products(unittest.TestCase):
    M, K, N = 160, 256, 128

    def setUp(self):
        self.x, self.kernel, self.cotangent = normal(self.M, self.K), normal(self.K, self.N), normal(self.M, self.N)

    def run_dense(self, quantizers):
        def loss(x, kernel, quantizers):
            y = te.dense.dense(x, kernel, quantizer_set=quantizers)
            return jnp.sum(y * self.cotangent), y

        (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(self.x, self.kernel, quantizers)
        return y, grads

    def check(self, found, wanted):
        # Tensor cores accumulate FP8 GEMMs with fewer bits than FP32 has.
        bound = 2e-6 if jax.default_backend() == "cpu" else 1e-5
        np.testing.assert_allclose(found, wanted, rtol=0, atol=bound * self.K * np.abs(wanted).max())

    def test_current_scaling(self):
        y, (dx, dkernel, _) = self.run_dense(create_set(recipe.Float8CurrentScaling()))
        x, kernel, dy = current(self.x, E4M3), current(self.kernel, E4M3), current(self.cotangent, E5M2)
        self.check(y, x @ kernel)
        self.check(dx, dy @ kernel.T)
        self.check(dkernel, x.T @ dy)

    def test_block_scaling(self):
        y, (dx, dkernel, _) = self.run_dense(create_set(recipe.Float8BlockScaling()))
        along = lambda a, axis: blocks(a, *((128, 1) if axis == 0 else (1, 128)), E4M3, power_of_two)  # noqa: E731
        kernel = blocks(self.kernel, 128, 128, E4M3, power_of_two)
        self.check(y, along(self.x, 1) @ kernel)
        self.check(dx, along(self.cotangent, 1) @ kernel.T)
        self.check(dkernel, along(self.x, 0).T @ along(self.cotangent, 0))

    def test_mxfp8(self):
        y, (dx, dkernel, _) = self.run_dense(create_set(recipe.MXFP8BlockScaling()))
        along = lambda a, axis: blocks(a, *((32, 1) if axis == 0 else (1, 32)), E4M3, mx)  # noqa: E731
        self.check(y, along(self.x, 1) @ along(self.kernel, 0))
        self.check(dx, along(self.cotangent, 1) @ along(self.kernel, 1).T)
        self.check(dkernel, along(self.x, 0).T @ along(self.cotangent, 0))

    def test_packed_columns_are_the_same_matrix(self):
        x, kernel = normal(128, 128), normal(128, 2, 128)
        for chosen in (recipe.DelayedScaling(), recipe.Float8BlockScaling(), recipe.MXFP8BlockScaling()):
            run = lambda k: te.dense.dense(x, k, quantizer_set=create_set(chosen))  # noqa: B023, E731
            packed, pull = jax.vjp(run, jnp.asarray(kernel))
            flat, pull_flat = jax.vjp(run, jnp.asarray(kernel.reshape(128, 256)))
            np.testing.assert_array_equal(packed.reshape(flat.shape), flat)
            cotangent = normal(128, 256)
            np.testing.assert_array_equal(pull(cotangent.reshape(128, 2, 128))[0].reshape(128, 256), pull_flat(cotangent)[0])

    def test_delayed_scaling_over_steps(self):
        """Each step quantises with the scale from the amaxes of the earlier steps."""
        length, margin = 3, 1
        state = create_set(recipe.DelayedScaling(amax_history_len=length, margin=margin))
        scales, seen = {"x": 1.0, "kernel": 1.0, "dgrad": 1.0}, []
        dtypes = {"x": E4M3, "kernel": E4M3, "dgrad": E5M2}
        for factor in (1.0, 4.0, 0.5, 0.25, 0.125):
            self.x, self.kernel, self.cotangent = normal(self.M, self.K) * factor, normal(self.K, self.N) / factor, normal(self.M, self.N)
            tensors = {"x": self.x, "kernel": self.kernel, "dgrad": self.cotangent}
            y, (dx, dkernel, state) = self.run_dense(state)
            q = {name: cast(t, scales[name], dtypes[name]) for name, t in tensors.items()}
            self.check(y, q["x"] @ q["kernel"])
            self.check(dx, q["dgrad"] @ q["kernel"].T)
            self.check(dkernel, q["x"].T @ q["dgrad"])
            seen.append({name: np.abs(t).max() for name, t in tensors.items()})
            for name in tensors:
                quantizer = getattr(state, name)
                last = [step[name] for step in seen[-length:]]
                scales[name] = np.float32(LARGEST[dtypes[name]] / 2**margin) / max(last)
                self.assertAlmostEqual(float(quantizer.scale[0]) / scales[name], 1.0, places=6)
                self.assertEqual(float(quantizer.amax_history[-1]), last[-1])
                self.assertEqual(float(quantizer.amax_history[0]), 0.0)  # this entry collects the current step's amax

    def test_most_recent(self):
        quantizer = Quantizer(jnp.ones(1), jnp.array([0.0, 8.0, 2.0]), amax_compute_algo="most_recent")
        self.assertEqual(float(quantizer.after(jnp.array([4.0])).scale[0]), 112.0)
        self.assertEqual(float(Quantizer(jnp.ones(1), jnp.array([0.0, 8.0, 2.0])).after(jnp.array([4.0])).scale[0]), 56.0)
        for amax in (np.inf, np.nan):  # a non-finite amax keeps the old scale
            self.assertEqual(float(quantizer.after(jnp.array([amax])).scale[0]), 1.0)

    def test_a_step_without_an_amax_changes_nothing(self):
        """Without an amax in a step, neither history nor scale changes, even if the earlier amaxes would give another scale."""
        for algorithm in ("max", "most_recent"):
            for history, amax, wanted in (([0.0, 2.0, 1.0, 4.0], 0.0, (7.0, [0.0, 2.0, 1.0, 4.0])), ([0.0], 0.0, (7.0, [0.0])),
                                          ([3.0, 2.0, 1.0, 4.0], 0.0, (112.0 if algorithm == "max" else 448 / 3, [0.0, 1.0, 4.0, 3.0])),
                                          ([0.0, 2.0, 1.0, 4.0], 8.0, (56.0, [0.0, 1.0, 4.0, 8.0]))):
                with self.subTest(algorithm, history=history, amax=amax):
                    quantizer = Quantizer(jnp.full(1, 7.0), jnp.array(history), amax_compute_algo=algorithm).after(jnp.full(1, amax))
                    self.assertEqual((float(quantizer.scale[0]), quantizer.amax_history.tolist()), (np.float32(wanted[0]), wanted[1]))

    def states(self, factors, length):
        """Returns microbatches scaled by these factors, a kernel, and an initial state that is not fresh."""
        base = normal(32, 64)
        x = [base * f for f in factors]
        begin = create_set(recipe.DelayedScaling(amax_history_len=length))
        first = jax.jit(jax.grad(lambda q, x, k: jnp.sum(te.dense.dense(x, k, quantizer_set=q) ** 2), (0,)))
        begin = first(begin, base * 3, normal(64, 32))[0]
        return x, normal(64, 32), begin

    def test_states_of_microbatches_become_that_of_a_step_over_all(self):
        """The accumulated state of microbatches equals that of one step over all of them, for gradients that JAX adds up and for those that a program
        adds up. Some microbatches are all zeros; a microbatch with factor 3 repeats the amax of the earlier step and so leaves the state
        unchanged."""
        for length, factors in ((1, (1, 4, 0.5)), (3, (0, 1, 0, 2, 4, 0)), (4, (0, 0)), (3, (4, 2)), (1, (3, 1)), (2, (1, 3))):
            x, kernel, begin = self.states(factors, length)

            def one(q, x):
                return jnp.sum(te.dense.dense(x, kernel, quantizer_set=q) ** 2)  # noqa: B023

            def scanned(q, x):
                q = te.quantize.accumulating(q)
                return jax.lax.scan(lambda total, x: (total + one(q, x), None), 0.0, x)[0]

            grad = jax.jit(jax.grad(one))
            wanted = grad(begin, jnp.concatenate(x))
            each = [grad(begin, part) for part in x]
            by_hand = functools.reduce(lambda a, b: te.quantize.add_gradients(a, b, begin), each)  # noqa: B023
            uses = jax.grad(lambda q, x: sum(one(joined, part) for joined in (te.quantize.accumulating(q),) for part in x))  # noqa: B023
            for found in (jax.jit(jax.grad(scanned))(begin, jnp.stack(x)), by_hand, jax.jit(uses)(begin, x)):
                for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
                    np.testing.assert_array_equal(a, b)

    def test_a_microbatch_without_an_amax_beside_one_below_the_state(self):
        """add_gradients() cannot distinguish a microbatch without an amax from one with the earlier step's amax. The result is then the smaller of
        the possible scales, with which no value saturates. A fresh state has no such amax."""
        grad = lambda amax, state: state.after(jnp.full(1, amax))  # noqa: E731
        for state, other, wanted in ((Quantizer(jnp.full(1, 112.0), jnp.zeros(1)), 1.0, 112.0), (Quantizer(jnp.ones(1), jnp.zeros(1)), 1.0, 448.0),
                                     (Quantizer(jnp.full(1, 112.0), jnp.array([0.0, 4.0])), 8.0, 56.0)):
            for pair in ((0.0, other), (other, 0.0)):
                found = te.quantize.add_gradients(grad(pair[0], state), grad(pair[1], state), state)
                self.assertEqual(found.scale.tolist(), [wanted])

    def test_accumulating_leaves_values_and_other_gradients(self):
        x, kernel, begin = self.states((1,), 2)
        loss = lambda k, q: jnp.sum(te.dense.dense(x[0], k, quantizer_set=q) ** 2)  # noqa: E731
        plain = jax.value_and_grad(loss, (0, 1))(kernel, begin)
        joined = jax.value_and_grad(lambda k, q: loss(k, te.quantize.accumulating(te.quantize.accumulating(q))), (0, 1))
        with self.assertRaisesRegex(NotImplementedError, r"accumulating\(\): JAX adds up .* put the gradient under jax.jit"):
            joined(kernel, begin)
        joined = jax.jit(joined)(kernel, begin)
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(joined), strict=True):
            np.testing.assert_array_equal(a, b)

    def test_a_step_without_a_gradient_leaves_the_state(self):
        state = create_set(recipe.DelayedScaling(amax_history_len=2))
        self.cotangent = np.zeros_like(self.cotangent)
        after = self.run_dense(state)[1][2]
        self.assertEqual(float(after.dgrad.scale[0]), 1.0)
        self.assertEqual(float(after.x.amax_history[-1]), np.abs(self.x).max())

    def test_a_product_that_the_loss_does_not_depend_on(self):
        """If the loss does not depend on a layer's output, JAX returns a zero state gradient, which counts as no amax; update_collections keeps the
        state."""
        state = create_set(recipe.DelayedScaling(amax_history_len=2))
        unused = jax.grad(lambda q: 0.0 * jnp.sum(self.x) + jnp.sum(jax.lax.stop_gradient(te.dense.dense(self.x, self.kernel, quantizer_set=q))))(state)
        self.assertEqual(float(unused.x.scale[0]), 0.0)
        y, (dx, _, after) = self.run_dense(unused)
        wanted, (wanted_dx, _, wanted_after) = self.run_dense(state)
        np.testing.assert_array_equal(y, wanted)
        np.testing.assert_array_equal(dx, wanted_dx)
        self.assertEqual(jax.tree.map(np.ndarray.tolist, jax.device_get(after)), jax.tree.map(np.ndarray.tolist, jax.device_get(wanted_after)))
        self.assertEqual(float(unused.x.after(jnp.zeros(1)).scale[0]), 1.0)


class Fused(unittest.TestCase):
    """Fused norm and activation write the codes directly. Their FP32 results may differ from NumPy's in the last bit, and so may single codes."""

    def check(self, found, wanted, step):
        off = np.abs(np.asarray(found, np.float64) - wanted)
        self.assertLess(np.mean(off > 1e-4 * np.abs(wanted).max()), 0.02 if jax.default_backend() == "cpu" else 0.05)
        self.assertLess(off.max(), step * np.abs(wanted).max())

    def test_layernorm_dense(self):
        x, gamma, beta, kernel, cotangent = normal(32, 64), normal(64), normal(64), normal(64, 32), normal(32, 32)
        quantizers = create_set(recipe.DelayedScaling(amax_history_len=1))

        def loss(x, kernel, quantizers):
            y = te.layernorm_dense.layernorm_dense(x, kernel, gamma, beta, quantizer_set=quantizers)
            return jnp.sum(y * cotangent), y

        (_, y), (dx, dkernel, after) = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, kernel, quantizers)
        wide = x.astype(np.float64)
        z = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6) * gamma + beta
        zq, kq, dyq = cast(z.astype(np.float32), 1, E4M3), cast(kernel, 1, E4M3), cast(cotangent, 1, E5M2)
        self.check(y, zq @ kq, 0.1)
        self.check(dkernel, zq.T @ dyq, 0.1)
        norm64 = lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6) * gamma + beta  # noqa: E731
        self.check(dx, jax.vjp(norm64, jnp.asarray(x))[1](jnp.asarray(dyq @ kq.T, jnp.float32))[0], 0.01)
        self.assertAlmostEqual(float(after.x.amax_history[0]), 0.0)
        self.assertAlmostEqual(float(after.x.scale[0]) * np.abs(z).max() / 448, 1.0, places=4)

    def test_layernorm_mlp(self):
        x, gamma, k1, k2 = normal(32, 64), normal(64), normal(64, 2, 48) / 8, normal(48, 64) / 8
        sets = tuple(create_set(recipe.Float8CurrentScaling()) for _ in range(2))
        y = te.layernorm_mlp.layernorm_mlp(x, gamma, None, [k1, k2], [None, None], "rmsnorm", activation_type=("silu", "linear"),
                                           quantizer_sets=sets)
        z = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) * gamma
        h = (current(z.astype(np.float32), E4M3) @ current(k1.reshape(64, -1), E4M3)).astype(np.float32).reshape(32, 2, 48)
        a = h[:, 0] / (1 + np.exp(-h[:, 0])) * h[:, 1]
        self.check(y, current(a, E4M3) @ current(k2, E4M3), 0.1)


class Recipes(unittest.TestCase):
    def test_unsupported_features_are_refused(self):
        for chosen, text in ((recipe.NVFP4BlockScaling(), "te_fl.jax has no NVFP4BlockScaling; it has DelayedScaling"),
                            (recipe.DelayedScaling(amax_compute_algo=lambda h: h[0]), r"DelayedScaling\(amax_compute_algo=.*give 'max'"),
                            (recipe.DelayedScaling(reduce_amax=False), "reduce_amax"),
                            (recipe.Float8CurrentScaling(fp8_dpa=True), "fp8_dpa.*leave it False")):
            with self.assertRaisesRegex(NotImplementedError, text):
                with te.autocast(enabled=True, recipe=chosen):
                    pass
            with te.autocast(enabled=False, recipe=chosen):  # a disabled autocast does not check its recipe
                self.assertIsNone(te.quantize.get_global_quantize_recipe())

    def test_what_is_no_recipe_or_mesh_resource_says_so(self):
        for chosen, text in ((dict(recipe=recipe.DelayedScaling), "the recipe is <class .*it is an object"), (dict(recipe="delayed"), "the recipe is 'delayed'"),
                             (dict(mesh_resource="dp"), "the mesh resource is 'dp'; it is a MeshResource")):
            with self.assertRaisesRegex(TypeError, text):
                with te.autocast(enabled=True, **chosen):
                    pass

    def test_a_recipe_in_the_place_of_enabled_says_so(self):
        for wrong in (recipe.Float8BlockScaling(), recipe.DelayedScaling):
            with self.assertRaisesRegex(TypeError, r"autocast\(enabled=.*enabled is True or False; a recipe is given by name: autocast\(enabled=True, recipe=.*\)"):
                with te.autocast(wrong):
                    pass
            with self.assertRaisesRegex(TypeError, r"fp8_autocast\(enabled=True, fp8_recipe="), te.fp8_autocast(wrong):
                pass
        for wrong in (None, 1, 0, "False", jnp.array(True)):
            with self.assertRaisesRegex(TypeError, "enabled is True or False$"), te.autocast(enabled=wrong):
                pass
        for right in (True, np.True_):
            with te.autocast(right):
                self.assertEqual(te.quantize.get_global_quantize_recipe(), recipe.DelayedScaling())

    def test_autocast_nests(self):
        outer, inner = recipe.DelayedScaling(), recipe.MXFP8BlockScaling()
        with te.autocast(enabled=True, recipe=outer):
            with self.assertWarns(DeprecationWarning), te.fp8_autocast(enabled=True, fp8_recipe=inner):
                self.assertEqual(te.quantize.get_global_quantize_recipe(), inner)
            with te.autocast(enabled=False):
                self.assertIsNone(te.quantize.get_global_quantize_recipe())
            self.assertEqual(te.quantize.get_global_quantize_recipe(), outer)
        self.assertIsNone(te.quantize.get_global_quantize_recipe())

    def test_what_was_traced_under_another_recipe_is_traced_again(self):
        """JAX caches traces of scans, checkpointed functions and inner jits; under another recipe te-fl must make JAX trace them again."""
        x, kernel = normal(16, 16), normal(16, 16)

        def step(h, _=None):
            return te.dense.dense(h, kernel, quantizer_set=create_set(te.quantize.get_global_quantize_recipe())), None

        again, inner, whole = jax.checkpoint(lambda h: step(h)[0]), jax.jit(lambda h: step(h)[0]), jax.jit(lambda h: step(h)[0])
        for name, f in (("scan", lambda x: jax.lax.scan(step, x, None, 2)[0]), ("checkpoint", jax.grad(lambda x: again(x).sum())),
                        ("jit", lambda x: inner(x) + 1), ("cond", lambda x: jax.lax.cond(x[0, 0] > 0, lambda: step(x)[0], lambda: x))):
            found = []
            for enabled, chosen in ((False, None), (True, recipe.Float8CurrentScaling()), (False, None), (True, recipe.MXFP8BlockScaling())):
                with te.autocast(enabled=enabled, recipe=chosen):
                    text = str(jax.make_jaxpr(f)(x))
                found.append("mxfp8" if "mxfp8" in text else "te_fl.quantize" in text)
            self.assertEqual(found, [False, True, False, "mxfp8"], name)
        full = whole(x)
        with te.autocast(enabled=True, recipe=recipe.Float8CurrentScaling()):
            self.assertFalse(np.array_equal(full, whole(x)))
            count = whole._cache_size()
        chosen = recipe.Float8CurrentScaling()
        with te.autocast(enabled=True, recipe=chosen):
            whole(x)
            chosen.fp8_format = recipe.Format.E4M3  # changes the recipe after autocast has read it
            whole(x)
            self.assertEqual(whole._cache_size(), count)  # an equal recipe gives the same cache key
        np.testing.assert_array_equal(full, whole(x))

    def test_autocast_is_the_thread_s(self):
        entered, left = threading.Event(), threading.Event()

        def other():
            with te.autocast(enabled=True, mesh_resource=te.MeshResource(dp_resource="dp")):
                entered.set()
                left.wait(60)

        thread = threading.Thread(target=other)
        thread.start()
        entered.wait(60)
        with te.autocast(enabled=True, recipe=recipe.MXFP8BlockScaling()):
            left.set()
            thread.join()
            self.assertEqual(te.quantize.get_global_quantize_recipe(), recipe.MXFP8BlockScaling())
            self.assertIsNone(te.sharding.global_mesh_resource().dp_resource)
        self.assertIsNone(te.quantize.get_global_quantize_recipe())

    def test_update_collections(self):
        self.assertEqual(te.update_collections({"a": {"b": 2}, "other": 1}, {"a": {"b": 1, "c": 3}, "d": 4}), {"a": {"b": 2, "c": 3}, "d": 4})
        state = {"x_scale": jnp.array([3.0]), "x_amax_history": jnp.array([0.0, 2.0])}
        unused = {"x_scale": jnp.array([0.0]), "x_amax_history": jnp.array([0.0, 0.0])}
        kept = te.update_collections({"layer": {**unused, "y_scale": 0}}, {"layer": {**state, "y_scale": 1}})["layer"]
        self.assertEqual((float(kept["x_scale"][0]), kept["x_amax_history"].tolist(), kept["y_scale"]), (3.0, [0.0, 2.0], 0))
        taken = te.update_collections(state, {**state, "x_scale": jnp.array([5.0])})
        self.assertEqual(float(taken["x_scale"][0]), 3.0)


if __name__ == "__main__":
    unittest.main()
