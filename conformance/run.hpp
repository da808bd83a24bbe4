#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "conformance/case.hpp"
#include "conformance/margins.hpp"
#include "conformance/processes.hpp"
#include "conformance/ranks.hpp"
#include "te_fl/device.hpp"

namespace te_fl::conformance {

enum class Outcome { kPass, kFail, kUnsupported };

struct Result {
  Outcome outcome = Outcome::kFail;
  std::string message;  // the first difference, or why the call was refused
  double milliseconds = 0;
  bool wrote_outside = false;  // that is why it failed
};

// The way in which a case is run, beyond which implementation serves it.
struct How {
  // On a device: copies and the call go to a stream made for them, each rank's to one of its own
  // device, and nobody waits for any other stream.
  bool own_stream = false;
  bool deterministic = false;  // asks for the same bits every time
  // Not 0, on the host: tensors lie before pages that nobody may touch, at this alignment. With 1
  // they are aligned to their elements only, and a byte past the end is found.
  size_t guard_alignment = 0;
  // With the above: behind such pages instead, and a byte before the start is found.
  bool guard_start = false;
  // Not null, on a device: what lies before and behind each tensor, in place of 256 plain bytes.
  Margins* margins = nullptr;
  // Asks what run() would run (te_fl_op_desc.describe) instead of calling the op. It passes if the
  // implementation says something and leaves the tensors alone; the message is what it said.
  bool describe = false;
};

// A case built once, its expectations evaluated, to be run on one implementation after another. One
// of a collective has a problem for each rank, and ranks are threads, or this process and others
// that run the same cases beside it.
class Prepared {
 public:
  // Tensors are in the memory of `device` when the op runs, those of rank r in that of the r-th
  // after it. With `strided` its plain inputs lie in rows that are further apart than they are
  // long.
  // `processes`: null, or the others, which must outlive it and make the same calls of run(); its
  // results are then those of all ranks, and alike on all of them.
  explicit Prepared(const Case& c, Device device = {}, bool strided = false,
                    Processes* processes = nullptr);
  Result run(const std::string& impl_id, const How& how = {});
  // Destroys the communicators that runs have made; another run makes new ones.
  void leave_ranks() { communicators_.clear(); }
  // The contents of the memory of its tensors now, guards left out.
  std::vector<uint8_t> bytes() const;
  // True if `strided` changed anything.
  bool has_strided_inputs() const { return has_strided_inputs_; }
  // After a run that passed: proves that the comparison would have noticed. Empty, or what went
  // unnoticed.
  std::string self_check(const std::string& impl_id);
  Problem& problem() { return *problems_.front(); }  // of rank 0

 private:
  void build(const Case& c, int rank, bool strided);
  void restore();
  Result run_ranks(const std::string& impl_id, const How& how);
  Result run_processes(const std::string& impl_id, const How& how);
  Result run_own_rank(const std::string& impl_id, const How& how);

  std::vector<std::unique_ptr<Problem>> problems_;
  Device device_;
  int ranks_ = 0;
  std::map<std::string, Ranks> communicators_;  // by implementation
  Processes* processes_ = nullptr;
  bool has_strided_inputs_ = false;
};

}  // namespace te_fl::conformance
