// FP32 relu implementations: one is correct and each of the others has one fault that te-fl check
// must find; and an attention that is wrong only in shapes that only randomly drawn cases have.
// Each is registered as vendor.wrong.NAME. For tests; never installed.
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "support/far_device.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/ops/activation.h"
#include "wrong_attention.hpp"

namespace {

namespace b = te_fl::backend;
using te_fl::testing::FarDevice;

struct ReluCall {
  const te_fl_context& ctx;
  const float* x;
  float* y;
  int64_t n, rows, columns;
};

void relu(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] < 0 ? 0 : x[i];
}

// ---- implementations that run on host memory

void right(const ReluCall& c) { relu(c.x, c.y, c.n); }
void a_little(const ReluCall& c) {
  relu(c.x, c.y, c.n);
  for (int64_t i = 0; i < c.n; ++i) c.y[i] *= 1.0001f;
}
void one_element(const ReluCall& c) {
  relu(c.x, c.y, c.n);
  if (c.n > 1000) c.y[c.n - 3] += 1;
}
// Wrong in the last element of large tensors, as a kernel with a grid of whole blocks may be.
void beyond_310000(const ReluCall& c) { relu(c.x, c.y, c.n > 310000 ? c.n - 1 : c.n); }
// Wrong only for sizes that te-fl bench uses and te-fl check's conformance cases do not.
void beyond_two_million(const ReluCall& c) { relu(c.x, c.y, c.n > 2000000 ? c.n - 2 : c.n); }
void no_nan(const ReluCall& c) {
  for (int64_t i = 0; i < c.n; ++i) c.y[i] = std::isnan(c.x[i]) ? 0 : std::max(c.x[i], 0.0f);
}
void prints(const ReluCall& c) {
  std::printf("relu of %lld elements\n", static_cast<long long>(c.n));
  relu(c.x, c.y, c.n);
}
const te_fl_host_api* g_host = nullptr;
void asks(const ReluCall& c) {
  g_host->setting(g_host->host, "TE_FL_WRONG_UNROLL");
  relu(c.x, c.y, c.n);
}
void reads_before(const ReluCall& c) {
  if (c.n > 0) [[maybe_unused]]
    volatile float before = c.x[-1];
  relu(c.x, c.y, c.n);
}
void unwritten(const ReluCall& c) { relu(c.x, c.y, c.n - 1); }
void late_refusal(const ReluCall& c) {
  relu(c.x, c.y, c.n / 2);
  b::unsupported("half way through, it turns out that it cannot");
}
void late_failure(const ReluCall& c) {
  relu(c.x, c.y, c.n);
  if (c.n > 1000) throw b::Error(TE_FL_INTERNAL, "the last block failed \xff");  // invalid UTF-8
}
void hangs(const ReluCall& c) {
  while (c.n == 17) std::this_thread::sleep_for(std::chrono::seconds(1));
  relu(c.x, c.y, c.n);
}
[[gnu::noinline]] void crashes(const ReluCall& c) {
  if (c.n == 17) std::abort();
  relu(c.x, c.y, c.n);
}
// Hangs for tensors of several rows whose width is a multiple of the vector length, as a
// specialised kernel for such shapes may.
void hangs_at_128(const ReluCall& c) {
  while (c.rows > 3 && c.columns == 128) std::this_thread::sleep_for(std::chrono::seconds(1));
  relu(c.x, c.y, c.n);
}
[[gnu::noinline]] float sum_of(const float* x, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  return sum;
}
// Reads whole vectors of four elements, also past the end of the tensor.
void reads_past(const ReluCall& c) {
  [[maybe_unused]] volatile float sum = sum_of(c.x, (c.n + 3) / 4 * 4);
  relu(c.x, c.y, c.n);
}
void leaks(const ReluCall& c) {
  static std::atomic<void*> kept;  // keeps the value from being optimised away
  kept = std::malloc(48);
  relu(c.x, c.y, c.n);
}
// Wrong from a certain call on, as if each call leaked a limited resource.
void wrong_later(const ReluCall& c) {
  static std::atomic<int> calls{0};
  relu(c.x, c.y, c.n);
  if (c.n == 231 && ++calls > 500) c.y[0] += 1;
}
void overruns(const ReluCall& c) {
  relu(c.x, c.y, c.n);
  if (c.n % 4 != 0) c.y[c.n] = 0;  // writes past the end of the tensor
}
void writes_input(const ReluCall& c) {
  relu(c.x, c.y, c.n);
  if (c.n > 0 && c.x != c.y) const_cast<float*>(c.x)[0] = 0;
}
void not_in_place(const ReluCall& c) {
  for (int64_t i = 0; i < c.n; ++i) c.y[i] = 0;
  for (int64_t i = 0; i < c.n; ++i) c.y[i] = std::max(c.y[i], c.x[i]);
}
void other_bits(const ReluCall& c) {
  static std::atomic<unsigned> calls{0};
  relu(c.x, c.y, c.n);
  if (++calls % 2 == 0)
    for (int64_t i = 0; i < c.n; ++i) c.y[i] = std::nextafter(c.y[i], 1e30f);
}
void shared_scratch(const ReluCall& c) {
  static float scratch[1 << 16];
  if (c.n > 1 << 16) return relu(c.x, c.y, c.n);
  relu(c.x, scratch, c.n);
  std::this_thread::sleep_for(std::chrono::microseconds(200));
  for (int64_t i = 0; i < c.n; ++i) c.y[i] = scratch[i];
}
void rounding_mode(const ReluCall& c) {
  std::fesetround(FE_TOWARDZERO);
  relu(c.x, c.y, c.n);
}
std::atomic<float*> g_last{nullptr};
void stale_pointer(const ReluCall& c) {
  relu(c.x, c.y, c.n);
  if (c.n > 0) g_last = c.y;
}
std::atomic<bool> g_thread{false};
void stray_thread(const ReluCall& c) {
  relu(c.x, c.y, c.n);
  if (!g_thread.exchange(true))
    std::thread([] {
      for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
    }).detach();
}

// Leaves a library's thread running, as drivers do: glibc keeps the thread that it starts for such
// timers.
void library_thread(const ReluCall& c) {
  relu(c.x, c.y, c.n);
  sigevent event{};
  event.sigev_notify = SIGEV_THREAD;
  event.sigev_notify_function = [](sigval) {};
  timer_t timer{};
  if (timer_create(CLOCK_MONOTONIC, &event, &timer) == 0) timer_delete(timer);
}

using Host = void (*)(const ReluCall&);

template <Host F>
void host_run(const te_fl_context& ctx, const te_fl_relu_args& args) {
  const b::Matrix shape = b::as_matrix(*args.input);
  F({ctx, b::data<float>(*args.input), b::data<float>(*args.output), b::numel(*args.input),
     shape.rows, shape.cols});
}
template <Host F>
// an implementation without the guard that turns exceptions into a status
te_fl_status bare_run(void*, const te_fl_context* ctx, const void* raw) {
  host_run<F>(*ctx, *static_cast<const te_fl_relu_args*>(raw));
  return TE_FL_OK;
}
void throws(const ReluCall&) { throw 42; }

// ---- implementations whose return value is no valid status

template <te_fl_status answer>
te_fl_status answers(void*, const te_fl_context* ctx, const void* raw) {
  host_run<right>(*ctx, *static_cast<const te_fl_relu_args*>(raw));
  return answer;
}
te_fl_status answers_bits(void*, const te_fl_context*, const void*) { return 0x20000; }

// ---- implementations that report what they run

te_fl_status says(void*, const te_fl_context*, const void*, const te_fl_error_sink* text) {
  b::report(text, "one loop");
  return TE_FL_OK;
}
te_fl_status says_nothing(void*, const te_fl_context*, const void*, const te_fl_error_sink*) {
  return TE_FL_OK;
}
te_fl_status throws_words(void*, const te_fl_context*, const void*, const te_fl_error_sink*) {
  throw 42;
}
te_fl_status dies_saying(void*, const te_fl_context*, const void*, const te_fl_error_sink*) {
  std::abort();
}
te_fl_status writes_saying(void*, const te_fl_context*, const void* raw,
                           const te_fl_error_sink* text) {
  const auto& args = *static_cast<const te_fl_relu_args*>(raw);
  if (b::numel(*args.output) > 0) b::data<float>(*args.output)[0] = 1;
  b::report(text, "one loop");
  return TE_FL_OK;
}

void compact(const te_fl_context&, const te_fl_relu_args& args) {
  if (!b::is_contiguous(*args.input) || !b::is_contiguous(*args.output))
    b::unsupported("relu takes compact tensors only");
}

// ---- implementations that run on the device

std::atomic<int64_t> g_used{0};
std::atomic<bool> g_late{false};
te_fl_device_api g_far;  // the far device's original functions

enum class Far {
  kRight,
  kHostAccess,
  kOtherStream,
  kLeak,
  kLateFailure,
  kLeakingDevice,
  kReadsPast,    // an element past the end is read and enters a maximum, which ignores NaN
  kReadsBefore,  // an element before the start is read and multiplied by zero, so only a NaN there
                 // changes the result
  kReadsBits,    // an element outside the tensor is read and changes the result by less than the
                 // tolerance
  kWritesFar     // writes so far beyond the end that the write misses the buffer's own guard bytes
};
void run_relu(Far kind, const float* x, float* y, int64_t n) {
  relu(x, y, n);
  if (kind == Far::kReadsPast && n % 4 != 0) y[n - 1] = std::fmax(y[n - 1], x[n + 1]);
  if (kind == Far::kReadsBefore) y[0] += 0 * x[-2];
  if (kind == Far::kReadsBits && x[n] > 0) y[0] = std::nextafter(y[0], 1e30f);
  if (kind == Far::kWritesFar && n % 4 != 0) y[n + 100] = 0;
}

std::atomic<bool> g_keeps{false};  // the device does not return freed memory

template <Far kind>
te_fl_status far_run(void* self, const te_fl_context* ctx, const void* raw) {
  return b::guard(ctx->errors, [&] {
    const b::Widened<te_fl_relu_args> args(raw);
    auto& device = *static_cast<FarDevice*>(self);
    const int64_t n = b::numel(*(*args).input);
    if (n == 0) return;
    const auto* shown = b::data<float>(*(*args).input);
    auto* x = reinterpret_cast<float*>(device.real(shown));
    auto* y = reinterpret_cast<float*>(device.real(b::data<char>(*(*args).output)));
    [[maybe_unused]] volatile float first = 0;
    if (kind == Far::kHostAccess && n == 17) first = shown[0];
    if (kind == Far::kLateFailure && n == 17) g_late = true;
    if (kind == Far::kLeakingDevice) g_keeps = true;
    if (kind == Far::kLeak) {
      void* kept = nullptr;
      te_fl_memory_desc memory;
      memory.bytes = 4096;
      memory.stream = ctx->stream;
      device.api.allocate(&device, &memory, &kept, ctx->errors);
    }
    device.enqueue(kind == Far::kOtherStream ? nullptr : ctx->stream,
                   [=] { run_relu(kind, x, y, n); });
  });
}

void change_device(FarDevice& device) {
  g_far = device.api;
  device.desc.provider = "wrong";
  device.api.create_stream = [](void*, void** out, const te_fl_error_sink*) -> te_fl_status {
    *out = new char;
    return TE_FL_OK;
  };
  device.api.destroy_stream = [](void* self, void* stream,
                                 const te_fl_error_sink*) -> te_fl_status {
    g_far.synchronize(self, stream, nullptr);
    delete static_cast<char*>(stream);
    return TE_FL_OK;
  };
  device.api.allocate = [](void* self, const te_fl_memory_desc* memory, void** out,
                           const te_fl_error_sink* e) {
    const te_fl_status status = g_far.allocate(self, memory, out, e);
    if (status == TE_FL_OK && memory->kind == TE_FL_MEMORY_DEVICE) ++g_used;
    return status;
  };
  device.api.free = [](void* self, void* data, uint32_t kind, void* stream,
                       const te_fl_error_sink* e) {
    if (kind == TE_FL_MEMORY_DEVICE && !g_keeps) --g_used;
    return g_far.free(self, data, kind, stream, e);
  };
  device.api.properties = [](void* self, te_fl_device_props* props,
                             const te_fl_error_sink* e) -> te_fl_status {
    g_far.properties(self, props, e);
    props->total_memory = uint64_t{1} << 32;
    props->free_memory = props->total_memory - static_cast<uint64_t>(g_used) * 4096;
#ifdef WRONG_FILE  // as if every host knew every member
    std::strcpy(props->driver, "1.0");
#endif
    return TE_FL_OK;
  };
  device.api.synchronize = [](void* self, void* stream, const te_fl_error_sink* e) -> te_fl_status {
    const te_fl_status status = g_far.synchronize(self, stream, e);
    if (!g_late.exchange(false)) return status;
    b::report(e, "a kernel that ran before has failed");
    return TE_FL_INTERNAL;
  };
}

// ---- the plugin

struct Instance {
  std::unique_ptr<FarDevice> device;
  const te_fl_device_desc* devices[1];
  te_fl_op_desc descs[64];
  const te_fl_op_desc* ops[64];
  uint32_t count = 0;

  te_fl_op_desc& add(const char* id,
                     te_fl_status (*run)(void*, const te_fl_context*, const void*)) {
    te_fl_op_desc& d = descs[count];
    ops[count++] = &d;
    d.op_name = "relu", d.impl_id = id, d.kind = TE_FL_KIND_VENDOR;
    d.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC | TE_FL_OP_IN_PLACE_OK;
    d.dtypes = TE_FL_BIT(TE_FL_F32), d.scalings = TE_FL_BIT(TE_FL_SCALING_NONE);
    d.device_types = uint64_t{1} << TE_FL_DEVICE_CPU;
    d.run = run;
    d.supports = b::supports_thunk<te_fl_relu_args, compact>;
    return d;
  }
  template <Host F>
  te_fl_op_desc& host(const char* id) {
    return add(id, b::run_thunk<te_fl_relu_args, host_run<F>>);
  }
  template <bool no_odd_tail>
  void attention(const char* id) {
    using Args = te_fl_fused_attn_fwd_args;
    te_fl_op_desc& d = add(id, b::run_thunk<Args, te_fl::testing::plain_attention<no_odd_tail>>);
    d.op_name = "fused_attn_fwd";
    d.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC;
    d.dtypes = TE_FL_MASK_HIGH | TE_FL_BIT(TE_FL_I32);
    d.supports = b::supports_thunk<Args, te_fl::testing::plain_attention_supports>;
  }
  template <Far kind>
  void far(const char* id) {
    te_fl_op_desc& d = add(id, far_run<kind>);
    d.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
    d.self = device.get();
  }
};

te_fl_status create(const te_fl_host_api* host, void** instance, const te_fl_error_sink* errors) {
  return b::guard(errors, [&] {
    g_host = host;
    auto made = std::make_unique<Instance>();
    made->device = std::make_unique<FarDevice>();
    change_device(*made->device);
    made->devices[0] = &made->device->desc;
    made->host<right>("vendor.wrong.right");
    made->host<right>("vendor.wrong.says").describe = says;
    made->host<right>("vendor.wrong.says_nothing").describe = says_nothing;
    made->host<right>("vendor.wrong.throws_words").describe = throws_words;
    made->host<right>("vendor.wrong.dies_saying").describe = dies_saying;
    made->host<right>("vendor.wrong.writes_saying").describe = writes_saying;
    made->host<a_little>("vendor.wrong.a_little");
    made->host<one_element>("vendor.wrong.one_element");
    made->host<unwritten>("vendor.wrong.unwritten");
    made->host<beyond_310000>("vendor.wrong.beyond_310000");
    made->host<beyond_two_million>("vendor.wrong.beyond_two_million");
    made->host<no_nan>("vendor.wrong.no_nan");
    made->host<prints>("vendor.wrong.prints");
    made->host<asks>("vendor.wrong.asks");
    made->host<reads_before>("vendor.wrong.reads_before");
    made->host<late_refusal>("vendor.wrong.late_refusal");
    made->host<late_failure>("vendor.wrong.late_failure");
    made->add("vendor.wrong.throws", bare_run<throws>);
    made->add("vendor.wrong.negative", answers<-1>);
    made->add("vendor.wrong.clean_success", answers<TE_FL_OK | TE_FL_CLEAN>);
    made->host<right>("vendor.wrong.unknown_bits").supports = answers_bits;
    made->host<hangs>("vendor.wrong.hangs");
    made->host<crashes>("vendor.wrong.crashes");
    made->host<hangs_at_128>("vendor.wrong.hangs_at_128");
    made->host<reads_past>("vendor.wrong.reads_past");
    made->host<leaks>("vendor.wrong.leaks");
    made->host<wrong_later>("vendor.wrong.wrong_later");
    made->host<overruns>("vendor.wrong.overruns");
    made->host<writes_input>("vendor.wrong.writes_input");
    made->host<not_in_place>("vendor.wrong.not_in_place");
    made->host<right>("vendor.wrong.strides").supports = nullptr;
    made->host<other_bits>("vendor.wrong.other_bits");
    made->host<shared_scratch>("vendor.wrong.shared_scratch");
    made->host<rounding_mode>("vendor.wrong.rounding_mode");
    made->host<stale_pointer>("vendor.wrong.stale_pointer");
    made->host<stray_thread>("vendor.wrong.stray_thread");
    made->host<library_thread>("vendor.wrong.library_thread");
    made->attention<false>("vendor.wrong.attention");
    made->attention<true>("vendor.wrong.attention_odd_heads");
    made->far<Far::kRight>("vendor.wrong.far_right");
    made->far<Far::kHostAccess>("vendor.wrong.far_host_access");
    made->far<Far::kOtherStream>("vendor.wrong.far_other_stream");
    made->far<Far::kLeak>("vendor.wrong.far_leak");
    made->far<Far::kLateFailure>("vendor.wrong.far_late_failure");
    made->far<Far::kLeakingDevice>("vendor.wrong.far_leaking_device");
    made->far<Far::kReadsPast>("vendor.wrong.far_reads_past");
    made->far<Far::kReadsBefore>("vendor.wrong.far_reads_before");
    made->far<Far::kReadsBits>("vendor.wrong.far_reads_bits");
    made->far<Far::kWritesFar>("vendor.wrong.far_writes_far");
    *instance = made.release();
  });
}

te_fl_status devices(void* instance, uint32_t* count, const te_fl_device_desc* const** list,
                     const te_fl_error_sink*) {
  *count = 1;
  *list = static_cast<Instance*>(instance)->devices;
  return TE_FL_OK;
}

te_fl_status ops(void* instance, uint32_t* count, const te_fl_op_desc* const** list,
                 const te_fl_error_sink*) {
  *count = static_cast<Instance*>(instance)->count;
  *list = static_cast<Instance*>(instance)->ops;
  return TE_FL_OK;
}

void destroy(void* instance) {
  delete static_cast<Instance*>(instance);
  // A queue that goes on writing after the plugin is destroyed. The library is linked so that it
  // stays mapped for this thread.
  if (float* last = g_last.exchange(nullptr))
    std::thread([last] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      *last = 12345;
    }).detach();
}

constexpr te_fl_plugin_api kApi = {
    sizeof(te_fl_plugin_api), 0, create, devices, ops, nullptr, destroy};
constexpr te_fl_plugin_header kHeader = {TE_FL_PLUGIN_MAGIC,
                                         sizeof(te_fl_plugin_header),
                                         TE_FL_ABI_MAJOR,
                                         TE_FL_ABI_MINOR,
                                         0,
                                         0,
                                         "wrong",
                                         "wrong",
                                         "1.0.0",
                                         nullptr,
                                         &kApi,
#ifdef WRONG_FILE
                                         {&kApi}};
#else
                                         {}};
#endif

}  // namespace

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &kHeader;
}

#ifdef WRONG_FILE
extern "C" TE_FL_PLUGIN_EXPORT int wrong_helper() { return 1; }
template <class T>
struct TE_FL_PLUGIN_EXPORT Unique {
  static inline int value = 0;
};
template struct Unique<int>;
#endif
