"""Python interface of the bench library (shim.cpp): tensors over PyTorch's memory, ops by name, layers."""

import ctypes
import json
import os

import torch

DTYPES = {  # torch dtype -> DLPack type code, bits
    torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.int32: (0, 32),
    torch.int64: (0, 64), torch.uint8: (1, 8), torch.float8_e4m3fn: (10, 8), torch.float8_e5m2: (12, 8),
}
TENSOR, BLOCK_1X128, BLOCK_128X128, MXFP8 = 1, 2, 3, 4
COMPUTE_SCALE, POW2_SCALE = 1, 2


class Quant(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("scaling", ctypes.c_uint32), ("flags", ctypes.c_uint32),
                ("amax_epsilon", ctypes.c_float), ("columnwise_data", ctypes.c_void_p),
                ("scale_inv", ctypes.c_void_p), ("columnwise_scale_inv", ctypes.c_void_p), ("amax", ctypes.c_void_p),
                ("scale", ctypes.c_void_p), ("columnwise_amax", ctypes.c_void_p)]


class TensorStruct(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("provider", ctypes.c_uint32), ("data", ctypes.c_void_p),
                ("device_type", ctypes.c_int32), ("device_index", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
                ("quant", ctypes.c_void_p)]


class Tensor:
    """A te_fl_tensor that shares a torch tensor's memory and keeps it alive."""

    def __init__(self, data, quant=None, keep=()):
        self.torch, self.quant, self.keep = data, quant, keep
        code, bits = DTYPES[data.dtype]
        n = data.dim()
        self.shape = (ctypes.c_int64 * n)(*data.shape)
        self.strides = (ctypes.c_int64 * n)(*data.stride())
        self.struct = TensorStruct(
            ctypes.sizeof(TensorStruct), 0, data.data_ptr(), 2, 0, n, code, bits, 1, ctypes.addressof(self.shape),
            ctypes.addressof(self.strides), 0, ctypes.addressof(quant) if quant is not None else None)

    @property
    def address(self):
        return ctypes.addressof(self.struct)

    def bytes(self):
        copies = 2 if self.quant is not None and self.quant.columnwise_data else 1
        return copies * self.torch.numel() * self.torch.element_size()


def plain(*shape, dtype=torch.bfloat16, std=1.0):
    t = torch.empty(shape, dtype=dtype, device="cuda")
    if dtype.is_floating_point:
        t.normal_(0, std)
    else:
        t.zero_()
    return Tensor(t)


def fp8(rows, cols, dtype=torch.float8_e4m3fn, columnwise=True, scaling=TENSOR, flags=0):
    """Makes an FP8 tensor with Gaussian random row-wise and column-wise data and a scale of 1."""
    def codes(a, b):
        return torch.empty((a, b), dtype=torch.bfloat16, device="cuda").normal_(0, 8).to(dtype)
    data = codes(rows, cols)
    column = codes(*((rows, cols) if scaling == MXFP8 else (cols, rows))) if columnwise else None
    if scaling == TENSOR:
        numbers = [1, 1]
    elif scaling == BLOCK_1X128:
        numbers = [-(-cols // 128) * (-(-rows // 4) * 4), -(-rows // 128) * (-(-cols // 4) * 4)]
    elif scaling == MXFP8:
        numbers = [-(-rows // 128) * -(-cols // 128) * 512] * 2
    else:
        padded = lambda n: -(-(-(-n // 128)) // 4) * 4
        numbers = [-(-rows // 128) * padded(cols), -(-cols // 128) * padded(rows)]
    value = dict(fill_value=120, dtype=torch.uint8) if scaling == MXFP8 else dict(fill_value=0.01)
    scale_inv = torch.full((numbers[0],), device="cuda", **value)
    column_scale = scale_inv if scaling == TENSOR else torch.full((numbers[1],), device="cuda", **value)
    amax = torch.zeros(1, device="cuda")
    scale = torch.full((1,), 64.0, device="cuda")
    per_tensor = scaling == TENSOR
    quant = Quant(ctypes.sizeof(Quant), scaling, flags, 0.0, column.data_ptr() if columnwise else None,
                  scale_inv.data_ptr(), column_scale.data_ptr() if columnwise else None,
                  amax.data_ptr() if per_tensor else None, scale.data_ptr() if per_tensor else None, None)
    return Tensor(data, quant, (column, scale_inv, column_scale, amax, scale))


def quantised(values, dtype, empty=False):
    """Makes a row-wise tensor with per-tensor scaling: the FP8 data of `values`, or, if `empty`, uninitialised FP8 data of the shape of `values` and
    a scale of 1."""
    most = torch.finfo(dtype).max
    scale = torch.ones(1, device="cuda") if empty else (most / values.abs().max().float()).reshape(1)
    data = torch.empty_like(values, dtype=dtype)
    if not empty:
        data.copy_((values.float() * scale).clamp(-most, most).to(dtype))
    scale_inv, amax = 1 / scale, torch.zeros(1, device="cuda")
    quant = Quant(ctypes.sizeof(Quant), TENSOR, 0, 0.0, None, scale_inv.data_ptr(), None, amax.data_ptr(),
                  scale.data_ptr(), None)
    return Tensor(data, quant, (scale, scale_inv, amax))


def rescale(t):
    """Updates the scale as delayed scaling with a history of one step does."""
    scale, _, amax = t.keep
    scale.copy_(torch.finfo(t.torch.dtype).max / amax)
    amax.zero_()


def numbers(t):
    """Returns the dequantised values of a tensor that quantised() made."""
    return t.torch.float() * t.keep[1]


class Library:
    def __init__(self, folder, plugin):
        os.environ.setdefault("TE_FL_PLUGIN_PATH", "")
        os.environ.setdefault("TE_FL_MAX_STAGED_BYTES", "0")  # no host fallback: a row whose op has no kernel for the device is an error
        self.lib = ctypes.CDLL(os.path.join(folder, "libte_fl_bench_gpu.so"))
        for name in ("tb_error", "tb_schema", "tb_usage", "tb_layer_parameters", "tb_memory", "tb_findings"):
            getattr(self.lib, name).restype = ctypes.c_char_p
        self.lib.tb_memory.argtypes = [ctypes.c_size_t]
        self.lib.tb_layer_open.restype = ctypes.c_void_p
        self.lib.tb_layer_tensor.restype = ctypes.c_void_p
        self.check(self.lib.tb_init(plugin.encode()))
        self.schemas = {}

    def check(self, code):
        if code != 0:
            raise RuntimeError(self.lib.tb_error().decode())

    def schema(self, op):
        if op not in self.schemas:
            text = self.lib.tb_schema(op.encode())
            if text is None:
                raise RuntimeError(self.lib.tb_error().decode())
            self.schemas[op] = json.loads(text)
        return self.schemas[op]

    def deterministic(self, on):
        self.check(self.lib.tb_deterministic(int(on)))

    def findings(self):
        """Returns the plugin's report on the driver, the device and the libraries that it uses: {subject: state}."""
        text = self.lib.tb_findings()
        if text is None:
            raise RuntimeError(self.lib.tb_error().decode())
        return {f["subject"]: f["state"] for f in json.loads(text)}

    def usage(self, reset=True):
        return json.loads(self.lib.tb_usage(int(reset)))

    def memory(self, record_at=0):
        """Returns the memory that te-fl holds, its peak, and the recorded uses of the memory; see tb_memory() in shim.cpp."""
        text = self.lib.tb_memory(record_at)
        if text is None:
            raise RuntimeError(self.lib.tb_error().decode())
        return json.loads(text)


class OpCall:
    """A call of an op with arguments by name; an argument is a Tensor, a list of Tensor, or a number."""

    def __init__(self, library, op, **arguments):
        self.library, self.op, self.keep = library, op.encode(), list(arguments.values())
        schema = library.schema(op)
        self.memory = ctypes.create_string_buffer(schema["size"])
        base = ctypes.addressof(self.memory)
        ctypes.c_uint32.from_address(base).value = schema["size"]
        scalars = {2: ctypes.c_int32, 3: ctypes.c_int32, 4: ctypes.c_int64, 5: ctypes.c_float, 6: ctypes.c_double,
                   7: ctypes.c_int32}
        for name, arg in schema["args"].items():
            if arg["type"] in scalars:
                kind = scalars[arg["type"]]
                value = arguments.get(name, arg["neutral"])
                kind.from_address(base + arg["offset"]).value = (
                    float(value) if kind in (ctypes.c_float, ctypes.c_double) else int(value))
        for name, value in arguments.items():
            arg = schema["args"][name]
            if isinstance(value, Tensor):
                ctypes.c_void_p.from_address(base + arg["offset"]).value = value.address
            elif isinstance(value, list):
                array = (ctypes.c_void_p * len(value))(*[t.address for t in value])
                self.keep.append(array)
                ctypes.c_void_p.from_address(base + arg["offset"]).value = ctypes.addressof(array)
                ctypes.c_int64.from_address(base + arg["count_offset"]).value = len(value)

    def __call__(self):
        stream = torch.cuda.current_stream().cuda_stream
        self.library.check(self.library.lib.tb_call(self.op, ctypes.byref(self.memory), ctypes.c_void_p(stream)))


class Layer:
    """A Transformer layer of te-fl's nn; step() runs forward, backward and the scale updates."""

    def __init__(self, library, x, dy, angles=None, **spec):
        self.library, self.keep = library, (x, dy, angles)
        def described(t):
            return {"data": t.data_ptr(), "shape": list(t.shape), "dtype": "bf16" if t.dtype == torch.bfloat16 else "f32"}
        spec.update(x=described(x), dy=described(dy))
        if angles is not None:
            spec.update(angles=described(angles))
        self.handle = library.lib.tb_layer_open(json.dumps(spec).encode())
        if not self.handle:
            raise RuntimeError(library.lib.tb_error().decode())

    def step(self):
        stream = torch.cuda.current_stream().cuda_stream
        self.library.check(self.library.lib.tb_layer_step(ctypes.c_void_p(self.handle), ctypes.c_void_p(stream)))

    def parameters(self):
        return json.loads(self.library.lib.tb_layer_parameters(ctypes.c_void_p(self.handle)))

    def view(self, which, shape):
        """Returns a torch view of a tensor of the last step; see tb_layer_tensor()."""
        pointer = self.library.lib.tb_layer_tensor(ctypes.c_void_p(self.handle), which)
        class Memory:
            __cuda_array_interface__ = {"shape": tuple(shape), "typestr": "<i2", "data": (pointer, False), "version": 3}
        return torch.as_tensor(Memory(), device="cuda").view(torch.bfloat16)

    def close(self):
        self.library.lib.tb_layer_close(ctypes.c_void_p(self.handle))
