#!/usr/bin/env python3
"""Measures the fastest cuBLASLt algorithms for the GEMMs of bench_gpu.py's layers and writes a file for TE_FL_CUDA_GEMM_FILE.

usage: tune_gemm.py --file FILE [--build DIR] [--match TEXT] [--seconds S] [--list]
  --file FILE    the file that choices are added to; products in it are not measured again, so that a run that
                 was interrupted can be continued
  --build DIR    folder with lib/libte_fl_bench_gpu.so and plugins/libte_fl_cuda.so (default build/release)
  --match TEXT   only the case of that name, or those whose names contain TEXT; several, separated by commas, in that
                 order (default all, those with the most to gain first)
  --seconds S    stops after the product that is being measured S seconds after the start (default: measures all)
  --list         only prints what the file holds; needs neither a GPU nor PyTorch

A case is a layer ("layer quickstart delayed"; two steps, about 12 products) or a product alone ("product fp8 forward
qkv"). A product takes about 4 s. The last thing printed is the table of the file's choices.
"""

import argparse
import gc
import os
import sys
import threading
import time

from gemm_choices import Choices, table

START = time.monotonic()
LONGEST_S = 10  # upper limit of the seconds that one GEMM's measurement takes

# The GEMMs of the quickstart layers, sorted by the gain from measuring on an H100. FP8 GEMMs alone come before their layers, because their FP8 data
# has the distribution that delayed scaling produces after its first steps: the bits decide the power that a GEMM draws, and so which algorithm is
# fastest.
FIRST = [*(f"product fp8 {name}" for name in (
             "forward fc1", "forward proj with residual", "forward qkv", "dgrad fc2", "wgrad fc2", "dgrad qkv",
             "forward fc2 with residual", "wgrad fc1", "wgrad proj", "wgrad qkv", "dgrad fc1", "dgrad proj")),
         *(f"product bf16 {name}" for name in (
             "wgrad fc1", "forward fc1", "dgrad fc2", "wgrad fc2 with bias_grad", "wgrad qkv with bias_grad")),
         "layer quickstart delayed", "layer quickstart none", "layer quickstart block"]


# The layer's other GEMMs: (dtype, kind, extra argument) -> linear layers.
MORE = {("fp8", "forward", "residual"): ("proj", "fc2"), ("bf16", "forward", "residual"): ("proj", "fc2"),
        ("bf16", "wgrad", "bias_grad"): ("qkv", "proj", "fc2")}


def cases(bench_gpu, layer_cases):
    """Returns {name of a case: function that takes the library and runs the case}."""
    def layer(shape, recipe):
        def run(library):
            import torch
            x, dy = layer_cases.activations(shape)
            made = layer_cases.te_fl_layer(library, shape, x, dy, recipe)
            for _ in range(2):  # the second step uses the scales that follow from the first step's amaxes
                made.step()
            torch.cuda.synchronize()
            made.close()
        return run
    def product(dtype, kind, name, more=""):
        def run(library):
            import torch
            pairs, _ = layer_cases.product(library, name, kind, dtype, 1, more)
            pairs[0][0]()
            torch.cuda.synchronize()
        return run
    found = {}
    for shape, recipe, *_ in bench_gpu.LAYERS:
        found.setdefault(f"layer {shape.name} {recipe}", layer(shape, recipe))
    for dtype in ("fp8", "bf16", "block"):
        for kind in ("forward", "dgrad", "wgrad"):
            for name in layer_cases.PRODUCTS:
                found[f"product {dtype} {kind} {name}"] = product(dtype, kind, name)
    for (dtype, kind, more), names in MORE.items():
        for name in names:
            found[f"product {dtype} {kind} {name} with {more}"] = product(dtype, kind, name, more)
    return {**{name: found[name] for name in FIRST}, **found}


def chosen_cases(found, match):
    if not match:
        return list(found)
    names = []
    for text in match.split(","):
        matching = [text] if text in found else [name for name in found if text in name]
        if not matching:
            sys.exit(f"tune_gemm.py: no case's name contains '{text}'; known: {', '.join(found)}")
        names += [name for name in matching if name not in names]
    return names


def stop_after(seconds, path, end_run):
    """Starts a thread that calls `end_run` when the time is over and the current GEMM's choice is in the file. A measurement cannot be
    interrupted; after each one the file is complete."""
    def wait():
        time.sleep(max(0.0, seconds - (time.monotonic() - START)))
        begin, held = time.monotonic(), len(Choices(path).all)
        while len(Choices(path).all) == held and time.monotonic() - begin < LONGEST_S:
            time.sleep(0.05)
        end_run()
    threading.Thread(target=wait, daemon=True).start()


def show(path, device):
    print("\n".join(table([c for c in Choices(path).all if c["device"] == device])), flush=True)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--file", required=True)
    parser.add_argument("--match", default="")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list:
        if not os.path.isfile(args.file):
            sys.exit(f"tune_gemm.py: {args.file} is not there; name a file that a run without --list has written")
        print("\n".join(table(Choices(args.file).all)))
        return
    # The plugin reads these variables when it is opened.
    os.environ.update(TE_FL_CUDA_GEMM_FILE=os.path.abspath(args.file), TE_FL_CUDA_GEMM_TUNE="1")
    try:
        import torch
    except ModuleNotFoundError as missing:
        sys.exit(f"tune_gemm.py: {missing}; install PyTorch with CUDA (pip install torch), or run it with a Python that has it")
    import bench_gpu
    import layer_cases
    from te_fl_bench import Library
    found = cases(bench_gpu, layer_cases)
    names = chosen_cases(found, args.match)
    if not torch.cuda.is_available():
        sys.exit("tune_gemm.py: PyTorch finds no CUDA device; run it where there is one")
    build = os.path.abspath(args.build)
    library = Library(os.path.join(build, "lib"), os.path.join(build, "plugins", "libte_fl_cuda.so"))
    device = torch.cuda.get_device_name()
    if args.seconds is not None:
        def end_run():
            print(f"stopped after {time.monotonic() - START:.1f} s", flush=True)
            show(args.file, device)
            os._exit(0)  # skips cleanup: the other thread is inside te-fl
        stop_after(args.seconds, args.file, end_run)
    failed = 0
    for name in names:
        before, begin = len(Choices(args.file).all), time.monotonic()
        try:
            found[name](library)
            result = f"{len(Choices(args.file).all) - before} measured"
        except RuntimeError as error:
            failed += 1
            result = str(error).splitlines()[0]
        print(f"{name:40} {result} in {time.monotonic() - begin:.1f} s", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    show(args.file, device)
    if failed:
        sys.exit(f"tune_gemm.py: {failed} of {len(names)} cases failed")


if __name__ == "__main__":
    main()
