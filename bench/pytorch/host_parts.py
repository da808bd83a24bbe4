#!/usr/bin/env python3
"""Times the parts of the host's work for te_fl.pytorch.Linear on a GPU: the calls into C++ alone, those through autograd, and
torch.nn.Linear.

usage: host_parts.py [--layer SECONDS | --profile | --walk]   (TE_FL_PLUGIN_MODULES names the CUDA plugin of a build)
  --layer  only runs steps of a TransformerLayer (hidden 1024, 512 tokens, BF16, new gradients) for SECONDS, first with autograd in threads of
           its own and then in the calling thread; for use under an external profiler
  --profile  only prints PyTorch's profile of a call that enters an autocast: counts, and us of the host and of the device
  --walk   only prints the way of a forward from the module to its call into C++, on the host: the Python files of te_fl that it enters, in order,
           and the calls that return from one file to another
"""

import argparse
import os
import sys
import time

import torch

import te_fl.pytorch as te
from te_fl import _native
from te_fl.common.recipe import DelayedScaling, Float8CurrentScaling
from te_fl.pytorch.autograd import call

ROWS, WIDTH = 64, 768


def median(call, calls=300, blocks=9):
    """Returns the host's microseconds per call; the device is synchronised at each block's end."""
    for _ in range(50):
        call()
    times = []
    for _ in range(blocks):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) / calls * 1e6)
        torch.cuda.synchronize()
    return sorted(times)[blocks // 2]


def main():
    device, dtype = torch.device("cuda"), torch.bfloat16
    x = torch.randn(ROWS, WIDTH, dtype=dtype, device=device)
    leaf, dy = x.clone().requires_grad_(), torch.randn_like(x)
    plain = torch.nn.Linear(WIDTH, WIDTH, dtype=dtype, device=device)
    ours = te.Linear(WIDTH, WIDTH, params_dtype=dtype, device=device)
    ours(leaf).backward(dy)
    about = call.LayerCall(ours._layer(x.device, "linear").native, 1, 0, -1, None, None, None, False)
    allocate, free = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete

    def native(training):
        return _native.layer_forward(about, training, x, ours.weight, ours.bias)

    def both():
        _native.layer_backward(native(True)[1], dy, None, False, True, ours.weight, ours.bias)

    def forward(module):
        with torch.no_grad():
            module(x)

    rows = (("call into C++, forward that keeps nothing", lambda: native(False)), ("call into C++, forward for a backward", lambda: native(True)),
            ("calls into C++, forward and backward", both), ("an allocation and its return", lambda: free(allocate(x.nbytes, 0))),
            ("torch.nn.Linear forward, no gradient", lambda: forward(plain)), ("te_fl Linear forward, no gradient", lambda: forward(ours)),
            ("torch.nn.Linear forward", lambda: plain(leaf)), ("te_fl Linear forward", lambda: ours(leaf)),
            ("torch.nn.Linear forward and backward", lambda: plain(leaf).backward(dy)),
            ("te_fl Linear forward and backward", lambda: ours(leaf).backward(dy)))
    for name, timed in rows:
        print(f"{name:45} {median(timed):8.1f} us")


def steps(seconds):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layer = te.TransformerLayer(1024, 4096, 16, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, device=device,
                                fuse_qkv_params=True, self_attn_mask_type="no_mask")
    x = torch.randn(512, 1, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy, parameters = torch.randn_like(x), list(layer.parameters())

    def step():
        y = layer(x)
        for p in (*parameters, x):
            p.grad = None
        y.backward(dy)

    for threads in (True, False):
        torch.autograd.set_multithreading_enabled(threads)
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            step()
            count += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(f"a step of the small layer, autograd in {'threads of its own' if threads else 'the calling thread'}: "
              f"{(time.perf_counter() - began) / count * 1e6:8.1f} us")


def make_step(device, recipe, backward, plain=False):
    """Returns a function that makes one call of a Linear and enters an autocast for it, as in host_time.py. plain: calls torch.nn.Linear."""
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True)
    dy, options = torch.randn_like(x), {} if recipe is None else {"is_first_microbatch": False}
    kind = {"dtype" if plain else "params_dtype": torch.bfloat16, "device": device}
    module = (torch.nn.Linear if plain else te.Linear)(WIDTH, WIDTH, **kind)

    def step():
        if plain:
            y = module(x)
        else:
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = module(x, **options)
        if backward:
            y.backward(dy)
    return step


def profile(calls=100):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = {"torch.nn.Linear": (None, True), "te_fl BF16": (None, False), "te_fl FP8 delayed": (DelayedScaling(), False),
             "te_fl FP8 current": (Float8CurrentScaling(), False)}
    for name, (recipe, plain) in cases.items():
        for backward in (False, True):
            step = make_step(device, recipe, backward, plain)
            for _ in range(20):
                step()
            with torch.profiler.profile() as seen:
                for _ in range(calls):
                    step()
            print(f"{name}, {'forward and backward' if backward else 'forward'}: a call's times, us on the host, us on the device")
            for e in sorted(seen.key_averages(), key=lambda e: -e.self_cpu_time_total - e.self_device_time_total):
                if 2 * e.count >= calls:
                    print(f"  {e.count / calls:6.2f} {e.self_cpu_time_total / calls:8.2f} {e.self_device_time_total / calls:8.2f}  {e.key[:100]}")


def walk(step):
    """Returns the files that `step` enters before its last call into C++ that computes a layer, and the number of returns between files."""
    targets = [f for f in (call._node and call._node.run, call.plain, _native.layer_forward) if f]
    files, returns, found = [], 0, ([], 0)

    def follow(frame, event, argument):
        nonlocal returns, found
        path = frame.f_code.co_filename
        if f"{os.sep}te_fl{os.sep}" not in path:
            return
        outer = frame.f_back.f_code.co_filename
        if event == "call" and path not in files:
            files.append(path)
        elif event == "return" and outer != path:
            returns += 1
        elif event == "c_call" and any(argument is f for f in targets):
            found = list(files), returns

    sys.setprofile(follow)
    try:
        step()
    finally:
        sys.setprofile(None)
    return [path.rpartition(f"te_fl{os.sep}")[2] for path in found[0]], found[1]


def walks():
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device="cpu", requires_grad=True)
    kind = {"params_dtype": torch.bfloat16, "device": "cpu"}
    modules = {"Linear": te.Linear(WIDTH, WIDTH, **kind), "LayerNormMLP": te.LayerNormMLP(WIDTH, WIDTH, **kind),
               "TransformerLayer": te.TransformerLayer(WIDTH, WIDTH, 12, attn_input_format="bshd", **kind)}
    for name, module in modules.items():
        for recipe in (None, DelayedScaling()):
            value = x[None] if name == "TransformerLayer" else x
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                for _ in range(3):
                    module(value)
                files, returns = walk(lambda: module(value))
            print(f"{name}, {'BF16' if recipe is None else 'FP8 delayed'}: {len(files)} files, {returns} returns: {', '.join(files)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", type=float, metavar="SECONDS")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--walk", action="store_true")
    options = parser.parse_args()
    if options.walk:
        walks()
    elif options.profile:
        profile()
    elif options.layer is None:
        main()
    else:
        steps(options.layer)
