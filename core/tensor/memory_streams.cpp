#include "core/tensor/memory_streams.hpp"

#include <algorithm>

#include "core/tensor/tensor_access.hpp"

namespace te_fl::core {
namespace {

void add(const std::shared_ptr<void>& storage, std::vector<void*>& streams) {
  const auto* memory = std::get_deleter<FreeOnStream>(storage);
  if (memory == nullptr || memory->device.is_host()) return;
  const StreamRef& stream = memory->stream;
  // The work of a retired stream is complete.
  if (stream != nullptr && stream->get() == nullptr) return;
  void* const handle = stream != nullptr ? stream->handle : nullptr;
  if (std::ranges::find(streams, handle) == streams.end()) streams.push_back(handle);
}

// Adds the streams that free a tensor's storage. For a quantised tensor, also adds the streams of
// tensors that the storage refers to.
void add_all(const std::shared_ptr<void>& storage, std::vector<void*>& streams) {
  add(storage, streams);
  if (std::get_deleter<FreeQuantStorage>(storage) == nullptr) return;
  const auto& parts = *static_cast<const QuantStorage*>(storage.get());
  add(parts.block, streams);
  for (const Tensor* tensor : {&parts.scale, &parts.amax}) {
    add_all(Tensor::Access::storage(*tensor), streams);
  }
}

Result<bool> captured(const Device& device, void* stream) {
  if (stream == nullptr) return false;
  return devices::is_capturing(device, stream);
}

}  // namespace

std::vector<void*> memory_streams(const Tensor& tensor) {
  std::vector<void*> streams;
  add_all(Tensor::Access::storage(tensor), streams);
  add_all(Tensor::Access::quant_storage(tensor), streams);
  return streams;
}

Status order_streams(const Device& device, void* first, void* then) {
  if (first == then) return {};
  TE_FL_ASSIGN_OR_RETURN(const bool first_captured, captured(device, first));
  TE_FL_ASSIGN_OR_RETURN(const bool then_captured, captured(device, then));
  if (first_captured || then_captured) return {};
  Result<Event> event = Event::create(device);
  if (!event.ok()) return devices::synchronize(device, first);
  TE_FL_RETURN_IF_ERROR(event->record(first));
  return devices::wait_event(device, event->get(), then);
}

}  // namespace te_fl::core
