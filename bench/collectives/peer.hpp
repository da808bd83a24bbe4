// The communication library below te-fl's provider, called directly on the same memory.
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
  virtual std::string name() const = 0;  // name and version
  virtual bool has(Op op) const = 0;
  // Runs one collective. `elements` is the number of F32 elements of the larger tensor. On a device
  // the call enqueues on `stream`. Exits the program on an error.
  virtual void call(Op op, float* input, float* output, size_t elements, void* stream) = 0;
};

// Make the library's communicator; the ranks find each other through the job's store. Return null
// and the reason in `why` if the library was absent at build time or is absent now.
std::unique_ptr<Peer> make_gloo(const std::shared_ptr<Store>& store, int rank, int size,
                                std::string& why);
std::unique_ptr<Peer> make_nccl(const std::shared_ptr<Store>& store, int rank, int size, int device,
                                std::string& why);

}  // namespace te_fl::bench_collectives
