"""Tests te_fl.jax on meshes with data, fully-sharded-data and tensor axes: eight emulated CPU devices against one device."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import pathlib  # noqa: E402
import re  # noqa: E402
import unittest  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

try:
    from flax import linen as nn
except ModuleNotFoundError as error:
    raise unittest.SkipTest(str(error)) from None

import te_fl.jax as te  # noqa: E402
from te_fl.common import recipe  # noqa: E402
from te_fl.jax.attention import AttnBiasType, AttnMaskType, AttnSoftmaxType, CPStrategy, QKVLayout, ReorderStrategy, SequenceDescriptor  # noqa: E402
from te_fl.jax.attention import fused_attn, inverse_reorder_causal_load_balancing, reorder_causal_load_balancing  # noqa: E402
from te_fl.jax.flax import DotProductAttention, LayerNormDenseGeneral, TransformerLayer, extend_logical_axis_rules  # noqa: E402
from te_fl.jax.quantize import create_set, random_state  # noqa: E402

DOCUMENT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "jax.md"
RNG = np.random.default_rng(5)
NAMES = ("dp", "fsdp", "tp")


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def make_mesh(*sizes, names=NAMES, kind=AxisType.Auto):
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names), devices=jax.devices()[:int(np.prod(sizes))])


def make_resource(sizes, sequence_parallel=False):
    named = {"dp_resource": "dp", "fsdp_resource": "fsdp", "tpsp_resource" if sequence_parallel else "tp_resource": "tp"}
    return te.MeshResource(**{key: axis for key, axis in named.items() if sizes[NAMES.index(axis)] > 1})


def make_layer(hidden, **options):
    fixed = {"hidden_size": hidden, "mlp_hidden_size": 2 * hidden, "num_attention_heads": 4, "enable_relative_embedding": False,
             "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return TransformerLayer(**{**fixed, **options})


def close(test, found, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        test.assertEqual(a.shape, b.shape)
        a, b = np.asarray(a), np.asarray(b)  # NumPy, because jnp would compile a program for each shape and layout
        test.assertLess(np.max(np.abs(a - b)), tolerance * max(1e-3, np.max(np.abs(b))))


def collectives(compiled, kind):
    """Returns the result shapes of the collectives of one kind that transfer more than a vector."""
    shapes = re.findall(rf"= (.*?) {kind}(?:-start)?\(", compiled.as_text())
    return [dims for shape in shapes for dims in re.findall(r"\[([0-9]+(?:,[0-9]+)+)\]", shape)]


def on_one_and_many(module, x, sizes, fp8=None, sequence_parallel=False, kind=AxisType.Auto):
    """Computes loss and gradients on one device and on a mesh; also returns the mesh's compiled program."""
    step = jax.value_and_grad(lambda v, x: (module.apply(v, x, deterministic=True) ** 2).mean(), (0, 1))
    with te.autocast(enabled=fp8 is not None, recipe=fp8):
        boxed = module.init(jax.random.key(0), x, deterministic=True)
        one = jax.jit(step)(nn.unbox(boxed), x)
    mesh = make_mesh(*sizes, kind=kind)
    with jax.set_mesh(mesh), te.autocast(enabled=fp8 is not None, recipe=fp8, mesh_resource=make_resource(sizes, sequence_parallel)):
        rules = extend_logical_axis_rules(())
        places = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
        lies = NamedSharding(mesh, P(dict(rules)[te.sharding.BATCH_AXES], "tp" if sequence_parallel else None))
        arguments = jax.tree.map(jax.device_put, nn.unbox(boxed), places), jax.device_put(x, lies)
        wanted = (NamedSharding(mesh, P()), (places, lies))
        compiled = jax.jit(step, out_shardings=wanted).lower(*arguments).compile()
        return one, compiled(*arguments), compiled


class Layers(unittest.TestCase):
    """Tests a TransformerLayer's loss and gradients, and the collectives in its program: four linear layers, whose inputs and gradients are gathered
    in each direction, except one gradient."""

    def check_collectives(self, compiled, x, sizes, sequence_parallel):
        _, fsdp, tp = sizes
        rows = f"{x.shape[0] // sizes[0] // fsdp},{x.shape[1]}"
        activations = lambda kind, shape=rows: [s for s in collectives(compiled, kind) if s.startswith(shape)]  # noqa: E731
        positions = "4,32"  # the gradient of relative positions, [heads, buckets], which every device holds
        gathered, scattered = [s for s in collectives(compiled, "all-gather") if s != positions], collectives(compiled, "reduce-scatter")
        moved = 4 * (tp > 1 and sequence_parallel)  # gathers before and after attention and the MLP, forward and backward
        self.assertEqual(len(gathered), moved + 4 * (fsdp > 1))  # plus the four weights
        self.assertEqual(len(scattered), moved + 4 * (fsdp > 1))
        self.assertEqual(len(activations("all-gather")), moved)
        self.assertEqual(len(activations("all-reduce")), 4 * (tp > 1 and not sequence_parallel))
        self.assertEqual(collectives(compiled, "all-to-all") + collectives(compiled, "collective-permute"), [])

    def test_grid(self):
        x = normal(8, 16, 32)
        for sizes, sequence_parallel in (((1, 1, 4), False), ((1, 1, 2), True), ((2, 1, 1), False), ((1, 2, 1), False), ((2, 1, 4), True),
                                         ((2, 2, 2), False), ((1, 2, 4), True)):
            with self.subTest(dp_fsdp_tp=sizes, sequence_parallel=sequence_parallel):
                module = make_layer(32, use_bias=True, mlp_activations=("silu", "linear"), enable_sequence_parallel=sequence_parallel)
                one, many, compiled = on_one_and_many(module, x, sizes, sequence_parallel=sequence_parallel)
                close(self, many, one, 1e-5)
                self.check_collectives(compiled, x, sizes, sequence_parallel)

    def test_other_layers(self):
        """Covers layers with a single activation, grouped queries, rotary and relative positions, LayerNorm, explicit axes."""
        x = normal(8, 16, 32)
        groups = make_layer(32, num_gqa_groups=2, layernorm_type="rmsnorm", enable_rotary_pos_emb=True)
        one, many, compiled = on_one_and_many(groups, x, (2, 1, 2))
        close(self, many, one, 1e-5)
        self.assertEqual(collectives(compiled, "all-gather"), [])
        one, many, compiled = on_one_and_many(make_layer(32, enable_relative_embedding=True, use_bias=True, enable_sequence_parallel=True), x, (1, 2, 2),
                                              sequence_parallel=True)
        close(self, many, one, 1e-5)
        self.check_collectives(compiled, x, (1, 2, 2), True)
        one, many, _ = on_one_and_many(groups, x, (2, 2, 2), kind=AxisType.Explicit)
        close(self, many, one, 1e-5)

    def test_fp8(self):
        """Weights and sequences are gathered as FP8 codes, and amaxes are those of whole tensors."""
        x = normal(8, 16, 32)
        for fp8, tolerance in ((recipe.DelayedScaling(amax_history_len=2), 1e-5), (recipe.Float8CurrentScaling(), 1e-2)):
            module = make_layer(32, use_bias=True, mlp_activations=("silu", "linear"), enable_sequence_parallel=True)
            one, many, compiled = on_one_and_many(module, x, (2, 2, 2), fp8, sequence_parallel=True)
            close(self, many, one, tolerance)
            self.assertEqual(re.findall(r"= f32\[\d+,\S* all-gather", compiled.as_text()), [])
            self.assertEqual(len(collectives(compiled, "reduce-scatter")), 8)

    def test_block_scales(self):
        """Blocks that lie entirely on one device are quantised there, and no amax is communicated."""
        x = normal(2, 128, 128)
        module = make_layer(256, mlp_hidden_size=256, mlp_activations=("silu", "linear"))
        one, many, compiled = on_one_and_many(module, x, (2, 1, 2), recipe.MXFP8BlockScaling())
        close(self, many, one, 1e-5)
        self.assertEqual(collectives(compiled, "all-gather"), [])
        self.assertNotIn("maximum", "".join(re.findall(r"all-reduce\(.*to_apply=%?(\S+)", compiled.as_text())))
        one, many, _ = on_one_and_many(make_layer(128, mlp_hidden_size=128, enable_sequence_parallel=True), normal(2, 128, 128), (2, 1, 2),
                                       recipe.MXFP8BlockScaling(), sequence_parallel=True)
        close(self, many, one, 1e-5)  # a device's half of 128 rows holds no whole block of 128
        one, many, _ = on_one_and_many(make_layer(48, mlp_activations=("silu", "linear")), normal(6, 10, 48), (2, 1, 2), recipe.Float8BlockScaling())
        close(self, many, one, 1e-5)  # blocks cross devices here, so these linear layers are computed unsharded


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 32)(tokens)
        for _ in range(2):
            x = make_layer(32, layernorm_type="rmsnorm", mlp_activations=("silu", "linear"), enable_rotary_pos_emb=True,
                         enable_sequence_parallel=True)(x, deterministic=True)
        return LayerNormDenseGeneral(features=64, layernorm_type="rmsnorm")(x)[0]


class Training(unittest.TestCase):
    def train(self, fp8, rate, sizes=None, steps=20):
        """Trains; returns the loss of each step and the final variables."""
        module, data = GPT(), np.random.default_rng(0).integers(0, 64, (4, 8, 1)) + np.arange(17) * 3  # each sequence counts upwards in threes

        def step(variables, tokens):
            def compute_loss(variables):
                logits = jax.nn.log_softmax(module.apply(variables, tokens[:, :-1]))
                return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))

            loss, grads = jax.value_and_grad(compute_loss)(variables)
            params = jax.tree.map(lambda p, g: p - rate * g, variables["params"], grads["params"])
            return {**te.update_collections(grads, variables), "params": params}, loss

        tokens = jnp.asarray(data % 64)
        with te.autocast(enabled=fp8 is not None, recipe=fp8):
            boxed = module.init(jax.random.key(0), tokens[0][:, :-1])
        mesh = make_mesh(*(sizes or (1, 1, 1)))
        with jax.set_mesh(mesh), te.autocast(enabled=fp8 is not None, recipe=fp8, mesh_resource=make_resource(sizes or (1, 1, 1), True)):
            places = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, extend_logical_axis_rules(()))
            variables = jax.tree.map(jax.device_put, nn.unbox(boxed), places)
            compiled = jax.jit(step, out_shardings=(places, NamedSharding(mesh, P())))
            losses = []
            for i in range(steps):
                variables, loss = compiled(variables, jax.device_put(tokens[i % 4], NamedSharding(mesh, P(("dp", "fsdp")))))
                losses.append(float(loss))
        return np.array(losses), variables

    def test_losses_are_those_of_one_device(self):
        # In FP8 a difference of 1e-7 can change a code; the effect grows with the learning rate, on one device too.
        for fp8, rate, tolerance in ((None, 0.1, 1e-4), (recipe.DelayedScaling(amax_history_len=4), 0.01, 5e-3),
                                     (recipe.Float8CurrentScaling(), 0.01, 5e-3)):
            one, _ = self.train(fp8, rate)
            many, variables = self.train(fp8, rate, (2, 2, 2))
            self.assertLess(one[-1], 0.9 * one[0])
            np.testing.assert_allclose(many, one, rtol=tolerance)
            for path, state in jax.tree_util.tree_leaves_with_path(variables.get("fp8_metas", {})):
                parts = [np.asarray(part.data) for part in state.addressable_shards]
                self.assertEqual(len(parts), 8)
                for part in parts[1:]:
                    np.testing.assert_array_equal(part, parts[0], err_msg=str(path))
            if isinstance(fp8, recipe.DelayedScaling):
                scales = [s for path, s in jax.tree_util.tree_leaves_with_path(variables["fp8_metas"]) if "scale" in str(path[-1])]
                self.assertEqual(len(scales), 27)  # three scales for each of nine linear layers
                self.assertTrue(all(float(scale[0]) != 1.0 for scale in scales))


class ShardMap(unittest.TestCase):
    def test_amaxes_are_those_of_whole_tensors(self):
        """Tests data, fully sharded and tensor parallelism in shard_map. For delayed scaling the FP8 state determines the mesh axes over which amaxes
        are reduced; for current scaling the mesh resource does."""
        arguments = (normal(8, 4, 32), normal(32), normal(32, 2, 64) / 6, normal(64, 32) / 8)

        def whole(x, gamma, k1, k2, sets):
            return te.layernorm_mlp.layernorm_mlp(x, gamma, None, [k1, k2], [None, None], "rmsnorm", activation_type=("silu", "linear"),
                                                  quantizer_sets=sets)

        def part(x, gamma, k1, k2, sets):
            k1, k2 = (jax.lax.all_gather(k, "fsdp", axis=axis, tiled=True) for axis, k in enumerate((k1, k2)))
            return jax.lax.psum(whole(x, gamma, k1, k2, sets), "tp")

        rows = P(("dp", "fsdp"))
        cut = jax.shard_map(part, mesh=make_mesh(2, 2, 2), in_specs=(rows, P(), P("fsdp", None, "tp"), P("tp", "fsdp"), P()), out_specs=rows)
        for fp8 in (None, recipe.DelayedScaling(amax_history_len=2), recipe.Float8CurrentScaling()):
            sets = tuple(create_set(fp8) for _ in range(2))
            with te.autocast(mesh_resource=make_resource((2, 2, 2))):
                many, one = [jax.jit(jax.value_and_grad(lambda *a: (f(*a) ** 2).mean(), (0, 1, 2, 3, 4)))(*arguments, sets)  # noqa: B023
                             for f in (cut, whole)]
            close(self, many, one, 1e-5)
        with te.autocast(mesh_resource=te.MeshResource(dp_resource="data")), self.assertRaisesRegex(ValueError, r"dp_resource='data'\) names no axis"):
            jax.jit(cut)(*arguments, sets)


class Attention(unittest.TestCase):
    def setUp(self):
        self.mesh = make_mesh(2, 1, 2)
        self.resource = make_resource((2, 1, 2))

    def put(self, array, *axes):
        return jax.device_put(array, NamedSharding(self.mesh, P(*axes)))

    def test_lengths_masks_biases_and_sinks_are_cut(self):
        q, bias, sink, lengths = normal(4, 16, 4, 8), normal(1, 4, 16, 16), normal(4), jnp.array([16, 7, 3, 12])
        kept = jnp.arange(16)[None, :] < lengths[:, None]

        def f(q, k, bias, sink, by_lengths):
            descriptor = SequenceDescriptor.from_seqlens(lengths) if by_lengths else jnp.broadcast_to(~kept[:, None, None], (4, 1, 16, 16))
            kind = AttnBiasType.NO_BIAS if by_lengths else AttnBiasType.POST_SCALE_BIAS
            o = fused_attn((q, k, k), None if by_lengths else bias, descriptor, None, kind, AttnMaskType.PADDING_CAUSAL_MASK,
                           QKVLayout.BSHD_BSHD_BSHD, AttnSoftmaxType.LEARNABLE_SOFTMAX, 0.3, 0.0, True, softmax_offset=sink)
            return (jnp.where(kept[:, :, None, None], o, 0) ** 2).sum()

        arguments = (q, q[:, :, :2] * 0.5, bias, sink)  # two heads of keys and values
        places = (("dp", None, "tp"), ("dp", None, "tp"), (None, "tp"), ("tp",))
        for by_lengths in (True, False):
            both = jax.jit(jax.value_and_grad(lambda *a: f(*a, by_lengths), (0, 1, 2, 3)))  # noqa: B023
            placed = [self.put(a, *axes) for a, axes in zip(arguments, places)]
            close(self, both(*placed), both(*arguments), 1e-5)
            self.assertEqual(collectives(both.lower(*placed).compile(), "all-gather"), [])

    def test_dropout_is_cut_and_its_gradient_draws_the_same_mask(self):
        """The output is linear in v, so its derivative along v is the output; other derivatives are compared with finite differences."""
        q, key, sink, c = normal(4, 16, 4, 8), normal(4, 16, 2, 8), normal(4), normal(4, 16, 4, 8)
        seed, direction = random_state(jax.random.key(5)), normal(4, 16, 4, 8)

        def f(v, q, sink):
            return fused_attn((q, key, v), None, None, seed, AttnBiasType.NO_BIAS, AttnMaskType.CAUSAL_MASK, QKVLayout.BSHD_BSHD_BSHD,
                              AttnSoftmaxType.LEARNABLE_SOFTMAX, 0.3, 0.4, True, softmax_offset=sink)

        for kind in (AxisType.Auto, AxisType.Explicit):
            self.mesh = make_mesh(2, 1, 2, kind=kind)
            cut = P("dp", None, "tp")
            with jax.set_mesh(self.mesh), te.autocast(mesh_resource=self.resource):
                placed = (self.put(key * 2, *cut), self.put(q, *cut), self.put(sink, "tp"))
                loss = jax.jit(lambda *a: (f(*a) * self.put(c, *cut)).sum())
                grad = jax.jit(jax.grad(loss, (0, 1, 2)))
                dv, dq, dsink = grad(*placed)
                self.assertAlmostEqual(float((dv * placed[0]).sum()), float(loss(*placed)), places=4)
                e, along = 1e-2, self.put(direction, *cut)
                difference = (loss(placed[0], placed[1] + e * along, placed[2]) - loss(placed[0], placed[1] - e * along, placed[2])) / (2 * e)
                self.assertAlmostEqual(float((dq * along).sum()), float(difference), delta=1e-2)
                difference = (loss(*placed[:2], placed[2] + e) - loss(*placed[:2], placed[2] - e)) / (2 * e)
                self.assertAlmostEqual(float(dsink.sum()), float(difference), delta=1e-2)
                self.assertEqual(collectives(grad.lower(*placed).compile(), "all-gather"), [])
                out = np.asarray(jax.jit(f)(self.put(jnp.ones_like(key), *cut), *[self.put(jnp.zeros_like(a), *p) for a, p in ((q, cut), (sink, ("tp",)))]))
                drawn = {out[b, :, h, 0].tobytes() for b in (0, 2) for h in (0, 2)}  # each device draws its own mask
                self.assertEqual(len(drawn), 4)


@unittest.skipUnless(DOCUMENT.exists(), "needs te-fl's documents")
class Document(unittest.TestCase):
    def test_the_page_runs(self):
        (block,) = re.findall(r"tested-by: python_jax_mesh_test -->\n```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
        names = {}
        exec(block, names)
        self.assertTrue(np.isfinite(float(names["value"])))
        kernel = names["variables"]["params"]["mlp"]["wi_kernel"]
        self.assertEqual((kernel.shape, kernel.addressable_shards[0].data.shape), ((64, 1, 128), (32, 1, 64)))


class Resources(unittest.TestCase):
    def setUp(self):
        self.layer = make_layer(32, mlp_activations=("silu", "linear"))

    def init(self, resource, *sizes, x=(8, 16, 32), layer=None, names=NAMES):
        with jax.set_mesh(make_mesh(*sizes, names=names)), te.autocast(mesh_resource=resource):
            return jax.jit(lambda x: (layer or self.layer).init_with_output(jax.random.key(0), x, deterministic=True)[0])(normal(*x))

    def test_sizes_that_an_axis_does_not_divide(self):
        with self.assertRaisesRegex(ValueError, r"dimension 0 of an array \[3, 16, 32\] has 3 elements, and its logical axis 'nvte_batch' lies on 'dp' of the "
                                    r"mesh, of 2 devices: 3 is not a multiple of 2. Pad it .* leave the axis out"):
            self.init(te.MeshResource(dp_resource="dp"), 2, 1, 1, x=(3, 16, 32))
        with self.assertRaisesRegex(ValueError, r"'nvte_batch' lies on 'dp' and 'fsdp' of the mesh, of 4 devices: 6 is not a multiple of 4"):
            self.init(te.MeshResource(dp_resource="dp", fsdp_resource="fsdp"), 2, 2, 1, x=(6, 16, 32))
        with self.assertRaisesRegex(ValueError, r"has 2 elements, and its logical axis 'nvte_head' lies on 'tp' of the mesh, of 4 devices"):
            self.init(te.MeshResource(tp_resource="tp"), 1, 1, 4, layer=make_layer(32, num_gqa_groups=2))
        with self.assertRaisesRegex(ValueError, "'nvte_seqlen_tp' lies on 'tp'"):
            self.init(te.MeshResource(tpsp_resource="tp"), 1, 1, 4, x=(8, 18, 32), layer=make_layer(32, enable_sequence_parallel=True))
        # A batch of one, as Flax's init often gets, and a single KV head cannot be sharded; they are computed unsharded.
        self.assertEqual(self.init(te.MeshResource(dp_resource="dp", tp_resource="tp"), 2, 1, 2, x=(1, 16, 32), layer=make_layer(32, num_gqa_groups=1)).shape,
                         (1, 16, 32))

    def test_axes_that_the_mesh_has_not(self):
        with self.assertRaisesRegex(ValueError, r"MeshResource\(tp_resource='model'\) names no axis of the mesh, which has 'dp' \(2\), 'fsdp' \(1\), 'tp' \(2\); "
                                    "name one of these, leave tp_resource out, or set a mesh"):
            self.init(te.MeshResource(tp_resource="model"), 2, 1, 2)
        with jax.set_mesh(make_mesh(2, 1, 2)), nn.logical_axis_rules((("rows", "data"),)), self.assertRaisesRegex(ValueError, "lay the logical axis 'rows' on 'data'"):
            te.sharding.with_sharding_constraint_by_logical_axes(normal(4, 4), ("rows", None))
        with self.assertRaisesRegex(ValueError, r"has 2 and 2 devices; give one of the two"):
            self.init(te.MeshResource(tp_resource="a", tpsp_resource="b"), 2, 2, names=("a", "b"))
        self.init(te.MeshResource(tp_resource="a", tpsp_resource="b"), 2, 1, names=("a", "b"))  # allowed, because one of the two axes has one device

    def test_expert_axes_have_one_device(self):
        """Programs may name an expert axis in the mesh resource; such an axis must have one device."""
        self.init(te.MeshResource(dp_resource="a", ep_resource="b"), 2, 1, names=("a", "b"))
        with self.assertRaisesRegex(NotImplementedError, r"MeshResource\(ep_resource='b'\) is not supported over 2 devices, only on a mesh axis of one"):
            self.init(te.MeshResource(dp_resource="a", ep_resource="b"), 1, 2, names=("a", "b"))

    def test_helpers(self):
        sharding, mesh = te.sharding, make_mesh(2, 1, 2)
        self.assertEqual((sharding.is_mesh_available(), sharding.get_all_mesh_axes(), sharding.get_num_devices_in_mesh()), (False, (), 1))
        with self.assertRaisesRegex(ValueError, "there is no mesh that could have the axis 'dp'"):
            sharding.get_mesh_axis_size("dp")
        resource = te.MeshResource(dp_resource="dp", fsdp_resource="fsdp", tpsp_resource="tp")
        with jax.set_mesh(mesh), sharding.global_shard_guard(resource):
            self.assertEqual((sharding.is_mesh_available(), sharding.get_all_mesh_axes(), sharding.get_num_devices_in_mesh()), (True, NAMES, 4))
            self.assertEqual((sharding.dp_or_fsdp_axis_size(), sharding.tpsp_axis_size(), sharding.ep_axis_size()), (2, 2, 1))
            self.assertEqual([sharding.get_active_resource_axis(f"{name}_resource") for name in ("dp", "fsdp", "cp")], ["dp", None, None])
            found = jax.jit(lambda x: sharding.with_sharding_constraint(x, P("dp", "tp")))(normal(4, 4))
            self.assertEqual(found.sharding.spec, P("dp", "tp"))

            def each(x):
                rank = sharding.get_mesh_axis_rank("tp", mesh).reshape(1, 1)
                return (sharding.all_reduce_sum_along_dp_fsdp(x, mesh), sharding.all_reduce_sum_along_dp_fsdp_tpsp(x, mesh),
                        sharding.all_reduce_max_along_all_axes_except_PP(x, mesh), rank)

            x = jnp.arange(4.0).reshape(2, 2)
            made = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=P("dp", "tp"), out_specs=(P(None, "tp"), P(), P(), P(None, "tp")), check_vma=False))(x)
        self.assertEqual([a.tolist() for a in made], [[[2.0, 4.0]], [[6.0]], [[3.0]], [[0, 1]]])

    def test_guards_nest_and_batches_lie_on_both_data_axes(self):
        axes = te.sharding.get_sharding_map_logic_axis_to_mesh_axis
        with jax.set_mesh(make_mesh(2, 2, 2)), te.sharding.global_shard_guard(te.MeshResource(dp_resource="dp", fsdp_resource="fsdp", tp_resource="tp")):
            self.assertEqual((axes()["nvte_batch"], axes()["nvte_w_fsdp"], axes()["nvte_head"]), (("dp", "fsdp"), "fsdp", "tp"))
            with te.sharding.global_shard_guard(te.MeshResource(dp_resource="tp", pp_resource="fsdp")):
                self.assertEqual((axes()["nvte_batch"], axes()["nvte_w_fsdp"], axes()["nvte_head"]), ("tp", None, None))
            self.assertEqual((axes()["nvte_batch"], axes()["nvte_head"]), (("dp", "fsdp"), "tp"))
        with jax.set_mesh(make_mesh(2, 1, 2)), te.sharding.global_shard_guard(te.MeshResource(dp_resource="dp", fsdp_resource="fsdp")):
            self.assertEqual(axes()["nvte_batch"], "dp")
        self.assertEqual(axes(), {})

    def test_another_mesh_is_another_program(self):
        x = normal(8, 16, 32)
        traced = jax.jit(lambda x: te.sharding.with_sharding_constraint_by_logical_axes(x, ("nvte_batch", None, "nvte_hidden_tp")))
        for sizes in ((2, 1, 2), (4, 1, 2), (1, 1, 8), (2, 1, 2)):
            with jax.set_mesh(make_mesh(*sizes)), te.autocast(mesh_resource=te.MeshResource(dp_resource="dp", tp_resource="tp")):
                found = traced(x)
                self.assertEqual(found.sharding.shard_shape(x.shape), (8 // sizes[0], 16, 32 // sizes[2]))

    def test_rules_of_flax_come_first(self):
        with jax.set_mesh(make_mesh(2, 1, 2)), te.autocast(mesh_resource=te.MeshResource(dp_resource="dp", tp_resource="tp")):
            with nn.logical_axis_rules((("nvte_batch", "tp"), ("width", "dp"))):
                found = jax.jit(lambda x: te.sharding.with_sharding_constraint_by_logical_axes(x, ("nvte_batch", "width")))(normal(4, 4))
            self.assertEqual(found.sharding.spec, P("tp", "dp"))


class ContextParallel(unittest.TestCase):
    """Attention with sequences divided over a mesh axis: outputs and gradients are those of one device."""

    def compare(self, mesh, strategy, balanced, causal, window=None, layout="bshd", resource=None, axis="cp", dtype=jnp.float32):
        dim, ranks = (1, 0)[layout == "sbhd"], mesh.shape["cp"]
        q, k, v, grad = (normal(2, 16, heads, 8).astype(dtype) for heads in (4, 2, 2, 4))
        if layout == "sbhd":
            q, k, v, grad = (jnp.swapaxes(t, 0, 1) for t in (q, k, v, grad))
        mask = AttnMaskType.CAUSAL_MASK if causal else AttnMaskType.NO_MASK

        def loss(q, k, v, grad, **options):
            out = fused_attn((q, k, v), None, None, None, AttnBiasType.NO_BIAS, mask, QKVLayout.BSHD_BSHD_BSHD, AttnSoftmaxType.VANILLA_SOFTMAX, 0.3, 0.0, True,
                             window_size=window, transpose_batch_sequence=layout == "sbhd", **options)
            return (out.astype(jnp.float32) * grad).sum(), out

        step = lambda **options: jax.jit(jax.value_and_grad(lambda *a: loss(*a, **options), (0, 1, 2), has_aux=True))  # noqa: E731
        (_, want), wanted = step()(q, k, v, grad)
        order = lambda t: reorder_causal_load_balancing(t, ReorderStrategy.DualChunkSwap, ranks, dim) if balanced else t  # noqa: E731
        back = lambda t: inverse_reorder_causal_load_balancing(t, ReorderStrategy.DualChunkSwap, ranks, dim) if balanced else t  # noqa: E731
        with jax.set_mesh(mesh), te.sharding.global_shard_guard(resource):
            compiled = step(context_parallel_strategy=strategy, context_parallel_axis=axis, context_parallel_causal_load_balanced=balanced)
            (_, got), grads = compiled(*map(order, (q, k, v, grad)))
        close(self, tuple(map(back, (got, *grads))), (want, *wanted), 2e-2 if dtype == jnp.bfloat16 else 1e-5)

    def test_strategies(self):
        mesh = make_mesh(2, 2, names=("dp", "cp"))
        for strategy in ("ALL_GATHER", CPStrategy.RING):
            for balanced, causal, layout in ((True, True, "bshd"), (False, True, "sbhd"), (False, False, "bshd")):
                with self.subTest(strategy=strategy, balanced=balanced, causal=causal):
                    self.compare(mesh, strategy, balanced, causal, layout=layout)
        self.compare(mesh, "DEFAULT", True, True, window=(3, 0))
        self.compare(make_mesh(4, names=("cp",)), CPStrategy.RING, True, True)
        self.compare(mesh, CPStrategy.RING, True, True, dtype=jnp.bfloat16)

    def test_with_other_axes(self):
        """The axis comes from the mesh resource; batches and heads are divided over further axes."""
        mesh = make_mesh(2, 2, 2, names=("dp", "cp", "tp"))
        self.compare(mesh, CPStrategy.RING, True, True, resource=te.MeshResource(dp_resource="dp", tp_resource="tp", cp_resource="cp"), axis="")

    def test_orders(self):
        """The orders of Transformer Engine's documentation."""
        tokens = jnp.arange(16)
        for strategy, stripe, begins in ((ReorderStrategy.DualChunkSwap, None, [0, 1, 14, 15, 2, 3]), (ReorderStrategy.Striped, None, [0, 4, 8, 12, 1]),
                                         (ReorderStrategy.Striped, 2, [0, 1, 8, 9, 2])):
            found = reorder_causal_load_balancing(tokens, strategy, 4, 0, stripe)
            self.assertEqual(found[:len(begins)].tolist(), begins)
            self.assertEqual(inverse_reorder_causal_load_balancing(found, strategy, 4, 0, stripe).tolist(), tokens.tolist())
        with self.assertRaisesRegex(ValueError, "multiple of 8; pad"):
            reorder_causal_load_balancing(tokens[:12], ReorderStrategy.DualChunkSwap, 4, 0)

    def test_refusals(self):
        q = normal(2, 4, 2, 8)
        attention = lambda x=q, **options: jax.jit(DotProductAttention(8, 2, attn_mask_type="causal", context_parallel_axis="cp", **options).apply)({}, x, x, x)  # noqa: E731
        for strategy in ("DEFAULT", "all_gather", "ALLGATHER", "Ring"):  # over one device the strategies have no effect
            with jax.set_mesh(make_mesh(2, 1, names=("dp", "cp"))):
                np.testing.assert_array_equal(attention(context_parallel_strategy=strategy), jax.jit(DotProductAttention(8, 2, attn_mask_type="causal").apply)({}, q, q, q))
        with jax.set_mesh(make_mesh(1, 2, names=("dp", "cp"))):
            with self.assertRaisesRegex(ValueError, "6 queries, which the 2 devices.*two chunks each; pad the sequences to a multiple of 4"):
                attention(normal(2, 6, 2, 8), context_parallel_causal_load_balanced=True)
            with self.assertRaisesRegex(NotImplementedError, "window_size=.*RING; take ALL_GATHER"):
                attention(window_size=(2, 0), context_parallel_strategy="RING")
            with self.assertRaisesRegex(NotImplementedError, "softmax 'off_by_one'"):
                attention(softmax_type="off-by-one")
        with jax.set_mesh(make_mesh(1, 2, 2)), self.assertRaisesRegex(ValueError, "context_parallel_axis='cp' names no axis of the mesh"):
            attention()


if __name__ == "__main__":
    unittest.main()