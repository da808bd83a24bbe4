// A PrivateUse1 backend for PyTorch, for torch_private_device_test.py and torch_device_test.py. Its
// devices are those that te-fl knows as ext:far:N or, if FAR_ALONE is set, FarDevices of its own,
// which te-fl does not know. Memory, copies, streams and events use the device's own function
// table; PyTorch's own ops run on host copies. The backend waits only where it must: the
// device's queues run late, so a read without synchronisation returns wrong data and is seen.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>

#include "support/far_device.hpp"
#include "te_fl/device.hpp"
#include "te_fl/plugin.h"

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
std::atomic<int64_t> g_allocations{0}, g_alive{0};
std::atomic<int64_t> g_until_full{
    -1};  // successful allocations until one fails; negative: none fails
std::array<std::atomic<bool>, kDevices> g_lost{};

// ---- the device's function table

const te_fl_device_desc& table(c10::DeviceIndex index) {
  static const auto all = [] {
    std::array<const te_fl_device_desc*, kDevices> found{};
    for (int i = 0; i < kDevices; ++i) {
      if (std::getenv("FAR_ALONE") != nullptr) {  // never freed: memory may outlive static objects
        found[static_cast<size_t>(i)] = &(new te_fl::testing::FarDevice(i))->desc;
        continue;
      }
      auto device = te_fl::parse_device("ext:far:" + std::to_string(i));
      TORCH_CHECK(device.ok(), device.status().to_string());
      auto desc = te_fl::devices::find(*device);
      TORCH_CHECK(desc.ok(), desc.status().to_string());
      found[static_cast<size_t>(i)] = *desc;
    }
    return found;
  }();
  TORCH_CHECK(index >= 0 && index < kDevices, "far:", static_cast<int>(index), " is not there");
  return *all[static_cast<size_t>(index)];
}

struct Errors {
  std::string text;
  te_fl_error_sink sink{};
  Errors() {
    sink.host = this;
    sink.write = [](void* host, const char* words) { static_cast<Errors*>(host)->text = words; };
  }
};

template <class Function, class... Args>
void call(c10::DeviceIndex index, Function te_fl_device_api::*function, Args... args) {
  const te_fl_device_desc& d = table(index);
  TORCH_CHECK(!g_lost[static_cast<size_t>(index)], "far:", static_cast<int>(index),
              " has fallen off the bus");
  Errors errors;
  const te_fl_status status = (d.api->*function)(d.self, args..., &errors.sink);
  TORCH_CHECK(status == TE_FL_OK, "far:", static_cast<int>(index), ": ", errors.text);
}

// ---- devices and streams

// The number of devices that the backend reports to PyTorch: 0 if FAR_ABSENT is set.
c10::DeviceIndex count() { return std::getenv("FAR_ABSENT") != nullptr ? 0 : kDevices; }

thread_local c10::DeviceIndex t_device = 0;
thread_local std::array<void*, kDevices> t_streams{};

c10::DeviceIndex to_index(c10::Device device) {
  return device.has_index() ? device.index() : t_device;
}
void* stream_handle(const c10::Stream& stream) { return reinterpret_cast<void*>(stream.id()); }
void* current(c10::DeviceIndex index) { return t_streams[static_cast<size_t>(index)]; }
c10::Stream make_stream(c10::DeviceIndex index, void* handle) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index),
                     reinterpret_cast<int64_t>(handle));
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
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    t_device = to_index(device);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return count(); }

  c10::Stream getStream(c10::Device device) const override {
    return make_stream(to_index(device), current(to_index(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make_stream(to_index(device), nullptr);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    void* handle = nullptr;
    call(to_index(device), &te_fl_device_api::create_stream, &handle);
    return make_stream(to_index(device), handle);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto index = stream.device_index();
    const c10::Stream before = make_stream(index, current(index));
    t_streams[static_cast<size_t>(index)] = stream_handle(stream);
    return before;
  }
  // Overrides PyTorch's function, which exists since PyTorch 2.11.
  void* getStreamNativeHandle(const c10::Stream stream) const { return stream_handle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    call(stream.device_index(), &te_fl_device_api::synchronize, stream_handle(stream));
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    call(index, &te_fl_device_api::synchronize, current(index));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) {
      call(stream.device_index(), &te_fl_device_api::create_event, uint32_t{0}, event);
    }
    call(stream.device_index(), &te_fl_device_api::record_event, *event, stream_handle(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    call(stream.device_index(), &te_fl_device_api::wait_event, event, stream_handle(stream));
  }
  bool queryEvent(void* event) const override {
    int32_t done = 0;
    call(0, &te_fl_device_api::query_event, event, &done);
    return done != 0;
  }
  void synchronizeEvent(void* event) const override {
    call(0, &te_fl_device_api::synchronize_event, event);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    const te_fl_device_desc& d = table(0);
    Errors errors;
    d.api->destroy_event(d.self, event, &errors.sink);
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
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(t_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(t_device, device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  bool isPinnedPtr(const void*) const override { return false; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override;
};

// ---- memory

// The size of a block and the stream on which it was allocated; the block is freed in the order of
// that stream.
struct Block {
  void* data;
  void* stream;
  c10::DeviceIndex index;
};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, t_device);
    if (bytes == 0) return {nullptr, device};
    TORCH_CHECK(count() > 0, "there are no far devices");
    if (g_until_full >= 0 && g_until_full-- == 0) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "far:", static_cast<int>(t_device),
                       " has no memory for ", bytes, " bytes");
    }
    auto* block = new Block{nullptr, current(t_device), t_device};
    te_fl_memory_desc wanted;
    wanted.bytes = bytes;
    wanted.stream = block->stream;
    call(t_device, &te_fl_device_api::allocate, static_cast<const te_fl_memory_desc*>(&wanted),
         &block->data);
    ++g_allocations, ++g_alive;
    return {block->data, block, release, device};
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "memory of the far device is copied as tensors");
  }
  static void release(void* raw) {
    auto* block = static_cast<Block*>(raw);
    const te_fl_device_desc& d = table(block->index);
    Errors errors;
    d.api->free(d.self, block->data, TE_FL_MEMORY_DEVICE, block->stream, &errors.sink);
    --g_alive;
    delete block;
  }
};
Memory g_memory;
REGISTER_ALLOCATOR(kType, &g_memory);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType, t_device)));
  return at::detail::empty_generic(size, &g_memory,
                                   c10::DispatchKeySet(at::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType, t_device)));
  return at::detail::empty_strided_generic(size, stride, &g_memory,
                                           c10::DispatchKeySet(at::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// ---- copies

enum : uint32_t { kWithin = 0, kToHost = 1, kFromHost = 2 };

void copy_bytes(c10::DeviceIndex index, void* to, const void* from, size_t bytes, uint32_t flags) {
  if (bytes == 0) return;
  call(index, &te_fl_device_api::copy, to, from, bytes, flags, current(index));
  if (flags == kToHost) call(index, &te_fl_device_api::synchronize, current(index));
}

// Copies a device tensor to a host tensor with the same values and strides; waits for the copy.
at::Tensor copy_to_host(const at::Tensor& t) {
  at::Tensor host = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU));
  if (t.numel() == 0) return host;
  copy_bytes(t.device().index(), host.data_ptr(), t.data_ptr(), host.storage().nbytes(), kToHost);
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
  if (dense && from.device() == to.device() && from.is_contiguous() &&
      from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes()) {
    copy_bytes(index, to.data_ptr(), from.data_ptr(), to.nbytes(), kWithin);
    return to;
  }
  // For a strided target, copies its memory first, so that the bytes between its elements are
  // written back unchanged.
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

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat>) {
  const auto bytes = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize());
  if (bytes > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) { return copy_to_host(self).item(); }

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  if (value.toDouble() == 0 && self.is_contiguous()) {
    if (self.numel() == 0) return self;
    const auto index = self.device().index();
    call(index, &te_fl_device_api::fill, self.data_ptr(), uint8_t{0}, self.nbytes(),
         current(index));
  } else {
    copy_from(at::full(self.sizes(), value, self.options().device(at::kCPU)), self, false);
  }
  return self;
}
at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

}  // namespace

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
// Before PyTorch 2.11 a backend provides the fallback of ops that have no derivative, such as
// c10d's.
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
#endif
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
}

extern "C" {
// Call once, after PyTorch knows the backend's name.
void private_device_register() { at::RegisterPrivateUse1HooksInterface(new Hooks); }
int64_t private_device_allocations() { return g_allocations; }
int64_t private_device_alive() { return g_alive; }
// Makes the allocation after `count` successful ones fail, and then none; -1: no allocation fails.
void private_device_fail_allocation(int64_t count) { g_until_full = count; }
// Makes each call of the device fail from now on, or no longer.
void private_device_lose(int index, int lost) { g_lost[static_cast<size_t>(index)] = lost != 0; }
}
