"""Tests te_fl.jax.flax: parameters, values against FP64, FP8 state as a collection, refusals, and the GPT of the example."""

import importlib.util
import inspect
import json
import pathlib
import re
import unittest

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np

import te_fl.jax as te
from te_fl.common import recipe
from te_fl.jax import flax as tf

RNG = np.random.default_rng(2)
DOCUMENT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "jax.md"
NAMES_TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "transformer_engine_jax.py"
EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "jax" / "quickstart.py"


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def shapes(tree):
    return {"/".join(k.key for k in path): leaf.shape for path, leaf in jax.tree_util.tree_flatten_with_path(nn.unbox(tree))[0]}


def as64(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), nn.unbox(tree))


def norm64(x, p):
    x = x - x.mean(-1, keepdims=True) if "ln_bias" in p else x
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p.get("ln_bias", 0)


def softmax64(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention64(x, p, heads, bias=None, scale=1.0):
    """Computes causal self-attention, with the projection, in FP64."""
    qkv = np.einsum("bsk,knf->bsnf", norm64(x, p["qkv"]), p["qkv"]["kernel"]) + p["qkv"].get("bias", 0)
    q, k, v = (qkv[:, :, i].reshape(*x.shape[:2], heads, -1) for i in range(3))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * scale + (0 if bias is None else bias)
    s = np.where(np.triu(np.ones(s.shape[-2:], bool), 1), -np.inf, s)
    o = np.einsum("bhqk,bkhd->bqhd", softmax64(s), v).reshape(*x.shape[:2], -1)
    return o @ p["out"]["kernel"] + p["out"].get("bias", 0)


def gelu64(x):
    return 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))


class Modules(unittest.TestCase):
    def test_parameters_are_named_as_transformer_engine_s(self):
        x = normal(2, 4, 16)
        layer = tf.TransformerLayer(hidden_size=16, mlp_hidden_size=24, num_attention_heads=4, use_bias=True)
        found = shapes(jax.eval_shape(layer.init, {"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)["params"])
        self.assertEqual(found, {
            "attention/qkv/scale": (16,), "attention/qkv/ln_bias": (16,), "attention/qkv/kernel": (16, 3, 16), "attention/qkv/bias": (3, 16),
            "attention/out/kernel": (16, 16), "attention/out/bias": (16,), "mlp/scale": (16,), "mlp/ln_bias": (16,),
            "mlp/wi_kernel": (16, 1, 24), "mlp/wi_bias": (1, 24), "mlp/wo_kernel": (24, 16), "mlp/wo_bias": (16,),
            "relpos_bias/rel_embedding": (4, 32)})
        apart = tf.MultiHeadAttention(head_dim=4, num_attention_heads=4, num_gqa_groups=2, fuse_qkv_params=False)
        self.assertEqual(set(shapes(jax.eval_shape(apart.init, jax.random.key(0), x, x)["params"])), {
            "query/scale", "query/ln_bias", "query/kernel", "key/kernel", "value/kernel", "out/kernel"})
        grouped = tf.MultiHeadAttention(head_dim=4, num_attention_heads=4, num_gqa_groups=2)
        self.assertEqual(shapes(jax.eval_shape(grouped.init, jax.random.key(0), x, x)["params"])["kv/kernel"], (16, 2, 8))

    def test_defaults_are_transformer_engine_s(self):
        def defaults(module):
            return {f.name: f.default for f in module.__dataclass_fields__.values() if f.name not in ("parent", "name")}

        dense, layer, mlp = defaults(tf.DenseGeneral), defaults(tf.TransformerLayer), defaults(tf.LayerNormMLP)
        self.assertEqual((dense["use_bias"], dense["axis"], dense["dtype"], dense["kernel_axes"]), (True, -1, jnp.float32, ()))
        self.assertEqual((defaults(tf.LayerNormDenseGeneral)["use_bias"], defaults(tf.LayerNormDenseGeneral)["scale_axes"]), (False, ("embed",)))
        self.assertEqual((mlp["intermediate_dim"], mlp["activations"], mlp["kernel_axes_1"]), (2048, ("gelu",), ("embed", "act", "mlp")))
        self.assertEqual((layer["hidden_size"], layer["hidden_dropout"], layer["attention_dropout"], layer["self_attn_mask_type"],
                          layer["enable_relative_embedding"], layer["scale_attn_logits"]), (512, 0.1, 0.1, "causal", True, False))
        self.assertEqual([len(d) for d in (dense, layer, mlp, defaults(tf.MultiHeadAttention), defaults(tf.DotProductAttention))],
                         [14, 44, 34, 37, 22])

    def test_transformer_layer(self):
        self.check_transformer_layer(16)

    def test_transformer_layer_whose_heads_are_wider_than_its_input(self):
        self.check_transformer_layer(32)

    def check_transformer_layer(self, hidden_size):
        x = normal(2, 6, 16)
        layer = tf.TransformerLayer(hidden_size=hidden_size, mlp_hidden_size=24, num_attention_heads=4, use_bias=True,
                                    bias_init=nn.initializers.normal())
        variables = nn.unbox(jax.jit(lambda: layer.init(jax.random.key(0), x, deterministic=True))())
        y = jax.jit(lambda v, x: layer.apply(v, x, deterministic=True))(variables, x)
        p, wide = as64(variables["params"]), np.asarray(x, np.float64)
        distance = np.arange(6)[:, None] - np.arange(6)[None]
        # 32 buckets, 16 for each direction; each of the nearest 8 distances has a bucket of its own.
        bias = p["relpos_bias"]["rel_embedding"][:, np.where(distance < 0, 16 - distance, distance)]
        wide = wide + attention64(wide, p["attention"], 4, bias)
        hidden = norm64(wide, p["mlp"]) @ p["mlp"]["wi_kernel"][:, 0] + p["mlp"]["wi_bias"][0]
        wide = wide + gelu64(hidden) @ p["mlp"]["wo_kernel"] + p["mlp"]["wo_bias"]
        np.testing.assert_allclose(y, wide, atol=5e-5)

    def test_decoder_with_padding(self):
        x, encoded = normal(2, 4, 16), normal(2, 5, 16)
        layer = tf.TransformerLayer(hidden_size=16, mlp_hidden_size=24, num_attention_heads=2, layer_type=tf.TransformerLayerType.DECODER,
                                    enable_relative_embedding=False, self_attn_mask_type="causal", hidden_dropout=0.0, attention_dropout=0.0)
        mask = jnp.zeros((2, 1, 4, 5), bool).at[0, :, :, 3:].set(True)
        variables = layer.init(jax.random.key(0), x, encoded, encoder_decoder_mask=mask)
        apply = jax.jit(lambda e: layer.apply(variables, x, e, encoder_decoder_mask=mask))
        y, changed = apply(encoded), apply(encoded.at[:, 3:].add(1.0))
        np.testing.assert_array_equal(y[0], changed[0])  # changes at masked positions have no effect
        self.assertFalse(np.allclose(y[1], changed[1]))

    def test_low_rank_and_dropout(self):
        x = normal(3, 8)
        dense = tf.DenseGeneral(features=4, enable_low_rank_adaptation=True, low_rank_adaptation_dim=2, low_rank_adaptation_alpha=4.0)
        variables = nn.unbox(dense.init(jax.random.key(0), x))
        params = {**variables["params"], "lora_b_kernel": normal(2, 4)}
        wanted = x @ params["kernel"] + params["bias"] + x @ params["lora_a_kernel"] @ params["lora_b_kernel"] * 2.0
        np.testing.assert_allclose(dense.apply({"params": params}, x), wanted, atol=1e-5)
        mlp = tf.LayerNormMLP(intermediate_dim=16, intermediate_dropout_rate=0.5)
        variables = mlp.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
        run = lambda seed, off=False: mlp.apply(variables, x, deterministic=off, rngs={"dropout": jax.random.key(seed)})[0]  # noqa: E731
        np.testing.assert_array_equal(run(1), run(1))
        self.assertFalse(np.array_equal(run(1), run(2)))
        np.testing.assert_array_equal(run(1, True), run(2, True))

    def test_unsupported_features_are_refused(self):
        x = normal(2, 4, 16)
        for module, text in (
                (tf.LayerNormDenseGeneral(4, axis=1), r"LayerNormDenseGeneral\(axis=1\) is not supported"),
                (tf.LayerNormMLP(axis=1), r"LayerNormMLP\(axis=1\) is not supported")):
            with self.assertRaisesRegex(NotImplementedError, text):
                module.init(jax.random.key(0), x)
        with self.assertRaisesRegex(NotImplementedError, r"MultiHeadAttention\(num_heads=4\) is not supported; its newer name is num_attention_heads"):
            tf.MultiHeadAttention(4, 4, num_heads=4).init(jax.random.key(0), x, x)
        with self.assertRaisesRegex(NotImplementedError, r"MultiHeadAttention\(decode=True\)"):
            tf.MultiHeadAttention(4, 4).init(jax.random.key(0), x, x, decode=True)
        with self.assertRaisesRegex(NotImplementedError, "score_mod"):
            tf.DotProductAttention(8, 2, score_mod=abs).init(jax.random.key(0), *[normal(1, 4, 2, 8)] * 3)
        with self.assertRaisesRegex(ValueError, "attn_mask_type is 'casual'"):
            tf.DotProductAttention(8, 2, attn_mask_type="casual").init(jax.random.key(0), *[normal(1, 4, 2, 8)] * 3)

    def test_wrong_values_are_refused_where_they_are_given(self):
        for make, text in (
                (lambda: tf.LayerNormMLP(8, activations=("gellu",)), "LayerNormMLP.*'gellu' is no activation.*did you mean 'gelu'"),
                (lambda: tf.LayerNormMLP(8, activations=("tahn", "linear")), "did you mean 'tanh'"),
                (lambda: tf.LayerNormMLP(8, activations="gelu"), r"it is a tuple of one or two activations, as \('gelu',\)"),
                (lambda: tf.LayerNormMLP(0), r"LayerNormMLP\(intermediate_dim=0\)"),
                (lambda: tf.DenseGeneral((3, -1)), r"DenseGeneral\(features=\(3, -1\)\)"), (lambda: tf.DenseGeneral(2.5), "features=2.5"),
                (lambda: tf.LayerNormDenseGeneral(0), r"LayerNormDenseGeneral\(features=0\)"),
                (lambda: tf.MultiHeadAttention(8, 0), r"MultiHeadAttention\(num_attention_heads=0\)"),
                (lambda: tf.MultiHeadAttention(8, 4, num_gqa_groups=3), "num_attention_heads 4 is not a multiple of num_gqa_groups 3"),
                (lambda: tf.TransformerLayer(16, 32, 4, mlp_activations=("silu", "linaer")), "TransformerLayer.*did you mean 'linear'"),
                (lambda: tf.TransformerLayer(18, 32, 4), "hidden_size 18 is not a multiple of num_attention_heads 4"),
                (lambda: tf.TransformerLayer(16, 0, 4), r"TransformerLayer\(mlp_hidden_size=0\)"),
                (lambda: tf.TransformerLayer(16, 32, 4, layer_type="encoder").init(jax.random.key(0), normal(1, 4, 16)), "layer_type is 'encoder'; it is one of"),
                (lambda: tf.DotProductAttention(8, 2, qkv_layout="bshd").init(jax.random.key(0), *[normal(1, 4, 2, 8)] * 3),
                 "qkv_layout is 'bshd'; it is one of bs3hd"),
                (lambda: tf.DotProductAttention(8, 2, window_size=5).init(jax.random.key(0), *[normal(1, 4, 2, 8)] * 3), "window_size is 5; it is a pair"),
                (lambda: tf.DotProductAttention(8, 2, window_size=(1.5, 0)).init(jax.random.key(0), *[normal(1, 4, 2, 8)] * 3),
                 r"window_size is \(1.5, 0\); its numbers of keys are integers"),
                (lambda: te.activation.activation(normal(3, 1, 4), ("gellu",)), "activation_type is .*did you mean 'gelu'")):
            with self.subTest(text), self.assertRaisesRegex(ValueError, text):
                make()
        own = tf.LayerNormMLP(8, activations=(jnp.tanh, "elu"))
        self.assertEqual(own.init(jax.random.key(0), normal(2, 4))["params"]["wi_kernel"].value.shape, (4, 2, 8))

    def test_misspelt_keywords_name_the_nearest(self):
        class Mine(tf.DenseGeneral):
            own_field: int = 0

        for make, text in (
                (lambda: tf.DenseGeneral(featurs=4), r"DenseGeneral\(\) has no argument 'featurs'; did you mean 'features'\?; it takes features, .*, name"),
                (lambda: tf.LayerNormDenseGeneral(4, epsilom=1), "did you mean 'epsilon'"), (lambda: tf.LayerNormMLP(intermediate_dims=4), "intermediate_dim'"),
                (lambda: tf.LayerNorm(epsilom=1), "epsilon"), (lambda: tf.Softmax(scale_facter=1), "scale_factor"),
                (lambda: tf.DotProductAttention(8, 2, attn_mask="causal"), r"DotProductAttention\(\) has no argument 'attn_mask'; did you mean 'attn_mask_type'"),
                (lambda: tf.MultiHeadAttention(8, 2, use_biass=True), "use_bias"), (lambda: tf.RelativePositionBiases(1, 1, 1, dtypes=1), "dtype"),
                (lambda: tf.TransformerLayer(hiden_size=4), "hidden_size"), (lambda: Mine(4, own_feild=1), r"Mine\(\) .*'own_field'"),
                (lambda: tf.TransformerLayer().init(jax.random.key(0), normal(1, 4, 512), determinstic=True),
                 r"TransformerLayer.__call__\(\) has no argument 'determinstic'; did you mean 'deterministic'")):
            with self.subTest(text), self.assertRaisesRegex(TypeError, text):
                make()
        self.assertEqual(Mine(4, own_field=3).own_field, 3)
        self.assertEqual(tf.DenseGeneral(4).clone(features=8).features, 8)
        self.assertEqual(list(inspect.signature(tf.LayerNorm).parameters)[:2], ["epsilon", "layernorm_type"])

    def test_own_modules_on_the_base_of_te_fl_s(self):
        class Own(tf.TransformerEngineBase):
            @nn.compact
            def __call__(self, x):
                kernel = self.param("kernel", nn.initializers.ones, (16, 8))
                return te.dense.dense(x, kernel, quantizer_set=self.generate_quantizer_set("_own"))

        with te.autocast(enabled=True, recipe=recipe.DelayedScaling(amax_history_len=2)):
            self.assertIn("kernel_own_scale", Own().init(jax.random.key(0), normal(4, 16))["fp8_metas"])

    def test_an_empty_batch(self):
        """Runs forward and backward of every module on an empty batch, in high precision and under each recipe."""
        x = jnp.zeros((0, 4, 32), jnp.float32)
        for chosen in (None, recipe.DelayedScaling(amax_history_len=2), recipe.Float8CurrentScaling(), recipe.Float8BlockScaling(), recipe.MXFP8BlockScaling()):
            layer = tf.TransformerLayer(hidden_size=32, mlp_hidden_size=32, num_attention_heads=2, use_bias=True, window_size=(1, 1), enable_rotary_pos_emb=True)
            rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
            with te.autocast(enabled=chosen is not None, recipe=chosen):
                variables = nn.unbox(layer.init(rngs, x))
                y, grads = jax.jit(jax.value_and_grad(lambda v: layer.apply(v, x, rngs=rngs).sum()))(variables)  # noqa: B023
            self.assertEqual(float(y), 0.0)
            for path, grad in jax.tree_util.tree_leaves_with_path(grads["params"]):
                self.assertFalse(bool(grad.any()), path)

    def test_every_field_is_read(self):
        """Every field of a class must be read in its source, since an unread field would be accepted and ignored. Exceptions: fields that functions
        taking the module read, and float32_logits, which describes what the op always does."""
        for module in (tf.DenseGeneral, tf.LayerNorm, tf.LayerNormDenseGeneral, tf.LayerNormMLP, tf.DotProductAttention, tf.MultiHeadAttention,
                       tf.RelativePositionBiases, tf.TransformerLayer):
            source = inspect.getsource(module).split("def ", 1)[1]
            for field in module.__dataclass_fields__:
                if field in ("parent", "name", "dtype", "low_rank_adaptation_dim", "low_rank_adaptation_alpha", "float32_logits"):
                    continue
                self.assertTrue(f"self.{field}" in source or f'"{field}"' in source, f"{module.__name__}.{field}")


class State(unittest.TestCase):
    def test_collection_and_round_trip(self):
        x = normal(4, 16)
        with te.autocast(enabled=True, recipe=recipe.DelayedScaling(amax_history_len=3)):
            mlp = tf.LayerNormMLP(intermediate_dim=32, activations=("silu", "linear"))
            variables = nn.unbox(mlp.init(jax.random.key(0), x))
            step = jax.jit(jax.value_and_grad(lambda v, x: (mlp.apply(v, x)[0] ** 2).mean()))
            self.assertEqual(shapes(variables[te.NVTE_FP8_COLLECTION_NAME]), {
                f"{name}_{i}_{what}": shape for name in ("x", "kernel", "grad") for i in (0, 1)
                for what, shape in (("scale", (1,)), ("amax_history", (3,)))})
            for factor in (1.0, 3.0):
                _, grads = step(variables, x * factor)
                variables = te.update_collections({te.NVTE_FP8_COLLECTION_NAME: grads[te.NVTE_FP8_COLLECTION_NAME]}, variables)
            metas = variables["fp8_metas"]
            kernel = np.abs(variables["params"]["wi_kernel"]).max()
            np.testing.assert_array_equal(metas["kernel_0_amax_history"], np.float32([0, kernel, kernel]))
            self.assertAlmostEqual(float(metas["kernel_0_scale"][0]) * kernel / 448, 1.0, places=6)
            saved = flax.serialization.to_bytes(variables)
            again = flax.serialization.from_bytes(jax.tree.map(jnp.zeros_like, variables), saved)
            self.assertEqual(float(step(variables, x)[0]), float(step(again, x)[0]))
            fresh = {**variables, "fp8_metas": jax.tree.map(lambda a: jnp.ones_like(a) * (a.shape == (1,)), metas)}
            self.assertNotEqual(float(step(variables, x)[0]), float(step(fresh, x)[0]))  # other scales give another loss, so the saved ones were used

    def test_high_precision_and_current_scaling_have_no_state(self):
        x = normal(4, 16)
        self.assertEqual(set(tf.DenseGeneral(8).init(jax.random.key(0), x)), {"params"})
        with te.autocast(enabled=True, recipe=recipe.Float8CurrentScaling()):
            self.assertEqual(set(tf.DenseGeneral(8).init(jax.random.key(0), x)), {"params"})

    def test_a_history_of_another_length_is_refused(self):
        x, dense = normal(4, 16), tf.DenseGeneral(8)
        with te.autocast(enabled=True, recipe=recipe.DelayedScaling(amax_history_len=3)):
            variables = dense.init(jax.random.key(0), x)
        with te.autocast(enabled=True, recipe=recipe.DelayedScaling(amax_history_len=5)):
            with self.assertRaisesRegex(ValueError, r"amax_history_len=5, and the variable x_amax_history of the collection 'fp8_metas' has shape \(3,\)"):
                dense.apply(variables, x)

    def test_nn_scan_over_layers(self):
        """Stacks layers with nn.scan: parameters and FP8 state are stacked too."""
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return tf.DenseGeneral(16)(x), None

        with te.autocast(enabled=True, recipe=recipe.DelayedScaling(amax_history_len=2)):
            stack = nn.scan(Block, variable_axes={"params": 0, "fp8_metas": 0}, split_rngs={"params": True}, length=3,
                            metadata_params={nn.PARTITION_NAME: "layers"})()
            variables = nn.unbox(stack.init(jax.random.key(0), normal(4, 16), None))
            grads = jax.jit(jax.grad(lambda v, x: (stack.apply(v, x, None)[0] ** 2).mean()))(variables, normal(4, 16))
        scales = np.asarray(grads["fp8_metas"]["DenseGeneral_0"]["kernel_scale"]).ravel()
        kernels = np.asarray(variables["params"]["DenseGeneral_0"]["kernel"])
        np.testing.assert_allclose(scales, 448 / np.abs(kernels).max((1, 2)), rtol=1e-6)


    def test_states_of_microbatches(self):
        """Tests a layer's FP8 state that is used several times, so that JAX adds up the states of the uses (nn.scan with a broadcast state, a layer
        called twice), a layer whose gradients the program adds up, and an optimizer that accumulates several microbatches."""
        class Twice(nn.Module):
            @nn.compact
            def __call__(self, x):
                dense = tf.DenseGeneral(16, name="dense")
                return sum(dense(part) ** 2 for part in x)

        class Body(nn.Module):
            @nn.compact
            def __call__(self, total, x):
                return total + tf.DenseGeneral(16, name="dense")(x) ** 2, None

        scanned = nn.scan(Body, variable_broadcast=("params", "fp8_metas"), split_rngs={"params": False})
        x = jnp.stack([normal(4, 16), jnp.zeros((4, 16)), normal(4, 16) * 5])
        with te.autocast(enabled=True, recipe=recipe.DelayedScaling(amax_history_len=3)):
            module = tf.DenseGeneral(16)
            variables = nn.unbox(module.init(jax.random.key(0), x[0]))
            one = jax.jit(jax.grad(lambda v, x: (module.apply(v, x) ** 2).sum()))
            variables = {**variables, "fp8_metas": one(variables, x[0] * 3)["fp8_metas"]}
            whole = one(variables, x.reshape(12, 16))
            below = {key: {"dense": value} for key, value in variables.items()}
            uses = [jax.jit(jax.grad(lambda v: Twice().apply(te.quantize.accumulating(v), x).sum()))(below),
                    jax.jit(jax.grad(lambda v: scanned().apply(te.quantize.accumulating(v), jnp.zeros((4, 16)), x)[0].sum()))(below)]
            total = one(variables, x[0])
            for part in x[1:]:
                total = te.quantize.add_gradients(total, one(variables, part), variables)
            for found in ({key: value["dense"] for key, value in uses[0].items()}, {key: value["dense"] for key, value in uses[1].items()}, total):
                for name, state in whole["fp8_metas"].items():
                    np.testing.assert_array_equal(found["fp8_metas"][name], state, err_msg=name)
                np.testing.assert_allclose(found["params"]["kernel"], whole["params"]["kernel"], rtol=1e-4, atol=1e-3)
            if importlib.util.find_spec("optax") is None:
                self.skipTest("no optax")
            import optax
            optimizer = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=3)
            params, state, held = variables["params"], variables["fp8_metas"], optimizer.init(variables["params"])
            wanted = variables
            for part in x:
                grads = one({"params": params, "fp8_metas": state}, part)
                wanted = {**variables, "fp8_metas": one(wanted, part)["fp8_metas"]}
                updates, held = optimizer.update(grads["params"], held, params)
                params, state = optax.apply_updates(params, updates), grads["fp8_metas"]
            for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(wanted["fp8_metas"]), strict=True):
                np.testing.assert_array_equal(a, b)
            self.assertFalse(np.array_equal(params["kernel"], variables["params"]["kernel"]))


class OwnLayers(unittest.TestCase):
    def test_dot_general_of_flax_s_dense(self):
        x = normal(4, 16)
        dense = nn.Dense(8, dot_general=tf.make_dot_general_cls(recipe.DelayedScaling(amax_history_len=2))())
        variables = dense.init(jax.random.key(0), x)
        self.assertEqual(set(variables), {"params", "_overwrite_with_gradient"})
        after = jax.grad(lambda v: dense.apply(v, x).sum())(variables)["_overwrite_with_gradient"]
        metas = {path[-1].key: leaf for path, leaf in jax.tree_util.tree_flatten_with_path(after)[0]}
        self.assertAlmostEqual(float(metas["x_scale"][0]) * float(np.abs(x).max()) / 448, 1.0, places=6)
        jaxpr = str(jax.make_jaxpr(lambda v: dense.apply(v, x))(variables))
        self.assertIn("te_fl.generic_gemm", jaxpr)
        self.assertNotIn("dot_general", jaxpr)
        with self.assertRaisesRegex(NotImplementedError, r"dot_general\(precision='highest'\) is not supported"):
            dense.clone(precision="highest").init(jax.random.key(0), x)


@unittest.skipUnless(DOCUMENT.exists(), "needs te-fl's documents")
class Document(unittest.TestCase):
    def test_its_code_runs(self):
        blocks = re.findall(r"tested-by: python_jax_flax_test -->\n```python\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)
        self.assertEqual(len(blocks), 1)
        names = {}
        exec(compile(blocks[0], str(DOCUMENT), "exec"), names)
        self.assertNotEqual(float(names["variables"]["fp8_metas"]["attention"]["qkv"]["x_scale"][0]), 1.0)
        self.assertTrue(np.isfinite(names["loss"]))


@unittest.skipUnless(NAMES_TOOL.exists(), "needs te-fl's tools")
class Names(unittest.TestCase):
    def test_what_differs_from_transformer_engine_has_a_reason_on_the_page(self):
        """Compares public names, members, parameters, fields and defaults with transformer_engine.jax."""
        spec = importlib.util.spec_from_file_location("transformer_engine_jax", NAMES_TOOL)
        tool = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tool)
        facts = json.loads(tool.FACTS.read_text())
        self.assertGreater(sum(len(names) for names in facts.values()), 150)
        found = tool.differences(facts)
        self.assertEqual(found, sorted(tool.REASONS))
        self.assertIn(tool.section(found), DOCUMENT.read_text())
        # Checks the comparison itself: it detects a differing name, member, parameter and default.
        for fact, what in (({"parameters": [["x", None, "positional"]]}, ": parameters"), ({"members": {"nothing": None}}, ".nothing"),
                           ({"members": {"epsilon": {"default": "0.5"}}}, ".epsilon: default"),
                           ({"members": {"__call__": {"parameters": [["y", None, "positional"]]}}}, ".__call__: parameters")):
            self.assertEqual(tool.compared(tf, "LayerNorm", fact), [what])
        self.assertEqual(tool.compared(tf, "NoLayer", {}), [""])


@unittest.skipUnless(EXAMPLE.exists(), "needs te-fl's examples")
class Example(unittest.TestCase):
    def test_a_gpt_trains_in_fp8(self):
        spec = importlib.util.spec_from_file_location("quickstart", EXAMPLE)
        quickstart = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(quickstart)
        full = quickstart.train(50)
        fp8 = quickstart.train(50, recipe.DelayedScaling(amax_history_len=16))
        self.assertNotEqual(full, fp8)
        self.assertLess(np.mean(full[-10:]), 0.7 * full[0])
        self.assertLess(abs(np.mean(fp8[-10:]) / np.mean(full[-10:]) - 1), 0.02)


if __name__ == "__main__":
    unittest.main()
