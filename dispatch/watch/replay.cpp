// Runs a saved call again.

#include <nlohmann/json.hpp>

#include "dispatch/watch/call_file.hpp"
#include "dispatch/watch/compare_outputs.hpp"
#include "dispatch/watch/quarantine.hpp"
#include "dispatch/watch/verify.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/tensor.hpp"
#include "te_fl/watch.hpp"

namespace te_fl {
namespace dispatch {
namespace {

// A copy of a saved call's memory on the device that runs the call.
class Placed {
 public:
  static Result<Placed> make(FiledCall& call, const Device& device) {
    Placed p(call, device);
    if (p.host_.data() == nullptr)
      return Status(StatusCode::kOutOfMemory, "no host memory for a copy of the call");
    if (device.is_host()) return p;
    TE_FL_ASSIGN_OR_RETURN(p.memory_,
                           Tensor::empty({static_cast<int64_t>(call.bytes())}, DType::kU8, device));
    TE_FL_RETURN_IF_ERROR(devices::copy(device, p.memory_.raw_data(), Device{}, p.host_.data(),
                                        call.bytes(), nullptr));
    TE_FL_RETURN_IF_ERROR(devices::synchronize(device));
    return p;
  }
  const void* bind() {
    return call_->bind(device_.is_host() ? host_.data() : memory_.data<char>(), device_,
                       host_.data());
  }
  // Copies all of the call's memory back to the host.
  Status fetch() {
    if (device_.is_host()) return {};
    CopyBuffer whole(call_->bytes());
    TE_FL_RETURN_IF_ERROR(devices::copy(Device{}, whole.data(), device_, memory_.raw_data(),
                                        call_->bytes(), nullptr));
    TE_FL_RETURN_IF_ERROR(devices::synchronize(device_));
    host_ = std::move(whole);
    return {};
  }
  const char* data() const { return host_.data(); }

 private:
  Placed(FiledCall& call, const Device& device)
      : call_(&call), device_(device), host_(call.before()) {}

  FiledCall* call_;
  Device device_;
  CopyBuffer host_;
  Tensor memory_;
};

Status run(FiledCall& call, Placed& placed, const std::string& impl_id) {
  PolicySettings settings;
  settings.deterministic = call.deterministic();
  settings.per_op[call.op()] = {PolicyToken{PolicyToken::Type::kImpl, Kind::kDefault, impl_id}};
  const PolicyScope scope(std::move(settings));
  const Unwatched unwatched;
  CallOptions options;
  const void* args = placed.bind();
  options.rng = call.rng();
  TE_FL_RETURN_IF_ERROR(OpManager::instance().call(call.op(), args, options));
  return placed.fetch();
}

std::string known_ids(const std::string& op) {
  std::string ids;
  for (const OpImplInfo& info : OpRegistry::instance().snapshot()) {
    if (info.op == op) ids += (ids.empty() ? "" : ", ") + info.impl_id;
  }
  return ids;
}

Result<std::string> reference_id(const std::string& op) {
  for (const OpImplInfo& info : OpRegistry::instance().snapshot()) {
    if (info.op == op && info.kind == Kind::kReference) return info.impl_id;
  }
  return not_found("op '" + op + "' has no reference implementation here");
}

std::vector<std::string> differences(const core::CompiledOp& op, FiledCall& call,
                                     const char* wanted, const char* got, int& compared) {
  // The binding only determines the addresses of the tensors; nothing is written.
  const void* args = call.bind(const_cast<char*>(wanted), Device{}, const_cast<char*>(wanted));
  std::vector<std::string> out;
  compared = 0;
  const CallDistances distances{got - wanted, call.before().data() - wanted};
  for (const OutputDifference& d : compare_outputs(op, args, distances, compared))
    out.push_back(d.text());
  return out;
}

}  // namespace
}  // namespace dispatch

Result<Replay> replay(const std::string& file, const std::string& impl_id,
                      const std::string& device) {
  using namespace dispatch;
  OpManager::instance();  // loads the built-in backends and the plugins
  TE_FL_ASSIGN_OR_RETURN(const std::unique_ptr<FiledCall> call, FiledCall::read(file));
  Replay out;
  const CallOrigin& from = call->origin();
  out.op = call->op();
  out.impl_id = impl_id.empty() ? from.impl_id : impl_id;
  out.note = from.note;
  out.saved_by = from.impl_id + " (" + from.owner + ", build " + from.build_id + ") on " +
                 from.device + (from.chip.empty() ? "" : ", " + from.chip) +
                 (from.driver.empty() ? "" : ", " + from.driver);
  Device where = call->device();
  if (!device.empty()) {
    TE_FL_ASSIGN_OR_RETURN(where, parse_device(device));
  } else if (!devices::find(where).ok()) {
    where = Device{};
  }
  out.device = to_string(where);
  TE_FL_ASSIGN_OR_RETURN(const OpId id, OpRegistry::instance().find(out.op));
  TE_FL_ASSIGN_OR_RETURN(const auto op,
                         core::CompiledOp::compile(*OpRegistry::instance().schema(id)));
  TE_FL_ASSIGN_OR_RETURN(Placed subject, Placed::make(*call, where));
  if (const Status status = run(*call, subject, out.impl_id); !status.ok()) {
    return status.wrap(file + " cannot be run on '" + out.impl_id + "' (op '" + out.op + "' has " +
                       known_ids(out.op) + ")");
  }
  TE_FL_ASSIGN_OR_RETURN(const std::string reference, reference_id(out.op));
  TE_FL_ASSIGN_OR_RETURN(Placed oracle, Placed::make(*call, Device{}));
  TE_FL_RETURN_IF_ERROR(
      run(*call, oracle, reference).wrap(file + " cannot be run on the reference"));
  out.from_reference = differences(*op, *call, oracle.data(), subject.data(), out.compared);
  out.from_saved = differences(*op, *call, call->after().data(), subject.data(), out.compared);
  return out;
}

}  // namespace te_fl
