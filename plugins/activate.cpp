#include "plugins/activate.hpp"

#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <span>

#include "core/base/abi_struct.hpp"
#include "core/base/error_text.hpp"
#include "core/base/fork.hpp"
#include "core/device/allocations.hpp"
#include "core/device/device_list.hpp"
#include "core/device/inside.hpp"
#include "plugins/load_turn.hpp"
#include "registry/comm_providers.hpp"
#include "registry/implementation.hpp"
#include "registry/registry_impl.hpp"
#include "te_fl/log.hpp"
#include "te_fl/version.hpp"

namespace te_fl::plugins {
namespace {

using core::copy_struct;
using core::plausible_size;

constinit core::ForkMutex mutex(core::LockLevel::kPluginSettings);
const core::ForkMutex::Registration registration(mutex);

constexpr uint32_t kMaxListed = 1u << 16;

// Calls a plugin function and converts an exception into a status. R5 forbids exceptions; one must
// not propagate into the host.
template <class F>
te_fl_status guarded(core::ErrorText& errors, const char* entry, F&& f) {
  std::string text;
  try {
    return errors.answered(f());
  } catch (const std::exception& e) {
    text = std::string(entry) + " threw an exception: " + e.what() + " (rule R5)";
  } catch (...) {
    text = std::string(entry) + " threw an exception (rule R5)";
  }
  errors.sink()->write(errors.sink()->host, text.c_str());
  return TE_FL_INTERNAL;
}

Status check_list(const char* entry, uint32_t count, const void* list) {
  if (count <= kMaxListed && (count == 0 || list != nullptr)) return {};
  return Status(StatusCode::kIncompatible, std::string(entry) + " returned " +
                                               std::to_string(count) + " entries" +
                                               (list == nullptr ? " and no list" : "") +
                                               " (at most " + std::to_string(kMaxListed) + ")");
}

// Returns an error for a struct_size that no version of the struct can have. Without this check it
// would be taken for a newer version (R3).
Status check_device(const te_fl_device_desc& desc, uint32_t i) {
  const auto bad = [&](const char* what, uint32_t size, size_t least) {
    return Status(StatusCode::kIncompatible, "device " + std::to_string(i) + ": " + what + " has " +
                                                 core::size_text(size, least));
  };
  if (!plausible_size(desc.struct_size, core::kLeastDeviceDesc)) {
    return bad("its descriptor", desc.struct_size, core::kLeastDeviceDesc);
  }
  if (desc.api != nullptr && !plausible_size(desc.api->struct_size, core::kLeastDeviceApi)) {
    return bad("its table of functions", desc.api->struct_size, core::kLeastDeviceApi);
  }
  return {};
}

// Returns the implementation's `later_args` without arguments that this te-fl's op does not have. A
// newer plugin may list such arguments, but no call here can set them (R20, R23). The returned text
// lives as long as the process.
const char* known_later_args(const te_fl_op_desc& desc, const OpRegistry& registry) {
  if (desc.later_args == nullptr || desc.schema != nullptr || desc.op_name == nullptr) {
    return desc.later_args;
  }
  const Result<OpId> op = registry.find(desc.op_name);
  if (!op.ok()) return desc.later_args;
  const te_fl_op_schema& schema = *registry.schema(*op);
  const std::string declared = " " + std::string(desc.later_args) + " ";
  std::string known;
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const std::string name = schema.args[i]->name;
    if (declared.find(" " + name + " ") != std::string::npos) known += " " + name;
  }
  return registry::intern_string(known);
}

}  // namespace

std::string innermost_reason(const Status& status) {
  std::string text = status.message();
  for (Status cause = status.cause(); !cause.ok(); cause = cause.cause()) {
    text += ": " + cause.message();
  }
  return text;
}

Status broken_rule(const Status& status) {
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
    case StatusCode::kNotFound:
    case StatusCode::kAlreadyExists:
      return Status(StatusCode::kIncompatible, innermost_reason(status));
    default:
      return status;
  }
}

// The host services that the plugin may call, and the error text of create(). A create() that hangs
// shares ownership of this object.
struct Instance::Host {
  explicit Host(std::string plugin)
      : name(std::move(plugin)), use(registry::intern_string("plugin " + name)) {
    api.struct_size = sizeof api;
    api.host = this;
    api.log = &log;
    api.setting = &setting;
    api.allocate = &allocate;
    api.free = &free;
    api.scaling = &scaling;
  }
  static void log(void* host, int32_t level, const char* text) noexcept {
    if (text == nullptr) return;
    const auto clamped = static_cast<log::Level>(level < TE_FL_LOG_TRACE   ? TE_FL_LOG_TRACE
                                                 : level > TE_FL_LOG_ERROR ? TE_FL_LOG_ERROR
                                                                           : level);
    try {
      if (log::enabled(clamped)) log::write(clamped, static_cast<Host*>(host)->name + ": " + text);
    } catch (...) {  // a lost log message must not fail the call
    }
  }
  static const char* setting(void* host, const char* name) noexcept {
    try {
      if (name == nullptr) return nullptr;
      auto* self = static_cast<Host*>(host);
      const std::optional<std::string> value = core::setting_for_plugin(name, self->name);
      if (!value) return nullptr;
      std::lock_guard lock(mutex);
      for (const std::string& known : self->values) {
        if (known == *value) return known.c_str();
      }
      return self->values.emplace_back(*value).c_str();
    } catch (...) {
      return nullptr;
    }
  }

  static te_fl_status allocate(void* host, te_fl_device device, uint32_t provider,
                               const te_fl_memory_desc* memory, void** out,
                               const te_fl_error_sink* sink) noexcept {
    try {
      auto* self = static_cast<Host*>(host);
      if (memory == nullptr || out == nullptr) return TE_FL_INVALID_ARGUMENT;
      const core::AllocationUse use(self->use);
      Result<void*> made =
          te_fl::devices::allocate(Device{device.type, device.index, provider}, *memory);
      if (made.ok()) {
        *out = *made;
        self->live.fetch_add(1, std::memory_order_relaxed);
        return TE_FL_OK;
      }
      std::string text = made.status().message();
      if (made.status().code() == StatusCode::kNotFound && LoadTurn::mine()) {
        text +=
            "; while it is created, a plugin has the devices of plugins that were loaded before "
            "it: allocate at the first use (rule R28)";
      }
      if (sink != nullptr && sink->write != nullptr) sink->write(sink->host, text.c_str());
      // The status is returned without the flag TE_FL_CLEAN (R6): free memory differs between
      // ranks, so a plugin that forwards this status must not trigger a fallback on one rank only.
      return TE_FL_STATUS_CODE(made.status().to_c());
    } catch (...) {
      return TE_FL_OUT_OF_MEMORY;
    }
  }
  static void free(void* host, te_fl_device device, uint32_t provider, void* data, uint32_t kind,
                   void* stream) noexcept {
    if (data == nullptr) return;
    te_fl::devices::free(Device{device.type, device.index, provider}, data,
                         static_cast<te_fl_memory_kind>(kind), stream);
    static_cast<Host*>(host)->live.fetch_sub(1, std::memory_order_relaxed);
  }

  static const te_fl_scaling_desc* scaling(void*, uint32_t scaling) noexcept {
    if (scaling == TE_FL_SCALING_NONE || scaling >= TE_FL_SCALING_COUNT) return nullptr;
    return &te_fl::describe(static_cast<Scaling>(scaling));
  }

  std::string name;
  const char* use;               // labels its allocations in the memory account
  std::atomic<int64_t> live{0};  // live blocks that it allocated through the host (R28)
  te_fl_host_api api{};
  std::deque<std::string> values;  // settings' texts returned to the plugin; kept until destroy()
  core::ErrorText errors;
  void* instance = nullptr;
};

Instance::Instance(Header header, ActivateOptions options)
    : header_(std::move(header)),
      options_(std::move(options)),
      host_(std::make_shared<Host>(header_.name)) {}

Instance::~Instance() {
  if (!created_) return;
  core::ErrorText errors;
  const te_fl_status code = guarded(errors, "destroy", [&] {
    header_.api.destroy(instance_);
    return TE_FL_OK;
  });
  if (code != TE_FL_OK) log::warning("plugin " + header_.name + ": " + errors.text());
}

int64_t Instance::live_objects() const {
  int64_t live = 0;
  for (const Device& device : devices_) live += te_fl::devices::live_objects(device);
  return live;
}

Result<std::vector<Finding>> Instance::diagnose() const {
  std::vector<Finding> found;
  if (header_.api.diagnose == nullptr) return found;
  core::ErrorText errors;
  te_fl_finding_sink sink{};
  sink.struct_size = sizeof sink;
  sink.host = &found;
  sink.write = [](void* host, const te_fl_finding* raw) {
    const auto text = [](const char* s) { return std::string(s == nullptr ? "" : s); };
    if (raw == nullptr || !plausible_size(raw->struct_size, core::kLeastFinding)) return;
    const auto f = copy_struct<te_fl_finding>(raw);
    const auto level = f.level == TE_FL_FINDING_OK     ? Finding::Level::kOk
                       : f.level == TE_FL_FINDING_NOTE ? Finding::Level::kNote
                                                       : Finding::Level::kProblem;
    static_cast<std::vector<Finding>*>(host)->push_back(
        {level, text(f.subject), text(f.state), text(f.disables), text(f.remedy)});
  };
  const te_fl_status code = guarded(
      errors, "diagnose", [&] { return header_.api.diagnose(instance_, &sink, errors.sink()); });
  TE_FL_RETURN_IF_ERROR(errors.status(code, "diagnose of plugin '" + header_.name + "'"));
  return found;
}

Status Instance::create() {
  // The function owns everything that it uses, so it may outlive this object if create() exceeds
  // its time limit.
  std::function<te_fl_status()> run = [host = host_, create = header_.api.create,
                                       library = options_.library] {
    const LoadTurn::Lent turn;  // if this is a helper thread, the loading thread waits for it
    return guarded(host->errors, "create",
                   [&] { return create(&host->api, &host->instance, host->errors.sink()); });
  };
  const te_fl_status code = options_.run_create ? options_.run_create(std::move(run)) : run();
  // After a timeout the helper thread may still be writing the error text, so it is not read.
  if (TE_FL_STATUS_CODE(code) == TE_FL_TIMEOUT) {
    return Status(StatusCode::kTimeout,
                  "create did not return in time (rule R14); the plugin is abandoned");
  }
  TE_FL_RETURN_IF_ERROR(host_->errors.status(code, "create"));
  instance_ = host_->instance;
  created_ = true;
  return {};
}

Status Instance::add_devices() {
  if (header_.api.devices == nullptr) return {};
  core::ErrorText errors;
  uint32_t count = 0;
  const te_fl_device_desc* const* list = nullptr;
  const te_fl_status code = guarded(errors, "devices", [&] {
    return header_.api.devices(instance_, &count, &list, errors.sink());
  });
  TE_FL_RETURN_IF_ERROR(errors.status(code, "devices"));
  TE_FL_RETURN_IF_ERROR(check_list("devices", count, list));
  devices_.reserve(count);  // no allocation may fail between adding a device and recording it
  for (uint32_t i = 0; i < count; ++i) {
    if (list[i] != nullptr) TE_FL_RETURN_IF_ERROR(check_device(*list[i], i));
    Result<Device> device = te_fl::devices::add(list[i]);
    if (!device.ok()) return broken_rule(device.status()).wrap("device " + std::to_string(i));
    devices_.push_back(*device);
  }
  return {};
}

void Instance::bar_devices() {
  for (const Device& device : devices_) core::bar_device(device);
}

void Instance::retire_devices(const std::shared_ptr<Instance>& self) {
  for (const Device& device : devices_) {
    // Each device keeps the instance alive until its last object is freed.
    const Status status = core::retire_device(device, [self] {});
    if (!status.ok()) log::warning("plugin " + header_.name + ": " + status.message());
  }
}

void Instance::report_memory() const {
  const int64_t live = host_->live.load(std::memory_order_relaxed);
  if (live == 0) return;
  log::warning("plugin " + header_.name + ": " + std::to_string(live) +
               (live == 1 ? " block" : " blocks") +
               " of memory that it had from the host and did not free by the end of quiesce() "
               "(rule R28); memory of a device of its own keeps it loaded");
}

Status Instance::quiesce() {
  if (header_.api.quiesce == nullptr) return {};
  core::ErrorText errors;
  const te_fl_status code =
      guarded(errors, "quiesce", [&] { return header_.api.quiesce(instance_, errors.sink()); });
  // For the caller, BUSY means that nothing was changed, so a plugin's BUSY is replaced by
  // INTERNAL.
  const bool busy = TE_FL_STATUS_CODE(code) == TE_FL_BUSY;
  return errors.status(busy ? static_cast<te_fl_status>(TE_FL_INTERNAL) : code,
                       "quiesce of plugin '" + header_.name + "'");
}

Status Instance::add_ops(OpRegistry& registry, const std::shared_ptr<Instance>& self) {
  if (header_.api.ops == nullptr) return {};
  core::ErrorText errors;
  uint32_t count = 0;
  const te_fl_op_desc* const* list = nullptr;
  const te_fl_status code = guarded(
      errors, "ops", [&] { return header_.api.ops(instance_, &count, &list, errors.sink()); });
  TE_FL_RETURN_IF_ERROR(errors.status(code, "ops"));
  TE_FL_RETURN_IF_ERROR(check_list("ops", count, list));
  if (count == 0) return {};
  std::vector<const te_fl_op_desc*> kept;
  const std::deque<te_fl_op_desc> copies = completed({list, count}, registry, kept);
  if (kept.empty()) return {};
  TE_FL_RETURN_IF_ERROR(
      broken_rule(registry.register_ops(kept, header_.name, header_.vendor, self)));
  for (const te_fl_op_desc* desc : kept) {
    ops_.push_back(std::string(desc->op_name) + ": " + desc->impl_id);
  }
  return {};
}

Status Instance::add_comms(const std::shared_ptr<Instance>& self) {
  if (header_.api.comms == nullptr) return {};
  core::ErrorText errors;
  uint32_t count = 0;
  const te_fl_comm_desc* const* list = nullptr;
  const te_fl_status code = guarded(
      errors, "comms", [&] { return header_.api.comms(instance_, &count, &list, errors.sink()); });
  TE_FL_RETURN_IF_ERROR(errors.status(code, "comms"));
  TE_FL_RETURN_IF_ERROR(check_list("comms", count, list));
  TE_FL_RETURN_IF_ERROR(broken_rule(registry::add_comm_providers(
      {list, count}, header_.name, header_.vendor, header_.version, self)));
  for (uint32_t i = 0; i < count; ++i) comms_.push_back(list[i]->name);
  return {};
}

// The plugin's op descriptors, completed for registration. A descriptor for kDLExtDev gets a
// provider (R18). Ops that only a newer te-fl has are left out (R20). `kept` receives pointers to
// the results, and to unreadable descriptors, which the registry then refuses.
std::deque<te_fl_op_desc> Instance::completed(std::span<const te_fl_op_desc* const> list,
                                              const OpRegistry& registry,
                                              std::vector<const te_fl_op_desc*>& kept) {
  const char* provider = header_.name.c_str();  // the default: it may have found no device
  const Device* first = nullptr;
  for (const Device& device : devices_) {
    if (device.type != TE_FL_DEVICE_EXT) continue;
    // With devices of two providers the default is ambiguous. The descriptor then gets none, and
    // the registry refuses it.
    const bool another = first != nullptr && first->provider != device.provider;
    provider = another ? nullptr : (*te_fl::devices::find(device))->provider;
    if (another) break;
    first = &device;
  }
  std::deque<te_fl_op_desc> copies;
  std::string left_out;
  for (const te_fl_op_desc* raw : list) {
    if (raw == nullptr || !plausible_size(raw->struct_size, core::kLeastOpDesc)) {
      kept.push_back(raw);
      continue;
    }
    te_fl_op_desc desc = copy_struct<te_fl_op_desc>(raw);
    const bool newer = header_.abi_minor > TE_FL_ABI_MINOR && desc.op_name != nullptr &&
                       desc.schema == nullptr &&
                       std::string_view(desc.op_name).find("::") == std::string_view::npos &&
                       !registry.find(desc.op_name).ok();
    if (newer) {
      left_out += (left_out.empty() ? "" : ", ") + std::string(desc.op_name);
      continue;
    }
    if (header_.abi_minor > TE_FL_ABI_MINOR) desc.later_args = known_later_args(desc, registry);
    const bool ext = (desc.device_types >> TE_FL_DEVICE_EXT & 1) != 0;
    if (ext && desc.provider == nullptr) desc.provider = provider;
    kept.push_back(&copies.emplace_back(desc));
  }
  if (!left_out.empty()) {
    remark_ = "left out, being unknown to this te-fl " TE_FL_VERSION ": " + left_out +
              "; the plugin is of ABI " + std::to_string(header_.abi_major) + "." +
              std::to_string(header_.abi_minor) + ", this te-fl speaks " +
              std::to_string(TE_FL_ABI_MAJOR) + "." + std::to_string(TE_FL_ABI_MINOR) +
              " (rule R20)";
    log::warning("plugin " + header_.name + ": " + remark_);
  }
  return copies;
}

Result<std::shared_ptr<Instance>> activate(te_fl_plugin_query_fn query, OpRegistry& registry,
                                           ActivateOptions options) {
  TE_FL_ASSIGN_OR_RETURN(Header header, read_header(query));
  const std::string name = header.name;
  std::shared_ptr<Instance> made(new Instance(std::move(header), std::move(options)));
  Status status;
  try {
    status = made->create();
    if (status.ok()) status = made->add_devices();
    if (status.ok()) status = made->add_ops(registry, made);
    if (status.ok()) status = made->add_comms(made);
  } catch (const std::bad_alloc&) {
    status = Status(StatusCode::kOutOfMemory, "no host memory is left for what it brings");
  }
  if (status.ok()) return made;
  if (made->created_) {
    (void)registry::remove_comm_providers(name);  // no communicator of it can exist yet
    registry.impl().remove([&](const registry::Implementation& i) { return i.owner == name; });
    // Another thread may already have used a device of the plugin.
    made->bar_devices();
    if (!core::is_inside()) core::wait_outside();  // from inside it would wait for itself
    const Status quiet = made->quiesce();
    if (!quiet.ok()) log::warning(quiet.to_string());
    made->retire_devices(made);
  }
  return status.wrap("plugin '" + name + "' cannot be activated");
}

Status withdraw(const std::shared_ptr<Instance>& instance, OpRegistry& registry) {
  if (core::is_inside()) {
    return Status(StatusCode::kBusy,
                  "plugin '" + instance->header_.name +
                      "' cannot be withdrawn from inside an op or a function of a device");
  }
  const std::string& name = instance->header_.name;
  const auto is_its = [&](const registry::Implementation& i) { return i.owner == name; };
  Status busy = registry.impl().check_removal(is_its);
  for (const Device& device : instance->devices_) {
    if (busy.ok()) busy = core::check_leave(device);
  }
  if (busy.ok()) busy = registry::remove_comm_providers(name);
  TE_FL_RETURN_IF_ERROR(busy.wrap("plugin '" + name + "' cannot be withdrawn"));
  instance->bar_devices();
  // Waits until no thread is inside the plugin's ops, and none is inside any op on its devices.
  registry.impl().remove(is_its);
  instance->withdrawn_ = true;
  TE_FL_RETURN_IF_ERROR(instance->quiesce());
  instance->retire_devices(instance);
  instance->report_memory();
  return {};
}

}  // namespace te_fl::plugins
