"""Tests that programs with the calls of Transformer Engine's quickstart, getting-started guide and README run on te-fl with unchanged import lines;
only TE_FL_AS_TRANSFORMER_ENGINE=1 is set. The device is cuda if there is one, else cpu."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest

from forkserver import PYTHON

ROOT = pathlib.Path(__file__).resolve().parents[2]
HAS_TORCH, HAS_FLAX = (importlib.util.find_spec(name) is not None for name in ("torch", "flax"))

# A layer in plain PyTorch, whose values the other layers must reproduce, and layers of Transformer Engine's modules with its parameters.
QUICKSTART = """
import math
import sys
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = getattr(torch, sys.argv[1])
HIDDEN, FFN, HEADS, LENGTH, BATCH = 64, 256, 4, 16, 2
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}[DTYPE]


class Attention(torch.nn.Module):
    def forward(self, q, k, v, mask):
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(mask, -math.inf)
        return (torch.softmax(scores, dim=-1) @ v).permute(2, 0, 1, 3).reshape(q.shape[2], q.shape[0], -1)


class Mlp(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear1, self.linear2 = linear(HIDDEN, FFN, bias=True), linear(FFN, HIDDEN, bias=True)

    def forward(self, x):
        return self.linear2(torch.nn.functional.gelu(self.linear1(x), approximate="tanh"))


class Layer(torch.nn.Module):
    def __init__(self, norm, linear, attention):
        super().__init__()
        self.ln1, self.ln2 = norm(HIDDEN, eps=1e-5), norm(HIDDEN, eps=1e-5)
        self.qkv_projection, self.projection = linear(HIDDEN, 3 * HIDDEN, bias=True), linear(HIDDEN, HIDDEN, bias=True)
        self.attention, self.mlp, self.dropout = attention, Mlp(linear), torch.nn.Dropout(0.0)

    def project(self, x):
        return self.qkv_projection(self.ln1(x))

    def forward(self, x, attention_mask):
        qkv = self.project(x)
        qkv = qkv.view(qkv.size(0), qkv.size(1), HEADS, 3 * HIDDEN // HEADS)
        q, k, v = torch.split(qkv, qkv.size(3) // 3, dim=3)
        x = x + self.dropout(self.projection(self.attention(q, k, v, attention_mask)))
        return x + self.feed(x)

    def feed(self, x):
        return self.mlp(self.ln2(x))


class FusedLayer(Layer):
    def __init__(self, attention):
        torch.nn.Module.__init__(self)
        self.ln_qkv = te.LayerNormLinear(HIDDEN, 3 * HIDDEN, eps=1e-5, bias=True)
        self.attention, self.dropout = attention, torch.nn.Dropout(0.0)
        self.projection = te.Linear(HIDDEN, HIDDEN, bias=True)
        self.ln_mlp = te.LayerNormMLP(HIDDEN, FFN, eps=1e-5, bias=True)

    def project(self, x):
        return self.ln_qkv(x)

    def feed(self, x):
        return self.ln_mlp(x)


def share_parts(layer, basic):
    for name in ("ln1", "ln2", "qkv_projection", "projection"):
        getattr(layer, name).weight, getattr(layer, name).bias = getattr(basic, name).weight, getattr(basic, name).bias
    for name in ("linear1", "linear2"):
        own, from_ = getattr(layer.mlp, name), getattr(basic.mlp, name)
        own.weight, own.bias = from_.weight, from_.bias
    return layer


def share(qkv, projection, mlp, basic):
    qkv.layer_norm_weight, qkv.layer_norm_bias = basic.ln1.weight, basic.ln1.bias
    qkv.weight, qkv.bias = basic.qkv_projection.weight, basic.qkv_projection.bias
    projection.weight, projection.bias = basic.projection.weight, basic.projection.bias
    mlp.layer_norm_weight, mlp.layer_norm_bias = basic.ln2.weight, basic.ln2.bias
    mlp.fc1_weight, mlp.fc1_bias = basic.mlp.linear1.weight, basic.mlp.linear1.bias
    mlp.fc2_weight, mlp.fc2_bias = basic.mlp.linear2.weight, basic.mlp.linear2.bias


def placed(layer):
    layer.to(dtype=DTYPE).to(DEVICE)
    return layer


def run(layer, mask, **autocast):
    # The output and the gradient of the shared projection after a few steps, as FP8 has its scales from the step before.
    for _ in range(3):
        layer.zero_grad()
        with te.autocast(**(autocast or {"enabled": False})):
            y = layer(x, attention_mask=mask)
        y.backward(dy)
    return y.detach().float(), basic.projection.weight.grad.float()


def near(got, want, tolerance, least=0.0):
    for g, w in zip(got, want):
        error = ((g - w).norm() / w.norm()).item()
        assert least <= error < tolerance, (error, tolerance)


torch.manual_seed(1234)
x = torch.rand(LENGTH, BATCH, HIDDEN).to(DEVICE).to(dtype=DTYPE)
dy = torch.rand(LENGTH, BATCH, HIDDEN).to(DEVICE).to(dtype=DTYPE)
causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=DEVICE).triu(1)
basic = placed(Layer(torch.nn.LayerNorm, torch.nn.Linear, Attention()))
no_mask, masked = run(basic, None), run(basic, causal)
fp8 = dict(enabled=True, recipe=DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max"))

unfused = share_parts(placed(Layer(te.LayerNorm, te.Linear, Attention())), basic)
near(run(unfused, None), no_mask, TOLERANCE)


def attention():
    return te.DotProductAttention(num_attention_heads=HEADS, kv_channels=HIDDEN // HEADS, attention_dropout=0.0, attn_mask_type="causal")


with_attention = share_parts(placed(Layer(te.LayerNorm, te.Linear, attention())), basic)
near(run(with_attention, None), masked, TOLERANCE)
near(run(with_attention, None, **fp8), masked, 0.1, 1e-3)

fused = placed(FusedLayer(Attention()))
share(fused.ln_qkv, fused.projection, fused.ln_mlp, basic)
near(run(fused, None), no_mask, TOLERANCE)
fused = placed(FusedLayer(attention()))
share(fused.ln_qkv, fused.projection, fused.ln_mlp, basic)
near(run(fused, None, **fp8), masked, 0.1, 1e-3)

whole = placed(te.TransformerLayer(HIDDEN, FFN, HEADS, fuse_qkv_params=True, self_attn_mask_type="causal", layernorm_epsilon=1e-5, bias=True,
                                   hidden_dropout=0.0, attention_dropout=0.0))
share(whole.self_attention.layernorm_qkv, whole.self_attention.proj, whole.layernorm_mlp, basic)
near(run(whole, None), masked, TOLERANCE)
high = run(whole, None)
near(run(whole, None, **fp8), masked, 0.1, 1e-3)
near(run(whole, None, **fp8), high, 0.1, 1e-3)

# The notebook's own layer: by default its projections of queries, keys and values lie apart, and it drops.
layer = placed(te.TransformerLayer(HIDDEN, FFN, HEADS))
share(layer.self_attention.layernorm_qkv, layer.self_attention.proj, layer.layernorm_mlp, basic)
torch.manual_seed(1234)
y = layer(x, attention_mask=None)
torch.manual_seed(1234)
assert torch.equal(layer(x, attention_mask=None), y)
torch.manual_seed(1234)
with te.fp8_autocast(enabled=True, fp8_recipe=fp8["recipe"]):
    in_fp8 = layer(x, attention_mask=None)
in_fp8.backward(dy)
near([in_fp8.float()], [y.float()], 0.1, 1e-3)
assert y.shape == x.shape and y.device.type == DEVICE and te.__name__ == "transformer_engine.pytorch"
import te_fl
assert any(row["op"] == "quantize" for row in te_fl.usage())
"""

# The guides' programs, unchanged except for the device if there is only the host.
GUIDE_PYTORCH = """
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe
in_features, out_features, hidden_size = 768, 3072, 2048
model = te.Linear(in_features, out_features, bias=True)
inp = torch.randn(hidden_size, in_features, device="cuda")
fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.E4M3)
with te.autocast(enabled=True, recipe=fp8_recipe):
    out = model(inp)
loss = out.sum()
loss.backward()
"""

GUIDE_PYTORCH_CHECKS = """
def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def check():
    want = inp.double() @ model.weight.detach().double().T + model.bias.detach().double()
    assert 1e-3 < error(out, want) < 0.06, error(out, want)
    assert torch.equal(model.bias.grad, torch.full_like(model.bias, hidden_size))
    want = inp.double().sum(0).expand_as(model.weight)
    assert 1e-4 < error(model.weight.grad, want) < 0.06, error(model.weight.grad, want)


check()
model.zero_grad()
with te.autocast(enabled=True, recipe=fp8_recipe):
    out = model(inp)
out.sum().backward()
check()
"""

GUIDE_VENDOR = """
from transformer_engine.plugin.core import OpRegistry, OpManager, OpImpl, BackendImplKind
registry = OpRegistry()
registry.register(OpImpl(op_name="my_op", impl_id="vendor.my_vendor", kind=BackendImplKind.VENDOR, fn=my_implementation, vendor="my_vendor"))
OpManager(registry).call("my_op", 41)
"""

# An out-of-tree plugin: a module that TE_FL_PLUGIN_MODULES names, and a program that does not mention it.
GUIDE_VENDOR_MODULE = """
from transformer_engine.plugin.core import OpImpl, BackendImplKind

def my_implementation(x):
    return x + 1

def register(registry):
    registry.register(OpImpl(op_name="my_op", impl_id="vendor.my_vendor", kind=BackendImplKind.VENDOR, fn=my_implementation, vendor="my_vendor"))
"""

README_JAX = """
import flax, jax, jax.numpy as jnp
import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from transformer_engine.common import recipe
BATCH, SEQLEN, HIDDEN = 8, 32, 256
init_rng, data_rng = jax.random.split(jax.random.PRNGKey(0))
inp = jax.random.normal(data_rng, [BATCH, SEQLEN, HIDDEN], jnp.float32)
with te.autocast(enabled=True, recipe=recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.HYBRID)):
    model = te_flax.DenseGeneral(features=HIDDEN)
    def loss_fn(params, other_vars, inp):
        return jnp.mean(model.apply({"params": params, **other_vars}, inp))
    variables = model.init(init_rng, inp)
    other_variables, params = flax.core.pop(variables, "params")
    fwd_bwd_fn = jax.value_and_grad(loss_fn, argnums=(0, 1))
    for _ in range(10):
        loss, (param_grads, other_grads) = fwd_bwd_fn(params, other_variables, inp)
# What the lines above ran, checked; then training steps that keep the FP8 state.
kernel = params["kernel"].unbox()
want = jnp.mean(inp @ kernel)
assert abs(loss - want) < 0.05 * jnp.std(inp @ kernel), (loss, want)
assert jax.tree.structure(other_grads) == jax.tree.structure(other_variables)
others = other_grads
with te.autocast(enabled=True, recipe=recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.HYBRID)):
    for _ in range(2):
        loss, (gradients, others) = fwd_bwd_fn(params, others, inp)
kernel, gradient = params["kernel"].unbox(), gradients["kernel"].unbox()
want = jnp.mean(inp @ kernel)
assert abs(loss - want) < 0.05 * jnp.std(inp @ kernel), (loss, want)
want = jnp.broadcast_to(inp.sum((0, 1))[:, None], kernel.shape) / (inp.size // HIDDEN * HIDDEN)
error = jnp.linalg.norm(gradient - want) / jnp.linalg.norm(want)
assert 1e-4 < error < 0.1, error
scales = [v for path, v in jax.tree_util.tree_leaves_with_path(others) if "scale" in jax.tree_util.keystr(path)]
assert scales and all(float(s.reshape(-1)[0]) != 1 for s in scales), others
"""

GUIDE_JAX = """
import jax
import jax.numpy as jnp
from flax import linen as nn
import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.jax.sharding import MeshResource

HIDDEN, FFN, HEADS, LENGTH, BATCH, DTYPE = 64, 256, 4, 16, 2, jnp.bfloat16
SIZE = HIDDEN // HEADS


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = te_flax.DenseGeneral(features=FFN, use_bias=True)(x)
        x = te.activation.activation(x.reshape(*x.shape[:-1], 1, x.shape[-1]), activation_type=("gelu",))
        return te_flax.DenseGeneral(features=HIDDEN, use_bias=True)(x)


class Unfused(nn.Module):
    own_attention: bool

    @nn.compact
    def __call__(self, x, deterministic=False):
        y = te_flax.LayerNorm(epsilon=1e-5, dtype=jnp.bfloat16)(x)
        y = te_flax.DenseGeneral(features=3 * HIDDEN, use_bias=True, dtype=jnp.bfloat16)(y)
        q, k, v = jnp.split(y.reshape(*y.shape[:2], HEADS, 3 * SIZE), 3, axis=3)
        if self.own_attention:
            y = te_flax.DotProductAttention(head_dim=SIZE, num_attention_heads=HEADS, num_gqa_groups=HEADS, attention_dropout=0.1,
                                            attn_mask_type="causal", transpose_batch_sequence=False)(q, k, v, deterministic=deterministic)
        else:
            y = nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(x[..., 0], dtype=jnp.bool_), deterministic=True)
        y = te_flax.DenseGeneral(features=HIDDEN, use_bias=True, dtype=jnp.bfloat16)(y.reshape(*y.shape[:2], HIDDEN))
        x = x + nn.Dropout(rate=0.1)(y, deterministic=deterministic)
        y = Mlp()(te_flax.LayerNorm(epsilon=1e-5)(x))
        return x + nn.Dropout(rate=0.1)(y, deterministic=deterministic)


class Fused(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=False):
        qkv, _ = te_flax.LayerNormDenseGeneral(features=3 * HIDDEN, epsilon=1e-5, use_bias=True, return_layernorm_output=False)(x)
        qkv = qkv.reshape(*qkv.shape[:2], 3, HEADS, SIZE)
        attention = te_flax.DotProductAttention(head_dim=SIZE, num_attention_heads=HEADS, num_gqa_groups=HEADS, attention_dropout=0.1,
                                                attn_mask_type="causal", qkv_layout="bshd_bshd_bshd", transpose_batch_sequence=False)
        y = attention(*(qkv[:, :, i] for i in range(3)), deterministic=deterministic)
        y = te_flax.DenseGeneral(features=HIDDEN, use_bias=True)(y.reshape(*y.shape[:2], HIDDEN))
        x = x + nn.Dropout(rate=0.1)(y, deterministic=deterministic)
        y, _ = te_flax.LayerNormMLP(intermediate_dim=FFN, epsilon=1e-5, use_bias=True, activations=("gelu",), intermediate_dropout_rate=0.0,
                                    return_layernorm_output=False)(x, deterministic=deterministic)
        return x + nn.Dropout(rate=0.1)(y, deterministic=deterministic)


whole = te_flax.TransformerLayer(hidden_size=HIDDEN, mlp_hidden_size=FFN, num_attention_heads=HEADS, mlp_activations=("gelu",),
                                 self_attn_mask_type="causal", layernorm_epsilon=1e-5, use_bias=True, attention_dropout=0.0,
                                 intermediate_dropout=0.0, hidden_dropout=0.0, enable_relative_embedding=False,
                                 self_attn_bias_type="no_bias", dtype=jnp.bfloat16, transpose_batch_sequence=False)
key = jax.random.PRNGKey(42)
x = jax.random.normal(key, (BATCH, LENGTH, HIDDEN)).astype(DTYPE)
mesh = MeshResource()
fp8 = dict(enabled=True, recipe=DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max"), mesh_resource=mesh)
high = dict(enabled=False, mesh_resource=mesh)


def run(model, autocast):
    # The output and the gradients after a few jitted steps; every dropout is off, as in the guide's measurements.
    with te.autocast(**autocast):
        variables = nn.unbox(model.init(key, x, deterministic=False))

        def compute_loss(variables):
            y = model.apply(variables, x, deterministic=True)
            return jnp.sum(y.astype(jnp.float32)), y

        step = jax.jit(jax.value_and_grad(compute_loss, has_aux=True))
        for _ in range(3):
            (_, y), gradients = step(variables)
            variables = {**te.update_collections(gradients, variables), "params": variables["params"]}
    return y.astype(jnp.float32), gradients["params"], gradients.get("fp8_metas")


for model in (Unfused(own_attention=False), Unfused(own_attention=True), Fused(), whole):
    y, gradients, state = run(model, high)
    assert y.shape == x.shape and state is None
    in_fp8, gradients_in_fp8, state = run(model, fp8)
    error = jnp.linalg.norm(in_fp8 - y) / jnp.linalg.norm(y)
    assert 1e-4 < error < 0.1, (type(model), error)
    flat = [jnp.concatenate([g.astype(jnp.float32).reshape(-1) for g in jax.tree.leaves(tree)]) for tree in (gradients, gradients_in_fp8)]
    error = jnp.linalg.norm(flat[1] - flat[0]) / jnp.linalg.norm(flat[0])
    assert 1e-4 < error < 0.15, (type(model), error)
    assert state is not None
"""


def run(program, *arguments, python=(sys.executable,), **plugins):
    """Runs the program as a user would, with only the variable set; returns its output. plugins: {name: source text} of modules. python: the command
    line."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "program.py")
        path.write_text(textwrap.dedent(program))
        # A wheel puts this file at the root of site-packages; here a folder stands for site-packages, read as Python does at start.
        pathlib.Path(folder, "te_fl.pth").write_text((ROOT / "python/te_fl_as_transformer_engine.pth").read_text())
        start = f"import runpy, site, sys; site.addsitedir({folder!r}); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        environment = {**{k: v for k, v in os.environ.items() if not k.startswith("NVTE_")}, "TE_FL_AS_TRANSFORMER_ENGINE": "1"}
        for name, text in plugins.items():
            pathlib.Path(folder, f"{name}.py").write_text(text)
            environment["TE_FL_PLUGIN_MODULES"] = ",".join(plugins)
        done = subprocess.run([*python, "-c", start, str(path), *arguments], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise AssertionError(f"exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


class Examples(unittest.TestCase):
    @unittest.skipUnless(HAS_TORCH, "needs PyTorch")
    def test_quickstart(self):
        for dtype in ("float32", "bfloat16", "float16"):
            with self.subTest(dtype=dtype):
                run(QUICKSTART, dtype, python=[sys.executable] if dtype == "float32" else PYTHON)

    @unittest.skipUnless(HAS_TORCH, "needs PyTorch")
    def test_guide_in_pytorch(self):
        import torch
        pasted = GUIDE_PYTORCH if torch.cuda.is_available() else GUIDE_PYTORCH.replace('device="cuda"', 'device="cpu"')
        run(pasted + GUIDE_PYTORCH_CHECKS, python=PYTHON)

    def test_guide_of_a_vendor(self):
        *lines, call = GUIDE_VENDOR.strip().splitlines()
        printed = run("\n".join(["my_implementation = lambda x: x + 1", *lines, f"print({call})", "import sys; print('torch' in sys.modules)"]))
        self.assertEqual(printed.split(), ["42", "False"])

    def test_guide_of_a_vendor_out_of_tree(self):
        printed = run("import te_fl; print(te_fl.ops.my_op(41)); print(te_fl.usage()[0]['impl_id'])", my_plugin_module=GUIDE_VENDOR_MODULE)
        self.assertEqual(printed.split(), ["42", "vendor.my_vendor"])

    @unittest.skipUnless(HAS_FLAX, "needs JAX and Flax")
    def test_readme_in_jax(self):
        run(README_JAX)

    @unittest.skipUnless(HAS_FLAX, "needs JAX and Flax")
    def test_guide_in_jax(self):
        run(GUIDE_JAX)


if __name__ == "__main__":
    unittest.main()
