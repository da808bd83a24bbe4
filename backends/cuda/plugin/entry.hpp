// A layer between the host and the ops: scratch that is too small is refused before anything is
// launched, and each run may be marked for a profiler.
#pragma once

#include <memory>
#include <vector>

#include "te_fl/plugin.h"

namespace te_fl::cuda {

// Owns what the wrapped descriptors point to.
class Entries {
 public:
  // `ranges`: every run() lies in an NVTX range "op implementation" of the domain te-fl.
  explicit Entries(bool ranges);
  ~Entries();
  // Replaces the functions of those ops that need it by functions that pass on to them. Descriptors
  // without scratch stay as they are unless ranges are wanted.
  void wrap(std::vector<te_fl_op_desc>& ops);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl::cuda
