#pragma once

// Helpers for a plugin in C++: they make the plugin's instance, its tables and its header. A
// backend derives its state from Instance or DeviceInstance:
//
//   struct Acme : te_fl::backend::DeviceInstance {
//     explicit Acme(const te_fl_host_api& host);  // fills ops and devices; may throw (guard())
//     ~Acme();
//     te_fl_status quiesce(const te_fl_error_sink* errors);  // if anything may still run (R15)
//     void diagnose(const te_fl_finding_sink& findings);     // optional; may throw
//     std::vector<const te_fl_comm_desc*> comms;             // optional: providers of collectives
//   };
//   constexpr te_fl_plugin_header kHeader =
//       te_fl::backend::plugin_header<Acme>("acme", "acme", "1.0.0", kSettings);
//
// te_fl_plugin_query then returns &kHeader.

#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "te_fl/backend.hpp"
#include "te_fl/plugin.h"

namespace te_fl::backend {

// The value of a setting (te_fl_host_api::setting). NULL if it is unset and has no default.
inline const char* setting(const te_fl_host_api& host, const char* name) noexcept {
  return host.setting != nullptr ? host.setting(host.host, name) : nullptr;
}
inline bool setting_is_on(const te_fl_host_api& host, const char* name) noexcept {
  const char* value = setting(host, name);
  return value != nullptr && std::string_view(value) == "1";
}
// The value in bytes of a setting that is given in MiB; `otherwise` MiB if it is unset. The host
// has checked that the value is a number.
inline size_t setting_mebibytes(const te_fl_host_api& host, const char* name,
                                size_t otherwise) noexcept {
  const char* value = setting(host, name);
  return (value != nullptr ? std::strtoull(value, nullptr, 10) : otherwise) << 20;
}
inline void log(const te_fl_host_api& host, te_fl_log_level level, const std::string& text) {
  if (host.log != nullptr) host.log(host.host, level, text.c_str());
}

// Writes one finding of diagnose(). Empty texts become NULL.
inline void write_finding(const te_fl_finding_sink& findings, te_fl_finding_level level,
                          const std::string& subject, const std::string& state,
                          const std::string& disables = "", const std::string& remedy = "") {
  const auto or_null = [](const std::string& text) {
    return text.empty() ? nullptr : text.c_str();
  };
  te_fl_finding finding;
  finding.level = level;
  finding.subject = subject.c_str();
  finding.state = state.c_str();
  finding.disables = or_null(disables);
  finding.remedy = or_null(remedy);
  findings.write(findings.host, &finding);
}

// Base of a plugin's state (R8). The constructor of the derived class fills `ops`, which must not
// change afterwards.
struct Instance {
  std::vector<te_fl_op_desc> ops;

  // Waits for all work that the plugin has enqueued. This default suits a plugin whose ops have
  // finished when run() returns.
  te_fl_status quiesce(const te_fl_error_sink*) const noexcept { return TE_FL_OK; }

  std::vector<const te_fl_op_desc*> op_list;  // pointers to `ops`, set by instance_create()
};

// Base of the state of a plugin that provides devices. The derived class owns the descriptors,
// which live as long as the instance.
struct DeviceInstance : Instance {
  std::vector<const te_fl_device_desc*> devices;
};

template <class T>
te_fl_status instance_create(const te_fl_host_api* host, void** out,
                             const te_fl_error_sink* errors) noexcept {
  return guard(errors, [&] {
    auto instance = std::make_unique<T>(*host);
    for (const te_fl_op_desc& op : instance->ops) instance->op_list.push_back(&op);
    *out = instance.release();
  });
}

template <class Descriptor>
te_fl_status hand_out(const std::vector<const Descriptor*>& descriptors, uint32_t* count,
                      const Descriptor* const** list) noexcept {
  *count = static_cast<uint32_t>(descriptors.size());
  *list = descriptors.data();
  return TE_FL_OK;
}

// The table of functions of a plugin whose instances are of class T.
template <class T>
constexpr te_fl_plugin_api plugin_api() {
  static_assert(std::is_base_of_v<Instance, T>);
  te_fl_plugin_api api;
  api.create = instance_create<T>;
  if constexpr (std::is_base_of_v<DeviceInstance, T>) {
    api.devices = [](void* self, uint32_t* count, const te_fl_device_desc* const** list,
                     const te_fl_error_sink*) {
      return hand_out(static_cast<const T*>(self)->devices, count, list);
    };
  }
  api.ops = [](void* self, uint32_t* count, const te_fl_op_desc* const** list,
               const te_fl_error_sink*) {
    return hand_out(static_cast<const T*>(self)->op_list, count, list);
  };
  api.quiesce = [](void* self, const te_fl_error_sink* errors) {
    te_fl_status status = TE_FL_OK;
    const te_fl_status failed =
        guard(errors, [&] { status = static_cast<T*>(self)->quiesce(errors); });
    return failed != TE_FL_OK ? failed : status;
  };
  api.destroy = [](void* self) { delete static_cast<T*>(self); };
  if constexpr (requires(T & instance) { instance.comms; }) {
    api.comms = [](void* self, uint32_t* count, const te_fl_comm_desc* const** list,
                   const te_fl_error_sink*) {
      return hand_out(static_cast<const T*>(self)->comms, count, list);
    };
  }
  if constexpr (requires(T & instance, const te_fl_finding_sink& findings) {
                  instance.diagnose(findings);
                }) {
    api.diagnose = [](void* self, const te_fl_finding_sink* findings,
                      const te_fl_error_sink* errors) {
      return guard(errors, [&] { static_cast<T*>(self)->diagnose(*findings); });
    };
  }
  return api;
}
template <class T>
inline constexpr te_fl_plugin_api kPluginApi = plugin_api<T>();

// The header that te_fl_plugin_query returns. `settings` are the settings that the plugin declares
// (R21). The strings and the settings must have static storage duration.
template <class T>
constexpr te_fl_plugin_header plugin_header(
    const char* name, const char* vendor, const char* version,
    std::span<const te_fl_setting_desc* const> settings = {}) {
  te_fl_plugin_header header;
  header.name = name;
  header.vendor = vendor;
  header.version = version;
  header.api = &kPluginApi<T>;
  header.settings = settings.data();
  header.setting_count = static_cast<uint32_t>(settings.size());
  return header;
}

}  // namespace te_fl::backend
