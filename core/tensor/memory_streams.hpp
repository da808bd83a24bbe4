#pragma once

#include <memory>
#include <vector>

#include "core/device/current_stream.hpp"
#include "te_fl/tensor.hpp"

// The streams on which the memory of tensors is allocated and freed.
namespace te_fl::core {

// Deleter for tensor memory that te-fl allocated: frees it on its stream.
struct FreeOnStream {
  Device device;
  StreamRef stream;  // null: the default stream
  void operator()(void* data) const noexcept {
    const StreamUse use(stream);
    devices::free(device, data, use.get());
  }
};

// Owns the memory of a quantised tensor except its row-wise data: one block of memory, and tensors
// that the caller supplied in place of some parts of that block.
struct QuantStorage {
  std::shared_ptr<void> block;
  Tensor scale;
  Tensor amax;
};
struct FreeQuantStorage {
  void operator()(QuantStorage* storage) const noexcept { delete storage; }
};

// The distinct streams that the memory of `tensor` belongs to; null is the default stream. Empty
// for host memory and for foreign memory.
std::vector<void*> memory_streams(const Tensor& tensor);

// Makes later work on stream `then` wait for the work that is now on stream `first`. Uses an event;
// if none can be created, as on a withdrawn device, blocks the calling thread until `first` is
// done. Does nothing while either stream is being captured, since a graph cannot be ordered against
// work outside it.
Status order_streams(const Device& device, void* first, void* then);

}  // namespace te_fl::core
