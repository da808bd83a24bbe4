#include "conformance/device_mirror.hpp"

#include <array>
#include <atomic>
#include <cstring>
#include <type_traits>

namespace te_fl::conformance {
namespace {

// An address range in the list that is_mirrored() reads. Ranges that do not fit into the list are
// omitted.
struct Range {
  std::atomic<uintptr_t> begin{0};
  std::atomic<size_t> bytes{0};
};
std::array<Range, 512> g_ranges;

void remember(const void* data, size_t bytes) {
  for (Range& range : g_ranges) {
    uintptr_t free = 0;
    if (!range.begin.compare_exchange_strong(free, reinterpret_cast<uintptr_t>(data))) continue;
    range.bytes = bytes;
    return;
  }
}
void forget(const void* data) {
  for (Range& range : g_ranges)
    if (range.begin == reinterpret_cast<uintptr_t>(data)) range.bytes = 0, range.begin = 0;
}

}  // namespace

bool is_mirrored(const void* address) noexcept {
  const auto at = reinterpret_cast<uintptr_t>(address);
  for (const Range& range : g_ranges)
    if (range.begin <= at && at < range.begin + range.bytes) return true;
  return false;
}

DeviceMirror::~DeviceMirror() {
  for (const auto& [buffer, data] : buffers_) {
    if (device_.is_host()) break;  // guarded_ owns them
    uint8_t* const begin = margins_ == nullptr ? data : surrounded_.at(buffer).begin;
    forget(begin);
    devices::free(device_, begin, stream_);
  }
  for (void* data : words_) devices::free(device_, data, stream_);
}

DeviceMirror::Kept DeviceMirror::keep_buffer(Buffer& buffer) const {
  const auto before = static_cast<size_t>(buffer.data() - buffer.whole());
  if (guard_start_) return {buffer.data(), buffer.whole_size() - before};
  return {buffer.whole(), before + buffer.size()};
}

// Copies the buffer to memory next to a guard page. The returned pointer corresponds to whole(),
// but the guard bytes on the side of the guard page do not exist.
te_fl::Result<uint8_t*> DeviceMirror::copy_guarded(Buffer* buffer, const std::string& name) {
  const Kept kept = keep_buffer(*buffer);
  TE_FL_ASSIGN_OR_RETURN(
      GuardedMemory memory,
      guard_start_
          ? GuardedMemory::behind_guard(kept.bytes, name.c_str(), buffer->size())
          : GuardedMemory::make(kept.bytes, guard_alignment_, name.c_str(), buffer->size()));
  std::memcpy(memory.data(), kept.begin, kept.bytes);
  guarded_.push_back(std::move(memory));
  return buffers_[buffer] = guarded_.back().data() - (kept.begin - buffer->whole());
}

// Copies the buffer's contents to the device between two margins. The returned pointer corresponds
// to whole(), but only the contents exist there.
te_fl::Result<uint8_t*> DeviceMirror::copy_surrounded(Buffer* buffer, const std::string& name) {
  Surrounded made{name, nullptr, margins_->around(*buffer, name)};
  margins_->add_placed(name);
  TE_FL_ASSIGN_OR_RETURN(void* const data, devices::allocate(device_, made.bytes.size(), stream_));
  remember(data, made.bytes.size());
  made.begin = static_cast<uint8_t*>(data);
  const Surrounded& kept = surrounded_[buffer] = std::move(made);
  buffers_[buffer] = kept.begin + margins_->bytes - (buffer->data() - buffer->whole());
  TE_FL_RETURN_IF_ERROR(
      devices::copy(device_, data, Device(), kept.bytes.data(), kept.bytes.size(), stream_));
  return buffers_[buffer];
}

te_fl::Result<uint8_t*> DeviceMirror::copy_buffer(Buffer* buffer, const std::string& name) {
  if (buffer == nullptr) return nullptr;
  if (const auto known = buffers_.find(buffer); known != buffers_.end()) return known->second;
  if (device_.is_host()) return copy_guarded(buffer, name);
  if (margins_ != nullptr) return copy_surrounded(buffer, name);
  TE_FL_ASSIGN_OR_RETURN(void* const data,
                         devices::allocate(device_, buffer->whole_size(), stream_));
  remember(data, buffer->whole_size());
  buffers_[buffer] = static_cast<uint8_t*>(data);
  TE_FL_RETURN_IF_ERROR(
      devices::copy(device_, data, Device(), buffer->whole(), buffer->whole_size(), stream_));
  return static_cast<uint8_t*>(data);
}

Status DeviceMirror::upload(const std::vector<std::unique_ptr<Tensor>>& tensors,
                            const std::set<const Tensor*>& on_host) {
  if (in_place()) return {};
  for (const auto& t : tensors) {
    if (on_host.count(t.get()) != 0) continue;
    auto made = std::make_unique<OnDevice>();
    made->tensor = t->c;
    made->tensor.dl.device = device_.to_c();
    made->tensor.provider = device_.provider;
    const auto place = [&](const std::shared_ptr<Buffer>& buffer, auto*& pointer,
                           const char* part = "") -> Status {
      TE_FL_ASSIGN_OR_RETURN(uint8_t* const copy, copy_buffer(buffer.get(), t->name + part));
      pointer = copy == nullptr ? nullptr
                                : reinterpret_cast<std::decay_t<decltype(pointer)>>(
                                      copy + (buffer->data() - buffer->whole()));
      return {};
    };
    TE_FL_RETURN_IF_ERROR(place(t->data, made->tensor.dl.data));
    if (t->c.quant != nullptr) {
      made->quant = *t->c.quant;
      TE_FL_RETURN_IF_ERROR(place(t->col_data, made->quant.columnwise_data, ".columnwise_data"));
      TE_FL_RETURN_IF_ERROR(place(t->scale_inv, made->quant.scale_inv, ".scale_inv"));
      TE_FL_RETURN_IF_ERROR(
          place(t->col_scale_inv, made->quant.columnwise_scale_inv, ".columnwise_scale_inv"));
      TE_FL_RETURN_IF_ERROR(place(t->amax, made->quant.amax, ".amax"));
      TE_FL_RETURN_IF_ERROR(place(t->scale, made->quant.scale, ".scale"));
      made->tensor.quant = &made->quant;
    }
    tensors_[t.get()] = std::move(made);
  }
  return device_.is_host() ? Status() : devices::synchronize(device_, stream_);
}

Status DeviceMirror::upload_words(const uint64_t*& words, size_t count) {
  if (device_.is_host() || words == nullptr) return {};
  TE_FL_ASSIGN_OR_RETURN(void* const data,
                         devices::allocate(device_, count * sizeof *words, stream_));
  words_.push_back(data);
  TE_FL_RETURN_IF_ERROR(
      devices::copy(device_, data, Device(), words, count * sizeof *words, stream_));
  words = static_cast<const uint64_t*>(data);
  return devices::synchronize(device_, stream_);
}

Status DeviceMirror::download() {
  for (const auto& [buffer, data] : buffers_) {
    if (!device_.is_host()) break;
    const Kept kept = keep_buffer(*buffer);
    std::memcpy(kept.begin, data + (kept.begin - buffer->whole()), kept.bytes);
  }
  if (device_.is_host()) return {};
  TE_FL_RETURN_IF_ERROR(devices::synchronize(device_, stream_));
  if (margins_ != nullptr) return download_surrounded();
  for (const auto& [buffer, data] : buffers_) {
    TE_FL_RETURN_IF_ERROR(
        devices::copy(Device(), buffer->whole(), device_, data, buffer->whole_size(), stream_));
  }
  return devices::synchronize(device_, stream_);
}

Status DeviceMirror::download_surrounded() {
  for (const auto& [buffer, copy] : surrounded_) {
    std::vector<uint8_t> now(copy.bytes.size());
    TE_FL_RETURN_IF_ERROR(
        devices::copy(Device(), now.data(), device_, copy.begin, now.size(), stream_));
    TE_FL_RETURN_IF_ERROR(devices::synchronize(device_, stream_));
    std::memcpy(buffer->data(), now.data() + margins_->bytes, buffer->size());
    const std::string outside = margins_->written_outside(*buffer, copy.bytes, now);
    if (outside.empty() || !written_outside_.empty()) continue;
    written_outside_ = copy.name + ": bytes outside its memory were written, the nearest one " +
                       outside + " (rule R11)";
  }
  return {};
}

const te_fl_tensor* DeviceMirror::of(const Tensor& tensor) const {
  const auto made = tensors_.find(&tensor);
  return made == tensors_.end() ? &tensor.c : &made->second->tensor;
}

}  // namespace te_fl::conformance
