"""Trains a small GPT of te_fl.jax.flax modules on te_fl's Python sources: in FP32, then in FP8 with delayed scaling, from equal initial parameters.

usage: python examples/jax/quickstart.py [steps]
Prints both losses and the implementations that ran the ops. Needs jax and flax; takes half a minute on a CPU, and runs on a GPU unchanged.
"""

import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import te_fl
import te_fl.jax as te
from te_fl.common import recipe
from te_fl.jax.flax import LayerNormDenseGeneral, TransformerLayer

BATCH, LENGTH, WIDTH, LAYERS, HEADS = 8, 64, 128, 2, 4
RATE, BETAS, EPSILON = 2e-3, (0.9, 0.98), 1e-8


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, WIDTH)(tokens)
        for _ in range(LAYERS):
            x = TransformerLayer(hidden_size=WIDTH, mlp_hidden_size=4 * WIDTH, num_attention_heads=HEADS, layernorm_type="rmsnorm",
                                 mlp_activations=("silu", "linear"), enable_relative_embedding=False, enable_rotary_pos_emb=True,
                                 scale_attn_logits=True, hidden_dropout=0.0, attention_dropout=0.0)(x, deterministic=True)
        return LayerNormDenseGeneral(features=256, layernorm_type="rmsnorm")(x)[0]


def batches(steps):
    """Returns random windows of the text for each step; one byte is one token."""
    files = sorted(pathlib.Path(te_fl.__file__).parent.rglob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(text) - LENGTH - 1, (steps, BATCH))
    return text[starts[..., None] + np.arange(LENGTH + 1)]


def train(steps, fp8_recipe=None):
    """Returns the loss of each step. Trains in FP32 if there is no recipe."""
    model = GPT()

    def loss_function(variables, tokens):
        logits = model.apply(variables, tokens[:, :-1])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1))

    @jax.jit
    def step(variables, moments, count, tokens):
        loss, gradients = jax.value_and_grad(loss_function)(variables, tokens)
        grads = gradients["params"]
        first = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, moments[0], grads)
        second = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, moments[1], grads)
        scale = RATE * jnp.sqrt(1 - BETAS[1] ** count) / (1 - BETAS[0] ** count)
        params = jax.tree.map(lambda p, m, v: p - scale * m / (jnp.sqrt(v) + EPSILON), variables["params"], first, second)
        # For the FP8 state, the "gradient" that JAX returns is the updated state.
        return {**te.update_collections(gradients, variables), "params": params}, (first, second), loss

    data = batches(steps)
    with te.autocast(enabled=fp8_recipe is not None, recipe=fp8_recipe):
        variables = nn.unbox(model.init(jax.random.key(0), data[0][:, :-1]))
        moments = tuple(jax.tree.map(jnp.zeros_like, variables["params"]) for _ in range(2))
        losses = []
        for i, tokens in enumerate(data):
            variables, moments, loss = step(variables, moments, jnp.float32(i + 1), tokens)
            losses.append(loss)
    return [float(loss) for loss in losses]


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 150
    last = {}
    for name, fp8_recipe in (("FP32", None), ("FP8", recipe.DelayedScaling(amax_history_len=16))):
        start = time.time()
        losses = train(steps, fp8_recipe)
        last[name] = float(np.mean(losses[-10:]))
        print(f"{name}: loss {losses[0]:.3f} -> {last[name]:.3f} after {steps} steps, {time.time() - start:.0f} s on {jax.devices()[0].platform}")
    print(f"FP8 / FP32: {last['FP8'] / last['FP32']:.3f}")
    for row in te_fl.usage()[:6]:
        print(f"{row['op']:20} {row['impl_id']:20} {row['calls']:7} calls")


if __name__ == "__main__":
    main()
