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

// Activation of a plugin: from its te_fl_plugin_query function to registered devices and ops, and
// the reverse. Built-in backends and opened libraries use the same code. Every call into a plugin
// converts an exception (forbidden by R5) into a status.
namespace te_fl::plugins {

// Formats a status and its causes on one line, for PluginInfo::reason.
std::string innermost_reason(const Status& status);

// Converts a registration error of one of the plugin's devices, ops or settings into INCOMPATIBLE,
// the status of the whole load. The codes of registration errors cannot be kept, since they have
// other meanings for a load: NOT_FOUND means a missing plugin, ALREADY_EXISTS an active one.
Status broken_rule(const Status& status);

// The validated copy of the header that the plugin's query function returned.
struct Header {
  uint32_t abi_major = 0;
  uint32_t abi_minor = 0;
  std::string name;
  std::string vendor;
  std::string version;
  std::string build_id;  // empty if the plugin gave none
  te_fl_plugin_api api{};
  std::vector<core::PluginSetting> settings;  // as declared (R21)
};

// The reason for which a plugin of this ABI version is incompatible with this te-fl (R2), with a
// remedy; empty if it is compatible.
std::string version_problem(uint32_t major, uint32_t minor);

// Calls the plugin's query function and validates the returned header (R1 to R4, R21). Accesses no
// device.
Result<Header> read_header(te_fl_plugin_query_fn query);

// Runs create() and returns its status. The loader's CreateRunner uses a helper thread and returns
// TIMEOUT after the limit (R14). The function `create` owns everything that it refers to.
using CreateRunner = std::function<te_fl_status(std::function<te_fl_status()> create)>;

struct ActivateOptions {
  // Null: create() is called on this thread without a time limit.
  CreateRunner run_create;
  // Keeps the plugin's code mapped. Held until the instance is destroyed.
  std::shared_ptr<void> library;
};

// A created plugin. Its owner and every implementation that it registered share ownership; the last
// of them calls destroy().
class Instance {
 public:
  ~Instance();
  Instance(const Instance&) = delete;
  Instance& operator=(const Instance&) = delete;

  const Header& header() const noexcept { return header_; }
  const std::vector<Device>& devices() const noexcept { return devices_; }
  // The plugin's implementations as "op: impl_id".
  const std::vector<std::string>& ops() const noexcept { return ops_; }
  // The names of its providers of collectives.
  const std::vector<std::string>& comms() const noexcept { return comms_; }
  // Lists the parts of the plugin that were not registered, with reasons; empty if all were.
  const std::string& remark() const noexcept { return remark_; }
  // The plugin's own diagnosis of its environment; empty if it has no such function.
  Result<std::vector<Finding>> diagnose() const;
  // The number of live allocations, streams and events on its devices.
  int64_t live_objects() const;
  // True after withdraw() has removed its ops.
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
  std::shared_ptr<Host> host_;  // the argument of create(); a hanging create() keeps it alive
  void* instance_ = nullptr;
  bool created_ = false;
  bool withdrawn_ = false;
  std::vector<Device> devices_;
  std::vector<std::string> ops_;
  std::vector<std::string> comms_;
  std::string remark_;
};

// Activates a plugin: query, validation, create, devices, ops, registration. All steps succeed or
// none has an effect. The registry records the plugin's name as owner of its implementations. After
// an error nothing of the plugin is registered and its instance is destroyed; after TIMEOUT the
// plugin must be abandoned (R14).
Result<std::shared_ptr<Instance>> activate(te_fl_plugin_query_fn query, OpRegistry& registry,
                                           ActivateOptions options = {});

// Withdraws a plugin. Bars its ops and its devices for new calls, waits until the threads inside
// have left, and calls quiesce(). The owner then drops the instance. While objects of its devices
// are alive, the devices keep the instance; the last one destroys it. BUSY, without any change: the
// thread is inside an op or a device function, or a stream that used a plan with device memory
// (R26) is being captured. After any other error (from quiesce()) its ops are removed and its
// devices stay, closed; the instance must not be destroyed.
Status withdraw(const std::shared_ptr<Instance>& instance, OpRegistry& registry);

}  // namespace te_fl::plugins
