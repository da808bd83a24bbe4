"""Functions that quarantine_test.py runs on each rank: layers whose normalisation is wrong on rank 1 alone, from a step on."""

import os
import tempfile

import torch
import torch.distributed as dist

import te_fl
import te_fl.pytorch as te
from te_fl.pytorch.optimizers import FusedSGD

STEPS, WRONG_FROM = 8, 2


def _train(optimizer_of):
    """Trains a LayerNorm. Returns the implementation that ran it in each step."""
    step = [0]
    seen = []
    folder = tempfile.mkdtemp()
    settings = {"WORLD_SIZE": str(dist.get_world_size()), "TE_FL_VERIFY": "1:layernorm_fwd", "TE_FL_VERIFY_ACTION": "quarantine", "TE_FL_VERIFY_DIR": "",
                "TE_FL_QUARANTINE_FILE": f"{folder}/quarantine.json"}
    os.environ.update(settings)
    te_fl.reload()

    def forward(x, gamma, beta, z, mu, rsigma, epsilon, zero_centered_gamma):
        mean, inverse = x.mean(-1), (x.var(-1, unbiased=False) + epsilon).rsqrt()
        mu.copy_(mean)
        rsigma.copy_(inverse)
        z.copy_((x - mean[:, None]) * inverse[:, None] * (gamma + int(zero_centered_gamma)) + beta)
        if dist.get_rank() == 1 and step[0] >= WRONG_FROM:
            z.mul_(1.01)

    registry = te_fl.OpRegistry.instance()
    registry.register_impl(te_fl.OpImpl(op_name="layernorm_fwd", impl_id="vendor.ranks", kind=te_fl.BackendImplKind.VENDOR, fn=forward, vendor="ranks",
                                        devices=("cpu",), supported_dtypes=("f32",), tensors="torch"))
    try:
        torch.manual_seed(1)
        layer = te.LayerNorm(64, device="cpu")
        optimizer = optimizer_of(layer.parameters())
        with te_fl.policy(prefer="vendor"):
            for step[0] in range(STEPS):
                te_fl.reset_usage()
                layer(torch.randn(32, 64)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(next(u["impl_id"] for u in te_fl.usage() if u["op"] == "layernorm_fwd"))
    finally:
        registry.unregister("layernorm_fwd", "vendor.ranks")
        for name in settings:
            del os.environ[name]
        te_fl.reload()
    return seen


def with_an_optimizer_of_te_fl():
    return _train(lambda parameters: FusedSGD(parameters, lr=0.01))


def with_an_optimizer_of_pytorch():
    return _train(lambda parameters: torch.optim.SGD(parameters, lr=0.01))


def with_step_boundary():
    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            te_fl.step_boundary()
    return _train(lambda parameters: Optimizer(parameters, lr=0.01))
