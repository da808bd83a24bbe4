#pragma once

#include <cstdint>

#include "registry/manager_impl.hpp"

// TE_FL_TRACE: what was called, who served it and how long the caller waited, for Perfetto.
namespace te_fl::registry {

// One traced call.
class TracedCall {
 public:
  explicit TracedCall(const Call& call);
  void finish(const Status& status, const Served& served);

 private:
  const Call& call_;
  int64_t start_;  // nanoseconds since the trace began
  uint32_t description_;
};

}  // namespace te_fl::registry
