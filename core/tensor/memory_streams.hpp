#pragma once

#include <memory>
#include <vector>

#include "core/device/current_stream.hpp"
#include "te_fl/tensor.hpp"

// On which streams the memory of tensors is allocated and freed.
namespace te_fl::core {

// Frees the memory of a tensor that te-fl allocated.
struct FreeOnStream {
  Device device;
  StreamRef stream;  // null: the default stream
  void operator()(void* data) const noexcept {
    const StreamUse use(stream);
    devices::free(device, data, use.get());
  }
};

// The parts of a quantised tensor besides its row-wise codes: a block, and tensors whose memory is
// used in its place.
struct QuantStorage {
  std::shared_ptr<void> block;
  Tensor scale;
  Tensor amax;
};
struct FreeQuantStorage {
  void operator()(QuantStorage* storage) const noexcept { delete storage; }
};

// The streams that the memory of `tensor` belongs to, each once; null is the default stream. None
// for host memory and for memory that somebody else allocated.
std::vector<void*> memory_streams(const Tensor& tensor);

// Puts all work enqueued on `then` from now on after what is on `first` now: by an event, or, where
// none can be had, as on a device that was withdrawn, by waiting for `first` here. Nothing happens
// if either is being captured: a graph has no order with work outside it.
Status order_streams(const Device& device, void* first, void* then);

}  // namespace te_fl::core
