"""Makes the calls that MaxText's source makes of Transformer Engine, with te-fl under that name (docs/frameworks.md)."""

import os
import unittest

os.environ["XLA_FLAGS"] = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), "--xla_force_host_platform_device_count=2")))
import te_fl  # noqa: E402

te_fl.as_transformer_engine()

import flax.linen as nn  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import transformer_engine.jax  # noqa: E402
import transformer_engine.jax.cpp_extensions as tex  # noqa: E402
from transformer_engine.common import recipe  # noqa: E402
from transformer_engine.jax.attention import SequenceDescriptor  # noqa: E402
from transformer_engine.jax.flax.transformer import DotProductAttention  # noqa: E402
from transformer_engine.jax.sharding import MeshResource, global_shard_guard  # noqa: E402

from te_fl.errors import Unsupported  # noqa: E402

RESOURCES = {"dp_resource": "data", "tp_resource": "tensor", "tpsp_resource": "tensor_sequence", "fsdp_resource": "fsdp", "pp_resource": None,
             "cp_resource": "context"}
AXES = ("data", "tensor", "tensor_sequence", "fsdp", "context", "expert")


def wrapped(chosen):
    """A module whose quantisers' state is where MaxText keeps it."""

    class Wrapper(transformer_engine.jax.flax.module.TransformerEngineBase):
        def generate_quantizer_set(self, postfix="", variable_collection=None, quantization_checkpoint_name=None, fp8_recipe=chosen, n_groups=None):
            return super().generate_quantizer_set(postfix=postfix, variable_collection="_overwrite_with_gradient",
                                                  quantization_checkpoint_name="quantization", fp8_recipe=fp8_recipe, n_groups=n_groups)

        @nn.compact
        def __call__(self, x, kernel, dims):
            return transformer_engine.jax.dense.dense(x, kernel, contracting_dims=dims[0], quantizer_set=self.generate_quantizer_set(),
                                                      collective_op_set=tex.noop_collective_op_set)

    return Wrapper()


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def mesh(**sizes):
    shape = [sizes.get(axis, 1) for axis in AXES]
    return jax.sharding.Mesh(np.array(jax.devices()[:np.prod(shape)]).reshape(shape), AXES)


class Products(unittest.TestCase):
    def setUp(self):
        self.x, self.kernel, self.dims = normal(0, 2, 32, 32), normal(1, 32, 32), (((2,), (0,)), ((), ()))

    def test_quantisations(self):
        wanted = jax.grad(lambda x: (x @ self.kernel).sum())(self.x)
        for chosen in (recipe.DelayedScaling(), recipe.Float8CurrentScaling(), recipe.MXFP8BlockScaling()):
            with self.subTest(type(chosen).__name__):
                module = wrapped(chosen)
                variables = module.init(jax.random.key(2), self.x, self.kernel, self.dims)
                self.assertEqual(set(variables), {"_overwrite_with_gradient"} if isinstance(chosen, recipe.DelayedScaling) else set())
                loss, grad = jax.value_and_grad(lambda x: module.apply(variables, x, self.kernel, self.dims).sum())(self.x)  # noqa: B023
                np.testing.assert_allclose(grad, wanted, atol=0.5, rtol=0.05)
                self.assertTrue(np.isfinite(loss))
        with self.assertRaisesRegex(Unsupported, "te_fl.jax has no NVFP4BlockScaling; it has DelayedScaling"):
            wrapped(recipe.NVFP4BlockScaling()).init(jax.random.key(2), self.x, self.kernel, self.dims)

    def test_a_policy_keeps_what_is_quantised(self):
        """Recomputation quantises input and kernel again, unless the policy keeps the arrays of this name."""
        module, counts = wrapped(recipe.Float8CurrentScaling()), {}
        for name in ("quantization", "another"):
            policy = jax.checkpoint_policies.save_only_these_names(name)
            run = jax.checkpoint(lambda x: module.apply({}, x, self.kernel, self.dims), policy=policy)
            te_fl.reset_usage()
            jax.grad(lambda x: run(x).sum())(self.x)  # noqa: B023
            counts[name] = sum(row["calls"] for row in te_fl.usage() if row["op"] == "quantize")
        self.assertEqual((counts["quantization"], counts["another"]), (3, 5))

    def test_overlapped_collectives_are_refused(self):
        with self.assertRaisesRegex(Unsupported, "CollectiveOpSet"):
            tex.CollectiveOpSet.create(tex.CollectiveOp.ALL_GATHER)


class Meshes(unittest.TestCase):
    """MaxText enters its mesh resources inside of `except (ImportError, AttributeError)`."""

    def run_on(self, sizes, **more):
        module = wrapped(recipe.Float8CurrentScaling())
        x, kernel = normal(0, 2, 32, 32), normal(1, 32, 32)
        with jax.set_mesh(mesh(**sizes)), global_shard_guard(MeshResource(**{**RESOURCES, **more})):
            return jax.jit(lambda x: transformer_engine.jax.sharding.with_sharding_constraint_by_logical_axes(
                module.apply({}, x, kernel, (((2,), (0,)), ((), ()))), ("nvte_batch", None, None)))(x)

    def test_axes_of_one_device(self):
        alone = self.run_on({})
        np.testing.assert_allclose(self.run_on({"data": 2}), alone, atol=1e-5)
        np.testing.assert_allclose(self.run_on({}, ep_resource="expert"), alone)

    def test_axes_of_several_devices_are_refused(self):
        for field, axis in (("ep_resource", "expert"),):
            with self.subTest(field), self.assertRaisesRegex(Unsupported, rf"MeshResource\({field}='{axis}'\) is not supported over 2 devices") as caught:
                self.run_on({axis: 2}, **{field: axis})
            self.assertNotIsInstance(caught.exception, (ImportError, AttributeError))


class Attention(unittest.TestCase):
    def layer(self, **options):
        return DotProductAttention(head_dim=8, num_attention_heads=4, num_gqa_groups=2, attn_bias_type="no_bias", attention_dropout=0.0, dropout_rng_name="aqt",
                                   dtype=jnp.float32, float32_logits=False, scale_factor=1.0, transpose_batch_sequence=False,
                                   context_parallel_causal_load_balanced=True, context_parallel_axis="context", context_parallel_strategy="all_gather",
                                   **{"attn_mask_type": "padding_causal", "qkv_layout": "BSHD_BSHD_BSHD", "window_size": None, "max_segments_per_seq": 1,
                                      **options})

    def test_a_mask_of_five_dimensions(self):
        q, k, v = normal(0, 2, 16, 4, 8), normal(1, 2, 16, 2, 8), normal(2, 2, 16, 2, 8)
        masked = jnp.triu(jnp.ones((16, 16), jnp.uint8), 1)[None, None, None] | (jnp.arange(16) >= 12).astype(jnp.uint8)
        with jax.set_mesh(mesh()):
            for window in (None, [4, 0]):
                with self.subTest(window=window):
                    layer = self.layer(window_size=window)
                    self.assertEqual(layer.init(jax.random.key(0), q[:1], k[:1], v[:1], sequence_descriptor=jnp.zeros((1, 1, 1, 16, 16), jnp.uint8)), {})
                    out = layer.apply({}, q, k, v, sequence_descriptor=masked)
                    hidden = masked[0, 0, 0].astype(bool)
                    if window:
                        hidden = hidden | (jnp.arange(16)[None] < jnp.arange(16)[:, None] - 4)
                    scores = jnp.einsum("bqgmd,bkgd->bgmqk", q.reshape(2, 16, 2, 2, 8), k)
                    wanted = jnp.einsum("bgmqk,bkgd->bqgmd", jax.nn.softmax(jnp.where(hidden, -jnp.inf, scores), -1), v).reshape(q.shape)
                    np.testing.assert_allclose(out[:, :12], wanted[:, :12], atol=1e-5)

    def test_what_needs_a_packed_kernel_is_refused(self):
        q, k, v = normal(0, 2, 16, 4, 8), normal(1, 2, 16, 2, 8), normal(2, 2, 16, 2, 8)
        ids = jnp.ones((2, 16), jnp.int32)
        with self.assertRaisesRegex(Unsupported, "segment ids are not supported"):
            SequenceDescriptor.from_segment_ids_and_pos(segment_ids=ids, segment_pos=ids)
        with jax.set_mesh(mesh()):
            with self.assertRaisesRegex(Unsupported, "THD_THD_THD is not supported"):
                self.layer(qkv_layout="THD_THD_THD").init(jax.random.key(0), q, k, v)

    def test_sequences_over_two_devices(self):
        """MaxText's context parallelism by gathered keys, its tokens in the order that balances the load."""
        q, k, v = normal(0, 2, 16, 4, 8), normal(1, 2, 16, 2, 8), normal(2, 2, 16, 2, 8)
        wanted = self.layer(attn_mask_type="causal").apply({}, q, k, v)
        order = [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11]
        with jax.set_mesh(mesh(context=2)):
            out = jax.jit(self.layer(attn_mask_type="causal").apply)({}, *(t[:, jnp.array(order)] for t in (q, k, v)))
        np.testing.assert_allclose(out, wanted[:, jnp.array(order)], atol=1e-5)


if __name__ == "__main__":
    unittest.main()
