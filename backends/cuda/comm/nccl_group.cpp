#include "comm/nccl_group.hpp"

#include <utility>
#include <vector>

#include "te_fl/backend.hpp"

namespace te_fl::cuda {
namespace {

struct Group {
  int depth = 0;
  std::vector<NcclRanks::Use> uses;
};
thread_local Group t_group;

}  // namespace

bool in_group() noexcept { return t_group.depth > 0; }

NcclCall::~NcclCall() {
  if (!in_group()) return;
  for (const NcclRanks::Use& use : t_group.uses) {
    if (use.handle() == use_.handle()) return;
  }
  t_group.uses.push_back(std::move(use_));
}

void NcclCall::check(int status, const char* function) const { use_.check(status, function); }

void NcclCall::group_start() const {
  use_.check(use_.nccl().group_start(), "ncclGroupStart");
  ++t_group.depth;
}
void NcclCall::group_end() const {
  --t_group.depth;
  check(use_.nccl().group_end(), "ncclGroupEnd");
}

void begin_group(const Nccl& nccl) {
  if (const int status = nccl.group_start(); status != kNcclSuccess)
    throw_nccl(nccl, status, "ncclGroupStart", nullptr);
  ++t_group.depth;
}

void end_group(const Nccl& nccl) {
  if (t_group.depth == 0) {
    throw backend::Error(TE_FL_FAILED_PRECONDITION | TE_FL_CLEAN,
                         "this thread has begun no group of collectives of NCCL");
  }
  const int status = nccl.group_end();
  if (--t_group.depth > 0) return;
  const std::vector<NcclRanks::Use> uses = std::exchange(t_group.uses, {});
  for (const NcclRanks::Use& use : uses) use.check(status, "ncclGroupEnd");
  if (uses.empty() && status != kNcclSuccess) throw_nccl(nccl, status, "ncclGroupEnd", nullptr);
}

}  // namespace te_fl::cuda
