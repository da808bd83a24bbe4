// A provider of collectives that claims to support ranks in separate processes as well as ranks
// that are threads. Its ranks find each other in memory of one process, so it is correct among
// threads and wrong among processes.
#include <cstdlib>
#include <string_view>
#include <vector>

#include "meeting.hpp"
#include "te_fl/backend/plugin.hpp"

namespace {

namespace b = te_fl::backend;

bool is_process() { return std::getenv("TE_FL_WORLD_SIZE") != nullptr; }

void broadcast(const te_fl_context&, const te_fl_broadcast_args& a) {
  // In separate processes, the variable WRONG_RANKS makes rank 1 crash or rank 0 exit without a
  // message.
  if (const char* fault = std::getenv("WRONG_RANKS"); fault != nullptr && is_process()) {
    if (std::string_view(fault) == "crash" && a.comm->rank == 1) std::abort();
    if (std::string_view(fault) == "leave" && a.comm->rank == 0) std::_Exit(0);
  }
  te_fl_test::broadcast_by_threads(a);
}

constexpr te_fl_comm_desc kDesc = {
    .name = "wrong_ranks",
    .kind = TE_FL_KIND_VENDOR,
    .device_types = uint64_t{1} << TE_FL_DEVICE_CPU,
    .api = &te_fl_test::kApi,
};

struct WrongRanks : b::Instance {
  explicit WrongRanks(const te_fl_host_api&) {
    te_fl_op_desc op;
    op.op_name = "broadcast", op.impl_id = "vendor.wrong_ranks", op.kind = TE_FL_KIND_VENDOR;
    op.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_IN_PLACE_OK;
    op.device_types = uint64_t{1} << TE_FL_DEVICE_CPU;
    op.run = b::run_thunk<te_fl_broadcast_args, broadcast>;
    op.supports =
        b::supports_thunk<te_fl_broadcast_args, b::check_collective<te_fl_broadcast_args>>;
    ops.push_back(op);
  }
  std::vector<const te_fl_comm_desc*> comms = {&kDesc};
};

constexpr te_fl_plugin_header kHeader =
    b::plugin_header<WrongRanks>("wrong_ranks", "wrong", "1.0.0");

}  // namespace

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &kHeader;
}
