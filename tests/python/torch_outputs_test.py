"""Tests te_fl.ops and te_fl.specification on outputs that a call leaves to te-fl: shapes, dtypes, requests, refusals; and on the gradients of ops."""

import subprocess
import sys
import unittest

import numpy as np
import torch

import te_fl
from te_fl import _native, ops, specification
from te_fl.torch_tensors import BY_CODE, DTYPE_CODES

BF16, F32 = torch.bfloat16, torch.float32


class Outputs(unittest.TestCase):
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)).to(BF16)
    gamma = torch.ones(8)

    def test_one_and_several(self):
        y = ops.gelu(input=self.x)
        self.assertEqual((y.shape, y.dtype, y.device), (self.x.shape, BF16, self.x.device))
        memory = torch.empty_like(self.x)
        self.assertIsNone(ops.gelu(input=self.x, output=memory))
        self.assertTrue(torch.equal(y, memory))
        z, mu, rsigma = ops.layernorm_fwd(x=self.x, gamma=self.gamma)
        self.assertEqual([(tuple(t.shape), t.dtype) for t in (z, mu, rsigma)], [((2, 3, 8), BF16), ((6,), F32), ((6,), F32)])
        self.assertEqual(len(ops.layernorm_fwd(x=self.x, gamma=self.gamma, z=z)), 2)  # only what it has allocated

    def test_requests(self):
        self.assertEqual(ops.gelu(input=self.x, output=F32).dtype, F32)
        dz, (_, mu, rsigma) = torch.ones_like(self.x), ops.layernorm_fwd(x=self.x, gamma=self.gamma)
        call = {"dz": dz, "x": self.x, "mu": mu, "rsigma": rsigma, "gamma": self.gamma}
        self.assertEqual([t.dtype for t in ops.layernorm_bwd(**call)], [BF16, F32])
        self.assertEqual([t.dtype for t in ops.layernorm_bwd(**call, dbeta=True)], [BF16, F32, F32])
        self.assertEqual([t.dtype for t in ops.layernorm_bwd(**call, dbeta=torch.float16)], [BF16, F32, torch.float16])

    def test_refusals(self):
        tokens, indices = torch.randn(6, 4), torch.zeros(6, 2, dtype=torch.int32)
        with self.assertRaisesRegex(te_fl.errors.InvalidArgument, "moe_permute_fwd: the shape of 'output' does not follow from the inputs; give a tensor$"):
            ops.moe_permute_fwd(input=tokens, indices=indices)
        with self.assertRaisesRegex(te_fl.errors.InvalidArgument, "the dtype of 'offsets' does not follow from the inputs; give a tensor, or the dtype"):
            ops.splits_to_offsets(splits=torch.ones(3, dtype=torch.int64))
        self.assertEqual(ops.splits_to_offsets(splits=torch.ones(3, dtype=torch.int64), offsets=torch.int64).tolist(), [0, 1, 2, 3])
        with self.assertRaisesRegex(te_fl.errors.InvalidArgument, "output"):
            ops.gelu(input=np.ones((2, 3), np.float32))  # NumPy's memory is the program's to make

    def test_strides_and_elements(self):
        y = ops.gelu(input=self.x.transpose(0, 1))
        self.assertTrue(y.is_contiguous())
        self.assertTrue(torch.equal(y.transpose(0, 1), ops.gelu(input=self.x)))
        self.assertEqual(ops.swiglu(input=torch.empty(0, 8)).shape, (0, 4))

    def test_matrices_and_positions(self):
        norm = _native.matrix_op("layernorm_fwd")
        z, mu, _ = norm(self.x, self.gamma, None, 1e-5, False)
        self.assertEqual((z.shape, mu.shape), (self.x.shape, (6,)))
        self.assertTrue(torch.equal(z, ops.layernorm_fwd(x=self.x, gamma=self.gamma)[0]))
        with self.assertRaisesRegex(TypeError, r"gelu\(\) takes 1 inputs, got 2"):
            _native.matrix_op("gelu")(self.x, self.x)
        with self.assertRaisesRegex(TypeError, "got 'input' twice"):
            _native.matrix_op("gelu")(self.x, input=self.x)

    def test_te_fl_finds_pytorch_by_itself(self):
        code = "import torch, te_fl; print(tuple(te_fl.ops.swiglu(input=torch.ones(2, 8)).shape))"
        self.assertEqual(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout, "(2, 4)\n")


class Specification(unittest.TestCase):
    def test_shapes_of_tensors_without_memory(self):
        shape, dtype = specification.output("swiglu", "output", {"input": (4, 5, 16)}, {"input": DTYPE_CODES[BF16]}, {})
        self.assertEqual((shape, BY_CODE[dtype]), ((4, 5, 8), BF16))
        for layout, freqs in (("sbhd", 7), ("thd", None)):
            shapes = {"input": (7, 2, 3, 8) if freqs else (7, 3, 8), "freqs": (9, 1, 1, 8)}
            self.assertEqual(specification.output("fused_rope_forward", "output", shapes, dict.fromkeys(shapes, 1), {"layout": layout})[0], shapes["input"])
        self.assertEqual(specification.output("moe_permute_fwd", "output", {"input": (4, 8), "indices": (4, 2)}, {"input": 1, "indices": 10}, {})[0], None)

    def test_every_op_that_can_be_called_says_what_the_native_call_makes(self):
        # Both forms of the derivation agree with the shapes that an op accepts.
        for name in ("gelu", "swiglu", "scaled_softmax_forward", "add", "dropout_fwd", "rmsnorm_fwd"):
            read = [a for a in te_fl.schema(name)["args"] if a["role"] == 0 and a["type"] == 0 and not a["optional"]]
            shape = (2, 3, 4, 8) if "B" in read[0]["shape"] else (2, 3, 8)
            tensors = {a["name"]: torch.ones(shape if a["shape"] != "H" else (8,)) for a in read}
            made = getattr(ops, name)(**tensors)
            made = made if isinstance(made, tuple) else (made,)
            outputs = [a["name"] for a in te_fl.schema(name)["args"] if a["allocated"] and not a["optional"]]
            for output, tensor in zip(outputs, made):
                shapes = {n: tuple(t.shape) for n, t in tensors.items()}
                told = specification.output(name, output, shapes, {n: DTYPE_CODES[t.dtype] for n, t in tensors.items()}, {})
                self.assertEqual((told[0], BY_CODE[told[1]]), (tuple(tensor.shape), tensor.dtype), (name, output))

    def test_gradients(self):
        rule = specification.gradient("scaled_swiglu")
        self.assertEqual(rule, ("scaled_dswiglu", {"grad": "output"}, {"input": "input", "act_scales": "act_scales"},
                                {"output": "input", "grad_scales": "act_scales"}))
        self.assertIsNone(specification.gradient("dgelu"))
        for name in _native.op_names():
            rule = specification.gradient(name)
            if rule is not None:
                args = {a["name"]: a for a in te_fl.schema(rule.op)["args"]}
                self.assertTrue(rule.grads and rule.results, name)
                self.assertTrue({*rule.grads, *rule.saved} <= {n for n, a in args.items() if a["role"] == 0}, name)


if __name__ == "__main__":
    unittest.main()
