"""Tests that ops on the storages of NVIDIA's package read their contents at the time of the call, as matrices, and check sizes and dtypes."""

import ctypes
import enum
import io
import pickle
import unittest

import inside_package  # noqa: F401
import torch

from te_fl import _native
from te_fl.errors import Error, InvalidArgument
from te_fl.tensors import QuantizedNames
from te_fl.transformer_engine_torch import matrix_ops
import transformer_engine.pytorch as te
from transformer_engine.pytorch import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer
from transformer_engine.pytorch.constants import DType
import transformer_engine_torch as tex  # registered by inside_package

E4M3 = torch.float8_e4m3fn


class Elsewhere:
    """A tensor that claims by DLPack to be on a GPU."""

    def __init__(self, tensor):
        self.tensor = tensor

    def numel(self):
        return self.tensor.numel()

    def __dlpack__(self):
        capsule = self.tensor.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = 2  # kDLCUDA; device_type lies after the data pointer
        return capsule


def make_quantizer(kind, internal=True, rowwise=True, columnwise=True):
    if kind == "delayed":
        made = Float8Quantizer(scale=torch.full((1,), 2.0), amax=torch.zeros(1), fp8_dtype=DType.kFloat8E4M3)
    elif kind == "current":
        made = Float8CurrentScalingQuantizer(fp8_dtype=DType.kFloat8E4M3, device="cpu")
    else:
        made = Float8BlockQuantizer(fp8_dtype=DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=2 if kind == "square" else 1)
    made.internal = internal
    made.set_usage(rowwise=rowwise, columnwise=columnwise)
    return made


def product(a, b, trans_b=True):
    """Computes b a^T, or b a for an untransposed A."""
    return tex.generic_gemm(a, trans_b, b, False, None, None, DType.kFloat32, None, DType.kFloat32, False, None, False, torch.empty(0), 0, False,
                            True)[0]


class Case(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(3)
        self.x, self.w = torch.randn(16, 2, 32).bfloat16(), torch.randn(48, 32).bfloat16()

    def values(self, tensor):
        return tex.dequantize(tensor, DType.kFloat32)

    def same_product(self, a, b):
        torch.testing.assert_close(product(a, b), torch.matmul(self.values(b).double(), self.values(a).double().t()).float(), rtol=1e-5, atol=1e-4)


class OneDevice(Case):
    def test_parts_on_two_devices_are_refused(self):
        for part in ("_scale_inv", "_transpose", "_data"):
            a = tex.quantize(self.w, make_quantizer("delayed"))
            setattr(a, part, Elsewhere(getattr(a, part)))
            with self.assertRaisesRegex(InvalidArgument, "lies on another device than the other parts"):
                matrix_ops.dequantize(input=a, output=torch.empty(48, 32))
        for part in ("scale", "amax"):
            quantizer = make_quantizer("delayed")
            setattr(quantizer, part, Elsewhere(getattr(quantizer, part)))
            with self.assertRaisesRegex(InvalidArgument, f"the quantizer's {part} lies on another device"):
                tex.quantize(self.w, quantizer)


class WhatItHoldsNow(Case):
    """A GEMM reads the buffers that a storage has at the time of the call, also if they were replaced, overwritten or removed after an earlier
    product."""

    def pair(self, kind="delayed", **usages):
        a = tex.quantize(self.w, make_quantizer(kind, **usages))
        b = tex.quantize(self.x, make_quantizer("row" if kind == "square" else kind, **usages))
        self.same_product(a, b)
        return a, b

    def test_new_values_in_place(self):
        for kind in ("delayed", "current", "row", "square"):
            with self.subTest(kind):
                a, b = self.pair(kind)
                before = product(a, b)
                tex.quantize(self.w * 3 + 1, make_quantizer(kind), a)
                self.same_product(a, b)
                self.assertFalse(torch.equal(product(a, b), before))

    def test_replaced_buffers(self):
        a, b = self.pair()
        other = tex.quantize(self.w.flip(0) * 0.5, make_quantizer("delayed"))
        a._data, a._transpose, a._scale_inv = other._data, other._transpose, other._scale_inv
        self.same_product(a, b)

    def test_another_scale(self):
        a, b = self.pair()
        before = product(a, b)
        a._scale_inv = a._scale_inv * 2
        self.assertTrue(torch.equal(product(a, b), before * 2))

    def test_a_buffer_whose_memory_is_another(self):
        a, b = self.pair()
        a._data.data = tex.quantize(-self.w, make_quantizer("delayed"))._data
        a._transpose_invalid = True
        self.same_product(a, b)

    def test_the_transpose_alone_and_a_stale_one(self):
        a, b = self.pair()
        before = product(a, b)
        a.update_usage(rowwise_usage=False, columnwise_usage=True)
        self.assertIsNone(a._data)
        self.assertTrue(torch.equal(product(a, b), before))
        a._transpose_invalid = True
        with self.assertRaisesRegex(InvalidArgument, "neither its data nor a valid transpose"):
            product(a, b)

    def test_a_stale_transpose_is_not_read(self):
        a, b = self.pair()
        before = product(a, b)
        a._transpose = a._transpose[:31]
        with self.assertRaisesRegex(InvalidArgument, "_transpose"):
            product(a, b)
        a._transpose_invalid = True
        self.assertTrue(torch.equal(product(a, b), before))

    def test_saved_and_cleared(self):
        a, b = self.pair()
        tensors, rest = a.prepare_for_saving()
        with self.assertRaises((Error, AttributeError, TypeError)):
            product(a, b)
        self.assertEqual(rest.restore_from_saved(tensors), [])
        self.same_product(a, b)
        a.clear()
        with self.assertRaises((Error, RuntimeError)):
            product(a, b)

    def test_tensors_as_storages(self):
        for kind in ("delayed", "current", "row", "square"):
            with self.subTest(kind):
                self.pair(kind, internal=False)


class Together(Case):
    """Tests the quantised tensors that split_quantize() makes as views of one buffer."""

    def parts(self, kind, sections, alone=False, columns=32, **usages):
        x = torch.randn(sum(sections), columns, generator=torch.Generator().manual_seed(1)).bfloat16()
        quantizers = [make_quantizer(kind, **usages) for _ in sections]
        return x, tex.split_quantize(x, sections, quantizers, alone)

    def test_they_are_what_each_is_alone(self):
        for kind, usages in (("delayed", {}), ("current", {}), ("delayed", {"rowwise": False}), ("current", {"columnwise": False}), ("row", {})):
            with self.subTest(kind, **usages):
                x, parts = self.parts(kind, [16, 0, 48, 32], **usages)
                _, others = self.parts(kind, [16, 0, 48, 32], alone=True, **usages)
                for rows, part, other in zip(x.split([16, 0, 48, 32]), parts, others):
                    self.assertEqual(tuple(part.size()), tuple(rows.shape))
                    self.assertEqual(type(part), type(other))
                    if not len(rows):
                        continue
                    one = tex.quantize(rows, make_quantizer(kind, **usages))
                    for name in ("_data", "_transpose", "_scale_inv", "_rowwise_data", "_columnwise_data"):
                        for made in (part, other):
                            value, want = getattr(made, name, None), getattr(one, name, None)
                            self.assertEqual(value is None, want is None, name)
                            self.assertTrue(value is None or torch.equal(value, want), name)

    def test_whose_memory_they_share(self):
        def memory(tensor):
            return tensor._data.untyped_storage().data_ptr()
        _, (a, b) = self.parts("delayed", [16, 48])
        self.assertEqual(memory(a), memory(b))
        self.assertNotEqual(memory(a), a._transpose.untyped_storage().data_ptr())
        self.assertEqual([b._data.data_ptr() % 16, (b._scale_inv.data_ptr() - a._scale_inv.data_ptr()) % 16], [0, 0])
        for why, (a, b) in (("requested", self.parts("delayed", [16, 48], alone=True)[1]), ("unaligned", self.parts("delayed", [3, 5], columns=8)[1]),
                            ("tensors", self.parts("delayed", [16, 48], internal=False)[1])):
            with self.subTest(why):
                self.assertNotEqual(memory(a), memory(b))


class AsMatrices(Case):
    def test_copies_of_a_tensor_of_three_dimensions(self):
        for kind in ("delayed", "current", "row", "square"):
            with self.subTest(kind):
                one = tex.quantize(self.x, make_quantizer(kind))
                flat = tex.quantize(self.x.view(32, 32), make_quantizer(kind))
                self.assertEqual(tuple(one.size()), (16, 2, 32))
                for name in ("_data", "_transpose", "_scale_inv", "_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv"):
                    if hasattr(one, name):
                        self.assertTrue(torch.equal(getattr(one, name).view(-1), getattr(flat, name).view(-1)), name)
                columns = tex.quantize(self.x, make_quantizer(kind, rowwise=False))
                self.assertTrue(torch.equal(self.values(columns), self.values(one)))

    def test_inputs_that_are_not_contiguous(self):
        turned = self.x.transpose(0, 1)
        self.assertTrue(torch.equal(product(self.w, turned), product(self.w, turned.contiguous())))
        wide = torch.randn(48, 64).bfloat16()[:, ::2]
        self.assertTrue(torch.equal(product(wide, self.x), product(wide.contiguous(), self.x)))
        self.assertTrue(torch.equal(tex.gelu(turned, None), tex.gelu(turned.contiguous(), None)))
        one, other = (tex.quantize(t, make_quantizer("delayed")) for t in (turned, turned.contiguous()))
        self.assertTrue(torch.equal(one._data, other._data))

    def test_an_output_that_is_not_contiguous_is_refused(self):
        out = torch.zeros(2, 16, 48, dtype=torch.float32).transpose(0, 1)
        with self.assertRaises(Error):
            matrix_ops.generic_gemm(a=self.x, b=self.w, trans_b=True, d=out)
        self.assertEqual(out.abs().max(), 0)

    def test_one_dimension(self):
        x = torch.randn(32)
        self.assertTrue(torch.equal(tex.relu(x, None), x.clamp(min=0)))

    def test_an_unknown_op(self):
        with self.assertRaisesRegex(AttributeError, "generic_gem"):
            matrix_ops.generic_gem


class WrongParts(Case):
    def refuses(self, pattern, **parts):
        for kind in parts.pop("kinds", ("delayed",)):
            a, b = tex.quantize(self.w, make_quantizer(kind)), tex.quantize(self.x, make_quantizer("row" if kind == "square" else kind))
            for name, value in parts.items():
                setattr(a, name, value)
            with self.subTest(kind), self.assertRaisesRegex(InvalidArgument, pattern):
                product(a, b)

    def test_sizes(self):
        self.refuses(r"_transpose of the Float8TensorStorage has shape \[32, 47\]; the transpose of \[48, 32\]",
                     _transpose=torch.zeros(32, 47, dtype=torch.uint8))
        self.refuses("_scale_inv of the Float8TensorStorage has 0 elements; the scales of these codes are 1 or more", _scale_inv=torch.ones(0))
        self.refuses("_rowwise_scale_inv of the Float8BlockwiseQTensorStorage has 47 elements; .* are 48 or more", kinds=("row",),
                     _rowwise_scale_inv=torch.ones(1, 47))
        self.refuses("_columnwise_scale_inv of the Float8BlockwiseQTensorStorage has 3 elements; .* are 4 or more", kinds=("square",),
                     _columnwise_scale_inv=torch.ones(1, 3))

    def test_dtypes(self):
        self.refuses("_data of the Float8TensorStorage is not uint8", _data=torch.zeros(48, 32))
        self.refuses("_scale_inv of the Float8TensorStorage is not FP32", _scale_inv=torch.ones(1, dtype=torch.double))
        self.refuses("dtype 4 is not an FP8 one", _fp8_dtype=DType.kFloat32)

    def test_what_is_not_contiguous(self):
        self.refuses("_data of the Float8TensorStorage is not contiguous", _data=torch.zeros(32, 48, dtype=torch.uint8).t())

    def test_a_quantizer_of_wrong_parts(self):
        for name, value in (("scale", torch.ones(2)), ("amax", torch.zeros(2)), ("scale", torch.ones(1, dtype=torch.double))):
            quantizer = make_quantizer("delayed")
            setattr(quantizer, name, value)
            out = tex.create_empty_quantized_tensor(quantizer, [48, 32], torch.bfloat16, "cpu", False)
            out._data.fill_(5)
            with self.subTest(name), self.assertRaisesRegex(InvalidArgument, rf"'output': the quantizer's {name} has shape .*; it is FP32 \[1\]"):
                tex.quantize(self.w, quantizer, out)
            self.assertTrue((out._data == 5).all())

    def test_a_class_without_codes(self):
        with self.assertRaisesRegex(ValueError, "names for data, columnwise_data, and code or shape"):
            _native.quantized_class(dict, QuantizedNames("a", "b"))
        with self.assertRaisesRegex(ValueError, "takes a te_fl.tensors.QuantizedNames"):
            _native.quantized_class(dict, ("a", "b"))
        with self.assertRaises(TypeError):
            _native.quantized_class("dict", QuantizedNames("a", "b", code="c"))


class Named(pickle.Unpickler):
    """An unpickler that records the module names that a pickle contains."""

    def find_class(self, module, name):
        self.modules.add(module)
        return super().find_class(module, name)


class Pickles(unittest.TestCase):
    def test_what_is_written_here_is_read_without_te_fl(self):
        """Pickles contain only names of NVIDIA's and PyTorch's modules. An enumerator is pickled as the extension module's class and a number, as
        NVIDIA's own is."""
        numbered = [kind for kind in vars(tex).values() if isinstance(kind, type) and issubclass(kind, enum.IntEnum)]
        self.assertGreater(len(numbered), 10)
        quantizers = [make_quantizer(kind, False) for kind in ("delayed", "current", "square")]
        quantizers[0].dtype = tex.DType.kFloat8E4M3  # as package versions before 2.17 store it
        values = [*(member for kind in numbered for member in kind), *quantizers, *(q(torch.ones(128, 128)) for q in quantizers), tex.FP8TensorMeta,
                  torch.Generator().manual_seed(1), te.Linear(16, 16, device="cpu").state_dict()]
        for value in values:
            with self.subTest(repr(value)[:60]):
                reader = Named(io.BytesIO(pickle.dumps(value, 2)))
                reader.modules = set()
                again = reader.load()
                self.assertFalse([name for name in reader.modules if name.startswith("te_fl")], reader.modules)
                self.assertIs(type(again), type(value))
                if isinstance(value, enum.IntEnum):
                    self.assertIs(again, value)
                    self.assertEqual(value.__reduce_ex__(2)[1], (int(value),))


if __name__ == "__main__":
    unittest.main()
