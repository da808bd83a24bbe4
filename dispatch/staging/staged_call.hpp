#pragma once

#include <cstdint>

#include "dispatch/call.hpp"
#include "dispatch/staging/staging_plan.hpp"
#include "dispatch/staging/staging_pool.hpp"

namespace te_fl::dispatch {

// A call on a device's tensors that a host implementation serves on copies of them. In order:
// plan(), acquire() or bind_nowhere(), copy_in(), the implementation's run() on args(), copy_out(),
// count(). Statuses say why in `errors`.
class StagedCall {
 public:
  StagedCall(const Call& call, core::ErrorText& errors) : call_(call), errors_(errors) {}
  ~StagedCall();
  StagedCall(const StagedCall&) = delete;
  StagedCall& operator=(const StagedCall&) = delete;

  // Finds what is to be copied. UNSUPPORTED: it cannot be, or is more than the policy allows.
  te_fl_status plan();
  // Memory for the copies.
  te_fl_status acquire();
  // Addresses without memory, for supports() and saved_bytes(), which read metadata only (R10).
  void bind_nowhere() noexcept;
  te_fl_context context(bool deterministic) const;
  const void* args() const noexcept { return plan_.args(); }
  // Waits for the stream's work and the copies.
  te_fl_status copy_in();
  te_fl_status copy_out();
  // Adds the call to the implementation's figures; says once per op that it is staged.
  void count(const Implementation& impl) const;

 private:
  te_fl_status refused(const Status& status);
  te_fl_status failed(const Status& status, const char* doing);

  const Call& call_;
  core::ErrorText& errors_;
  StagingPlan plan_;
  StagingPool::Block buffer_;
  bool copying_ = false;              // copies may be under way
  int64_t copies_ = 0, waiting_ = 0;  // ns: for the copies; for the stream's work before them
};

}  // namespace te_fl::dispatch
