// Collectives of one thread that begin together.
#include "comm/rep.hpp"
#include "core/base/error_text.hpp"
#include "te_fl/log.hpp"

namespace te_fl {
namespace {

// Ends the group of the provider; the status is that of the collectives in it.
Status end_group(const std::shared_ptr<Comm::Rep>& rep) {
  core::ErrorText errors;
  const te_fl_status code = errors.call(
      [&] { return rep->provider->api.group_end(rep->provider->desc.self, errors.sink()); });
  Status status = errors.status(code, "communicator '" + rep->name + "': a group of collectives");
  if (status.code() == StatusCode::kCommFailed) comm::fail_all(rep, status);
  return status;
}

}  // namespace

Result<CommGroup> CommGroup::begin(const Comm& comm) {
  if (!comm) return invalid_argument("CommGroup::begin: the Comm is empty");
  const std::shared_ptr<Comm::Rep> rep = comm::find(comm.c()->id);
  TE_FL_RETURN_IF_ERROR(comm::check_process(*rep));
  const te_fl_comm_api& api = rep->provider->api;
  if (api.group_start == nullptr) {
    return Status(
        StatusCode::kUnsupported,
        "provider '" + rep->provider->name +
            "' of collectives has no groups (te_fl_comm_api.group_start); order sends and "
            "receives so that no two ranks wait for each other");
  }
  core::ErrorText errors;
  const te_fl_status code =
      errors.call([&] { return api.group_start(rep->provider->desc.self, errors.sink()); });
  TE_FL_RETURN_IF_ERROR(errors.status(code, "communicator '" + rep->name + "': group_start"));
  return CommGroup(rep);
}

CommGroup::CommGroup(CommGroup&& other) noexcept : rep_(std::move(other.rep_)) {}

CommGroup::~CommGroup() {
  if (rep_ == nullptr) return;
  if (const Status status = end(); !status.ok()) log::error(status.to_string());
}

Status CommGroup::end() {
  if (rep_ == nullptr) return failed_precondition("CommGroup::end: the group has ended");
  return end_group(std::exchange(rep_, nullptr));
}

}  // namespace te_fl
