// The library below a provider, called directly on the same memory.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "te_fl/comm.hpp"

namespace te_fl::bench_collectives {

enum class Op { kAllReduce, kAllGather, kReduceScatter, kAllToAll, kBroadcast };

class Peer {
 public:
  virtual ~Peer() = default;
  virtual std::string name() const = 0;  // with its version
  virtual bool has(Op op) const = 0;
  // `elements` of F32 are those of the larger of the two tensors. On a device it enqueues on
  // `stream`. Ends the program on an error.
  virtual void call(Op op, float* input, float* output, size_t elements, void* stream) = 0;
};

// Ranks find each other by the job's store. NULL: the library was not there when this was built or
// is not here now, with the reason in `why`.
std::unique_ptr<Peer> make_gloo(const std::shared_ptr<Store>& store, int rank, int size,
                                std::string& why);
std::unique_ptr<Peer> make_nccl(const std::shared_ptr<Store>& store, int rank, int size, int device,
                                std::string& why);

}  // namespace te_fl::bench_collectives
