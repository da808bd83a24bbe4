#!/usr/bin/env python3
"""Measures which cuBLASLt algorithms the products of bench_gpu.py's layers take, into a file for TE_FL_CUDA_GEMM_FILE.

usage: tune_gemm.py --file FILE [--build DIR] [--match TEXT] [--list]
  --file FILE    what the choices are added to; products that it has are not measured again, so that a run that
                 was cut off is continued by the next
  --build DIR    folder with lib/libte_fl_bench_gpu.so and plugins/libte_fl_cuda.so (default build/release)
  --match TEXT   only the case of that name, or those whose names contain TEXT; several, separated by commas, in that
                 order (default all)
  --list         only prints what the file holds; needs neither a GPU nor PyTorch

A case is a layer ("layer quickstart delayed"; two steps, about 12 products) or a product alone ("product fp8 forward
qkv"). A product takes about 8 s. The last thing printed is the table of the file's choices.
"""

import argparse
import gc
import os
import sys
import time

from gemm_choices import Choices, table


def cases(bench_gpu, layer_cases):
    """(name, function of the library) of everything that is measured, layers first."""
    def layer(shape, recipe):
        def run(library):
            import torch
            x, dy = layer_cases.activations(shape)
            made = layer_cases.te_fl_layer(library, shape, x, dy, recipe)
            for _ in range(2):  # the second has the scales of the first
                made.step()
            torch.cuda.synchronize()
            made.close()
        return run
    def product(name, kind, is_fp8):
        def run(library):
            import torch
            pairs, _ = layer_cases.product(library, name, kind, is_fp8, 1)
            pairs[0][0]()
            torch.cuda.synchronize()
        return run
    found = {}
    for shape, recipe, *_ in bench_gpu.LAYERS:
        found.setdefault(f"layer {shape.name} {recipe}", layer(shape, recipe))
    for is_fp8 in (True, False):
        for kind in ("forward", "dgrad", "wgrad"):
            for name in layer_cases.PRODUCTS:
                found[f"product {'fp8' if is_fp8 else 'bf16'} {kind} {name}"] = product(name, kind, is_fp8)
    return found


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


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--file", required=True)
    parser.add_argument("--match", default="")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list:
        print("\n".join(table(Choices(args.file).all)))
        return
    # Read when the plugin is opened.
    os.environ.update(TE_FL_CUDA_GEMM_FILE=os.path.abspath(args.file), TE_FL_CUDA_GEMM_TUNE="1")
    import torch

    import bench_gpu
    import layer_cases
    from te_fl_bench import Library
    found = cases(bench_gpu, layer_cases)
    names = chosen_cases(found, args.match)
    if not torch.cuda.is_available():
        sys.exit("tune_gemm.py: PyTorch finds no CUDA device; run it where there is one")
    build = os.path.abspath(args.build)
    library = Library(os.path.join(build, "lib"), os.path.join(build, "plugins", "libte_fl_cuda.so"))
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
    device = torch.cuda.get_device_name()
    print("\n".join(table([c for c in Choices(args.file).all if c["device"] == device])))
    if failed:
        sys.exit(f"tune_gemm.py: {failed} of {len(names)} cases failed")


if __name__ == "__main__":
    main()
