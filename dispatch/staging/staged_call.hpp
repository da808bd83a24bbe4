#pragma once

#include <cstdint>

#include "dispatch/call.hpp"
#include "dispatch/staging/staging_plan.hpp"
#include "dispatch/staging/staging_pool.hpp"

namespace te_fl::dispatch {

// A call on device tensors that a host implementation runs on host copies. Order of use: plan(),
// acquire() or bind_nowhere(), copy_in(), the implementation's run() on args(), copy_out(),
// count(). For each error status the text is in `errors`.
class StagedCall {
 public:
  StagedCall(const Call& call, core::ErrorText& errors) : call_(call), errors_(errors) {}
  ~StagedCall();
  StagedCall(const StagedCall&) = delete;
  StagedCall& operator=(const StagedCall&) = delete;

  // Determines the memory to copy. UNSUPPORTED: the memory cannot be copied, or exceeds the
  // policy's size limit.
  te_fl_status plan();
  // Allocates the buffer for the copies.
  te_fl_status acquire();
  // Sets addresses without memory, for supports() and saved_bytes(), which read only metadata
  // (R10).
  void bind_nowhere() noexcept;
  te_fl_context context(bool deterministic) const;
  const void* args() const noexcept { return plan_.args(); }
  // copy_in() waits for earlier work of the stream and for the copies; copy_out() for the copies.
  te_fl_status copy_in();
  te_fl_status copy_out();
  // Adds the call to the implementation's statistics. Logs once per implementation that it runs
  // staged.
  void count(const Implementation& impl) const;

 private:
  te_fl_status refused(const Status& status);
  te_fl_status failed(const Status& status, const char* doing);

  const Call& call_;
  core::ErrorText& errors_;
  StagingPlan plan_;
  StagingPool::Block buffer_;
  bool copying_ = false;              // copies may be in progress
  int64_t copies_ = 0, waiting_ = 0;  // ns: for copies; waiting for earlier stream work
};

}  // namespace te_fl::dispatch
