// NCCL groups: collectives that a thread calls between ncclGroupStart and ncclGroupEnd start
// together.
#pragma once

#include "comm/nccl_ranks.hpp"

namespace te_fl::cuda {

// One call of a collective: gives access to NCCL's functions and checks their status. In a group,
// the functions start when the group ends.
class NcclCall {
 public:
  explicit NcclCall(const NcclRanks& ranks) : use_(ranks) {}
  ~NcclCall();  // an open group takes over the reference to the communicator and holds it until the
                // group ends
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

// A group belongs to the calling thread. end_group() throws the errors of the calls since
// begin_group().
void begin_group(const Nccl& nccl);
void end_group(const Nccl& nccl);
bool in_group() noexcept;

}  // namespace te_fl::cuda
