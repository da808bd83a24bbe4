#pragma once

#include <string>

#include "conformance/case.hpp"
#include "te_fl/device.hpp"

namespace te_fl::conformance {

enum class Outcome { kPass, kFail, kUnsupported };

struct Result {
  Outcome outcome = Outcome::kFail;
  std::string message;  // the first difference, or why the call was refused
  double milliseconds = 0;
};

// A case built once, its expectations evaluated, to be run on one implementation after another.
class Prepared {
 public:
  // Tensors are in the memory of `device` when the op runs.
  explicit Prepared(const Case& c, Device device = {});
  Result run(const std::string& impl_id);
  // After a run that passed: proves that the comparison would have noticed. Empty, or what went
  // unnoticed.
  std::string self_check(const std::string& impl_id);
  Problem& problem() { return problem_; }

 private:
  void restore();
  std::string check_memory(bool untouched) const;

  Problem problem_;
  Device device_;
};

}  // namespace te_fl::conformance
