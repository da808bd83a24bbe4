"""Trains modules of NVIDIA's Python package on the far device, in a process of its own: python inside_device.py DEVICE; far, or cpu for the emulation of CUDA
on the host. Prints {"case": numbers} as JSON, and for far the devices on which ops ran. Environment: as far.py's, with FAR_ALONE.
"""

import json
import os
import pathlib
import sys
import warnings

warnings.filterwarnings("ignore")
sys.path[:0] = [os.path.join(sys.prefix, "inside"), str(pathlib.Path(__file__).resolve().parent)]
import torch  # noqa: E402

import te_fl  # noqa: E402

DEVICE = sys.argv[1]
if DEVICE == "far":
    import far
    far.start()
    torch.far.default_generators = (torch.default_generator,) * 2  # the backend's random numbers are the CPU's
te_fl.inside_transformer_engine(device=DEVICE)

import transformer_engine.pytorch as te  # noqa: E402
from transformer_engine.common import recipe as recipes  # noqa: E402

BF16 = torch.bfloat16


def values(tensors):
    return [t.detach().double().cpu().flatten().tolist() for t in tensors]


def on_cuda(shape, seed, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda().requires_grad_()


def trained(module, recipe, *arguments, shape=(16, 2, 64), steps=2):
    torch.manual_seed(3)
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.1)
    x = on_cuda(shape, 5)
    for _ in range(steps):
        x.grad = None
        module.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x, *arguments)
        y.float().square().mean().backward()
    assert all(t.is_cuda and t.device.type == ("cpu" if DEVICE == "cpu" else DEVICE) for t in (y, x.grad)), y.device
    return values([y, x.grad, *(p.grad for p in module.parameters() if p.grad is not None)])


def block(**options):
    return te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16, **options)


def permuted():
    x = on_cuda((8, 16), 1)
    routing = torch.zeros(8, 4, dtype=torch.int32).scatter_(1, torch.arange(16).view(8, 2) % 4, 1).cuda()
    rows, places = te.moe_permute(x, routing, num_out_tokens=16, map_type="mask")
    y = te.moe_unpermute(rows * 2, places, restore_shape=x.shape, map_type="mask")
    y.float().sum().backward()
    return values([rows, y, x.grad])


def optimised():
    layer = te.Linear(32, 16)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, 512).view(16, 32))
        layer.bias.zero_()
    optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=BF16):
            y = layer(on_cuda((4, 32), step, torch.float32))
        assert y.dtype == BF16
        y.float().square().sum().backward()
        optimizer.step()
    return values([*layer.parameters()])


CASES = {
    "Linear": lambda: trained(te.Linear(64, 32, params_dtype=BF16), None),
    "LayerNormMLP delayed": lambda: trained(te.LayerNormMLP(64, 128, params_dtype=BF16), recipes.DelayedScaling(amax_history_len=4)),
    "block": lambda: trained(block(), None),
    "block current": lambda: trained(block(normalization="RMSNorm", activation="swiglu"), recipes.Float8CurrentScaling()),
    "block mxfp8": lambda: trained(block(), recipes.MXFP8BlockScaling(), shape=(32, 2, 64)),
    "checkpoint": lambda: trained(lambda_module(block()), None),
    "grouped": lambda: trained(te.GroupedLinear(2, 64, 32, params_dtype=BF16), None, [16, 16], shape=(32, 64)),
    "permuted": permuted,
    "optimised": optimised,
}


def lambda_module(layer):
    class Recomputed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return te.checkpoint(self.layer, x)
    return Recomputed()


def names():
    """torch.cuda on the device."""
    assert torch.cuda.is_available() and torch.cuda.device_count() == (1 if DEVICE == "cpu" else 2)
    assert torch.device("cuda").type == torch.zeros(1, device="cuda").device.type == DEVICE
    if DEVICE == "cpu":
        return
    assert torch.device("cuda:1") == torch.device("cuda", 1) == torch.device(type="cuda", index=1) == torch.device("far", 1)
    x = torch.ones(3, device="cuda:1")
    assert (x.device, x.get_device(), x.cuda(0).device, x.cpu().cuda().device.index) == (torch.device("far:1"), 1, torch.device("far:0"), 0)
    assert x.is_cuda and not x.cpu().is_cuda and x.to("cuda:0").device.index == 0 and x.type() == "torch.cuda.FloatTensor"
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1 and torch.zeros(1, device="cuda").device.index == 1
    assert torch.cuda.current_device() == 0
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    assert isinstance(stream, torch.cuda.Stream) and isinstance(event, torch.cuda.Event) and isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
    late = torch.zeros(4, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late.copy_(torch.ones(4))
        event.record()
    event.synchronize()
    assert late.sum().item() == 4
    torch.cuda.synchronize()
    torch.cuda.manual_seed(1)
    assert torch.cuda.get_device_capability() == (9, 0) and torch.cuda.get_device_properties(0).major == 9
    for refused, what in ((lambda: torch.cuda.memory_summary(), "memory_summary"), (lambda: torch.cuda.CUDAGraph(), "CUDAGraph"),
                          (lambda: torch.cuda.MemPool(), "MemPool")):
        try:
            refused()
        except RuntimeError as error:
            assert f"torch.far has no {what}" in str(error), error
        else:
            raise AssertionError(what)
    with torch.autocast("cuda", dtype=BF16):
        assert torch.is_autocast_enabled("far") and torch.get_autocast_dtype("far") == BF16
    assert not torch.is_autocast_enabled("far")
    try:
        torch.distributed.init_process_group("nccl", init_method="tcp://127.0.0.1:1", rank=0, world_size=1)
    except te_fl.errors.Unsupported as error:
        assert "the backend nccl for the device far" in str(error), error
    else:
        raise AssertionError("a group without a backend")


names()
made = {}
for case, run in CASES.items():
    try:
        made[case] = run()
    except Exception as error:
        import traceback
        made[case] = traceback.format_exc()[-1500:]
print(json.dumps({"cases": made, "ran": sorted({row["impl_id"] for row in te_fl.usage()})}))
