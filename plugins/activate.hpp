#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/plugin_settings.hpp"
#include "te_fl/device.hpp"
#include "te_fl/op_registry.hpp"
#include "te_fl/plugin.h"
#include "te_fl/plugins.hpp"
#include "te_fl/status.hpp"

// From a te_fl_plugin_query function to registered devices and ops, and back. One path for built-in
// backends and for opened libraries. Every entry of a plugin is called so that an exception (which
// R5 forbids) becomes a status.
namespace te_fl::plugins {

// A status and its causes on one line, for PluginInfo::reason.
std::string reason_of(const Status& status);

// Turns the error of a registration that breaks a rule, about a device, an op or a setting of the
// plugin, into the status of its load: INCOMPATIBLE. NOT_FOUND is a plugin that is not there,
// ALREADY_EXISTS one that is.
Status broken_rule(const Status& status);

// The answer of a query, checked and copied.
struct Header {
  uint32_t abi_major = 0;
  uint32_t abi_minor = 0;
  std::string name;
  std::string vendor;
  std::string version;
  std::string build_id;  // empty if the plugin gave none
  te_fl_plugin_api api{};
  std::vector<core::PluginSetting> settings;  // declared (R21)
};

// The reason for which a plugin of this ABI version and this te-fl do not go together (R2), and the
// way out; empty if they do.
std::string version_problem(uint32_t major, uint32_t minor);

// Calls the query and checks its answer (R1 to R4, R21). Touches no device.
Result<Header> read_header(te_fl_plugin_query_fn query);

// Runs create() and returns its status. The loader's runs it on a helper thread and returns TIMEOUT
// after the limit (R14); everything that `create` refers to is kept alive by it.
using CreateRunner = std::function<te_fl_status(std::function<te_fl_status()> create)>;

struct ActivateOptions {
  // Null: create() is called on this thread, without a limit.
  CreateRunner run_create;
  // Held until the instance is destroyed: whatever keeps the plugin's code mapped.
  std::shared_ptr<void> library;
};

// A created plugin. Held by its owner and by every implementation that it registered; destroy() is
// called when the last of them goes.
class Instance {
 public:
  ~Instance();
  Instance(const Instance&) = delete;
  Instance& operator=(const Instance&) = delete;

  const Header& header() const noexcept { return header_; }
  const std::vector<Device>& devices() const noexcept { return devices_; }
  // "op: impl_id"
  const std::vector<std::string>& ops() const noexcept { return ops_; }
  // Its providers of collectives.
  const std::vector<std::string>& comms() const noexcept { return comms_; }
  // Names the parts of the plugin that were left out, and why; empty if there are none.
  const std::string& remark() const noexcept { return remark_; }
  // The plugin's findings about its surroundings; none if it has no such entry.
  Result<std::vector<Finding>> diagnose() const;
  // Memory, streams and events of its devices that are still alive.
  int64_t live_objects() const;
  // True once withdraw() has taken its ops out.
  bool withdrawn() const noexcept { return withdrawn_; }

 private:
  friend Result<std::shared_ptr<Instance>> activate(te_fl_plugin_query_fn, OpRegistry&,
                                                    ActivateOptions);
  friend Status withdraw(const std::shared_ptr<Instance>&, OpRegistry&);
  struct Host;
  Instance(Header header, ActivateOptions options);
  Status create();
  Status add_devices();
  Status add_ops(OpRegistry& registry, const std::shared_ptr<Instance>& self);
  Status add_comms(const std::shared_ptr<Instance>& self);
  std::deque<te_fl_op_desc> completed(std::span<const te_fl_op_desc* const> list,
                                      const OpRegistry& registry,
                                      std::vector<const te_fl_op_desc*>& kept);
  void bar_devices();
  void report_memory() const;
  Status quiesce();
  void retire_devices(const std::shared_ptr<Instance>& self);

  Header header_;
  ActivateOptions options_;
  std::shared_ptr<Host> host_;  // the argument of create(); a hanging create() keeps it
  void* instance_ = nullptr;
  bool created_ = false;
  bool withdrawn_ = false;
  std::vector<Device> devices_;
  std::vector<std::string> ops_;
  std::vector<std::string> comms_;
  std::string remark_;
};

// query, checks, create, devices, ops, registration: all of it or nothing. Implementations are
// owned by the plugin's name. After an error nothing of the plugin is registered and its instance
// is destroyed; after a TIMEOUT the plugin must be abandoned (R14).
Result<std::shared_ptr<Instance>> activate(te_fl_plugin_query_fn query, OpRegistry& registry,
                                           ActivateOptions options = {});

// Takes ops and devices out: no new call enters its ops, nor anybody's on its devices; who is
// inside leaves; quiesce(). Then the owner drops the instance; while objects of its devices are
// alive, these devices hold it, and it is destroyed when the last one goes. BUSY from inside an op
// or a function of a device, and while a stream that worked with a plan of R26 is being captured:
// nothing was changed. After any other error (of quiesce) its ops are
// gone and its devices stay, closed; it must not be destroyed.
Status withdraw(const std::shared_ptr<Instance>& instance, OpRegistry& registry);

}  // namespace te_fl::plugins
