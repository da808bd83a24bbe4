// The Gloo plugin: communicators between processes whose tensors are in host memory, over TCP.
#include <gloo/common/error.h>
#include <gloo/common/logging.h>
#include <gloo/config.h>
#include <gloo/transport/tcp/device.h>
#include <unistd.h>

#include <system_error>

#include "collectives.hpp"
#include "communicator.hpp"
#include "signals.hpp"
#include "te_fl/backend/plugin.hpp"
#include "te_fl/version.hpp"

namespace te_fl::gloo_ranks {
namespace {

#define TE_FL_TEXT_(x) #x
#define TE_FL_TEXT(x) TE_FL_TEXT_(x)
constexpr char kVersion[] = TE_FL_TEXT(GLOO_VERSION_MAJOR) "." TE_FL_TEXT(
    GLOO_VERSION_MINOR) "." TE_FL_TEXT(GLOO_VERSION_PATCH);

using Network = std::shared_ptr<::gloo::transport::Device>;

Network open_network(const std::string& interface, const std::string& host) {
  ::gloo::transport::tcp::attr attr;
  attr.iface = interface;
  attr.hostname = interface.empty() ? host : "";
  const AllSignalsBlocked inherited;
  return ::gloo::transport::tcp::CreateDevice(attr);
}

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "localhost";
}

struct Gloo : backend::Instance {
  explicit Gloo(const te_fl_host_api& services);
  Network network();
  void diagnose(const te_fl_finding_sink& findings) const;

  const te_fl_host_api& host;
  std::string interface;
  te_fl_comm_desc provider;
  std::vector<const te_fl_comm_desc*> comms;
};

// Opens the network of one communicator. Its thread ends when the communicator is destroyed.
Network Gloo::network() {
  try {
    return open_network(interface, host_name());
  } catch (const std::exception& e) {
    if (!interface.empty()) {
      throw backend::Error(TE_FL_FAILED_PRECONDITION,
                           "TE_FL_GLOO_INTERFACE=" + interface + " cannot be used: " + e.what());
    }
    backend::log(host, TE_FL_LOG_WARNING,
                 "gloo: this machine's name '" + host_name() +
                     "' has no address that it can listen on; ranks on this machine alone can be "
                     "reached, at 127.0.0.1, until TE_FL_GLOO_INTERFACE names an interface");
  }
  return open_network("", "127.0.0.1");
}

void Gloo::diagnose(const te_fl_finding_sink& findings) const {
  backend::write_finding(
      findings, TE_FL_FINDING_OK, "libgloo",
      std::string(kVersion) + ", over TCP, " +
          (interface.empty() ? "at the address of " + host_name() : "interface " + interface));
}

// ---- the provider's table

te_fl_status create(void* self, const te_fl_comm_config* config, void** comm,
                    const te_fl_error_sink* errors) {
  return backend::guard(errors, [&] {
    Network network = config->size > 1 ? static_cast<Gloo*>(self)->network() : nullptr;
    try {
      *comm = new Communicator(*config, std::move(network), errors);
    } catch (const ::gloo::Exception& e) {
      throw backend::Error(TE_FL_COMM_FAILED, e.what());
    } catch (const ::gloo::EnforceNotMet& e) {
      throw backend::Error(TE_FL_COMM_FAILED, e.what());
    }
  });
}

void destroy(void* comm) { delete static_cast<Communicator*>(comm); }

void abort(void* comm) { static_cast<Communicator*>(comm)->abort(); }

te_fl_status async_error(void* comm, const te_fl_error_sink* errors) {
  return backend::guard(errors, [&] {
    const std::string failure = static_cast<Communicator*>(comm)->failure();
    if (!failure.empty()) throw backend::Error(TE_FL_COMM_FAILED, failure);
  });
}

constexpr te_fl_comm_api make_api() {
  te_fl_comm_api api;
  api.create = create;
  api.destroy = destroy;
  api.abort = abort;
  api.async_error = async_error;
  api.group_start = [](void*, const te_fl_error_sink* errors) {
    return backend::guard(errors, group_start);
  };
  api.group_end = [](void*, const te_fl_error_sink* errors) {
    return backend::guard(errors, group_end);
  };
  api.version = [](void*) { return kVersion; };
  return api;
}
constexpr te_fl_comm_api kApi = make_api();

Gloo::Gloo(const te_fl_host_api& services) : host(services) {
  const char* wanted = backend::setting(host, "TE_FL_GLOO_INTERFACE");
  if (wanted != nullptr) interface = wanted;
  append_collectives(ops);
  provider.name = "gloo";
  provider.kind = TE_FL_KIND_DEFAULT;
  provider.device_types = ops.front().device_types;
  provider.self = this;
  provider.api = &kApi;
  comms.push_back(&provider);
}

// gloo.json.in describes the same setting; keep it in step with this descriptor.
constexpr te_fl_setting_desc kInterface = {
    .type = TE_FL_SETTING_STRING,
    .name = "TE_FL_GLOO_INTERFACE",
    .doc =
        "Network interface, such as eth0, that connects the ranks' machines; unset: the interface "
        "of the address of the machine's host name.",
};
constexpr const te_fl_setting_desc* kSettings[] = {&kInterface};

constexpr te_fl_plugin_header kHeader =
    backend::plugin_header<Gloo>("gloo", "te-fl", TE_FL_VERSION, kSettings);

}  // namespace
}  // namespace te_fl::gloo_ranks

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &te_fl::gloo_ranks::kHeader;
}
