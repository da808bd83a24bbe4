#pragma once

#include <cstddef>
#include <memory>

#include "dispatch/call.hpp"
#include "dispatch/staging/staging_plan.hpp"

namespace te_fl::dispatch {

// Host memory of whole bytes, aligned as calls want it.
class CopyBuffer {
 public:
  CopyBuffer() = default;
  // Zeros. Null data() if there is no memory.
  explicit CopyBuffer(size_t bytes);
  CopyBuffer(const CopyBuffer& other);
  CopyBuffer(CopyBuffer&&) noexcept = default;
  CopyBuffer& operator=(CopyBuffer&&) noexcept = default;
  char* data() const noexcept { return data_.get(); }
  size_t size() const noexcept { return size_; }
  // The memory, for copies that may outlive this.
  std::shared_ptr<void> shared() const noexcept { return data_; }

 private:
  std::shared_ptr<char> data_;
  size_t size_ = 0;
};

// All that a call reads and writes, copied to the host, wherever it lies: before the call what it
// reads, after the call what it wrote. One layout serves all copies.
class CallCopy {
 public:
  explicit CallCopy(const Call& call) : call_(call) {}

  // Copies what the call reads. Waits for the stream; waited() says what that answered.
  // UNSUPPORTED: the call cannot be copied.
  Status before();
  // Copies what the call has written, over a copy of before(). Waits for the stream, as before().
  Status after();
  // An error: work that was enqueued on the stream has failed. A device tells that once, to the
  // first who waits (R12), so whoever made the copy passes it on to the caller.
  const Status& waited() const noexcept { return waited_; }
  // A copy of what the call read, to run another implementation on; args() then points into it.
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
