"""Trains the GPT of quickstart.py on a mesh with data, fully-sharded-data and tensor axes, in FP32 and FP8, with sequence parallelism over "tp".

usage: python examples/jax/mesh_gpt.py [--dp N] [--fsdp N] [--tp N] [--steps N]
Prints the losses on one device and on the mesh, the sharding of a kernel and of an FP8 scale, and the collectives that XLA inserted.
Without GPUs enough the CPU plays the devices. Needs jax and flax; takes a minute on a CPU.
"""

import argparse
import os
import re
from collections import Counter

parser = argparse.ArgumentParser()
for option, value in (("dp", 2), ("fsdp", 2), ("tp", 2), ("steps", 40)):
    parser.add_argument(f"--{option}", type=int, default=value)
arguments = parser.parse_args()
SIZES = (arguments.dp, arguments.fsdp, arguments.tp)
COUNT = arguments.dp * arguments.fsdp * arguments.tp
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={COUNT}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import linen as nn  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from quickstart import HEADS, LAYERS, WIDTH, batches  # noqa: E402

import te_fl.jax as te  # noqa: E402
from te_fl.common import recipe  # noqa: E402
from te_fl.jax.flax import LayerNormDenseGeneral, TransformerLayer, extend_logical_axis_rules  # noqa: E402

RESOURCE = te.MeshResource(dp_resource="dp", fsdp_resource="fsdp", tpsp_resource="tp")


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, WIDTH)(tokens)
        for _ in range(LAYERS):
            x = TransformerLayer(hidden_size=WIDTH, mlp_hidden_size=4 * WIDTH, num_attention_heads=HEADS, layernorm_type="rmsnorm",
                                 mlp_activations=("silu", "linear"), enable_relative_embedding=False, enable_rotary_pos_emb=True,
                                 scale_attn_logits=True, enable_sequence_parallel=True)(x, deterministic=True)
        return LayerNormDenseGeneral(features=256, layernorm_type="rmsnorm", kernel_axes=("nvte_w_fsdp", None))(x)[0]


def step(variables, tokens):
    def loss_function(variables):
        logits = GPT().apply(variables, tokens[:, :-1])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1))

    loss, grads = jax.value_and_grad(loss_function)(variables)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads["params"])
    return {**te.update_collections(grads, variables), "params": params}, loss


def train(sizes, fp8_recipe):
    """Returns the loss of each step, the variables after the last step, and the compiled program."""
    data = batches(arguments.steps)
    devices = jax.devices() if jax.device_count() >= COUNT else jax.devices("cpu")
    mesh = jax.make_mesh(sizes, ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3, devices=devices[:sizes[0] * sizes[1] * sizes[2]])
    with jax.set_mesh(mesh), te.autocast(enabled=fp8_recipe is not None, recipe=fp8_recipe, mesh_resource=RESOURCE):
        boxed = jax.eval_shape(GPT().init, jax.random.key(0), data[0][:, :-1])
        places = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, extend_logical_axis_rules(()))
        rows = NamedSharding(mesh, P(("dp", "fsdp")))
        variables = jax.jit(lambda tokens: nn.unbox(GPT().init(jax.random.key(0), tokens)), out_shardings=places)(data[0][:, :-1])
        program = jax.jit(step, donate_argnums=0, out_shardings=(places, NamedSharding(mesh, P()))).lower(variables, jax.device_put(data[0], rows)).compile()
        losses = []
        for tokens in data:
            variables, loss = program(variables, jax.device_put(tokens, rows))
            losses.append(float(loss))
    return losses, variables, program


def main():
    for name, fp8_recipe in (("FP32", None), ("FP8", recipe.DelayedScaling(amax_history_len=16))):
        one, _, _ = train((1, 1, 1), fp8_recipe)
        many, variables, program = train(SIZES, fp8_recipe)
        print(f"{name}: loss {one[0]:.4f} -> {one[-1]:.4f} on one device, {many[0]:.4f} -> {many[-1]:.4f} on {SIZES} (dp, fsdp, tp)")
        kernel = variables["params"]["TransformerLayer_0"]["mlp"]["wi_kernel"]
        print(f"  an MLP's kernel {list(kernel.shape)} is {list(kernel.addressable_shards[0].data.shape)} on each device")
        if fp8_recipe is not None:
            scale = variables["fp8_metas"]["TransformerLayer_0"]["mlp"]["x_0_scale"]
            print(f"  the scale of its input is {sorted({float(part.data[0]) for part in scale.addressable_shards})} on all devices")
        found = Counter(re.findall(r" (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(", program.as_text()))
        print("  collectives of a step:", ", ".join(f"{count} {kind}" for kind, count in sorted(found.items())))


if __name__ == "__main__":
    main()
