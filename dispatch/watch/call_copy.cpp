#include "dispatch/watch/call_copy.hpp"

#include <cstdlib>
#include <cstring>
#include <string>

#include "core/device/in_flight.hpp"

namespace te_fl::dispatch {
namespace {

constexpr size_t kAlignment = 256;

Status no_memory(size_t bytes) {
  return Status(StatusCode::kOutOfMemory,
                "the copy of the call takes " + std::to_string(bytes) + " bytes of host memory");
}

}  // namespace

CopyBuffer::CopyBuffer(size_t bytes) : size_(bytes) {
  const size_t whole = (bytes + kAlignment) / kAlignment * kAlignment;
  data_.reset(static_cast<char*>(std::aligned_alloc(kAlignment, whole)), &std::free);
  if (data_ != nullptr) std::memset(data_.get(), 0, whole);
}

CopyBuffer::CopyBuffer(const CopyBuffer& other) : CopyBuffer(other.size_) {
  if (data_ != nullptr && other.data_ != nullptr) std::memcpy(data(), other.data(), size_);
}

Status CallCopy::move(const std::vector<StagedCopy>& copies, CopyBuffer& buffer) {
  char* const to = buffer.data();
  const Device& device = call_.signature.device;
  bool waits = false;
  Status status;
  for (const StagedCopy& c : copies) {
    if (c.on_host && device.is_host()) {
      std::memcpy(to + c.offset, c.device, c.bytes);
      continue;
    }
    waits = true;
    if (c.on_host) continue;
    status =
        devices::copy(Device{}, to + c.offset, device, c.device, c.bytes, call_.options.stream);
    if (!status.ok()) break;
  }
  // Waits also after an error: no copy may be writing to the buffer when it is freed.
  if (waits) {
    waited_ = core::wait_for_copies(device, call_.options.stream, buffer.shared());
    if (status.ok()) status = waited_;
  }
  if (!status.ok() || !waits) return status;
  for (const StagedCopy& c : copies) {  // after the wait: earlier work may have used host memory
    if (c.on_host) std::memcpy(to + c.offset, c.device, c.bytes);
  }
  return {};
}

Status CallCopy::before() {
  TE_FL_RETURN_IF_ERROR(plan_.make(*call_.row.compiled, call_.args, call_.signature.device,
                                   call_.options.rng, StagingPlan::Scope::kAll));
  before_ = CopyBuffer(plan_.buffer_bytes());
  if (before_.data() == nullptr) return no_memory(plan_.buffer_bytes());
  plan_.bind(before_.data());
  return move(plan_.in(), before_);
}

Status CallCopy::after() {
  after_ = CopyBuffer(before_);
  if (after_.data() == nullptr) return no_memory(before_.size());
  return move(plan_.out(), after_);
}

Status CallCopy::rerun() {
  again_ = CopyBuffer(before_);
  if (again_.data() == nullptr) return no_memory(before_.size());
  plan_.bind(again_.data());
  return {};
}

}  // namespace te_fl::dispatch
