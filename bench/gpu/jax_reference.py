#!/usr/bin/env python3
"""Trains and times layers of te_fl.jax where no plugin of te-fl serves JAX's platform, so that reference.xla computes every op.

usage: TE_FL_SKIP_CUDA=1 python bench/gpu/jax_reference.py [--small] [--recipes NAMES] [--parts WORDS] [--steps N] [--json FILE]

1. FP8 codes and scales of each scaling mode, against those of te-fl's own ops on the CPU: equal to the bit.
2. Results and gradients of a layer, against those on the CPU.
3. Times of a Transformer layer, forward and backward, beside the same layer in Flax: medians of alternating blocks. The target is a ratio of 1.10.
4. The model of examples/jax/quickstart.py in BF16 and with FP8 recipes, against the same training on the CPU.
5. Times of FP8 products in several forms, to choose among them.
A part that fails prints its error, and the others still run; the file is written after each part. The exit status is 1 if a part failed or a result is wrong. Needs jax and flax; with --small
it can be tried on a CPU, where a policy chooses reference.xla.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
import traceback

os.environ.setdefault("TE_FL_SKIP_CUDA", "1")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import linen as nn  # noqa: E402

import te_fl  # noqa: E402
import te_fl.jax as te  # noqa: E402
from te_fl import reference_xla  # noqa: E402
from te_fl.common import recipe  # noqa: E402
from te_fl.jax.flax import LayerNormDenseGeneral, TransformerLayer  # noqa: E402

RECIPES = {
    "bf16": lambda: None, "delayed": lambda: recipe.DelayedScaling(amax_history_len=16), "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling, "mxfp8": recipe.MXFP8BlockScaling,
}
found = {}
failed = []
path = None  # of the JSON file
chosen = [""]  # words in the names of the parts that run


def save():
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"jax": jax.__version__, "device": jax.devices()[0].device_kind, "found": found, "failed": failed}, file, indent=1)


def layer(width, heads):
    return TransformerLayer(hidden_size=width, mlp_hidden_size=4 * width, num_attention_heads=heads, layernorm_type="rmsnorm",
                            mlp_activations=("silu", "linear"), enable_relative_embedding=False, enable_rotary_pos_emb=True,
                            scale_attn_logits=True, hidden_dropout=0.0, attention_dropout=0.0, dtype=jnp.bfloat16)


class FlaxLayer(nn.Module):
    """Computes what layer() does, in Flax and jax.numpy alone."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x):
        def dense(features, **options):
            return nn.DenseGeneral(features, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, **options)

        def norm(x):
            return nn.RMSNorm(epsilon=1e-6, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)(x)

        size = self.width // self.heads
        qkv = dense((3, self.heads, size))(norm(x))
        angles = jnp.arange(x.shape[1])[:, None] / 10000.0 ** (2 * jnp.arange(size // 2) / size)
        cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]

        def turn(t):
            a, b = t[..., ::2].astype(jnp.float32), t[..., 1::2].astype(jnp.float32)
            return jnp.stack((a * cos - b * sin, b * cos + a * sin), -1).reshape(t.shape).astype(t.dtype)

        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        y = nn.dot_product_attention(turn(qkv[:, :, 0]), turn(qkv[:, :, 1]), qkv[:, :, 2], mask=mask, dtype=jnp.bfloat16, force_fp32_for_softmax=True,
                                     deterministic=True)
        x = x + dense(self.width)(y.reshape(x.shape))
        hidden = dense((2, 4 * self.width))(norm(x))
        return x + dense(self.width)(nn.silu(hidden[..., 0, :]) * hidden[..., 1, :])


def by_xla():
    """A scope in which reference.xla computes the ops. It does without a policy where no plugin serves the platform."""
    if jax.devices()[0].platform == "cpu":
        return te_fl.policy(per_op={op: ["impl:reference.xla"] for op in reference_xla.OPS})
    return contextlib.nullcontext()


def part(name):
    """Runs the function now; prints its error and goes on."""
    def run(function):
        if not any(word in name for word in chosen):
            return
        print(f"\n## {name}", flush=True)
        start = time.time()
        try:
            function()
        except Exception:
            failed.append(name)
            traceback.print_exc()
        print(f"({time.time() - start:.0f} s)", flush=True)
        save()
    return run


def check(name, value, most):
    found[name] = value
    if not value <= most:
        failed.append(name)
    print(f"{'ok   ' if value <= most else 'WRONG'} {name}: {value:.3g} (at most {most:.3g})", flush=True)


def on_both(function, *arguments):
    """The results on JAX's default device and on the CPU, as NumPy arrays."""
    results = []
    for scope, device in ((by_xla(), jax.devices()[0]), (contextlib.nullcontext(), jax.devices("cpu")[0])):
        with scope, jax.default_device(device):
            made = jax.jit(function)(*jax.device_put(arguments, device))
            results.append([np.asarray(leaf) for leaf in jax.tree.leaves(made)])
    return results


def difference(ours, theirs):
    """The largest root mean square of a difference, relative to that of the tensor."""
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(ours, theirs, strict=True)]
    return max(float(np.sqrt(np.mean((a - b) ** 2)) / max(1e-30, np.sqrt(np.mean(b**2)))) for a, b in pairs if a.size)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="sizes for a trial on a CPU")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--recipes", default=",".join(RECIPES), help="a comma-separated selection")
    parser.add_argument("--parts", default="", help="a comma-separated selection, by words in the names of the parts")
    parser.add_argument("--json")
    options = parser.parse_args()
    global path, chosen
    path, chosen = options.json, options.parts.split(",")
    recipes = {name: RECIPES[name] for name in options.recipes.split(",")}
    steps = 6 if options.small else options.steps
    platform = jax.devices()[0].platform
    print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind} ({platform}); te-fl {te_fl.info()['version']}, devices {te_fl.info()['devices']}")

    @part("FP8 codes against the CPU")
    def _():
        x = np.random.default_rng(0).normal(size=(256, 384)).astype(np.float32)
        x[0, :5] = [0.0, -0.0, 1e-3, -300.0, np.nan]
        for name in recipes:
            for dtype in (jnp.float32, jnp.bfloat16):
                made = te.quantize.create_set(recipes[name]())
                for part_name in ("x", "kernel", "dgrad") if made.active else ():
                    q = getattr(made, part_name)
                    ours, theirs = on_both(lambda a: [leaf.view(jnp.uint8) if leaf.dtype.itemsize == 1 else leaf for leaf in jax.tree.leaves(q.quantize(a))],
                                           jnp.asarray(x[:128] if name == "mxfp8" else x, dtype))
                    check(f"{name} {part_name} {jnp.dtype(dtype).name}: differing elements",
                          sum(int(np.sum(a.view(np.uint8) != b.view(np.uint8))) for a, b in zip(ours, theirs)), 0)

    @part("a layer against the CPU")
    def _():
        module = layer(256, 4)
        with jax.default_device(jax.devices("cpu")[0]):
            x = jax.random.normal(jax.random.key(0), (2, 128, 256), jnp.bfloat16)
        for name, make in recipes.items():
            with te.autocast(enabled=make() is not None, recipe=make()):
                with jax.default_device(jax.devices("cpu")[0]):
                    variables = nn.unbox(module.init(jax.random.key(1), x, deterministic=True))
                # Gradients of a mean would lie below E5M2's smallest normal number at the first scale of 1, where one bit of the input changes a quarter.
                loss = lambda v, x: jnp.sum(module.apply(v, x, deterministic=True).astype(jnp.float32) ** 2)  # noqa: E731
                value = lambda v, x: (module.apply(v, x, deterministic=True), jax.grad(loss, (0, 1))(v, x))  # noqa: E731
                ours, theirs = on_both(value, variables, x)
                check(f"layer {name}: relative difference", difference(ours, theirs), 0.03 if name == "bf16" else 0.15)

    def timed(functions, arguments):
        """Medians of milliseconds."""
        times = {name: [] for name in functions}
        for name, function in functions.items():
            jax.block_until_ready(function(*arguments[name]))
        calls = 2 if options.small else 10
        for _ in range(2 if options.small else options.blocks):
            for name, function in functions.items():
                start = time.perf_counter()
                for _ in range(calls):
                    made = function(*arguments[name])
                jax.block_until_ready(made)
                times[name].append((time.perf_counter() - start) / calls * 1e3)
        return {name: statistics.median(one) for name, one in times.items()}

    def time_layer(batch, length, width, heads):
        x = jax.random.normal(jax.random.key(0), (batch, length, width), jnp.bfloat16)
        functions, arguments = {}, {}

        def add(name, module, **call_options):
            variables = nn.unbox(module.init(jax.random.key(1), x, **call_options))
            loss = lambda v, x: jnp.sum(module.apply(v, x, **call_options).astype(jnp.float32) ** 2)  # noqa: E731
            start = time.time()
            functions[name] = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(variables, x).compile()
            print(f"{name}: {time.time() - start:.1f} s of compilation", flush=True)
            arguments[name] = (variables, x)

        add("flax", FlaxLayer(width, heads))
        for name, make in recipes.items():
            try:
                with by_xla(), te.autocast(enabled=make() is not None, recipe=make()):
                    add(name, layer(width, heads), deterministic=True)
            except Exception:
                failed.append(f"compile {name} {width}")
                traceback.print_exc()
        times = timed(functions, arguments)
        for name, taken in times.items():
            ratio = taken / times["flax"]
            found[f"layer {batch}x{length}x{width} {name}"] = {"ms": taken, "ratio": ratio}
            print(f"{batch} x {length} x {width}, {heads} heads, {name}: {taken:.3f} ms, {ratio:.2f} of Flax in BF16", flush=True)

    sizes = ((2, 32, 64, 4),) if options.small else ((8, 512, 1024, 16), (2, 2048, 4096, 32))
    for size in sizes:
        part(f"times of a layer {size}")(lambda size=size: time_layer(*size))

    @part("training against the CPU")
    def _():
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples", "jax"))
        import quickstart
        quickstart.TransformerLayer = lambda **arguments: TransformerLayer(**arguments, dtype=jnp.bfloat16)
        quickstart.LayerNormDenseGeneral = lambda **arguments: LayerNormDenseGeneral(**arguments, dtype=jnp.bfloat16)
        embed = nn.Embed
        quickstart.nn.Embed = lambda *arguments: embed(*arguments, dtype=jnp.bfloat16)
        for name in [one for one in ("bf16", "delayed", "block") if one in recipes]:
            last, first = [], []
            for what, scope, device in (("reference.xla", by_xla(), jax.devices()[0]), ("te-fl's ops", contextlib.nullcontext(), jax.devices("cpu")[0])):
                with scope, jax.default_device(device):
                    start = time.time()
                    losses = quickstart.train(steps, recipes[name]())
                last.append(float(np.mean(losses[-5:])))
                first.append(losses[0])
                print(f"{name}, {what} on {device.platform}: loss {first[-1]:.4f} -> {last[-1]:.4f}, {time.time() - start:.0f} s", flush=True)
            check(f"training {name}: last loss / first", last[0] / first[0], 0.999)
            check(f"training {name}: relative difference of the last losses", abs(last[0] / last[1] - 1), 0.05)

    @part("forms of an FP8 product")
    def _():
        n = 64 if options.small else 4096
        wide = jax.random.normal(jax.random.key(0), (2, n, n), jnp.bfloat16)
        a, b = wide[0].astype(jnp.float8_e4m3fn), wide[1].astype(jnp.float8_e4m3fn)
        s = jnp.float32(0.37)
        dims = (((1,), (1,)), ((), ()))

        def dot(x, y, kind, precision=None):
            return jax.lax.dot_general(x, y, dims, precision=precision, preferred_element_type=kind)

        forms = {
            "bf16": (lambda a, b, s: dot(a, b, jnp.bfloat16), (wide[0], wide[1], s)),
            "codes, f32 sum": (lambda a, b, s: (dot(a, b, jnp.float32) * s).astype(jnp.bfloat16), (a, b, s)),
            "codes, f32 sum, highest": (lambda a, b, s: (dot(a, b, jnp.float32, jax.lax.Precision.HIGHEST) * s).astype(jnp.bfloat16), (a, b, s)),
            "codes, bf16 sum": (lambda a, b, s: (dot(a, b, jnp.bfloat16).astype(jnp.float32) * s).astype(jnp.bfloat16), (a, b, s)),
            "scaled values": (lambda a, b, s: dot(a.astype(jnp.float32) * s, b.astype(jnp.float32), jnp.float32).astype(jnp.bfloat16), (a, b, s)),
            "codes as bf16": (lambda a, b, s: (dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), jnp.float32) * s).astype(jnp.bfloat16), (a, b, s)),
        }
        functions = {name: jax.jit(function) for name, (function, _) in forms.items()}
        times = timed(functions, {name: operands for name, (_, operands) in forms.items()})
        for name, taken in times.items():
            found[f"product {name}"] = taken
            print(f"{n}^3, {name}: {taken:.4f} ms, {2e-9 * n**3 / taken:.0f} TFLOP/s")

    print("\nops and implementations")
    for row in te_fl.usage():
        print(f"{row['op']:24} {row['impl_id']:16} {row['calls']:6} calls")
    ratios = {name: one["ratio"] for name, one in found.items() if isinstance(one, dict) and name.endswith("bf16")}
    print("\nratios to Flax in BF16:", ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()), "(target 1.10)")
    print("failed:", ", ".join(failed) or "nothing")
    save()
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
