"""Tests reference.xla: te_fl.jax's ops by jax.numpy and lax, chosen by a policy on the CPU, and on platforms that no plugin of te-fl serves."""

import re
import unittest

import jax
import jax.numpy as jnp
import numpy as np

import te_fl
import te_fl.jax as te
from te_fl import reference_xla
from te_fl.common import recipe
from te_fl.jax.attention import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout, SequenceDescriptor, fused_attn
from te_fl.jax.quantize import random_state
from te_fl.jax.rope import rotary_pos_emb
from te_fl.jax.softmax import SoftmaxFusionType

RNG = np.random.default_rng(11)
BF16, E4M3, E5M2 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2
TOLERANCES = {jnp.dtype(jnp.float32): (1e-6, 5e-6), jnp.dtype(BF16): (1e-5, 1e-2), jnp.dtype(jnp.float16): (1e-5, 1e-3)}


def by_xla(*ops):
    return te_fl.policy(per_op={op: ["impl:reference.xla"] for op in ops or reference_xla.OPS})


def by_host():
    return te_fl.policy(prefer="reference")


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.normal(size=shape), dtype)


def differentiated(function):
    """A function that returns the results and all gradients, with an uneven cotangent."""
    def both(*arguments):
        y, pull = jax.vjp(function, *arguments)
        weight = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(y.dtype)
        return y, pull(weight)
    return both


class ReferenceXla(unittest.TestCase):
    def compare(self, function, *arguments, exact=False, factor=1.0, others=()):
        """Compares reference.xla with reference.host. Every op runs by reference.xla, so no call of te-fl is in its program. others: more arguments of
        the same shapes.
        """
        with by_xla():
            lowered = jax.jit(lambda *a: function(*a)).lower(*arguments)
            self.assertNotIn("te_fl.", lowered.as_text())
            ours = lowered.compile()
        with by_host():
            theirs = jax.jit(lambda *a: function(*a)).lower(*arguments).compile()
        for inputs in (arguments, *others):
            self.compare_results(ours(*inputs), theirs(*inputs), exact, factor)

    def compare_results(self, ours, theirs, exact, factor):
        for got, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            self.assertEqual((got.shape, got.dtype), (wanted.shape, wanted.dtype))
            if got.dtype == jax.dtypes.float0:
                continue
            if exact or got.dtype not in TOLERANCES:
                np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(wanted).view(np.uint8))
                continue
            absolute, relative = (factor * one for one in TOLERANCES[got.dtype])
            wanted = np.asarray(wanted, np.float64)
            np.testing.assert_allclose(np.asarray(got, np.float64), wanted, relative, absolute * max(1.0, float(np.max(np.abs(wanted), initial=0))))


class Ops(ReferenceXla):
    def test_quantisation_is_equal_to_the_bit(self):
        """Also for tensors of one value, for which the scales have special cases."""
        x = np.pad(RNG.normal(size=(130, 200)).astype(np.float32), ((0, 62), (0, 56)))
        x[0, :6] = [0.0, -0.0, np.nan, 3e38, -1e-30, 447.9]
        x[:, 128:] *= 1e-3
        special = [np.full(x.shape, value, np.float32) for value in (0.0, np.inf, np.nan, 1e-33, 1.5)]
        for dtype, code, forms in (
                (jnp.float32, E4M3, (("tensor", {"scale": jnp.asarray([3.7])}), ("tensor", {}), ("block_1x128", {}), ("mxfp8", {}))),
                (BF16, E5M2, (("tensor", {"pow2_scale": True, "amax_epsilon": 1e-3}), ("block_128x128", {"pow2_scale": True}), ("mxfp8", {})))):
            outputs = [te.quantize.QuantizedOutput(code, scaling, True, True, **more) for scaling, more in forms]
            self.compare(lambda x, outputs=outputs: [te.ops.quantize(input=x if out.scaling == "mxfp8" else x[:130, :200], output=out) for out in outputs],
                         jnp.asarray(x, dtype), exact=True, others=[(jnp.asarray(one, dtype),) for one in special])

    def test_denormals_are_quantised_to_the_bit(self):
        """XLA's operations on hosts take them for 0. The scale that is infinite in FP32 is the largest power of two."""
        x = (RNG.normal(size=(5, 256)).astype(np.float32).view(np.uint32) >> 9 & 0x803FFFFF).view(np.float32)
        wanted = (x.astype(np.float64) * 2.0**127).astype(E4M3).view(np.uint8)
        self.assertGreater(np.count_nonzero(wanted & 0x7F), x.size // 2)
        for scaling in ("tensor", "block_1x128"):
            with by_xla("quantize"):
                made = jax.jit(lambda x, s=scaling: te.ops.quantize(input=x, output=te.quantize.QuantizedOutput(E4M3, s, pow2_scale=True)))(x)
            np.testing.assert_array_equal(np.asarray(made.data).view(np.uint8), wanted)

    def test_fused_results_are_quantised_from_fp32(self):
        x, gamma = normal(4, 64, dtype=BF16), normal(64, dtype=BF16)
        q = te.quantize.QuantizedOutput(E4M3, columnwise=True, scale=jnp.asarray([2.0]))
        def f(x, gamma):
            z = te.ops.rmsnorm_fwd(x=x, gamma=gamma, z=q)[0]
            h = te.ops.swiglu(input=x, output=q)
            return [te.ops.dequantize(input=one, output=jnp.float32) for one in (z, h)], h.amax
        with by_xla():
            ours = jax.jit(f)(x, gamma)
        with by_host():
            theirs = jax.jit(f)(x, gamma)
        for got, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
            np.testing.assert_allclose(got, wanted, 0.13, 2**-9)  # a tie may round the other way

    def test_norms_and_activations(self):
        self.compare(differentiated(lambda x, g, b: jnp.stack([te.layernorm.layernorm(x, g, b if kind == "layernorm" else None, kind, centred)
                                                               for kind, centred in (("layernorm", True), ("rmsnorm", False))])),
                     normal(3, 5, 24, dtype=BF16), normal(24, dtype=BF16), normal(24, dtype=BF16), factor=4)
        names = ("gelu", "silu", "relu", "quick_gelu", "squared_relu", "sigmoid")
        self.compare(differentiated(lambda x: jnp.stack(
            [te.activation.activation(x[:, :1], (name,)) for name in names[:-1]] + [te.activation.activation(x, (name, "linear")) for name in names] +
            [te.activation.activation(x, ("clamped_silu", "clamped_linear"), act_params={"limit": 1.0, "alpha": 1.5})])), normal(4, 2, 9))

    def test_softmax_and_rope(self):
        x, mask = normal(2, 3, 5, 5), jnp.asarray(RNG.integers(0, 2, (2, 1, 5, 5)), bool).at[0, 0, 0].set(True)
        self.compare(differentiated(lambda x: jnp.stack([
            te.softmax.softmax(x, None, 0.7), te.softmax.softmax(x, mask, 0.7, SoftmaxFusionType.SCALED_MASKED),
            te.softmax.softmax(x, None, 0.7, SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED)])), x)
        for transposed in (False, True):
            self.compare(differentiated(lambda x: jnp.stack([rotary_pos_emb(x, (1, 10000), transposed, method) for method in ("consecutive", "alternate")])),
                         normal(2, 5, 3, 8))

    def test_products(self):
        for dtype in (jnp.float32, BF16):
            self.compare(differentiated(lambda x, k, b: te.dense.dense(x, k, b, contracting_dims=((2,), (0,)))),
                         normal(2, 3, 24, dtype=dtype), normal(24, 2, 7, dtype=dtype), normal(2, 7, dtype=dtype), factor=4)
        a, b, d = normal(8, 16), normal(12, 16), normal(8, 12)
        self.compare(lambda a, b, d: te.ops.generic_gemm(a=a, b=b, d=d, bias=d[0], residual=d, trans_b=True, gelu=True, accumulate=True, alpha=0.5, beta=2.0,
                                                         pre_gelu_out=True), a, b, d)

    def test_products_of_every_recipe(self):
        x, kernel = normal(2, 64, 128, dtype=BF16), normal(128, 128, dtype=BF16)
        for make in (recipe.DelayedScaling, recipe.Float8BlockScaling, recipe.MXFP8BlockScaling):
            with self.subTest(make.__name__):
                q = te.quantize.create_set(make())
                self.compare(differentiated(lambda x, k, q: te.dense.dense(x, k, contracting_dims=((2,), (0,)), quantizer_set=q)), x, kernel, q)


    def test_products_of_narrow_types_are_not_widened(self):
        """On a platform other than the host each product of BF16 is one of BF16, whose sums in FP32 are rounded at once, but the scores of attention."""
        def layer(x, kernel, q):
            y = te.dense.dense(x, kernel, contracting_dims=((1,), (0,)))
            return y, fused_attn((q, q, q), None, None, None, AttnBiasType.NO_BIAS, AttnMaskType.CAUSAL_MASK, QKVLayout.BSHD_BSHD_BSHD,
                                 AttnSoftmaxType.VANILLA_SOFTMAX, 0.3, 0.0, True)
        def step(x, kernel, q):
            y, back = jax.vjp(layer, x, kernel, q)
            return y, back(y)
        text = jax.jit(step).trace(normal(6, 8, dtype=BF16), normal(8, 5, dtype=BF16), normal(2, 7, 4, 8, dtype=BF16)).lower(lowering_platforms=("tpu",)).as_text()
        products = re.findall(r"dot_general .*: \((.*)\) -> tensor<(.*)>", text)
        self.assertEqual(len(products), 3 + 2 + 5)
        self.assertTrue(all(operands.count("xbf16>") == 2 for operands, _ in products), products)
        self.assertEqual({result for _, result in products if not result.endswith("xbf16")}, {"2x4x7x7xf32"}, products)


class Attention(ReferenceXla):
    def attend(self, mask=AttnMaskType.NO_MASK, bias=None, descriptor=None, window=None, softmax=AttnSoftmaxType.VANILLA_SOFTMAX, sink=None, dropout=0.0,
               keys=6, dtype=jnp.float32, transposed=False):
        q, k, v = normal(2, 5, 4, 8, dtype=dtype), normal(2, keys, 2, 8, dtype=dtype), normal(2, keys, 2, 6, dtype=dtype)
        q, k, v = (a.swapaxes(0, 1) if transposed else a for a in (q, k, v))
        extra = [a for a in (bias, sink) if a is not None]
        seed = random_state(jax.random.key(3)) if dropout else None

        def f(q, k, v, *extra):
            rest = iter(extra)
            bias_ = next(rest) if bias is not None else None
            return fused_attn((q, k, v), bias_, descriptor, seed, AttnBiasType.NO_BIAS if bias is None else AttnBiasType.POST_SCALE_BIAS, mask,
                              QKVLayout.BSHD_BSHD_BSHD, softmax, 0.3, dropout, True, window_size=window,
                              softmax_offset=next(rest) if sink is not None else None, transpose_batch_sequence=transposed)
        self.compare(differentiated(f), q, k, v, *extra, factor=4)

    def test_masks_and_windows(self):
        for mask, window in ((AttnMaskType.NO_MASK, None), (AttnMaskType.CAUSAL_MASK, (2, 0)), (AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK, None),
                             (AttnMaskType.NO_MASK, (1, 2))):
            with self.subTest(f"{mask} {window}"):
                self.attend(mask, window=window)
        self.attend(AttnMaskType.CAUSAL_MASK, dtype=BF16, transposed=True)
        lengths = SequenceDescriptor.from_seqlens((jnp.asarray([5, 0], jnp.int32), jnp.asarray([4, 3], jnp.int32)))
        self.attend(AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK, descriptor=lengths)
        self.attend(AttnMaskType.PADDING_MASK, descriptor=jnp.asarray(RNG.integers(0, 2, (2, 1, 5, 6)), bool).at[1, 0, 2].set(True))

    def test_bias_sink_and_dropout(self):
        self.attend(bias=normal(1, 4, 5, 6), softmax=AttnSoftmaxType.LEARNABLE_SOFTMAX, sink=normal(4), dropout=0.3)
        self.attend(AttnMaskType.CAUSAL_MASK, softmax=AttnSoftmaxType.OFF_BY_ONE_SOFTMAX)

    def test_what_is_refused_is_named(self):
        q = normal(4, 2, 8)
        def f(q):
            return te.ops.fused_attn_fwd(q=q, k=q, v=q, o=jax.ShapeDtypeStruct(q.shape, q.dtype), cu_seqlens_q=jnp.asarray([0, 4]), cu_seqlens_kv=jnp.asarray([0, 4]),
                                         layout="thd")
        for call, reason in ((f, "fused_attn_fwd' on the platform tpu.*thd is not implemented"),
                             (lambda q: te.ops.strided_copy(input=q, output=jax.ShapeDtypeStruct(q.shape, q.dtype)), "'strided_copy' on the platform tpu.*reference.xla has")):
            with self.assertRaisesRegex(te_fl.errors.Unsupported, reason):
                jax.jit(call).trace(q).lower(lowering_platforms=("tpu",))


class Dropout(ReferenceXla):
    def test_random_numbers_are_equal_to_the_bit(self):
        rng = jnp.asarray([7, 2**31, 2**32 - 3, 5], jnp.uint32)  # the counter's low word overflows
        self.compare(lambda x: te.ops.dropout_fwd(input=x, p=0.4, rng=rng), jnp.ones((3, 7)))


class Choice(unittest.TestCase):
    def lowered(self, function, *arguments, platform="tpu"):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()

    def test_a_platform_without_a_plugin(self):
        """A training step of a layer lowered for such a platform has no call of te-fl; on the CPU it has nothing else."""
        from te_fl.jax.flax import TransformerLayer
        x = normal(2, 16, 32, dtype=BF16)
        module = TransformerLayer(hidden_size=32, mlp_hidden_size=64, num_attention_heads=4, mlp_activations=("silu", "linear"), dtype=BF16)
        with te.autocast(enabled=True, recipe=recipe.DelayedScaling(amax_history_len=4)):
            variables = jax.eval_shape(module.init, {"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
            step = jax.grad(lambda v, x: module.apply(v, x, rngs={"dropout": jax.random.key(2)}).astype(jnp.float32).sum())
            for platform in ("tpu", "rocm") if "cuda:0" in te_fl.info()["devices"] else ("tpu", "cuda"):
                te_fl.reset_usage()
                text = self.lowered(step, variables, x, platform=platform)
                self.assertNotIn("@te_fl", text)
                self.assertEqual({row["impl_id"] for row in te_fl.usage()}, {"reference.xla"})
            self.assertIn("@te_fl.quantize", self.lowered(step, variables, x, platform="cpu"))
        explained = te_fl.explain("quantize", device="ext:tpu:0", dtypes=["bf16", "f8e4m3"], scalings=["none", "tensor"])
        reasons = {c["impl_id"]: c["reason"] for c in explained["candidates"]}
        self.assertRegex(reasons["reference.xla"], "would be a candidate if there were a ext:tpu:0 here")
        self.assertEqual([name for name, reason in reasons.items() if "would be" in reason], ["reference.xla"])

    def test_one_program_for_several_platforms(self):
        exported = jax.export.export(jax.jit(lambda x: te.ops.relu(input=x)), platforms=("cpu", "tpu"),
                                     disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("te_fl.relu")])(jax.ShapeDtypeStruct((3,), jnp.float32))
        text = exported.mlir_module()
        self.assertEqual(text.count("@te_fl.relu"), 1)
        self.assertIn("stablehlo.select", text)

    def test_the_policy_chooses(self):
        x = normal(3, 8)
        def f(x):
            return te.activation.activation(x[:, None], ("gelu",))
        te_fl.reset_usage()
        self.assertIn("@te_fl.gelu", self.lowered(f, x, platform="cpu"))
        self.assertEqual(te_fl.usage(), [])
        with by_xla("gelu"):
            self.assertNotIn("@te_fl.gelu", self.lowered(f, x, platform="cpu"))
            np.testing.assert_allclose(jax.jit(f)(x), jax.nn.gelu(x), 1e-5, 1e-6)
            self.assertEqual([(row["op"], row["impl_id"]) for row in te_fl.usage()], [("gelu", "reference.xla")])
            chosen = [c["impl_id"] for c in te_fl.explain("gelu", dtypes=["f32"])["candidates"] if c["chosen"]]
            self.assertEqual(chosen, ["reference.xla"])
        with te_fl.policy(per_op={"gelu": ["vendor:nobody", "reference"]}):  # reference.host comes first
            self.assertIn("@te_fl.gelu", self.lowered(f, x, platform="cpu"))
        with te_fl.policy(per_op={"gelu": ["vendor"]}), self.assertRaisesRegex(te_fl.errors.Unsupported, "'gelu' on the platform tpu.*does not name it"):
            self.lowered(f, x)

    def test_calls_outside_of_programs(self):
        x, y = np.linspace(-2, 2, 9, dtype=np.float32), np.zeros(9, np.float32)
        with by_xla("gelu"):
            te_fl.ops.gelu(input=x, output=y)
        np.testing.assert_allclose(y, jax.nn.gelu(x), 1e-5, 1e-6)
        program = jax.jit(lambda x: te.ops.gelu(input=x)).lower(x).compile()  # calls te-fl
        before = te_fl.policy_text()
        te_fl.reset_usage()
        with by_xla("gelu"):
            program(x)
        self.assertEqual([row["impl_id"] for row in te_fl.usage()], ["default.cpu"], before)

    def test_vmap(self):
        x, gamma = normal(3, 2, 8), normal(8)
        with by_xla():
            wide = jax.jit(jax.vmap(lambda x: (te.ops.relu(input=x), te.ops.rmsnorm_fwd(x=x, gamma=gamma)[0])))(x)
        np.testing.assert_array_equal(wide[0], jnp.maximum(x, 0))
        np.testing.assert_allclose(wide[1], te.ops.rmsnorm_fwd(x=x, gamma=gamma)[0], 1e-5, 1e-6)


class Training(unittest.TestCase):
    def test_losses_fall(self):
        from te_fl.jax.flax import TransformerLayer
        x, y = normal(2, 16, 32, dtype=BF16), normal(2, 16, 32)
        module = TransformerLayer(hidden_size=32, mlp_hidden_size=64, num_attention_heads=4, layernorm_type="rmsnorm", mlp_activations=("silu", "linear"),
                                  enable_relative_embedding=False, enable_rotary_pos_emb=True, dtype=BF16)
        for used in (None, recipe.DelayedScaling(amax_history_len=4)):
            with by_xla(), te.autocast(enabled=used is not None, recipe=used), self.subTest(str(used)):
                te_fl.reset_usage()
                variables = jax.jit(lambda key: module.init(key, x, deterministic=True))(jax.random.key(0))
                loss = lambda v: jnp.mean((module.apply(v, x, deterministic=True).astype(jnp.float32) - y) ** 2)  # noqa: E731

                @jax.jit
                def step(variables):
                    value, grads = jax.value_and_grad(loss)(variables)
                    params = jax.tree.map(lambda p, g: p - 0.3 * g, variables["params"], grads["params"])
                    return value, {**te.update_collections(grads, variables), "params": params}

                losses = []
                for _ in range(8):
                    value, variables = step(variables)
                    losses.append(float(value))
                self.assertLess(losses[-1], 0.9 * losses[0])
                self.assertEqual({row["impl_id"] for row in te_fl.usage()}, {"reference.xla"})


if __name__ == "__main__":
    unittest.main()
