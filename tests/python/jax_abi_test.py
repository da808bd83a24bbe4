"""Tests python/src/jax/xla_ffi.hpp, which declares XLA's C ABI, against the headers of the installed jaxlib."""

import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

import jax

SOURCE = pathlib.Path(__file__).resolve().parents[2] / "python" / "src" / "jax"
MEMBERS = {  # our struct -> XLA's: pairs of members whose offsets and sizes must agree
    ("Extension", "XLA_FFI_Extension_Base"): {"type": "type", "next": "next"},
    ("ApiVersion", "XLA_FFI_Api_Version"): {"major": "major_version", "minor": "minor_version"},
    ("ErrorRequest", "XLA_FFI_Error_Create_Args"): {"message": "message", "code": "errc"},
    ("StreamRequest", "XLA_FFI_Stream_Get_Args"): {"context": "ctx", "stream": "stream"},
    ("OrdinalRequest", "XLA_FFI_DeviceOrdinal_Get_Args"): {"context": "ctx", "ordinal": "device_ordinal"},
    ("Api", "XLA_FFI_Api"): {"version": "api_version", "create_error": "XLA_FFI_Error_Create", "get_stream": "XLA_FFI_Stream_Get",
                             "get_ordinal": "XLA_FFI_DeviceOrdinal_Get"},
    ("Buffer", "XLA_FFI_Buffer"): {"type": "dtype", "data": "data", "rank": "rank", "extents": "dims"},
    ("Buffers", "XLA_FFI_Args"): {"count": "size", "types": "types", "buffers": "args"},
    ("Buffers", "XLA_FFI_Rets"): {"count": "size", "types": "types", "buffers": "rets"},
    ("Bytes", "XLA_FFI_ByteSpan"): {"data": "ptr", "size": "len"},
    ("Attributes", "XLA_FFI_Attrs"): {"count": "size", "types": "types", "names": "names", "values": "attrs"},
    ("CallFrame", "XLA_FFI_CallFrame"): {"api": "api", "context": "ctx", "stage": "stage", "operands": "args", "results": "rets",
                                    "attributes": "attrs"},
    ("Metadata", "XLA_FFI_Metadata"): {"version": "api_version", "traits": "traits"},
    ("MetadataExtension", "XLA_FFI_Metadata_Extension"): {"metadata": "metadata"},
}
NUMBERS = {"kMetadataExtension": "XLA_FFI_Extension_Metadata", "kBufferArgument": "XLA_FFI_ArgType_BUFFER",
           "kStringAttribute": "XLA_FFI_AttrType_STRING", "kMajor": "XLA_FFI_API_MAJOR"}
RENAMED = {"XLA_FFI_Extension_Base": "XLA_FFI_InternalExtension"}  # names from JAX 0.12 on
ERRORS = {"kInvalidArgument": "INVALID_ARGUMENT", "kDeadlineExceeded": "DEADLINE_EXCEEDED", "kNotFound": "NOT_FOUND",
          "kAlreadyExists": "ALREADY_EXISTS", "kResourceExhausted": "RESOURCE_EXHAUSTED", "kFailedPrecondition": "FAILED_PRECONDITION",
          "kUnimplemented": "UNIMPLEMENTED", "kInternal": "INTERNAL", "kUnavailable": "UNAVAILABLE", "kDataLoss": "DATA_LOSS"}


@unittest.skipUnless(shutil.which("c++") and SOURCE.exists(), "needs a C++ compiler and te-fl's sources")
class Abi(unittest.TestCase):
    def compile(self, checks):
        known = (pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
        for older, newer in RENAMED.items():
            if re.search(rf"\b{newer}\b", known):
                checks = [re.sub(rf"\b{older}\b", newer, check) for check in checks]
        text = '#include "xla/ffi/api/c_api.h"\n#include "xla_ffi.hpp"\nnamespace x = te_fl::xla;\n' + "\n".join(checks)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "check.cpp"
            path.write_text(text)
            command = ["c++", "-std=c++20", "-fsyntax-only", f"-I{SOURCE}", f"-I{jax.ffi.include_dir()}", str(path)]
            return subprocess.run(command, capture_output=True, text=True)

    def test_layout_and_numbers(self):
        checks = []
        for (ours, theirs), members in MEMBERS.items():
            for mine, other in members.items():
                checks.append(f"static_assert(offsetof(x::{ours}, {mine}) == offsetof({theirs}, {other}) && "
                              f"sizeof(x::{ours}::{mine}) == sizeof({theirs}::{other}));")
        checks += [f"static_assert(int(x::{mine}) == int({other}));" for mine, other in NUMBERS.items()]
        checks += [f"static_assert(int(x::ErrorCode::{mine}) == int(XLA_FFI_Error_Code_{other}));" for mine, other in ERRORS.items()]
        header = (SOURCE / "xla_ffi.hpp").read_text()
        types = re.search(r"enum class ElementType : int32_t \{(.*?)\};", header, re.S).group(1)
        named = re.findall(r"k(\w+) = \d+", types)
        self.assertGreater(len(named), 15)
        checks += [f"static_assert(int(x::ElementType::k{name}) == int(XLA_FFI_DataType_{name.upper()}));" for name in named]
        checks.append("static_assert(XLA_FFI_API_MINOR >= x::kLeastMinor);")
        done = self.compile(checks)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_wrong_layout_is_found(self):
        done = self.compile(["static_assert(offsetof(x::CallFrame, operands) == offsetof(XLA_FFI_CallFrame, rets));"])
        self.assertNotEqual(done.returncode, 0)


if __name__ == "__main__":
    unittest.main()
