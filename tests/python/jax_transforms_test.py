"""Tests te_fl.jax under vmap, scan, remat, shard_map and XLA's partitioner, on four emulated CPU devices."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import functools  # noqa: E402
import re  # noqa: E402
import unittest  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import te_fl.jax as te  # noqa: E402
from te_fl.common import recipe  # noqa: E402
from te_fl.jax.attention import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout, fused_attn  # noqa: E402
from te_fl.jax.quantize import create_set  # noqa: E402
from te_fl.jax.rope import rotary_pos_emb  # noqa: E402

RNG = np.random.default_rng(3)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def close(test, found, wanted, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        test.assertEqual(a.shape, b.shape)
        a, b = np.asarray(a), np.asarray(b)  # NumPy, because jnp would compile a program for each shape and layout
        test.assertLess(np.max(np.abs(a - b)), tolerance * max(1.0, np.max(np.abs(b))))


def attend(q):
    return fused_attn((q, q, q), None, None, None, AttnBiasType.NO_BIAS, AttnMaskType.CAUSAL_MASK, QKVLayout.BSHD_BSHD_BSHD,
                      AttnSoftmaxType.VANILLA_SOFTMAX, 0.3, 0.0, True)


class OneDevice(unittest.TestCase):
    def test_vmap_is_the_loop(self):
        x, gamma, kernel = normal(3, 4, 16), normal(16), normal(3, 16, 8)

        def one(x, kernel):
            loss = lambda x, k: (te.layernorm_dense.layernorm_dense(x, k, gamma, None, norm_type="rmsnorm") ** 2).sum()  # noqa: E731
            return jax.value_and_grad(loss, (0, 1))(x, kernel)

        close(self, jax.jit(jax.vmap(one))(x, kernel), jax.tree.map(lambda *a: jnp.stack(a), *[one(a, k) for a, k in zip(x, kernel)]))
        close(self, jax.vmap(one, in_axes=(0, None))(x, kernel[0])[1][1], jnp.stack([one(a, kernel[0])[1][1] for a in x]))
        close(self, jax.vmap(attend)(normal(2, 1, 4, 2, 8).at[1].set(1.0))[1], attend(jnp.ones((1, 4, 2, 8))))

    def test_vmap_of_lists_is_the_loop(self):
        a, b = normal(2, 4, 5), normal(2, 5, 3)
        one = lambda a, b: te.ops.grouped_gemm(a=[a], b=[b], d=[jnp.zeros((4, 3))])[0]  # noqa: E731
        close(self, jax.vmap(one)(a, b), a @ b)

    def test_scan_stacks_the_state(self):
        kernels, x = normal(3, 16, 16) / 4, normal(8, 16)
        states = jax.tree.map(lambda a: jnp.stack([a] * 3), create_set(recipe.DelayedScaling(amax_history_len=2)))

        def scanned(kernels, states):
            return (jax.lax.scan(lambda h, layer: (te.dense.dense(h, layer[0], quantizer_set=layer[1]), None), x, (kernels, states))[0] ** 2).sum()

        def unrolled(kernels, states):
            h = x
            for i in range(3):
                h = te.dense.dense(h, kernels[i], quantizer_set=jax.tree.map(lambda a: a[i], states))  # noqa: B023
            return (h**2).sum()

        close(self, jax.jit(jax.value_and_grad(scanned, (0, 1)))(kernels, states), jax.jit(jax.value_and_grad(unrolled, (0, 1)))(kernels, states))

    def test_remat_is_bit_identical(self):
        x, kernels, gamma = normal(8, 16), (normal(16, 2, 32), normal(32, 16)), normal(16)
        sets = tuple(create_set(recipe.DelayedScaling(amax_history_len=2)) for _ in range(2))

        def loss(block, x, kernels, sets):
            return (block(block(x, kernels, sets), kernels, sets) ** 2).sum()

        def block(x, kernels, sets):
            return te.layernorm_mlp.layernorm_mlp(x, gamma, None, list(kernels), [None, None], "rmsnorm", activation_type=("gelu", "linear"),
                                                  quantizer_sets=sets)

        plain, again = [jax.jit(jax.value_and_grad(functools.partial(loss, b), (0, 1)))(x, kernels, sets) for b in (block, jax.checkpoint(block))]
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a, b)
        calls = [jax.jit(jax.grad(functools.partial(loss, b))).lower(x, kernels, sets).as_text().count("@te_fl.rmsnorm_fwd")
                 for b in (block, jax.checkpoint(block))]
        self.assertGreater(calls[1], calls[0])  # the lowered program recomputes the norm; XLA's CPU compiler may merge the copies later


class FourDevices(unittest.TestCase):
    def setUp(self):
        self.mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("dp", "tp"))

    def put(self, array, *axes):
        return jax.device_put(array, NamedSharding(self.mesh, P(*axes)))

    def mlp(self, x, gamma, kernels, biases, sets):
        y = te.layernorm_mlp.layernorm_mlp(x, gamma, None, list(kernels), list(biases), "rmsnorm", activation_type=("silu", "linear"),
                                           quantizer_sets=sets)
        return (y**2).mean()

    def test_xla_cuts_the_calls(self):
        """With data on dp and the hidden width on tp, results equal those on one device, and no device holds a whole activation."""
        x, gamma, kernels = normal(8, 4, 32), normal(32), (normal(32, 2, 64) / 6, normal(64, 32) / 8)
        biases = (normal(2, 64), normal(32))
        both = jax.jit(jax.value_and_grad(self.mlp, (0, 1, 2, 3, 4)))
        for chosen in (None, recipe.DelayedScaling(amax_history_len=2), recipe.Float8CurrentScaling()):
            sets = tuple(create_set(chosen) for _ in range(2))
            arguments = (self.put(x, "dp"), self.put(gamma), (self.put(kernels[0], None, None, "tp"), self.put(kernels[1], "tp", None)),
                         (self.put(biases[0], None, "tp"), self.put(biases[1])), jax.tree.map(self.put, sets))
            close(self, both(*arguments), both(x, gamma, kernels, biases, sets), 1e-4)
            text = both.lower(*arguments).compile().as_text()
            calls = re.findall(r"= .*custom-call.*te_fl.generic_gemm", text)
            self.assertEqual(len(calls), 6)
            self.assertFalse([c for c in calls if "[32,128]" in c])  # the first layer's output is [16,2*32] on a device and [32,2*64] unsharded
            self.assertIn("all-reduce", text)
            self.assertNotIn(" all-gather(", text)  # no all-gather of kernels, activations or gradients

    def test_layouts_that_do_not_divide_are_computed_whole(self):
        """Three rows cannot be divided evenly over two or four devices: XLA pads them for transfers, and each op computes the unsharded tensor."""
        x, kernel, gamma = normal(3, 8), normal(8, 5), normal(8)

        def f(x, kernel, gamma, spec=None):
            x = x if spec is None else jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
            return (te.layernorm.layernorm(x, gamma, None, "rmsnorm") ** 2).sum() + (te.dense.dense(x, kernel) ** 2).sum()

        wanted = jax.value_and_grad(f, (0, 1, 2))(x, kernel, gamma)
        for spec in (P("dp"), P(("dp", "tp"))):
            close(self, jax.jit(jax.value_and_grad(functools.partial(f, spec=spec), (0, 1, 2)))(x, kernel, gamma), wanted)
        axes = (te.sharding.BATCH_AXES, te.sharding.HIDDEN_TP_AXES)
        placed = lambda x, k: (te.dense.dense(x, k, input_axes=(axes[0], None), output_axes=axes) ** 2).sum()  # noqa: E731
        for mesh in (self.mesh, jax.make_mesh((2, 2), ("dp", "tp"))):  # extents with te-fl's logical axes must be divisible
            with jax.set_mesh(mesh), te.autocast(mesh_resource=te.MeshResource(dp_resource="dp", tp_resource="tp")):
                with self.assertRaisesRegex(ValueError, "3 is not a multiple of 2"):
                    jax.jit(placed)(x, kernel)

    def test_xla_cuts_attention(self):
        q = normal(4, 8, 4, 8)
        grad = jax.jit(jax.grad(lambda q: (attend(q) ** 2).sum()))
        cut = grad(self.put(q, "dp", None, "tp"))
        close(self, cut, grad(q))
        self.assertEqual(cut.sharding.spec, P("dp", None, "tp"))
        self.assertNotIn(" all-gather(", grad.lower(self.put(q, "dp", None, "tp")).compile().as_text())

    def test_block_scales_that_do_not_divide_run_whole(self):
        x, kernel = normal(8, 128), normal(128, 32)
        product = jax.jit(lambda x, k: te.dense.dense(x, k, quantizer_set=create_set(recipe.Float8BlockScaling())))
        close(self, product(self.put(x, "dp"), self.put(kernel, None, "tp")), product(x, kernel))

    def test_shard_map(self):
        """Tensor parallelism in shard_map: each device calls the ops on its part, the program itself sums over devices, and the parts of a tensor
        share one scale."""
        x, gamma, kernels = normal(8, 32), normal(32), (normal(32, 2, 64) / 6, normal(64, 32) / 8)

        def whole(x, gamma, k1, k2, sets):
            return te.layernorm_mlp.layernorm_mlp(x, gamma, None, [k1, k2], [None, None], "rmsnorm", activation_type=("silu", "linear"),
                                                  quantizer_sets=sets)

        part = jax.shard_map(lambda *a: jax.lax.psum(whole(*a), "tp"), mesh=self.mesh,
                             in_specs=(P("dp"), P(), P(None, None, "tp"), P("tp"), P()), out_specs=P("dp"))
        for chosen in (None, recipe.DelayedScaling(amax_history_len=2)):
            arguments = (x, gamma, *kernels, tuple(create_set(chosen) for _ in range(2)))
            cut, one = [jax.jit(jax.value_and_grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2, 3, 4)))(*arguments) for f in (part, whole)]  # noqa: B023
            close(self, cut, one, 1e-4)
        self.assertNotIn("custom_partitioning", str(jax.make_jaxpr(part)(*arguments)))

    def test_shard_map_of_attention_and_norms(self):
        q, gamma, beta = normal(4, 8, 4, 8), normal(8), normal(8)

        def whole(q, gamma, beta):
            return attend(te.layernorm.layernorm(q, gamma, beta, "layernorm"))

        part = jax.shard_map(whole, mesh=self.mesh, in_specs=(P("dp", None, "tp"), P(), P()), out_specs=P("dp", None, "tp"))
        close(self, *[jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2)))(q, gamma, beta) for f in (part, whole)])  # noqa: B023

    def test_a_transformer_layer_on_data_and_tensor_axes(self):
        """A layer whose parameters are placed by Flax's logical axes, in FP8: equals the result on one device, without any all-gather."""
        try:
            from flax import linen as nn
        except ModuleNotFoundError as error:
            self.skipTest(str(error))
        from te_fl.jax.flax import TransformerLayer, extend_logical_axis_rules

        x, chosen = normal(4, 8, 32), recipe.DelayedScaling(amax_history_len=2)
        layer = TransformerLayer(hidden_size=32, mlp_hidden_size=64, num_attention_heads=4, enable_relative_embedding=False, use_bias=True,
                                 mlp_activations=("silu", "linear"))
        step = jax.value_and_grad(lambda v, x: (layer.apply(v, x, deterministic=True) ** 2).mean())
        with te.autocast(enabled=True, recipe=chosen):
            boxed = layer.init(jax.random.key(0), x, deterministic=True)
            whole = jax.jit(step)(nn.unbox(boxed), x)
        resource = te.MeshResource(dp_resource="dp", tp_resource="tp")
        with jax.set_mesh(self.mesh), te.autocast(enabled=True, recipe=chosen, mesh_resource=resource):
            places = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), self.mesh, extend_logical_axis_rules(()))
            arguments = (jax.tree.map(jax.device_put, nn.unbox(boxed), places), self.put(x, "dp"))
            compiled = jax.jit(step).lower(*arguments).compile()
            cut = compiled(*arguments)
        close(self, cut, whole, 1e-4)
        self.assertEqual(cut[1]["params"]["attention"]["qkv"]["kernel"].sharding.spec, P(None, None, "tp"))
        self.assertNotIn(" all-gather(", compiled.as_text())

    def test_state_that_would_differ_by_device_is_refused(self):
        """Without check_vma, JAX would sum a state over the devices, or let each device have a different one, so te-fl refuses."""
        x, kernel, sets = normal(8, 32), normal(32, 16), create_set(recipe.DelayedScaling(amax_history_len=2))
        state = lambda x, q: jax.grad(lambda q: te.dense.dense(x, kernel, quantizer_set=q).sum())(q)  # noqa: E731
        shard = functools.partial(jax.shard_map, mesh=self.mesh, in_specs=(P("dp"), P()), out_specs=P())
        close(self, shard(state)(x, sets), state(x, sets))
        for wrong in (shard(state, check_vma=False), lambda x, q: jax.pmap(state, in_axes=(0, None))(x.reshape(4, 2, 32), q)):
            with self.assertRaisesRegex(NotImplementedError, r"delayed scaling under pmap or shard_map\(check_vma=False\) is not supported"):
                wrong(x, sets)
        current = create_set(recipe.Float8CurrentScaling())
        both = [shard(lambda x, q: te.dense.dense(x, kernel, quantizer_set=q), out_specs=P("dp"), check_vma=c)(x, current) for c in (True, False)]
        np.testing.assert_array_equal(*both)

    def test_logical_axes_follow_the_mesh_resource(self):
        names = (te.sharding.BATCH_AXES, None, te.sharding.HIDDEN_TP_AXES)
        with jax.set_mesh(self.mesh), te.autocast(mesh_resource=te.MeshResource(dp_resource="dp", tp_resource="tp")):
            y = jax.jit(lambda x: te.sharding.with_sharding_constraint_by_logical_axes(x, names))(normal(4, 3, 8))
            self.assertEqual(y.sharding.spec, P("dp", None, "tp"))
            self.assertEqual(te.sharding.get_sharding_map_logic_axis_to_mesh_axis()[te.sharding.W_TP_AXES], "tp")
        self.assertEqual(te.sharding.get_sharding_map_logic_axis_to_mesh_axis(), {})


class ExplicitAxes(unittest.TestCase):
    """Meshes of jax.make_mesh, where an array's type contains its sharding: tests results, gradients and their types, and that no device runs an op
    on the whole tensor."""

    def setUp(self):
        self.mesh = jax.make_mesh((2, 2), ("dp", "tp"))

    def compare(self, f, arguments, axes, parts=None):
        """axes: the sharding of each argument. parts: per-device shapes in the calls of the matrix products."""
        placed = tuple(jax.tree.map(lambda a, axes=axes: jax.device_put(a, NamedSharding(self.mesh, P(*axes))), argument)
                       for argument, axes in zip(arguments, axes, strict=True))
        both = jax.jit(jax.value_and_grad(f, tuple(range(len(arguments)))))
        wanted = both(*arguments)
        if parts is not None:  # checks in some cases only that types alone suffice, without jax.set_mesh
            close(self, both(*placed), wanted, 1e-5)
        with jax.set_mesh(self.mesh):
            compiled = both.lower(*placed).compile()
            cut = compiled(*placed)
        close(self, cut, wanted, 1e-5)
        for gradient, argument in zip(jax.tree.leaves(cut[1]), jax.tree.leaves(placed), strict=True):
            self.assertEqual(jax.typeof(gradient).sharding, jax.typeof(argument).sharding)
        if parts is not None:
            self.assertEqual(sorted(re.findall(r"= f32\[([0-9,]+)\]\S* custom-call.*te_fl.generic_gemm", compiled.as_text())), sorted(parts))

    def test_dense(self):
        x, kernel, bias = normal(8, 4, 32), normal(32, 64), normal(64)
        dense = lambda x, k, b: (te.dense.dense(x, k, b, contracting_dims=((2,), (0,))) ** 2).mean()  # noqa: E731
        self.compare(dense, (x, kernel, bias), (("dp",), (None, "tp"), ()), ["16,32", "16,32", "32,32"])
        self.compare(dense, (x, kernel, bias), (("dp", None, "tp"), ("tp", None), ()), ["16,64", "16,16", "16,64"])
        self.compare(dense, (x, kernel, bias), ((None, "dp"), ("dp", "tp"), ("tp",)))
        self.compare(dense, (x, kernel, bias), ((("dp", "tp"),), (), ()))

    def test_mlp_with_every_kind_of_scaling(self):
        arguments = (normal(8, 4, 32), normal(32), normal(32, 2, 64) / 6, normal(64, 32) / 8, normal(2, 64), normal(32))
        axes = (("dp",), (), (None, None, "tp"), ("tp", None), (None, "tp"), (), ())

        def mlp(x, gamma, k1, k2, b1, b2, sets):
            return (te.layernorm_mlp.layernorm_mlp(x, gamma, None, [k1, k2], [b1, b2], "rmsnorm", activation_type=("silu", "linear"),
                                                   quantizer_sets=sets) ** 2).mean()

        for chosen in (None, recipe.DelayedScaling(amax_history_len=2), recipe.Float8CurrentScaling(), recipe.Float8BlockScaling()):
            self.compare(mlp, (*arguments, tuple(create_set(chosen) for _ in range(2))), axes)

    def test_attention_rope_softmax_activation(self):
        q = normal(4, 8, 4, 8)

        def f(q, x):
            y = attend(rotary_pos_emb(q, (1, 10000), False))
            return (y**2).sum() + (te.softmax.softmax(x) ** 2).sum() + te.activation.activation(x, ("gelu",)).sum()

        self.compare(f, (q, normal(4, 4, 1, 8)), (("dp", None, "tp"), ("dp", "tp")))

    def test_a_transformer_layer(self):
        try:
            from flax import linen as nn
        except ModuleNotFoundError as error:
            self.skipTest(str(error))
        from te_fl.jax.flax import TransformerLayer, extend_logical_axis_rules

        x, chosen = normal(4, 8, 32), recipe.DelayedScaling(amax_history_len=2)
        layer = TransformerLayer(hidden_size=32, mlp_hidden_size=64, num_attention_heads=4, enable_relative_embedding=False, attention_dropout=0.0)
        rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        step = jax.jit(jax.value_and_grad(lambda v, x: (layer.apply(v, x, rngs=rngs) ** 2).mean()))
        with te.autocast(enabled=True, recipe=chosen):
            boxed = layer.init(rngs, x)
            whole = step(nn.unbox(boxed), x)
        with jax.set_mesh(self.mesh), te.autocast(enabled=True, recipe=chosen, mesh_resource=te.MeshResource(dp_resource="dp", tp_resource="tp")):
            places = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), self.mesh, extend_logical_axis_rules(()))
            arguments = (jax.tree.map(jax.device_put, nn.unbox(boxed), places), jax.device_put(x, NamedSharding(self.mesh, P("dp"))))
            compiled = step.lower(*arguments).compile()
            cut = compiled(*arguments)
        close(self, cut, whole, 1e-4)
        self.assertNotIn(" all-gather(", compiled.as_text())


if __name__ == "__main__":
    unittest.main()
