// Wrappers around the ops' run functions. They refuse a call whose scratch is too small before
// anything is launched, and can mark each run for a profiler.
#pragma once

#include <memory>
#include <vector>

#include "te_fl/plugin.h"

namespace te_fl::cuda {

// Owns the data to which the wrapped descriptors point.
class Entries {
 public:
  // `ranges`: marks every run() with an NVTX range "op implementation" in the domain te-fl.
  explicit Entries(bool ranges);
  ~Entries();
  // Replaces the functions of the ops by wrappers that call them. Descriptors without scratch are
  // unchanged unless ranges are on.
  void wrap(std::vector<te_fl_op_desc>& ops);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl::cuda
