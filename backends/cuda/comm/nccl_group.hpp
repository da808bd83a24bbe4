// Collectives that a thread calls between ncclGroupStart and ncclGroupEnd begin together.
#pragma once

#include "comm/nccl_ranks.hpp"

namespace te_fl::cuda {

// One call of a collective: NCCL's functions that it calls, and their errors. In a group, they
// begin when it ends.
class NcclCall {
 public:
  explicit NcclCall(const NcclRanks& ranks) : use_(ranks) {}
  ~NcclCall();  // the group, if there is one, keeps the communicator until it ends
  NcclCall(const NcclCall&) = delete;
  NcclCall& operator=(const NcclCall&) = delete;
  const Nccl* operator->() const noexcept { return &use_.nccl(); }
  void* handle() const noexcept { return use_.handle(); }
  void check(int status, const char* function) const;
  void group_start() const;
  void group_end() const;

 private:
  NcclRanks::Use use_;
};

// A group is the calling thread's. end_group() throws what the calls between them met.
void begin_group(const Nccl& nccl);
void end_group(const Nccl& nccl);
bool in_group() noexcept;

}  // namespace te_fl::cuda
