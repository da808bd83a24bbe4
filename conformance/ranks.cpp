#include "conformance/ranks.hpp"

#include <algorithm>
#include <exception>
#include <thread>

#include "te_fl/te_fl.hpp"

namespace te_fl::conformance {
namespace {

constexpr std::chrono::milliseconds kTimeout{20000};

// The communicator provider of the plugin that registered the implementation.
te_fl::Result<std::string> find_provider(const std::string& op, const std::string& impl_id) {
  std::string owner;
  for (const OpImplInfo& info : OpRegistry::instance().snapshot()) {
    if (info.op == op && info.impl_id == impl_id) owner = info.owner;
  }
  for (const plugins::PluginInfo& plugin : plugins::list()) {
    if (plugin.name == owner && !plugin.comms.empty()) return plugin.comms.front();
  }
  return not_found("plugin '" + owner + "', which has " + impl_id +
                   ", has no provider of collectives (te_fl_plugin_api.comms)");
}

}  // namespace

Device rank_device(const Device& device, int rank) {
  return device.is_host() ? device : Device{device.type, device.index + rank, device.provider};
}

void Ranks::run(const std::function<void(int rank)>& f) const {
  if (size() == 1) return f(0);
  std::vector<std::thread> threads;
  for (int r = 0; r < size(); ++r) threads.emplace_back([&f, r] { f(r); });
  for (std::thread& thread : threads) thread.join();
}

te_fl::Result<CommOptions> comm_options(const std::string& op, const std::string& impl_id,
                                        const Device& device, int rank, int size) {
  TE_FL_ASSIGN_OR_RETURN(const std::string provider, find_provider(op, impl_id));
  for (int r = 0; r < size; ++r) {
    if (devices::find(rank_device(device, r)).ok()) continue;
    return Status(StatusCode::kUnsupported, "a case of " + std::to_string(size) +
                                                " ranks, each on its own device, and " +
                                                to_string(rank_device(device, r)) + " is not here");
  }
  CommOptions options;
  options.device = rank_device(device, rank);
  options.rank = rank;
  options.size = size;
  options.name = "conformance";
  options.provider = provider;
  options.timeout = kTimeout;
  return options;
}

te_fl::Result<Ranks> Ranks::create(const std::string& op, const std::string& impl_id,
                                   const Device& device, int size) {
  TE_FL_RETURN_IF_ERROR(comm_options(op, impl_id, device, 0, size).status());
  Ranks made(size);
  std::vector<Status> statuses(static_cast<size_t>(size));
  const std::shared_ptr<Store> store = Store::in_process();
  made.run([&](int r) {
    te_fl::Result<CommOptions> options = comm_options(op, impl_id, device, r, size);
    const auto at = static_cast<size_t>(r);
    statuses[at] = options.status();
    if (!options.ok()) return;
    options->store = store;
    te_fl::Result<Comm> comm = Comm::create(*options);
    if (comm.ok()) made.comms_[at] = std::move(*comm);
    statuses[at] = comm.status();
  });
  for (const Status& status : statuses) TE_FL_RETURN_IF_ERROR(status);
  return made;
}

Status Ranks::status() const {
  for (const Comm& comm : comms_) TE_FL_RETURN_IF_ERROR(comm.status());
  return {};
}

}  // namespace te_fl::conformance
