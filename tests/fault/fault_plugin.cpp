// A plugin with one fault. It is compiled once and copied for each fault: fault_name, from
// fault_name.c, is both the fault and the plugin's name. The plugin "good" has no fault; it
// implements relu for F32 on the host as vendor.fault.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <string>
#include <string_view>

#include "fault_ops.hpp"
#include "te_fl/ops/activation.h"
#include "te_fl/plugin.h"

#ifdef FAULT_CALLS
extern "C" int FAULT_CALLS();  // defined in no library, or in one that has been removed
#endif

extern "C" const char fault_name[];

namespace {

bool is(std::string_view name) { return name == fault_name; }

// Reports a call to the test: FAULT_EVENTS holds the address of the test's function.
void event(const char* text) {
  const char* address = std::getenv("FAULT_EVENTS");
  if (address == nullptr) return;
  const auto number = std::strtoull(address, nullptr, 16);
  reinterpret_cast<void (*)(const char*)>(number)(text);
}

// The fault "mortal" has static objects, which exit() destroys. A thread that is inside the plugin
// at that time, or enters it later, ends the process with a special exit status.
std::atomic<bool> g_destroyed{false};
void need_static_objects(const char* where) {
  if (!is("mortal")) return;
  event(where);
  const timespec t{0, 30'000'000};
  nanosleep(&t, nullptr);
  if (g_destroyed.load()) std::_Exit(66);
}
const struct FirstObject {
  ~FirstObject() {
    g_destroyed.store(true);
    const timespec t{0, 60'000'000};  // time for other threads to reach the destroyed objects
    if (is("mortal")) nanosleep(&t, nullptr);
  }
} g_first;
const struct SecondObject {
  SecondObject() { need_static_objects("opening"); }
} g_second;

void say(const te_fl_error_sink* sink, const char* text) {
  if (sink != nullptr && sink->write != nullptr) sink->write(sink->host, text);
}

// Throws a class defined in the plugin, whose code is unmapped when the plugin is closed.
struct Mistake : std::exception {
  std::string text = std::string("thrown by ") + fault_name;
  const char* what() const noexcept override { return text.c_str(); }
};

struct Flat {
  const float* in;
  float* out;
  int64_t n;
};

Flat flat(const te_fl_tensor* input, const te_fl_tensor* output) {
  Flat f{};
  f.in = reinterpret_cast<const float*>(static_cast<char*>(input->dl.data) + input->dl.byte_offset);
  f.out = reinterpret_cast<float*>(static_cast<char*>(output->dl.data) + output->dl.byte_offset);
  f.n = 1;
  for (int i = 0; i < input->dl.ndim; ++i) f.n *= input->dl.shape[i];
  return f;
}

te_fl_status relu(void*, const te_fl_context* ctx, const void* raw) {
  event("run");
  need_static_objects("calling");
  const auto* args = static_cast<const te_fl_relu_args*>(raw);
  if (is("throw_run")) throw Mistake();
  if (is("throw_int_run")) throw 7;
  if (is("clean_failure")) {
    say(ctx->errors, "not today");
    return TE_FL_INTERNAL | TE_FL_CLEAN;
  }
  if (is("garbage_status")) return -559038737;
  const Flat f = flat(args->input, args->output);
  const int64_t n = is("half_written") ? f.n / 2 : f.n;
  for (int64_t i = 0; i < n; ++i) f.out[i] = f.in[i] > 0 ? f.in[i] : 0;
  if (is("half_written")) {
    say(ctx->errors, "stopped in the middle");
    return TE_FL_INTERNAL;
  }
  return TE_FL_OK;
}

te_fl_status supports(void*, const te_fl_context*, const void*) { throw Mistake(); }
te_fl_status workspace(void*, const te_fl_context*, const void*, size_t*) { throw Mistake(); }
te_fl_status prepare(void*, const te_fl_context*, const void*, void** plan) {
  if (is("throw_prepare")) throw Mistake();
  *plan = std::malloc(16);
  return TE_FL_OK;
}
void destroy_plan(void*, void* plan) {
  event("destroy_plan");
  std::free(plan);
  if (is("throw_destroy_plan")) throw Mistake();
}

te_fl_status scale(void*, const te_fl_context*, const void* raw) {
  uint32_t size;
  std::memcpy(&size, raw, sizeof size);
  const auto* args = static_cast<const fault::ScaleArgs*>(raw);
  // The implementation "old_parameters" does not declare the bias and ignores it.
  const bool biased = !is("old_parameters") && size >= sizeof(fault::ScaleArgs);
  const Flat f = flat(args->input, args->output);
  for (int64_t i = 0; i < f.n; ++i) f.out[i] = f.in[i] * args->factor + (biased ? args->bias : 0);
  return TE_FL_OK;
}

te_fl_status forward(void*, const te_fl_context*, const void* raw) {
  const auto* args = static_cast<const fault::RecordArgs*>(raw);
  const Flat f = flat(args->input, args->output);
  for (int64_t i = 0; i < f.n; ++i) f.out[i] = f.in[i];
  if (args->saved != nullptr) args->saved->opaque = 1;
  return TE_FL_OK;
}

te_fl_status backward(void*, const te_fl_context*, const void* raw) {
  const auto* args = static_cast<const fault::RecordArgs*>(raw);
  const Flat f = flat(args->input, args->output);
  // Only this implementation adds 1000.
  for (int64_t i = 0; i < f.n; ++i) f.out[i] = 1000 + f.in[i];
  return TE_FL_OK;
}

// ---- a device whose memory is host memory

bool two_providers() { return is("two_providers") || is("two_providers_named"); }
bool has_device() {
  return two_providers() || is("device") || is("second_device_bad") ||
         is("ops_fail_after_devices") || is("mortal") || is("throw_device") || is("quiesce_fails");
}

te_fl_status dev_allocate(void*, const te_fl_memory_desc* memory, void** out,
                          const te_fl_error_sink*) {
  if (memory->kind != TE_FL_MEMORY_DEVICE) return te_fl_status{TE_FL_UNSUPPORTED};
  const size_t bytes = memory->bytes;
  if (is("throw_device")) throw Mistake();
  *out = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *out != nullptr ? TE_FL_OK : TE_FL_OUT_OF_MEMORY;
}
te_fl_status dev_free(void*, void* data, uint32_t, void*, const te_fl_error_sink*) {
  event("free");
  need_static_objects("freeing");
  std::free(data);
  return TE_FL_OK;
}
te_fl_status dev_copy(void*, void* dst, const void* src, size_t bytes, uint32_t, void*,
                      const te_fl_error_sink*) {
  if (is("throw_device")) throw Mistake();
  need_static_objects("copying");
  std::memcpy(dst, src, bytes);
  return TE_FL_OK;
}
te_fl_status dev_fill(void*, void* dst, uint8_t value, size_t bytes, void*,
                      const te_fl_error_sink*) {
  if (is("throw_device")) throw Mistake();
  std::memset(dst, value, bytes);
  return TE_FL_OK;
}
te_fl_status dev_synchronize(void*, void*, const te_fl_error_sink*) {
  if (is("throw_device")) throw Mistake();
  return TE_FL_OK;
}
te_fl_status dev_properties(void*, te_fl_device_props* props, const te_fl_error_sink*) {
  if (is("throw_device")) throw Mistake();
  std::strcpy(props->name, "fault device");
  props->arch = 7;
  return TE_FL_OK;
}

te_fl_device_api make_device_api() {
  te_fl_device_api api{};
  api.struct_size = sizeof api;
  api.allocate = dev_allocate;
  api.free = dev_free;
  api.copy = dev_copy;
  api.fill = dev_fill;
  api.synchronize = dev_synchronize;
  api.properties = dev_properties;
  return api;
}

struct Instance {
  const te_fl_host_api* host = nullptr;
  te_fl_device_api device_api = make_device_api();
  te_fl_device_desc device[2] = {};
  const te_fl_device_desc* devices[2] = {&device[0], &device[1]};
  te_fl_op_desc op[3];
  const te_fl_op_desc* ops[3] = {&op[0], &op[1], &op[2]};
  uint32_t op_count = 1;
  // Memory for a descriptor of another ABI version, which may be longer or shorter.
  alignas(8) unsigned char longer[sizeof(te_fl_op_desc) + 64];
};

te_fl_op_desc describe(const char* name,
                       te_fl_status (*run)(void*, const te_fl_context*, const void*),
                       const te_fl_op_schema* schema) {
  te_fl_op_desc d;
  d.op_name = name;
  d.impl_id = "vendor.fault";
  d.kind = TE_FL_KIND_VENDOR;
  d.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_STATIC_SUPPORT;
  d.dtypes = TE_FL_BIT(TE_FL_F32);
  d.scalings = TE_FL_BIT(TE_FL_SCALING_NONE);
  d.device_types = uint64_t{1} << (has_device() ? TE_FL_DEVICE_EXT : TE_FL_DEVICE_CPU);
  d.run = run;
  d.schema = schema;
  return d;
}

void fill_ops(Instance& self) {
  te_fl_op_desc& op = self.op[0];
  op = describe("relu", relu, nullptr);
  if (is("throw_supports")) {
    op.supports = supports;
    op.flags &= ~uint32_t{TE_FL_OP_STATIC_SUPPORT};
  }
  if (is("throw_workspace")) op.workspace = workspace;
  if (is("throw_prepare") || is("throw_destroy_plan")) {
    op.prepare = prepare;
    op.destroy_plan = destroy_plan;
  }
  if (is("no_destroy_plan")) op.prepare = prepare;
  if (is("null_run")) op.run = nullptr;
  if (is("null_op_name")) op.op_name = nullptr;
  if (is("null_impl_id")) op.impl_id = nullptr;
  if (is("misspelt_op")) op.op_name = "reluu";
  if (is("bad_impl_id")) op.impl_id = "Vendor Fault";
  if (is("garbage_op_size")) op.struct_size = 0xffffffffu;
  if (is("half_op_member")) op.struct_size = offsetof(te_fl_op_desc, supports) + 4;
  if (is("zero_op_size")) op.struct_size = 0;
  if (is("second_op_bad") || is("duplicate")) {
    self.op[1] =
        describe(is("duplicate") ? "relu" : "gelu", is("duplicate") ? relu : nullptr, nullptr);
    self.op_count = 2;
  }
  if (is("old_parameters") || is("custom_op") || is("other_schema")) {
    self.op[0] = describe("fault::scale", scale, &fault::kScale);
    self.op[0].later_args = is("old_parameters") ? nullptr : "bias";
  }
  if (is("no_schema")) self.op[0] = describe("fault::unknown", scale, nullptr);
  if (is("opaque_record")) {
    self.op[0] = describe("fault::forward", forward, &fault::kForward);
    self.op[1] = describe("fault::backward", backward, &fault::kBackward);
    self.op_count = 2;
  }
  if (is("newer_minor") || is("newer_misspelt")) {  // an op that this version of te-fl lacks
    self.op[1] =
        describe(is("newer_minor") ? "relu_of_a_later_te_fl" : "later::relu", relu, nullptr);
    self.op_count = 2;
  }
  if (is("names_provider")) {  // ops for a device of another plugin
    op.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
    op.provider = "stranger";
  }
  if (is("two_providers_named")) {
    op.provider = "fault";
    self.op[1] = describe("relu", relu, nullptr);
    self.op[1].impl_id = "vendor.fault_second";
    self.op[1].provider = "second";
    self.op_count = 2;
  }
  if (is("smaller_structs")) op.struct_size = offsetof(te_fl_op_desc, supports);
  if (is("larger_structs")) {
    std::memcpy(self.longer, &op, sizeof op);
    std::memset(self.longer + sizeof op, 0x5a, sizeof self.longer - sizeof op);
    const uint32_t size = sizeof self.longer;
    std::memcpy(self.longer, &size, sizeof size);
    self.ops[0] = reinterpret_cast<const te_fl_op_desc*>(self.longer);
  }
}

// ---- the plugin's API functions

te_fl_status create(const te_fl_host_api* host, void** instance, const te_fl_error_sink* errors) {
  event("create");
  need_static_objects("loading");
  host->log(host->host, TE_FL_LOG_DEBUG, "created");
  if (is("throw_create")) throw Mistake();
  if (is("create_fails")) {
    say(errors, "the fault device is on fire");
    return TE_FL_FAILED_PRECONDITION;
  }
  if (is("early_create")) {  // create() allocates memory on a device whose plugin is loaded later
    void* data = nullptr;
    te_fl_memory_desc memory;
    memory.bytes = 64;
    const te_fl_status code =
        host->allocate(host->host, {TE_FL_DEVICE_CUDA, 3}, 0, &memory, &data, errors);
    return code == TE_FL_OK ? TE_FL_INTERNAL : code;
  }
  if (is("create_garbage_status")) return 0x7fffffff;
  if (is("hanging_create") || is("slow_create")) {
    const timespec t{is("hanging_create") ? 2 : 0, is("hanging_create") ? 0 : 20'000'000};
    nanosleep(&t, nullptr);
    say(errors, "late text");
    event("create ends");
  }
  if (is("settings")) {
    for (const char* name : {"TE_FL_SETTINGS_DEBUG", "TE_FL_SETTINGS_LEVEL", "TE_FL_SETTINGS_MODE",
                             "TE_FL_SETTINGS_TABLE"}) {
      const char* value = host->setting(host->host, name);
      const std::string text = std::string(name) + "=" + (value == nullptr ? "(null)" : value);
      host->log(host->host, TE_FL_LOG_WARNING, text.c_str());
      event(text.c_str());
    }
  }
  auto* self = new Instance;
  // The instance of an abandoned create() is never destroyed; this pointer keeps it from being
  // reported as a leak.
  [[maybe_unused]] static Instance* volatile late = nullptr;
  if (is("hanging_create")) late = self;
  self->host = host;
  *instance = self;
  return TE_FL_OK;
}

te_fl_status devices(void* raw, uint32_t* count, const te_fl_device_desc* const** list,
                     const te_fl_error_sink* errors) {
  event("devices");
  auto* self = static_cast<Instance*>(raw);
  if (is("throw_devices")) throw std::runtime_error("thrown by throw_devices");
  if (is("devices_fail")) {
    say(errors, "no bus");
    return TE_FL_INTERNAL;
  }
  for (int i = 0; i < 2; ++i) {
    self->device[i].struct_size = sizeof(te_fl_device_desc);
    self->device[i].device = {TE_FL_DEVICE_EXT, i};
    self->device[i].provider = "fault";
    self->device[i].api = &self->device_api;
  }
  *count = has_device() ? 1 : 0;
  *list = self->devices;
  if (two_providers()) {
    *count = 2;
    self->device[1].device = {TE_FL_DEVICE_EXT, 0};
    self->device[1].provider = "second";
  }
  if (is("second_device_bad")) {
    *count = 2;
    self->device[1].provider = nullptr;
  }
  if (is("garbage_device_count")) *count = 0xfffffff0u;
  if (is("null_device_list")) {
    *count = 1;
    *list = nullptr;
  }
  if (is("null_device")) {
    *count = 1;
    self->devices[0] = nullptr;
  }
  if (is("garbage_device_size")) {
    *count = 1;
    self->device[0].struct_size = 0xfffffffeu;
  }
  if (is("null_device_slot")) {
    *count = 1;
    self->device_api.free = nullptr;
  }
  return TE_FL_OK;
}

te_fl_status ops(void* raw, uint32_t* count, const te_fl_op_desc* const** list,
                 const te_fl_error_sink* errors) {
  event("ops");
  need_static_objects("registering");
  auto* self = static_cast<Instance*>(raw);
  if (is("throw_ops")) throw Mistake();
  if (is("ops_fail") || is("ops_fail_after_devices")) {
    say(errors, "no kernels");
    return TE_FL_OUT_OF_MEMORY;
  }
  fill_ops(*self);
  *count = self->op_count;
  *list = self->ops;
  if (is("garbage_op_count")) *count = 0xffffffffu;
  if (is("null_op_list")) *list = nullptr;
  if (is("null_op")) self->ops[0] = nullptr;
  return TE_FL_OK;
}

te_fl_status quiesce(void*, const te_fl_error_sink* errors) {
  event("quiesce");
  if (is("throw_quiesce")) throw Mistake();
  if (is("quiesce_fails")) {
    say(errors, "a kernel hangs");
    return TE_FL_DEVICE_LOST;
  }
  if (is("quiesce_busy")) {
    say(errors, "a queue is busy");
    return TE_FL_BUSY;
  }
  return TE_FL_OK;
}

void destroy(void* raw) {
  event("destroy");
  need_static_objects("unloading");
  delete static_cast<Instance*>(raw);
  if (is("throw_destroy")) throw Mistake();
}

template <class T>
struct Longer {
  T now;
  unsigned char later[64];
};

Longer<te_fl_plugin_api> g_api{};
Longer<te_fl_plugin_header> g_header{};

void fill_header() {
  const bool larger = is("larger_structs");
  te_fl_plugin_api& api = g_api.now;
  std::memset(g_api.later, 0x5a, sizeof g_api.later);
  api.struct_size = larger ? sizeof g_api : sizeof api;
  api.create = is("null_create") ? nullptr : create;
  api.devices = devices;
  api.ops = ops;
  api.quiesce = quiesce;
  api.destroy = is("null_destroy") ? nullptr : destroy;
  if (is("garbage_api_size")) api.struct_size = 0xdeadbeefu;
  if (is("half_api_member")) api.struct_size = offsetof(te_fl_plugin_api, diagnose) + 4;

  te_fl_plugin_header& h = g_header.now;
  std::memset(g_header.later, 0x5a, sizeof g_header.later);
  h.magic = is("bad_magic") ? 0x12345678u : TE_FL_PLUGIN_MAGIC;
  h.struct_size = larger ? sizeof g_header : sizeof h;
  if (is("smaller_structs")) h.struct_size = offsetof(te_fl_plugin_header, reserved);
  if (is("garbage_header_size")) h.struct_size = 3;
  if (is("half_header_member")) h.struct_size = offsetof(te_fl_plugin_header, settings) + 4;
  h.abi_major = is("newer_major") ? 3 : TE_FL_ABI_MAJOR;
  h.abi_minor = TE_FL_ABI_MINOR + (is("newer_minor") ? 1 : 0);
  if (is("older_major")) h.abi_major = 0, h.abi_minor = 1;
  if (is("withdrawn")) h.abi_major = 1, h.abi_minor = 0;
  h.min_host_minor = is("needs_newer_host") ? TE_FL_ABI_MINOR + 3
                     : is("needs_its_own")  ? TE_FL_ABI_MINOR
                                            : 0;
  h.features = is("unknown_feature") ? 4 : 0;
  h.name = is("bad_name") ? "Bad Name!" : is("null_name") ? nullptr : fault_name;
  h.vendor = is("null_vendor") ? nullptr : is("of_nvidia") ? "nvidia" : "fault";
  h.version = "1.2.3";
  h.build_id = nullptr;
  h.api = is("null_api") ? nullptr : &api;

  static te_fl_setting_desc settings[4];
  static const te_fl_setting_desc* list[4];
  for (int i = 0; i < 4; ++i) list[i] = &settings[i];
  const auto declare = [&](te_fl_setting_type type, const char* name, const char* value,
                           const char* choices) {
    te_fl_setting_desc& s = settings[h.setting_count++];
    s.type = type, s.name = name, s.default_value = value, s.choices = choices,
    s.doc = "A setting.";
    h.settings = list;
  };
  if (h.setting_count != 0) return;  // a repeated call
  if (is("settings")) {
    declare(TE_FL_SETTING_BOOL, "TE_FL_SETTINGS_DEBUG", "0", nullptr);
    declare(TE_FL_SETTING_INT, "TE_FL_SETTINGS_LEVEL", "3", "1 9");
    declare(TE_FL_SETTING_ENUM, "TE_FL_SETTINGS_MODE", nullptr, "fast exact");
    declare(TE_FL_SETTING_FILE, "TE_FL_SETTINGS_TABLE", nullptr, nullptr);
  }
  if (is("settings_foreign")) declare(TE_FL_SETTING_BOOL, "TE_FL_OTHER_DEBUG", "0", nullptr);
  if (is("settings_default")) declare(TE_FL_SETTING_INT, "TE_FL_SETTINGS_DEFAULT_A", "10", "1 9");
  if (is("settings_type")) {
    declare(TE_FL_SETTING_BOOL, "TE_FL_SETTINGS_TYPE_A", "0", nullptr);
    settings[0].type = 77;
  }
  if (is("settings_null")) {
    declare(TE_FL_SETTING_BOOL, "TE_FL_SETTINGS_NULL_A", "0", nullptr);
    list[0] = nullptr;
  }
  if (is("verify")) declare(TE_FL_SETTING_STRING, "TE_FL_VERIFY_DIR", nullptr, nullptr);
}

}  // namespace

#ifdef FAULT_NO_ENTRY
#define te_fl_plugin_query te_fl_plugin_qeury
#endif

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
#ifdef FAULT_CALLS
  if (FAULT_CALLS() == 1) return nullptr;
#endif
  if (is("throw_query")) throw Mistake();
  if (is("null_header")) return nullptr;
  fill_header();
  return &g_header.now;
}
