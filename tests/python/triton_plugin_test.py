"""Tests examples/triton_plugin against FP64: on a GPU if there is one, else in Triton's interpreter on the host."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["TE_FL_PLUGIN_MODULES"] = "te_fl_triton"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "triton_plugin"))
import triton  # noqa: E402, F401

import te_fl  # noqa: E402

OPS = ("rmsnorm_fwd", "rmsnorm_bwd", "swiglu", "dswiglu", "fused_rope_forward", "fused_rope_backward")


def tensor(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


class Triton(unittest.TestCase):
    def run_op(self, name, **arguments):
        te_fl.reset_usage()
        with te_fl.policy(per_op={name: ["impl:default.triton"]}):
            getattr(te_fl.ops, name)(**arguments)
        self.assertEqual([u["impl_id"] for u in te_fl.usage()], ["default.triton"])

    def close(self, got, expected, dtype=torch.float32):
        tolerance = {torch.float32: dict(atol=2e-6, rtol=1e-5), torch.bfloat16: dict(atol=1e-2, rtol=1e-2)}[dtype]
        torch.testing.assert_close(got.double(), expected, **tolerance)

    def test_all_are_registered(self):
        rows = [p for p in te_fl.info()["plugins"] if p["name"] == "te_fl_triton"]
        self.assertEqual([p["state"] for p in rows], ["active"], rows)
        self.assertEqual(sorted(rows[0]["ops"]), sorted(f"{op}: default.triton" for op in OPS))

    def test_rmsnorm(self):
        for dtype, rows, columns in ((torch.float32, 5, 33), (torch.bfloat16, 3, 128)):
            for zero_centered in (False, True):
                x, gamma, dz = tensor(rows, columns, dtype=dtype), tensor(columns, dtype=dtype), tensor(rows, columns, dtype=dtype).flip(0)
                z, rsigma, dx, dgamma = torch.empty_like(x), torch.empty(rows, device=DEVICE), torch.empty_like(x), torch.empty_like(gamma)
                self.run_op("rmsnorm_fwd", x=x, gamma=gamma, z=z, rsigma=rsigma, epsilon=1e-3, zero_centered_gamma=zero_centered)
                a, g = x.double().requires_grad_(), gamma.double().requires_grad_()
                normal = a * torch.rsqrt(a.square().mean(1, keepdim=True) + 1e-3) * (g + 1 if zero_centered else g)
                normal.backward(dz.double())
                self.close(z, normal.detach(), dtype)
                self.run_op("rmsnorm_bwd", dz=dz.contiguous(), x=x, rsigma=rsigma, gamma=gamma, dx=dx, dgamma=dgamma,
                            zero_centered_gamma=zero_centered)
                self.close(dx, a.grad, dtype)
                torch.testing.assert_close(dgamma.double(), g.grad, atol=5e-2 if dtype is torch.bfloat16 else 1e-5, rtol=1e-2)

    def test_swiglu(self):
        for dtype in (torch.float32, torch.bfloat16):
            x, dy = tensor(3, 2, 70, dtype=dtype), tensor(3, 2, 35, dtype=dtype)
            y, dx = torch.empty_like(dy), torch.empty_like(x)
            a = x.double().requires_grad_()
            expected = torch.nn.functional.silu(a[..., :35]) * a[..., 35:]
            expected.backward(dy.double())
            self.run_op("swiglu", input=x, output=y)
            self.run_op("dswiglu", grad=dy, input=x, output=dx)
            self.close(y, expected.detach(), dtype)
            self.close(dx, a.grad, dtype)

    def test_rope(self):
        for layout, shape, rotated in (("sbhd", (6, 2, 3, 20), 16), ("bshd", (2, 6, 3, 20), 16), ("sbhd", (3, 1, 2, 9000), 4600),
                                       ("bshd", (1, 3, 20, 300), 300)):  # more than one program instance processes, of a head and of heads
            length = shape[0 if layout == "sbhd" else 1]
            for interleaved in (False, True):
                x, dy = tensor(*shape), tensor(*shape).flip(0).contiguous()
                freqs = tensor(length, 1, 1, rotated) * 3
                y, dx = torch.empty_like(x), torch.empty_like(x)
                f = freqs.double().reshape((length, 1, 1, rotated) if layout == "sbhd" else (1, length, 1, rotated))
                a = x.double().requires_grad_()
                turned = a[..., :rotated]
                if interleaved:
                    other = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
                else:
                    other = torch.cat((-turned[..., rotated // 2:], turned[..., :rotated // 2]), -1)
                expected = torch.cat((turned * f.cos() + other * f.sin(), a[..., rotated:]), -1)
                expected.backward(dy.double())
                self.run_op("fused_rope_forward", input=x, freqs=freqs, output=y, layout=layout, interleaved=interleaved)
                self.run_op("fused_rope_backward", input=dy, freqs=freqs, output=dx, layout=layout, interleaved=interleaved)
                self.close(y, expected.detach())
                self.close(dx, a.grad)

    def test_handlers_of_signals_are_kept(self):
        """Checks signal handlers while a kernel is compiled, which needs no GPU."""
        program = '''
import ctypes, os, signal, time
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from te_fl_triton import handlers, swiglu

def actions():
    found = [ctypes.create_string_buffer(256) for _ in range(65)]
    for number, action in enumerate(found):
        ctypes.CDLL(None).sigaction(number, None, action)
    return [action.raw[:8] for action in found]  # the handlers

signature = {"input": "*fp32", "output": "*fp32", "columns": "i32", "blocks": "i32", "BLOCK": "constexpr"}
make = lambda: triton.compile(ASTSource(swiglu.forward_kernel, signature, {"BLOCK": 64}), target=GPUTarget("cuda", 90, 32))
if KEPT:
    make = handlers.kept(make)
before = actions()
make()
print("kept" if actions() == before else "taken")
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt:
    print("interrupted")
'''
        for kept, word in (("False", "taken"), ("True", "kept")):
            with tempfile.TemporaryDirectory() as cache:  # an empty cache, because kernels in Triton's cache are not compiled again
                environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "TE_FL_PLUGIN_MODULES")}
                paths = os.pathsep.join([sys.path[0], environment.get("PYTHONPATH", "")])
                done = subprocess.run([sys.executable, "-c", program.replace("KEPT", kept)], capture_output=True, text=True,
                                      env={**environment, "TRITON_CACHE_DIR": cache, "PYTHONPATH": paths})
            self.assertEqual(done.stdout.split(), [word, "interrupted"], done.stderr)

    def test_unsupported_calls_have_a_reason(self):
        x, out = tensor(7, 3, 16), tensor(7, 3, 16)
        candidates = te_fl.explain("fused_rope_forward", input=x, freqs=tensor(8, 1, 1, 16), output=out, layout="thd",
                                   cu_seqlens=torch.tensor([0, 7], dtype=torch.int32, device=DEVICE))["candidates"]
        self.assertEqual([c["reason"] for c in candidates if c["impl_id"] == "default.triton"], ["layout thd is not supported"])


if __name__ == "__main__":
    unittest.main()
