"""Tests te_fl.jax's functions against jnp in FP64: values and gradients, the compiled program's contents, and how errors are raised."""

import concurrent.futures
import dataclasses
import functools
import pathlib
import tempfile
import unittest
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np

import te_fl
import te_fl.jax as te
from te_fl.jax.attention import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout, SequenceDescriptor, fused_attn
from te_fl.jax.quantize import random_state
from te_fl.jax.rope import rotary_pos_emb
from te_fl.jax.softmax import SoftmaxFusionType

jax.config.update("jax_enable_x64", True)
RNG = np.random.default_rng(5)
GELU = {"gelu": lambda x: 0.5 * x * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * x**3))), "silu": lambda x: x * jax.nn.sigmoid(x),
        "relu": lambda x: jnp.maximum(x, 0), "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
        "squared_relu": lambda x: jnp.maximum(x, 0) ** 2, "sigmoid": jax.nn.sigmoid}


def normal(*shape, dtype=np.float32):
    return jnp.asarray(RNG.normal(size=shape), dtype)


def norm64(x, gamma, beta, kind, zero_centered):
    centred = x - x.mean(-1, keepdims=True) if kind == "layernorm" else x
    y = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * (gamma + 1 if zero_centered else gamma)
    return y if beta is None else y + beta


def attention64(q, k, v, bias=None, sink=None, out=None, scale=0.3):
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], 2) for a in (k, v))
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    s = s if bias is None else s + bias
    s = s if out is None else jnp.where(out, -jnp.inf, s)
    if sink is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(sink[None, :, None, None], (*s.shape[:3], 1))], -1)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s, -1)[..., :k.shape[1]], v)


def attend64(q):
    return fused_attn((q, q, q), None, None, None, AttnBiasType.NO_BIAS, AttnMaskType.NO_MASK, QKVLayout.BSHD_BSHD_BSHD,
                      AttnSoftmaxType.VANILLA_SOFTMAX, 0.3, 0.0, True)


class Against64(unittest.TestCase):
    """Helpers shared by the tests of functions."""

    def compare(self, ours, theirs, *arguments, tolerance=2e-5):
        """Compares jitted values and all gradients, with an asymmetric cotangent."""
        weight = np.random.default_rng(1).normal(size=jax.eval_shape(theirs, *arguments).shape)
        places = tuple(range(len(arguments)))
        ours_both = jax.jit(lambda *a: (ours(*a), jax.grad(lambda *b: jnp.sum(ours(*b).astype(jnp.float64) * weight), places)(*a)))(*arguments)
        wide = jax.tree.map(lambda a: a.astype(jnp.float64), arguments)
        theirs_both = jax.jit(lambda *a: (theirs(*a), jax.grad(lambda *b: jnp.sum(theirs(*b) * weight), places)(*a)))(*wide)
        for got, wanted in zip(jax.tree.leaves(ours_both), jax.tree.leaves(theirs_both), strict=True):
            self.assertEqual(got.shape, wanted.shape)
            got, wanted = np.asarray(got, np.float64), np.asarray(wanted)
            self.assertLess(np.max(np.abs(got - wanted), initial=0), tolerance * max(1.0, np.max(np.abs(wanted))))


class Functions(Against64):
    def test_norms(self):
        x, gamma, beta = normal(3, 5, 24), normal(24), normal(24)
        kinds = [(kind, zero_centered) for kind in ("layernorm", "rmsnorm") for zero_centered in (False, True)]
        self.compare(lambda x, g, b: jnp.stack([te.layernorm.layernorm(x, g, b if k[0] == "layernorm" else None, *k) for k in kinds]),
                     lambda x, g, b: jnp.stack([norm64(x, g, b if k[0] == "layernorm" else None, *k) for k in kinds]), x, gamma, beta)

    def test_dense(self):
        x, kernel, bias = normal(3, 5, 24), normal(24, 2, 7), normal(2, 7)
        self.compare(lambda *a: te.dense.dense(*a, contracting_dims=((2,), (0,))), lambda x, k, b: jnp.einsum("abk,knf->abnf", x, k) + b,
                     x, kernel, bias)
        self.compare(lambda x, k: te.dense.dense(x, k, contracting_dims=((0, 2), (1, 0))), lambda x, k: jnp.einsum("abk,kaf->bf", x, k),
                     normal(3, 5, 24), normal(24, 3, 4))

    def test_dense_in_half_precision_has_one_dtype(self):
        y, grads = jax.value_and_grad(lambda k: te.dense.dense(normal(4, 16, dtype=jnp.bfloat16), k).astype(jnp.float32).sum())(normal(16, 8))
        self.assertEqual(grads.dtype, jnp.float32)

    def test_layernorm_dense_and_mlp(self):
        x, gamma, beta, k1, k2 = normal(3, 5, 16), normal(16), normal(16), normal(16, 2, 12), normal(12, 16)
        b1, b2 = normal(2, 12), normal(16)
        self.compare(lambda x, k, g, b, bias: te.layernorm_dense.layernorm_dense(x, k, g, b, bias),
                     lambda x, k, g, b, bias: jnp.einsum("abk,knf->abnf", norm64(x, g, b, "layernorm", False), k) + bias, x, k1, gamma, beta, b1)

        def mlp64(x, g, k1, k2, b1, b2):
            h = jnp.einsum("abk,knf->abnf", norm64(x, g, None, "rmsnorm", True), k1) + b1
            return (GELU["silu"](h[:, :, 0]) * h[:, :, 1]) @ k2 + b2

        self.compare(lambda x, g, k1, k2, b1, b2: te.layernorm_mlp.layernorm_mlp(x, g, None, [k1, k2], [b1, b2], "rmsnorm", True,
                                                                                activation_type=("silu", "linear")),
                     mlp64, x, gamma, k1, k2, b1, b2)

    def test_activations(self):
        def ours(x):
            plain = [te.activation.activation(x[:, :1], (name,)) for name in GELU if name != "sigmoid"]
            gated = [te.activation.activation(x, ("linear", name)) for name in GELU]
            clamped = te.activation.activation(x, ("clamped_silu", "clamped_linear"), act_params={"limit": 1.0, "alpha": 1.5})
            return jnp.stack(plain + gated + [clamped])

        def theirs(x):
            plain = [f(x[:, 0]) for name, f in GELU.items() if name != "sigmoid"]
            small = jnp.minimum(x[:, 0], 1)
            clamped = small * jax.nn.sigmoid(1.5 * small) * (jnp.clip(x[:, 1], -1, 1) + 1)
            return jnp.stack(plain + [f(x[:, 0]) * x[:, 1] for f in GELU.values()] + [clamped])

        self.compare(ours, theirs, normal(4, 2, 9))

    def test_softmax(self):
        x = normal(2, 3, 5, 5)
        mask = jnp.asarray(RNG.integers(0, 2, (2, 1, 5, 5)), bool).at[..., 0].set(False)
        causal = jnp.triu(jnp.ones((5, 5), bool), 1)
        self.compare(lambda x: jnp.stack([te.softmax.softmax(x, None, 0.7), te.softmax.softmax(x, mask, 0.7, SoftmaxFusionType.SCALED_MASKED),
                                          te.softmax.softmax(x, None, 0.7, SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED)]),
                     lambda x: jnp.stack([jax.nn.softmax(jnp.where(out, -jnp.inf, 0.7 * x)) for out in (False, mask, causal)]), x)
        for nonzero in (256, 0.5, -1e9):  # a cast to uint8 would turn 256 and 0.5 into 0
            masked = te.softmax.softmax(x, mask * nonzero, 0.7, SoftmaxFusionType.SCALED_MASKED)
            np.testing.assert_array_equal(masked, te.softmax.softmax(x, mask, 0.7, SoftmaxFusionType.SCALED_MASKED))

    def test_rope(self):
        def rope64(x, consecutive):
            angles = jnp.arange(x.shape[1])[:, None] / (1.0 * 10000.0 ** (2 * jnp.arange(4) / 8))
            cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
            a, b = (x[..., ::2], x[..., 1::2]) if consecutive else jnp.split(x, 2, -1)
            parts = (a * cos - b * sin, b * cos + a * sin)
            return jnp.stack(parts, -1).reshape(x.shape) if consecutive else jnp.concatenate(parts, -1)

        for method in ("consecutive", "alternate"):
            self.compare(lambda x: rotary_pos_emb(x, (1, 10000), False, method), lambda x: rope64(x, method == "consecutive"), normal(2, 5, 3, 8))


class Attention(Against64):
    def setUp(self):
        self.q, self.k, self.v = normal(2, 6, 4, 8), normal(2, 6, 2, 8), normal(2, 6, 2, 8)
        self.causal = jnp.triu(jnp.ones((6, 6), bool), 1)[None, None]
        self.lengths = jnp.array([3, 6], jnp.int32)
        self.padding = (jnp.arange(6) >= self.lengths[:, None])[:, None, None, :]

    def call(self, q, k, v, mask_type=AttnMaskType.NO_MASK, bias=None, sink=None, descriptor=None, softmax=AttnSoftmaxType.VANILLA_SOFTMAX, **rest):
        kind = AttnBiasType.NO_BIAS if bias is None else AttnBiasType.POST_SCALE_BIAS
        return fused_attn((q, k, v), bias, descriptor, None, kind, mask_type, QKVLayout.BSHD_BSHD_BSHD, softmax, 0.3, 0.0, True,
                          softmax_offset=sink, **rest)

    def test_masks_and_windows(self):
        qkv = (self.q, self.k, self.v)
        window = self.causal | jnp.tril(jnp.ones((6, 6), bool), -3)
        self.compare(lambda *a: jnp.stack([self.call(*a), self.call(*a, AttnMaskType.CAUSAL_MASK),
                                           self.call(*a, AttnMaskType.CAUSAL_MASK, window_size=(2, 0))]),
                     lambda *a: jnp.stack([attention64(*a, out=out) for out in (None, self.causal, window)]), *qkv)

    def test_padding_as_lengths_and_as_a_mask(self):
        rows = (jnp.arange(6) < self.lengths[:, None])[:, :, None, None]  # leaves out the rows of padding queries, which are unspecified
        kinds = ((AttnMaskType.PADDING_MASK, self.padding), (AttnMaskType.PADDING_CAUSAL_MASK, self.padding | self.causal))
        operands = (SequenceDescriptor.from_seqlens(self.lengths), jnp.broadcast_to(self.padding, (2, 1, 6, 6)))
        self.compare(lambda *a: jnp.stack([self.call(*a, kind, descriptor=one) * rows for kind, _ in kinds for one in operands]),
                     lambda *a: jnp.stack([attention64(*a, out=out) * rows for _, out in kinds for _ in operands]), self.q, self.k, self.v)

    def test_windows_line_up_as_the_mask_type_says(self):
        """Windows align at the bottom right if the mask type's name contains bottom_right, otherwise at the top left. Tests more, as many and fewer
        keys than queries, and per-sequence lengths."""
        kinds = {kind: "BOTTOM_RIGHT" in kind.name for kind in AttnMaskType}
        for queries, keys in ((3, 6), (6, 6), (6, 4)):
            q, k, v = self.q[:, :queries], self.k[:, :keys], self.v[:, :keys]
            lengths = (jnp.array([queries, queries - 1], jnp.int32), jnp.array([keys - 2, keys], jnp.int32))
            for window in ((1, 1), (3, -1), (-1, 0)):
                wanted, calls = [], []
                for kind, bottom_right in kinds.items():
                    counts = lengths if kind.is_padding() else (jnp.full(2, queries), jnp.full(2, keys))
                    shift = (counts[1] - counts[0])[:, None, None] * bottom_right
                    where = np.arange(keys)[None, None] - np.arange(queries)[None, :, None] - shift  # position of a key relative to its query
                    out = (window[0] >= 0) & (where < -window[0]) | (window[1] >= 0) & (where > window[1]) | kind.is_causal() & (where > 0)
                    out = out | (np.arange(keys) >= counts[1][:, None, None])
                    # leaves out rows without visible keys, which are unspecified
                    alive = ((np.arange(queries) < counts[0][:, None]) & ~out.all(-1))[:, :, None, None]
                    wanted.append((out[:, None], alive))
                    calls.append((kind, SequenceDescriptor.from_seqlens(lengths), alive))
                    if kind.is_padding():
                        padding = np.broadcast_to((np.arange(keys) >= counts[1][:, None])[:, None, None], (2, 1, queries, keys))
                        rows = (np.arange(queries) >= counts[0][:, None])[:, None, :, None]
                        wanted.append((out[:, None], alive))
                        calls.append((kind, jnp.asarray(padding | rows if bottom_right else padding), alive))
                with self.subTest(queries=queries, keys=keys, window=window):
                    self.compare(lambda *a: jnp.stack([jnp.where(alive, self.call(*a, kind, descriptor=one, window_size=window), 0)  # noqa: B023
                                                       for kind, one, alive in calls]),  # noqa: B023
                                 lambda *a: jnp.stack([jnp.where(alive, attention64(*a, out=out & alive[:, :, :, 0][:, None]), 0)  # noqa: B023
                                                       for out, alive in wanted]), q, k, v)  # noqa: B023

    def test_masks_of_five_dimensions(self):
        out = jnp.asarray(RNG.integers(0, 2, (2, 2, 2, 6, 6)), jnp.uint8).at[..., 0].set(0)  # dimensions: KV groups, and query heads of each group
        whole = self.call(self.q, self.k, self.v, AttnMaskType.PADDING_MASK, descriptor=out)
        np.testing.assert_array_equal(whole, self.call(self.q, self.k, self.v, AttnMaskType.PADDING_MASK, descriptor=out.reshape(2, 4, 6, 6)))
        np.testing.assert_array_equal(self.call(self.q, self.k, self.v, AttnMaskType.PADDING_MASK, descriptor=out[:, :1, :1]),
                                      self.call(self.q, self.k, self.v, AttnMaskType.PADDING_MASK, descriptor=out[:, 0, :1]))
        with self.assertRaisesRegex(ValueError, r"the mask has shape \(6, 6\)"):
            self.call(self.q, self.k, self.v, AttnMaskType.PADDING_MASK, descriptor=out[0, 0, 0])

    def test_make_swa_mask(self):
        where = np.arange(6)[None] - np.arange(4)[:, None]
        for window in (None, (1, 2), (2, -1), (-1, 0)):
            left, right = (np.inf if one < 0 else one for one in window or (-1, -1))
            found = te.attention.make_swa_mask(jnp.arange(4)[None], jnp.arange(6)[None], window, jnp.uint8)
            np.testing.assert_array_equal(found, ((where >= -left) & (where <= right))[None, None])
        ids = (jnp.array([[1, 1, 2, 2]]), jnp.array([[1, 1, 1, 2, 2, 2]]))
        positions = (jnp.array([[0, 1, 0, 1]]), jnp.array([[0, 1, 2, 0, 1, 2]]))
        found = te.attention.make_swa_mask(*positions, (0, 0), jnp.uint8, *ids)
        np.testing.assert_array_equal(found[0, 0, :2, :3], [[0, 1, 1], [0, 0, 1]])  # two queries, three keys: aligned at the bottom right

    def test_names_of_masks_and_layouts(self):
        names = te.attention.canonicalize_attn_mask_type
        self.assertIs(names("bottom_right_causal"), AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK)
        for name in ("padding_causal_bottom_right", "causal_padding_bottom_right", "bottom_right_causal_padding", "bottom_right_padding_causal"):
            self.assertIs(names(name), AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK)
        for layout in QKVLayout:
            self.assertEqual([layout.is_qkvpacked(), layout.is_kvpacked(), layout.is_separate()].count(True), 1)
            self.assertEqual({layout.to_qkvpacked().is_thd(), layout.to_kvpacked().is_thd(), layout.to_separate().is_thd()}, {layout.is_thd()})
            self.assertEqual(layout.get_qkv_format().name, "THD" if layout.is_thd() else "BSHD")

    def test_bias_and_sink(self):
        self.compare(lambda q, k, v, b, s: jnp.stack([self.call(q, k, v, bias=b),
                                                      self.call(q, k, v, sink=s, softmax=AttnSoftmaxType.LEARNABLE_SOFTMAX),
                                                      self.call(q, k, v, softmax=AttnSoftmaxType.OFF_BY_ONE_SOFTMAX)]),
                     lambda q, k, v, b, s: jnp.stack([attention64(q, k, v, bias=b), attention64(q, k, v, sink=s),
                                                      attention64(q, k, v, sink=jnp.zeros(4))]),
                     self.q, self.k, self.v, normal(1, 4, 6, 6), normal(4))

    def test_packed_and_transposed(self):
        packed = normal(2, 6, 3, 4, 8)
        whole = fused_attn((packed,), None, None, None, AttnBiasType.NO_BIAS, AttnMaskType.CAUSAL_MASK, QKVLayout.BS3HD,
                           AttnSoftmaxType.VANILLA_SOFTMAX, 0.3, 0.0, True)
        parts = [packed[:, :, i] for i in range(3)]
        np.testing.assert_array_equal(whole, self.call(*parts, AttnMaskType.CAUSAL_MASK))
        turned = self.call(*[a.swapaxes(0, 1) for a in parts], AttnMaskType.CAUSAL_MASK, transpose_batch_sequence=True)
        np.testing.assert_allclose(whole, turned.swapaxes(0, 1), atol=1e-6)

    def test_dropout_repeats_with_its_key_and_keeps_the_mean(self):
        def drop(v, seed):
            ones = jnp.zeros((1, 64, 2, 8), jnp.float32)
            seed = random_state(jax.random.key(seed)) if isinstance(seed, int) else seed
            return fused_attn((ones, ones, v), None, None, seed, AttnBiasType.NO_BIAS, AttnMaskType.NO_MASK,
                              QKVLayout.BSHD_BSHD_BSHD, AttnSoftmaxType.VANILLA_SOFTMAX, 1.0, 0.5, True)

        v = jnp.ones((1, 64, 2, 8), jnp.float32)
        first = drop(v, 0)
        np.testing.assert_array_equal(first, drop(v, 0))
        self.assertFalse(np.array_equal(first, drop(v, 1)))
        self.assertLess(abs(float(first.mean()) - 1), 0.1)  # a row is the mean of 64 values, each 0 or 2; there are 128 rows
        # Typed and raw keys, several keys, and any two integers are valid seeds.
        for name, seed, same in (("typed", jax.random.key(0), 0), ("typed, several", jax.random.split(jax.random.key(0), 3), None),
                                 ("raw", jax.random.PRNGKey(7), None), ("raw, several", jax.random.split(jax.random.PRNGKey(7), 2), None),
                                 ("rbg", jax.random.key(7, impl="rbg"), None), ("numbers", jnp.array([3, 4], jnp.int32), None)):
            with self.subTest(name):
                one = jax.jit(drop)(v, seed)
                np.testing.assert_array_equal(one, drop(v, seed if same is None else same))
                self.assertLess(abs(float(one.mean()) - 1), 0.1)
        for wrong in (jnp.zeros((1,), jnp.uint32), jnp.zeros((2,), jnp.float32)):
            with self.assertRaisesRegex(ValueError, "it is a key of jax.random, two numbers of uint32"):
                drop(v, wrong)
        # The gradient of v is zero where the forward dropped. With these v, sum(out) is the sum of the kept probabilities.
        self.assertAlmostEqual(float(jax.grad(lambda v: drop(v, 0).sum())(v).sum()), float(first.sum()), places=2)


class Programs(unittest.TestCase):
    def test_the_program_contains_the_calls(self):
        def loss(x, gamma, kernel):
            return te.layernorm_dense.layernorm_dense(x, kernel, gamma, None, norm_type="rmsnorm").sum()

        arguments = (normal(4, 16), normal(16), normal(16, 8))
        jaxpr = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*arguments))
        text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arguments).as_text()
        for op in ("rmsnorm_fwd", "generic_gemm", "rmsnorm_bwd"):
            self.assertIn(f"te_fl.{op}", jaxpr)
            self.assertIn(f"custom_call @te_fl.{op}", text)
        self.assertNotIn("dot_general", jaxpr)
        self.assertIn('call = "rmsnorm_fwd x gamma -> z rsigma | epsilon=1e-06 zero_centered_gamma=0"', text)

    @unittest.skipIf(jax.device_count() > 1, "on several devices a loop")
    def test_vmap_of_an_elementwise_op_is_one_call(self):
        x = normal(3, 2, 8)
        self.assertNotIn("scan", str(jax.make_jaxpr(jax.vmap(lambda x: te.ops.gelu(input=x)))(x)))
        self.assertIn("scan", str(jax.make_jaxpr(jax.vmap(lambda x: te.ops.rmsnorm_fwd(x=x, gamma=normal(8))))(x)))
        np.testing.assert_array_equal(jax.vmap(lambda x: te.ops.gelu(input=x))(x), te.ops.gelu(input=x))

    def test_te_fl_counts_the_calls(self):
        te_fl.reset_usage()
        jax.block_until_ready(te.ops.gelu(input=normal(8)))
        self.assertEqual([row["op"] for row in te_fl.usage()], ["gelu"])

    def test_ops_by_name(self):
        x = normal(3, 4, 8)
        self.assertEqual(te.ops.geglu(input=x).shape, (3, 4, 4))
        z, mu, rsigma = te.ops.layernorm_fwd(x=x, gamma=normal(8))
        self.assertEqual((z.shape, mu.shape, rsigma.dtype), ((3, 4, 8), (12,), jnp.float32))
        d = te.ops.generic_gemm(a=normal(3, 4), b=normal(5, 4), trans_b=True, alpha=np.float32(0.5))
        self.assertEqual(d.shape, (3, 5))
        self.assertEqual(te.ops.gelu(input=jnp.zeros((0, 4), jnp.float32)).shape, (0, 4))
        self.assertEqual(float(te.ops.relu(input=jnp.float32(-1))), 0.0)
        old = jnp.ones((3, 5), jnp.float32)
        a, b = normal(3, 4), normal(4, 5)
        np.testing.assert_allclose(te.ops.generic_gemm(a=a, b=b, d=old, accumulate=True), a @ b + 1, atol=1e-5)
        np.testing.assert_array_equal(old, 1)  # the function returns the updated array; the argument stays unchanged
        kept, mask = te.ops.dropout_fwd(input=jnp.ones(250, jnp.float32), p=0.25, rng=random_state(jax.random.key(0)))
        self.assertEqual(mask.shape, (32,))
        self.assertEqual(int(np.unpackbits(np.asarray(mask)).sum()), int((kept != 0).sum()))
        _, each = te.ops.multi_tensor_l2norm(inputs=[jnp.full((4,), 2.0, jnp.float32), jnp.ones((9,), jnp.float32)], per_tensor_norms=True)
        np.testing.assert_allclose(each, [4, 3])
        for layout, shape in (("sbhd", (4, 2, 3, 8)), ("bshd", (2, 4, 3, 8)), ("thd", (4, 3, 8))):  # the layout determines the order of the extents
            lengths = {"cu_seqlens": jnp.array([0, 4], jnp.int32)} if layout == "thd" else {}
            turned = te.ops.fused_rope_forward(input=normal(*shape), freqs=jnp.zeros((4, 1, 1, 8), jnp.float32), layout=layout, **lengths)
            self.assertEqual(turned.shape, shape)
        _, (scale,) = te.ops.fused_amax_and_scale_update_after_reduction(amax_histories=[jnp.full((2, 1), 2.0, jnp.float32)],
                                                                         scales=[jnp.ones((1,), jnp.float32)], fp8_dtype="e4m3")
        self.assertEqual(float(scale[0]), 224.0)

    def test_ops_that_write_lists(self):
        twice, _ = te.ops.multi_tensor_scale(inputs=[np.ones(3, np.float32)], outputs=[True], scale=2.0, noop_flag=np.zeros(1, np.int32))
        np.testing.assert_array_equal(twice[0], 2)
        shapes = ((4,), (2, 3))
        g, p, m = ([normal(*s) for s in shapes] for _ in range(3))
        v = [jnp.abs(normal(*s)) for s in shapes]
        adam = jax.jit(lambda lr, step, p, m, v: te.ops.multi_tensor_adam(
            grads=g, params=p, exp_avgs=m, exp_avg_sqs=v, lr_tensor=lr, step_tensor=step, beta1=0.8, beta2=0.9,
            fp8_params=te.quantize.QuantizedOutput(jnp.float8_e4m3fn, scale=jnp.full((1,), 2.0, jnp.float32))))
        params, first, second, codes = adam(jnp.full((1,), 0.1, jnp.float32), jnp.full((1,), 3), p, m, v)
        for i in range(2):
            wide = [np.asarray(a[i], np.float64) for a in (g, p, m, v)]
            a, b = 0.8 * wide[2] + 0.2 * wide[0], 0.9 * wide[3] + 0.1 * wide[0] ** 2
            wanted = wide[1] - 0.1 * (a / (1 - 0.8**3)) / (np.sqrt(b / (1 - 0.9**3)) + 1e-8)
            for found, want in ((params[i], wanted), (first[i], a), (second[i], b)):
                np.testing.assert_allclose(found, want, atol=1e-5)
            np.testing.assert_allclose(codes[i].data.astype(jnp.float32) * codes[i].scale_inv, params[i], rtol=0.07, atol=1e-2)
        sgd = functools.partial(te.ops.multi_tensor_sgd, grads=g, params=p, momentums=m, lr=0.1, momentum=0.5)
        params, momentums, copies = sgd(param_copies=jnp.bfloat16)
        np.testing.assert_allclose(momentums[1], 0.5 * m[1] + g[1], atol=1e-6)
        np.testing.assert_allclose(params[1], p[1] - 0.1 * momentums[1], atol=1e-6)
        np.testing.assert_array_equal(copies[0], params[0].astype(jnp.bfloat16))
        held = [jnp.full(s, 7, jnp.bfloat16) for s in shapes]
        _, _, copies = sgd(param_copies=held, noop_flag=jnp.ones((1,), jnp.int32))
        np.testing.assert_array_equal(copies[1], held[1])
        with self.assertRaisesRegex(ValueError, "what 'param_copies' holds stays where noop_flag says so: give arrays"):
            sgd(param_copies=jnp.bfloat16, noop_flag=jnp.ones((1,), jnp.int32))
        scaled, flag = te.ops.multi_tensor_scale(inputs=g, noop_flag=jnp.zeros((1,), jnp.int32), scale=2.0)
        np.testing.assert_array_equal(scaled[1], 2 * g[1])
        for wrong in ([], g[0], None):
            with self.assertRaisesRegex(TypeError, "'grads'.*list of"):
                te.ops.multi_tensor_sgd(grads=wrong, params=p, momentums=m)

    def test_float64_is_refused_while_it_is_traced_and_an_empty_sum_is_0(self):
        x = normal(4, 4, dtype=np.float64)
        for f in (lambda x: te.dense.dense(x, x), lambda x: te.layernorm.layernorm(x, x[0], None, "rmsnorm"),
                  lambda x: te.activation.activation(x[:, None], ("gelu",)), lambda x: te.softmax.softmax(x[None, None]),
                  lambda x: attend64(x.reshape(1, 4, 2, 2)), lambda x: rotary_pos_emb(x.reshape(1, 4, 2, 2), (1, 10000), False)):
            with self.assertRaisesRegex(te_fl.errors.InvalidArgument, r"is float64\[.*its dtype must be float32 or float16 or bfloat16.*convert it first"):
                jax.eval_shape(f, x)
        loss = lambda x, k, b: (te.dense.dense(x, k, b) ** 2).sum()  # noqa: E731
        empty = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(normal(4, 0), normal(0, 3), jnp.ones(3, jnp.float32))
        self.assertEqual(float(empty[0]), 12.0)
        self.assertEqual([g.shape for g in empty[1]], [(4, 0), (0, 3), (3,)])

    def test_errors_have_te_fl_s_text(self):
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, r"argument 'output' has shape \[4\], must be \[5\]"):
            jax.block_until_ready(te.ops.gelu(input=normal(5), output=jax.ShapeDtypeStruct((4,), jnp.float32)))
        with self.assertRaisesRegex(te_fl.errors.InvalidArgument, r"'input' is int32\[5\], its dtype must be float32 or float16 or bfloat16"):
            te.ops.gelu(input=jnp.ones(5, jnp.int32), output=jax.ShapeDtypeStruct((5,), jnp.float32))
        with self.assertRaisesRegex(TypeError, r"gelu\(\) has no argument 'inputs'; gelu\(\) takes input, output"):
            te.ops.gelu(inputs=normal(5))
        with self.assertRaisesRegex(TypeError, r"gelu\(\) needs 'input'"):
            te.ops.gelu()
        with self.assertRaisesRegex(AttributeError, "gelu"):
            te.ops.gelo
        with self.assertRaisesRegex(ValueError, "the shape of 'o' does not follow from the inputs: give o=jax.ShapeDtypeStruct"):
            te.ops.fused_attn_fwd(q=normal(1, 2, 1, 8), k=normal(1, 2, 1, 8), v=normal(1, 2, 1, 8))
        with self.assertRaisesRegex(ValueError, r"pair \[8\] of x \(3, 8\) with \[4\] of kernel"):
            te.dense.dense(normal(3, 8), normal(4, 2))

    @unittest.skipIf(jax.default_backend() != "cpu", "it names the CPU's implementations")
    def test_the_policy_is_that_of_the_trace(self):
        """A compiled program keeps the policy under which it was traced, even if XLA runs it on another thread."""
        x = normal(8, 1, 4)
        f = jax.jit(lambda x: jax.lax.scan(lambda c, _: (te.activation.activation(c[:, None], ("gelu",)), None), x[:, 0], None, 2)[0])

        def servers(run, *arguments):
            te_fl.reset_usage()
            jax.block_until_ready(run(*arguments))
            return {row["impl_id"] for row in te_fl.usage()}

        plain = f.lower(x).compile()
        self.assertEqual(servers(f, x), {"default.cpu"})
        with te_fl.policy(per_op={"gelu": ["vendor:nobody", "reference"]}):
            self.assertEqual(servers(f, x), {"reference.host"})
            with te_fl.policy(strict=True):  # settings that the inner scope omits stay those of the outer scope
                self.assertIn("| per_op=gelu=vendor:nobody|reference strict=1", f.lower(x).as_text())
                with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "strict"):
                    jax.block_until_ready(f(x))
            compiled = f.lower(x).compile()
            self.assertEqual(servers(f, x), {"reference.host"})
            self.assertEqual(servers(plain, x), {"default.cpu"})
            self.assertIn("nobody", te_fl.policy_text())  # running the program does not read the thread's own policy scopes
            with concurrent.futures.ThreadPoolExecutor(1) as other:
                self.assertEqual(other.submit(servers, f, x).result(), {"default.cpu"})
        self.assertEqual(servers(compiled, x), {"reference.host"})
        self.assertEqual(servers(f, x), {"default.cpu"})
        for text, reason in (("prefer=vendr", "did you mean 'vendor'"), ("colour=red", "a policy has no setting 'colour'"), ("strict", "is no policy"),
                             ("max_staged_bytes=-1", "no number of bytes")):
            with self.assertRaisesRegex(jax.errors.JaxRuntimeError, reason):
                jax.block_until_ready(jax.ffi.ffi_call("te_fl.relu", jax.ShapeDtypeStruct((2,), jnp.float32))(
                    jnp.ones(2, jnp.float32), call=f"relu input -> output | | {text}"))

    def test_every_op_is_known_to_xla_from_the_import_on(self):
        """An exported program names call targets that the process has not traced itself; importing te_fl.jax registers all of them."""
        out = jax.ShapeDtypeStruct((2, 3), jnp.float32)
        # Calls an op that no test in this file traces.
        y = jax.ffi.ffi_call("te_fl.strided_copy", out)(jnp.ones((2, 3), jnp.float32), call="strided_copy input -> output |")
        np.testing.assert_array_equal(y, 1)

    def test_a_text_that_is_no_call_is_refused(self):
        x, out = jnp.ones((2, 2), jnp.float32), jax.ShapeDtypeStruct((2, 2), jnp.float32)
        for text, reason in (
                ("", "it is not OP OPERANDS"), ("relu input -> output", "it is not OP OPERANDS"), ("| relu input -> output", "it is not OP"),
                ("rely input -> output |", "relu"), ("relu inputs -> output |", "relu has no tensor argument 'inputs'"),
                ("relu input.amex -> output |", "'input.amex' is no part of a tensor"), ("relu input -> output | limit=1", "no argument 'limit'"),
                ("clamped_swiglu input -> output | limit=high", "'high' is no value of 'limit'"), ("relu input -> output | x", "'x' has no value"),
                *((f"fused_topk_with_score_function_fwd logits -> probs | {name}={value}", f"'{value}' is no value of '{name}'")
                  for name, value in (("topk", "2.7"), ("topk", "4294967298"), ("use_pre_softmax", "0.5"))),
                ("relu input -> output | output.scaling=mx", "'mx' is no value of a tensor's 'scaling'"), ("relu -> output |", "names 0 arrays"),
                ("relu input input -> output |", "names 2 arrays, XLA gives 1"), ("dropout_fwd rng -> output | p=0.5", "'rng' has 4 elements of 16 bits; it is to have 4 of 32"),
                ("relu input.columnwise_data -> output | input.scaling=tensor", "it is to have 4 of 8"), ("relu input.scale_inv -> output |", "without data")):
            with self.assertRaisesRegex(jax.errors.JaxRuntimeError, reason):
                operands = x if "rng" not in text else jnp.ones(4, jnp.float16)
                jax.block_until_ready(jax.ffi.ffi_call("te_fl.relu", out)(operands, call=text))
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "one attribute, the string 'call'"):
            jax.block_until_ready(jax.ffi.ffi_call("te_fl.relu", out)(x, calls="relu input -> output |", n=1))

    def test_parts_of_another_size_are_refused(self):
        codes = te.quantize.Quantizer(scaling="block_1x128").quantize(jnp.ones((4, 256), jnp.float32), columnwise=False)
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, r"'input.scale_inv' has 1 elements of 32 bits; it is to have 8 of 32"):
            jax.block_until_ready(te.ops.dequantize(input=dataclasses.replace(codes, scale_inv=jnp.ones((1, 1), jnp.float32)),
                                                    output=jax.ShapeDtypeStruct((4, 256), jnp.float32)))

    def test_unsupported_features_are_refused(self):
        q = normal(1, 4, 2, 8)
        operands = ((q, q, q), None, None, None, AttnBiasType.NO_BIAS, AttnMaskType.NO_MASK)
        with self.assertRaisesRegex(NotImplementedError, "qkv_layout THD_THD_THD is not supported; pad"):
            fused_attn(*operands, QKVLayout.THD_THD_THD, AttnSoftmaxType.VANILLA_SOFTMAX, 1.0, 0.0, True)
        for name, value in (("stripe_size", 2), ("score_mod", abs), ("return_max_logit", True), ("max_segments_per_seq", 2)):
            with self.assertRaisesRegex(NotImplementedError, rf"fused_attn\({name}="):
                fused_attn(*operands, QKVLayout.BSHD_BSHD_BSHD, AttnSoftmaxType.VANILLA_SOFTMAX, 1.0, 0.0, True, **{name: value})
        with self.assertRaisesRegex(NotImplementedError, "collective_op_set"):
            te.dense.dense(normal(2, 4), normal(4, 2), collective_op_set=object())
        with self.assertRaisesRegex(ValueError, "context_parallel_strategy is 'rings'; it is one of DEFAULT, ALL_GATHER, RING"):
            fused_attn(*operands, QKVLayout.BSHD_BSHD_BSHD, AttnSoftmaxType.VANILLA_SOFTMAX, 1.0, 0.0, True, context_parallel_strategy="rings")

    def test_derivatives_that_are_none_name_the_function_that_has_one(self):
        x, square = normal(4, 2, 8), normal(1, 4, 2, 8)
        attend = functools.partial(attend64)
        for function, by_name, x in (
                ("dense.dense", lambda x: te.dense.dense(x, x[0].T, contracting_dims=((2,), (0,))), x),
                ("activation.activation", lambda x: te.activation.activation(x, ("gelu", "linear")), x),
                ("layernorm.layernorm", lambda x: te.layernorm.layernorm(x, x[0, 0], x[0, 1], "layernorm"), x),
                ("layernorm.layernorm", lambda x: te.layernorm.layernorm(x, x[0, 0], None, "rmsnorm"), x),
                ("softmax.softmax", lambda x: te.softmax.softmax(x), square), ("attention.fused_attn", attend, square),
                ("rope.rotary_pos_emb", lambda x: rotary_pos_emb(x, (1, 10000), False), square)):
            first = jax.grad(lambda x: (by_name(x) ** 2).sum())  # noqa: B023
            for second in (jax.grad(lambda x: (first(x) ** 2).sum()), jax.jit(jax.grad(lambda x: (first(x) ** 2).sum())),  # noqa: B023
                           jax.jacfwd(first)):
                with self.subTest(function), self.assertRaisesRegex(
                        te_fl.errors.Unsupported, rf"te_fl.jax: the op \w+ has no derivative of its own; te_fl.jax.{function} has a first one.*jax.custom_jvp"):
                    jax.eval_shape(second, x)
            # a recomputed forward does not count as a second-order derivative
            self.assertEqual(jax.eval_shape(jax.checkpoint(first), x).shape, x.shape)
        for f, text in ((lambda x: te.ops.gelu(input=x), "the op gelu has no derivative of its own; te_fl.jax.activation.activation has"),
                        (lambda x: te.ops.dropout_fwd(input=x, p=0.5, rng=jnp.zeros(4, jnp.uint32))[0], "no function of te_fl.jax has one of it; make one of "
                         "te_fl.jax.ops.dropout_fwd and the op of its gradient")):
            for derivative in (jax.grad(lambda x: f(x).sum()), lambda x: jax.jvp(f, (x,), (x,))):  # noqa: B023
                with self.assertRaisesRegex(te_fl.errors.Unsupported, text):
                    jax.eval_shape(derivative, x)


class Versions(unittest.TestCase):
    def test_an_old_jax_is_refused_by_name_and_version(self):
        version = jax.__version__
        try:
            jax.__version__ = "0.9.1"
            with self.assertRaisesRegex(ImportError, "JAX 0.9.1 is installed; te_fl needs 0.10 or newer"):
                te._check_versions()
        finally:
            jax.__version__ = version
        te._check_versions()

    def test_another_ffi_is_refused(self):
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(jax.ffi, "include_dir", lambda: folder):
            te._check_versions()  # without headers the check is left to XLA
            header = pathlib.Path(folder) / "xla/ffi/api/c_api.h"
            header.parent.mkdir(parents=True)
            for version in ((1, 0), (0, 2)):
                header.write_text("#define XLA_FFI_API_MAJOR {}\n#define XLA_FFI_API_MINOR {}\n".format(*version))
                with self.assertRaisesRegex(ImportError, "speaks version 0.3 of XLA's FFI.*has {}.{}".format(*version)):
                    te._check_versions()


if __name__ == "__main__":
    unittest.main()
