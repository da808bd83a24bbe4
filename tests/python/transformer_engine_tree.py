"""usage: transformer_engine_tree.py, with TRANSFORMER_ENGINE_TREE=FOLDER. Runs the tests of context parallelism of a checkout of NVIDIA/TransformerEngine
(tests/pytorch/attention/run_attention_with_cp.py, unedited) on te-fl, over processes on this machine's CPU: by te-fl's names and inside NVIDIA's package.

The configurations are those of test_attention_with_cp.py with shorter sequences. `utils` and `test_attention_with_cp` are stand-ins with the parts of
NVIDIA's files that the runner reads, since the files themselves ask for a GPU. Prints a line for each case that fails or is refused, and how many
passed. Exits 77, which means skipped, without TRANSFORMER_ENGINE_TREE.
"""

import ast
import copy
import os
import pathlib
import subprocess
import sys
import tempfile
import traceback
import types

TREE = os.environ.get("TRANSFORMER_ENGINE_TREE")
TOKENS = 64


def parts_of(path, names):
    """The source of the statements of a file that define these names."""
    text = path.read_text()
    found = []
    for node in ast.parse(text).body:
        defined = getattr(node, "name", None) or (node.targets[0].id if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) else None)
        if defined in names:
            found.append(ast.get_source_segment(text, node))
            names = names - {defined}
    return "\n".join(found)


def stand_in(name, path, names, **known):
    module = types.ModuleType(name)
    module.__dict__.update(known)
    exec(parts_of(path, names), module.__dict__)
    sys.modules[name] = module
    return module


def on_host(torch):
    """Makes PyTorch's calls for GPUs those for the host, as inside_transformer_engine(device="cpu") does for the package."""
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.cuda.Stream = lambda *_, **__: None
    torch.cuda.device_count, torch.cuda.set_device = lambda: 1, lambda _: None
    own = torch.distributed.new_group
    torch.distributed.new_group = lambda ranks=None, backend=None, **more: own(ranks, **more)


def cases(configurations, world):
    for model, config in configurations.items():
        for layout in ("bshd", "sbhd", "thd"):
            for kind in ("a2a+p2p",) if world == 4 else ("p2p", "all_gather", "a2a"):
                windowed = tuple(config.window_size) not in ((-1, -1), (-1, 0))
                biased = config.attn_bias_type != "no_bias"
                # NVIDIA's test skips these too.
                if windowed and "p2p" in kind or biased and (layout == "thd" or kind != "p2p") or config.softmax_type != "vanilla" and kind != "a2a":
                    continue
                for dtype in ("bf16", "fp8") if layout != "thd" and not biased else ("bf16",):
                    if dtype == "fp8" and (config.return_max_logit or config.softmax_type != "vanilla"):
                        continue
                    yield dict(dtype=dtype, model=model, qkv_format=layout, kernel_backend="FusedAttention", cp_comm_type=kind, fp8_bwd=str(dtype == "fp8"),
                               fp8_dpa=str(dtype == "fp8"), scaling_mode="delayed" if dtype == "fp8" else "None",
                               is_training=str(config.bias_shape != "111s"))


def work(way, rank, world, store):
    if way == "inside":
        import inside_package  # noqa: F401
    else:
        import te_fl
        te_fl.as_transformer_engine()
    import torch
    if way == "names":
        on_host(torch)
    torch.set_num_threads(1)
    folder = pathlib.Path(TREE) / "tests/pytorch"
    import logging
    from typing import Tuple
    utils = stand_in("utils", folder / "utils.py", {"compare_and_assert", "ModelConfig"}, torch=torch, logging=logging, Tuple=Tuple, os=os)
    configurations = stand_in("test_attention_with_cp", folder / "attention/test_attention_with_cp.py", {"model_configs_fused_attn", "model_configs_flash_attn"},
                              ModelConfig=utils.ModelConfig).model_configs_fused_attn
    for config in configurations.values():
        config.max_seqlen_q = config.max_seqlen_kv = TOKENS
        config.window_size = tuple(min(n, 12) for n in config.window_size)
    sys.path.insert(0, str(folder / "attention"))
    import transformer_engine_torch as tex
    if way == "names":  # extension functions that te-fl's names do not have
        import te_fl.transformer_engine_torch as own
        for name in ("thd_get_partitioned_indices",):
            setattr(tex, name, getattr(own, name))
    os.environ["NVTE_CP_POOL_PG"] = "1"
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{store}")
    import run_attention_with_cp as runner
    passed, failed = 0, 0
    for case in cases(copy.deepcopy(configurations), world):
        torch.manual_seed(1234)
        try:
            if way == "inside":
                from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as dpa
                from transformer_engine.pytorch.quantization import FP8GlobalStateManager
                FP8GlobalStateManager.reset()
                dpa._attention_backends["backend_selection_requires_update"] = True
            runner.run_dpa_with_cp(**case)
            passed += 1
        except Exception as error:
            failed += 1
            if rank == 0:
                place = traceback.extract_tb(error.__traceback__)[-1]
                print(f"{way}: {', '.join(str(v) for v in case.values())}: {type(error).__name__}: {str(error)[:400]} ({place.filename}:{place.lineno})", flush=True)
    if rank == 0:
        print(f"{way}, {world} ranks: {passed} passed, {failed} failed", flush=True)
    os._exit(failed > 0)


def main():
    if not TREE:
        print("skipped: TRANSFORMER_ENGINE_TREE names no checkout of NVIDIA/TransformerEngine")
        return 77
    wrong = 0
    for way in sys.argv[1:] or ("names", "inside"):
        for world in (2, 4):
            with tempfile.TemporaryDirectory() as folder:
                begun = [subprocess.Popen([sys.executable, __file__, way, str(rank), str(world), os.path.join(folder, "store")],
                                          env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(world)}) for rank in range(world)]
                wrong += sum(process.wait() != 0 for process in begun)
    return wrong > 0


if __name__ == "__main__":
    if len(sys.argv) == 5:
        work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        sys.exit(main())
