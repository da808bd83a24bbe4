// The files of `te-fl new-backend --pytorch`: the device as PyTorch's PrivateUse1.
#include "new_backend.hpp"

namespace te_fl_tool {
namespace {

// clang-format off
constexpr const char* kTorchSource = R"raw(// The device in PyTorch: PrivateUse1 under the name "@NAME@". Memory, copies, streams and events are those of src/device.cpp,
// which te-fl hands out, so that PyTorch and te-fl use one device. PyTorch's own ops run on the host, on copies, until you
// register kernels for them (TORCH_LIBRARY_IMPL at the end); te-fl's ops run by the plugin.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "te_fl/device.hpp"
#include "te_fl/plugin.h"

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// ---- the devices of the plugin, by index

const std::vector<const te_fl_device_desc*>& devices() {
  static const auto all = [] {
    std::vector<const te_fl_device_desc*> found;
    for (const te_fl::Device& device : te_fl::devices::list()) {
      if (te_fl::to_string(device) != "ext:@NAME@:" + std::to_string(found.size())) continue;
      if (const auto desc = te_fl::devices::find(device); desc.ok()) found.push_back(*desc);
    }
    return found;
  }();
  return all;
}
const te_fl_device_desc& device_at(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && static_cast<size_t>(index) < devices().size(), "there is no device @NAME@:", static_cast<int>(index),
              "; te-fl has ", devices().size(), " of them (TE_FL_PLUGIN_MODULES names the plugin, `te-fl info` lists it)");
  return *devices()[static_cast<size_t>(index)];
}

struct Errors {
  std::string text;
  te_fl_error_sink sink{};
  Errors() {
    sink.struct_size = sizeof sink;
    sink.host = this;
    sink.write = [](void* host, const char* words) { static_cast<Errors*>(host)->text += words; };
  }
};

// Calls a function of the device; its error becomes PyTorch's. A function that the device lacks (R4) does nothing.
template <class Function, class... Args>
void call(c10::DeviceIndex index, Function te_fl_device_api::*function, Args... args) {
  const te_fl_device_desc& d = device_at(index);
  if (d.api->*function == nullptr) return;
  Errors errors;
  const te_fl_status status = (d.api->*function)(d.self, args..., &errors.sink);
  if (TE_FL_STATUS_CODE(status) == TE_FL_OUT_OF_MEMORY)
    TORCH_CHECK_WITH(OutOfMemoryError, false, "@NAME@:", static_cast<int>(index), ": ", errors.text);
  TORCH_CHECK(status == TE_FL_OK, "@NAME@:", static_cast<int>(index), ": ", errors.text);
}

// ---- devices, streams and events of this thread

thread_local c10::DeviceIndex t_device = 0;
thread_local std::vector<void*> t_streams;

c10::DeviceIndex count() { return static_cast<c10::DeviceIndex>(devices().size()); }
void*& current(c10::DeviceIndex index) {
  t_streams.resize(std::max(t_streams.size(), static_cast<size_t>(index) + 1));
  return t_streams[static_cast<size_t>(index)];
}
c10::DeviceIndex to_index(c10::Device device) { return device.has_index() ? device.index() : t_device; }
// PyTorch's number of a stream is its handle; 0 is the default stream.
void* handle_of(const c10::Stream& stream) { return reinterpret_cast<void*>(stream.id()); }
c10::Stream make_stream(c10::DeviceIndex index, void* handle) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), reinterpret_cast<int64_t>(handle));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(kType, t_device);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, t_device}; }
  void setDevice(c10::Device device) const override { t_device = to_index(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { t_device = to_index(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return count(); }

  c10::Stream getStream(c10::Device device) const override { return make_stream(to_index(device), current(to_index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return make_stream(to_index(device), nullptr); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    void* handle = nullptr;
    call(to_index(device), &te_fl_device_api::create_stream, &handle);
    return make_stream(to_index(device), handle);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return make_stream(stream.device_index(), std::exchange(current(stream.device_index()), handle_of(stream)));
  }
  // Overrides PyTorch's function, which exists since PyTorch 2.11.
  void* getStreamNativeHandle(const c10::Stream stream) const { return handle_of(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    call(stream.device_index(), &te_fl_device_api::synchronize, handle_of(stream));
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    call(index, &te_fl_device_api::synchronize, current(index));
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) call(stream.device_index(), &te_fl_device_api::create_event, uint32_t{0}, event);
    call(stream.device_index(), &te_fl_device_api::record_event, *event, handle_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    call(stream.device_index(), &te_fl_device_api::wait_event, event, handle_of(stream));
  }
  bool queryEvent(void* event) const override {
    int32_t done = 1;  // where there are no events, work is done at once
    call(t_device, &te_fl_device_api::query_event, event, &done);
    return done != 0;
  }
  void synchronizeEvent(void* event) const override { call(t_device, &te_fl_device_api::synchronize_event, event); }
  void destroyEvent(void* event, const c10::DeviceIndex index) const noexcept override {
    const te_fl_device_desc& d = *devices()[static_cast<size_t>(index)];
    Errors errors;
    if (d.api->destroy_event != nullptr) d.api->destroy_event(d.self, event, &errors.sink);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return count(); }
  c10::DeviceIndex getCurrentDevice() const override { return t_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { t_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(t_device, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return std::exchange(t_device, device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  bool isPinnedPtr(const void*) const override { return false; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override;
};

// ---- memory

// A block is freed in the order of the stream on which it was allocated.
struct Block {
  void* data;
  void* stream;
  c10::DeviceIndex index;
};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, t_device);
    if (bytes == 0) return {nullptr, device};
    auto* block = new Block{nullptr, current(t_device), t_device};
    te_fl_memory_desc wanted;
    wanted.bytes = bytes;
    wanted.stream = block->stream;
    try {
      call(t_device, &te_fl_device_api::allocate, static_cast<const te_fl_memory_desc*>(&wanted), &block->data);
    } catch (...) {
      delete block;
      throw;
    }
    return {block->data, block, release, device};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    call(t_device, &te_fl_device_api::copy, to, from, bytes, uint32_t{0}, current(t_device));
  }
  static void release(void* raw) {
    auto* block = static_cast<Block*>(raw);
    const te_fl_device_desc& d = *devices()[static_cast<size_t>(block->index)];
    Errors errors;
    d.api->free(d.self, block->data, TE_FL_MEMORY_DEVICE, block->stream, &errors.sink);
    delete block;
  }
};
Memory g_memory;
REGISTER_ALLOCATOR(kType, &g_memory);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType, t_device)));
  return at::detail::empty_generic(size, &g_memory, c10::DispatchKeySet(at::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType, t_device)));
  return at::detail::empty_strided_generic(size, stride, &g_memory, c10::DispatchKeySet(at::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// ---- copies. The flags of te_fl_device_api.copy say which side is host memory.

enum : uint32_t { kWithin = 0, kToHost = 1, kFromHost = 2 };

void copy_bytes(c10::DeviceIndex index, void* to, const void* from, size_t bytes, uint32_t flags) {
  if (bytes == 0) return;
  call(index, &te_fl_device_api::copy, to, from, bytes, flags, current(index));
  if (flags == kToHost) call(index, &te_fl_device_api::synchronize, current(index));
}

at::Tensor copy_to_host(const at::Tensor& t) {
  at::Tensor host = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU));
  if (t.numel() > 0) copy_bytes(t.device().index(), host.data_ptr(), t.data_ptr(), host.storage().nbytes(), kToHost);
  return host;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (to.numel() == 0) return to;
  if (to.is_cpu()) {
    to.copy_(copy_to_host(from));
    return to;
  }
  const auto index = to.device().index();
  const bool dense = to.is_contiguous();
  if (dense && from.device() == to.device() && from.is_contiguous() && from.scalar_type() == to.scalar_type() &&
      from.sizes() == to.sizes()) {
    copy_bytes(index, to.data_ptr(), from.data_ptr(), to.nbytes(), kWithin);
    return to;
  }
  // The bytes between the elements of a strided target are written back as they were.
  at::Tensor host = dense ? at::empty(to.sizes(), to.options().device(at::kCPU)) : copy_to_host(to);
  host.copy_(from.is_cpu() ? from : copy_to_host(from));
  copy_bytes(index, to.data_ptr(), host.data_ptr(), host.storage().nbytes(), kFromHost);
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr memory = g_memory.allocate(bytes);
  copy_bytes(t_device, memory.get(), storage.data(), std::min(bytes, storage.nbytes()), kWithin);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}
const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto bytes = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize());
  if (bytes > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) { return copy_to_host(self).item(); }

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  copy_from(at::full(self.sizes(), value, self.options().device(at::kCPU)), self, false);
  return self;
}
at::Tensor& zero(at::Tensor& self) {
  if (!self.is_contiguous()) return fill(self, 0);
  const auto index = self.device().index();
  if (self.numel() > 0) call(index, &te_fl_device_api::fill, self.data_ptr(), uint8_t{0}, self.nbytes(), current(index));
  return self;
}

void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

// Kernels of your own for PyTorch's ops go here; what is missing runs on the host.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("fill_.Scalar", fill);
  m.impl("zero_", zero);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
}
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 11
// Ops that have no derivative, such as c10d's. PyTorch has this itself since 2.11.
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
#endif
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>()); }

// Called by @NAME@_torch.py once PyTorch knows the name.
extern "C" __attribute__((visibility("default"))) int @NAME@_torch_register() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return count();
}
)raw";

constexpr const char* kTorchModule = R"raw("""Makes the device of the @NAME@ backend PyTorch's device "@NAME@": `import @NAME@_torch`, then `torch.ones(3, device="@NAME@")`.

The library is build/lib@NAME@_torch.so of the project, or @NAME@_TORCH_LIBRARY. te-fl finds the plugin by its manifest once it is installed; before
that TE_FL_PLUGIN_MODULES names it, as pytorch.sh does.
"""

import contextlib
import ctypes
import os
import pathlib
import types

import te_fl
import torch

te_fl.info()  # loads te-fl's library, which the backend's library then uses
torch.utils.rename_privateuse1_backend("@NAME@")
_BUILT = pathlib.Path(__file__).resolve().parent.parent / "build" / "lib@NAME@_torch.so"
_LIBRARY = ctypes.CDLL(os.environ.get("@NAME@_TORCH_LIBRARY") or str(_BUILT))
_COUNT = _LIBRARY.@NAME@_torch_register()


class Stream(torch.Stream):
    """A stream of the device, as torch.cuda.Stream is. Before PyTorch 2.11 te-fl reads its handle from here."""

    def __new__(cls, device=None, priority=0, **of_another):
        if of_another:
            return super().__new__(cls, **of_another)
        return super().__new__(cls, device=device or torch.device("@NAME@", torch.accelerator.current_device_index()), priority=priority)

    @property
    def @NAME@_stream(self):
        return self.stream_id


class Event(torch.Event):
    def __new__(cls, **options):
        return super().__new__(cls, device="@NAME@", **options)


def _current_stream(device=None):
    now = torch.accelerator.current_stream(device)
    return Stream(stream_id=now.stream_id, device_index=now.device_index, device_type=now.device_type)


def _module():
    """torch.@NAME@, the module that PyTorch expects of a device. Random numbers are the CPU's."""
    module = types.ModuleType("torch.@NAME@")
    module.is_available = lambda: _COUNT > 0
    module.is_initialized = lambda: True
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: _COUNT
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.synchronize = torch.accelerator.synchronize
    module.Stream, module.Event = Stream, Event
    module.current_stream = _current_stream
    module.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


torch._register_device_module("@NAME@", _module())
)raw";

constexpr const char* kTorchTrain = R"raw("""Trains a layer of te_fl.pytorch on the device and prints which implementation ran each op."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import torch  # noqa: E402

import @NAME@_torch  # noqa: E402, F401
import te_fl  # noqa: E402
import te_fl.pytorch as te  # noqa: E402

torch.manual_seed(0)
layer = te.LayerNormMLP(32, 64, activation="relu", device="@NAME@", params_dtype=torch.bfloat16)
optimizer = torch.optim.SGD(layer.parameters(), lr=2.0)
x = torch.randn(16, 32).to("@NAME@", torch.bfloat16)
target = torch.randn(16, 32).to("@NAME@", torch.bfloat16)
losses = []
for step in range(20):
    optimizer.zero_grad()
    loss = (layer(x).float() - target.float()).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss on {x.device}: {losses[0]:.4f} -> {losses[-1]:.4f}")
for row in te_fl.usage():
    print(f"{row['op']} by {row['impl_id']}: {row['calls']} calls")
if not losses[-1] < 0.9 * losses[0]:
    sys.exit("the loss did not fall")
if not any(row["impl_id"] == "vendor.@NAME@" for row in te_fl.usage()):
    sys.exit("no op ran in the plugin")
)raw";

constexpr const char* kTorchScript = R"raw(#!/usr/bin/env bash
# Builds the device's half in PyTorch and trains a layer on it. PYTHON: the interpreter that has PyTorch and te_fl (default: python3);
# TE_FL_PREFIX as in ci.sh, which builds the plugin alone.
set -euo pipefail
cd "$(dirname "$0")"
python=$(command -v "${PYTHON:-python3}")
cmake -S . -B build ${TE_FL_PREFIX:+-DCMAKE_PREFIX_PATH="$TE_FL_PREFIX"} -DPYTORCH=ON -DPython3_EXECUTABLE="$python"
cmake --build build --parallel
TE_FL_PLUGIN_MODULES="$PWD/build/libte_fl_@NAME@.so" "$python" pytorch/train.py
)raw";
// clang-format on

constexpr const char* kTorchCMake = R"raw(
# The device in PyTorch, for pytorch.sh: built against the PyTorch of an interpreter, whose version it then needs.
option(PYTORCH "Build lib@NAME@_torch.so" OFF)
if(PYTORCH)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  execute_process(COMMAND ${Python3_EXECUTABLE} -c "import os, torch; print(os.path.dirname(torch.__file__), int(torch.compiled_with_cxx11_abi()), sep=';')"
    OUTPUT_VARIABLE pytorch OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  list(GET pytorch 0 folder)
  list(GET pytorch 1 cxx11_abi)
  add_library(@NAME@_torch SHARED src/pytorch.cpp)
  target_include_directories(@NAME@_torch SYSTEM PRIVATE ${folder}/include ${folder}/include/torch/csrc/api/include)
  target_compile_definitions(@NAME@_torch PRIVATE _GLIBCXX_USE_CXX11_ABI=${cxx11_abi})
  target_compile_options(@NAME@_torch PRIVATE -O1 -w) # its time is spent in PyTorch and the driver
  target_link_libraries(@NAME@_torch PRIVATE te_fl::te_fl ${folder}/lib/libtorch_cpu.so ${folder}/lib/libc10.so)
endif()
)raw";

constexpr ProjectFile kTorchFiles[] = {
    {"src/pytorch.cpp", kTorchSource},
    {"pytorch/@NAME@_torch.py", kTorchModule},
    {"pytorch/train.py", kTorchTrain},
    {"pytorch.sh", kTorchScript, true},
};

constexpr Mark kTorchMarks[] = {
    {"@TORCH_CMAKE@", kTorchCMake},
    {"@TORCH_ROWS@",
     "| src/pytorch.cpp | the device as PyTorch's PrivateUse1 |\n"
     "| pytorch/@NAME@_torch.py | `import @NAME@_torch` makes it torch's device @NAME@ |\n"
     "| pytorch.sh, pytorch/train.py | builds that and trains a layer on the device |\n"},
};
constexpr Mark kNoTorchMarks[] = {{"@TORCH_CMAKE@", ""}, {"@TORCH_ROWS@", ""}};

}  // namespace

std::span<const ProjectFile> pytorch_files() { return kTorchFiles; }
std::span<const Mark> pytorch_marks(bool pytorch) {
  if (pytorch) return kTorchMarks;
  return kNoTorchMarks;
}

}  // namespace te_fl_tool
