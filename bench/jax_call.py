#!/usr/bin/env python3
"""Times one op of te-fl as a jitted JAX call, less the time of XLA's own smallest call, in one process.

usage: PYTHONPATH=build/release/python python bench/jax_call.py [--blocks N]

Medians of alternating blocks of calls on arrays of 16 elements; each call is waited for. The target is at most 10 us more.
"""
import argparse
import statistics
import time

import jax
import jax.numpy as jnp

import te_fl.jax as te

CALLS = 200


def block(function, arguments):
    start = time.perf_counter()
    for _ in range(CALLS):
        jax.block_until_ready(function(*arguments))
    return (time.perf_counter() - start) / CALLS * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=30)
    options = parser.parse_args()
    x, gamma = jnp.ones((2, 8), jnp.float32), jnp.ones((8,), jnp.float32)
    cases = {
        "x + 1 (XLA)": (jax.jit(lambda x: x + 1), (x,)),
        "relu": (jax.jit(lambda x: te.ops.relu(input=x)), (x,)),
        "rmsnorm_fwd": (jax.jit(lambda x, g: te.ops.rmsnorm_fwd(x=x, gamma=g)), (x, gamma)),
        "generic_gemm": (jax.jit(lambda x, y: te.ops.generic_gemm(a=x, b=y, trans_b=True)), (x, x)),
        "quantize, a scale": (jax.jit(lambda x: te.quantize.Quantizer(jnp.ones(1), jnp.zeros(1)).quantize(x)), (x,)),
        "relu three times": (jax.jit(lambda x: te.ops.relu(input=te.ops.relu(input=te.ops.relu(input=x)))), (x,)),
    }
    times = {name: [] for name in cases}
    for i in range(options.blocks + 1):
        for name, case in cases.items():
            taken = block(*case)
            if i > 0:  # the first block compiles
                times[name].append(taken)
    least = statistics.median(times["x + 1 (XLA)"])
    print(f"JAX {jax.__version__} on {jax.devices()[0]}; microseconds, medians of {options.blocks} blocks of {CALLS} calls")
    print("| call | us | beyond XLA's smallest |\n|---|---|---|")
    for name, taken in times.items():
        median = statistics.median(taken)
        print(f"| {name} | {median:.1f} | {median - least:+.1f} |")


if __name__ == "__main__":
    main()
