#pragma once

#include <cstddef>
#include <memory>

#include "dispatch/call.hpp"
#include "dispatch/staging/staging_plan.hpp"

namespace te_fl::dispatch {

// A host buffer with the alignment that calls need.
class CopyBuffer {
 public:
  CopyBuffer() = default;
  // Allocates zeroed memory. data() is null if there is not enough.
  explicit CopyBuffer(size_t bytes);
  CopyBuffer(const CopyBuffer& other);
  CopyBuffer(CopyBuffer&&) noexcept = default;
  CopyBuffer& operator=(CopyBuffer&&) noexcept = default;
  char* data() const noexcept { return data_.get(); }
  size_t size() const noexcept { return size_; }
  // Shared ownership of the memory, for copies that may outlive this object.
  std::shared_ptr<void> shared() const noexcept { return data_; }

 private:
  std::shared_ptr<char> data_;
  size_t size_ = 0;
};

// Copies in host memory of everything that a call reads and writes, wherever the originals are: the
// inputs before the call, the outputs after it. All copies have the same layout.
class CallCopy {
 public:
  explicit CallCopy(const Call& call) : call_(call) {}

  // Copies the memory that the call reads. Waits for the stream; waited() returns the result of the
  // wait. UNSUPPORTED: the call cannot be copied.
  Status before();
  // Copies the outputs into a second buffer, which starts with the contents of the buffer of
  // before(). Waits for the stream.
  Status after();
  // Returns an error if work that was enqueued on the stream before the call has failed. A device
  // reports such an error only to the first wait (R12), so the owner of this object must return it
  // to the caller.
  const Status& waited() const noexcept { return waited_; }
  // Makes another copy of the inputs, on which another implementation can run, and points args() to
  // that copy.
  Status rerun();

  StagingPlan& plan() noexcept { return plan_; }
  const CopyBuffer& read() const noexcept { return before_; }
  const CopyBuffer& written() const noexcept { return after_; }
  const CopyBuffer& again() const noexcept { return again_; }

 private:
  Status move(const std::vector<StagedCopy>& copies, CopyBuffer& buffer);

  const Call& call_;
  StagingPlan plan_;
  CopyBuffer before_, after_, again_;
  Status waited_;
};

}  // namespace te_fl::dispatch
