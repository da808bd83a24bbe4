#include "conformance/device_mirror.hpp"

namespace te_fl::conformance {

DeviceMirror::~DeviceMirror() {
  for (const auto& [buffer, data] : buffers_) devices::free(device_, data);
  for (void* data : words_) devices::free(device_, data);
}

te_fl::Result<uint8_t*> DeviceMirror::copy_of(Buffer* buffer) {
  if (buffer == nullptr) return nullptr;
  if (const auto known = buffers_.find(buffer); known != buffers_.end()) return known->second;
  TE_FL_ASSIGN_OR_RETURN(void* const data, devices::allocate(device_, buffer->whole_size()));
  buffers_[buffer] = static_cast<uint8_t*>(data);
  TE_FL_RETURN_IF_ERROR(
      devices::copy(device_, data, Device(), buffer->whole(), buffer->whole_size()));
  return static_cast<uint8_t*>(data);
}

Status DeviceMirror::upload(const std::vector<std::unique_ptr<Tensor>>& tensors,
                            const std::set<const Tensor*>& on_host) {
  if (device_.is_host()) return {};
  for (const auto& t : tensors) {
    if (on_host.count(t.get()) != 0) continue;
    auto made = std::make_unique<OnDevice>();
    made->tensor = t->c;
    made->tensor.dl.device = device_.to_c();
    made->tensor.provider = device_.provider;
    const auto place = [&](const std::shared_ptr<Buffer>& buffer, auto*& pointer) -> Status {
      TE_FL_ASSIGN_OR_RETURN(uint8_t* const copy, copy_of(buffer.get()));
      pointer = copy == nullptr ? nullptr
                                : reinterpret_cast<std::decay_t<decltype(pointer)>>(
                                      copy + (buffer->data() - buffer->whole()));
      return {};
    };
    TE_FL_RETURN_IF_ERROR(place(t->data, made->tensor.dl.data));
    if (t->c.quant != nullptr) {
      made->quant = *t->c.quant;
      TE_FL_RETURN_IF_ERROR(place(t->col_data, made->quant.columnwise_data));
      TE_FL_RETURN_IF_ERROR(place(t->scale_inv, made->quant.scale_inv));
      TE_FL_RETURN_IF_ERROR(place(t->col_scale_inv, made->quant.columnwise_scale_inv));
      TE_FL_RETURN_IF_ERROR(place(t->amax, made->quant.amax));
      TE_FL_RETURN_IF_ERROR(place(t->scale, made->quant.scale));
      made->tensor.quant = &made->quant;
    }
    tensors_[t.get()] = std::move(made);
  }
  return devices::synchronize(device_);
}

Status DeviceMirror::upload_words(const uint64_t*& words, size_t count) {
  if (device_.is_host() || words == nullptr) return {};
  TE_FL_ASSIGN_OR_RETURN(void* const data, devices::allocate(device_, count * sizeof *words));
  words_.push_back(data);
  TE_FL_RETURN_IF_ERROR(devices::copy(device_, data, Device(), words, count * sizeof *words));
  words = static_cast<const uint64_t*>(data);
  return devices::synchronize(device_);
}

Status DeviceMirror::download() {
  if (device_.is_host()) return {};
  TE_FL_RETURN_IF_ERROR(devices::synchronize(device_));
  for (const auto& [buffer, data] : buffers_) {
    TE_FL_RETURN_IF_ERROR(
        devices::copy(Device(), buffer->whole(), device_, data, buffer->whole_size()));
  }
  return devices::synchronize(device_);
}

const te_fl_tensor* DeviceMirror::of(const Tensor& tensor) const {
  const auto made = tensors_.find(&tensor);
  return made == tensors_.end() ? &tensor.c : &made->second->tensor;
}

}  // namespace te_fl::conformance
