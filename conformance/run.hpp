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
  std::string message;  // the first difference, or the reason for a refusal
  double milliseconds = 0;
  bool wrote_outside = false;  // the failure is a write outside of a tensor
};

// Options for running a case, apart from the choice of the implementation.
struct How {
  // On a device: the copies and the call use a new stream, one per rank on the rank's device, and
  // only that stream is waited for.
  bool own_stream = false;
  bool deterministic = false;  // requests results with the same bits each time
  // Not 0, on the host: places tensors before guard pages with this alignment. With 1 they are
  // aligned to their elements only, and an access one byte past the end is detected.
  size_t guard_alignment = 0;
  // With guard_alignment: places tensors after guard pages instead, which detects accesses before
  // the start.
  bool guard_start = false;
  // Not null, on a device: the margins around each tensor, which replace the usual 256 guard bytes.
  Margins* margins = nullptr;
  // Calls te_fl_op_desc.describe instead of the op. Passes if the implementation returns a text and
  // does not change the tensors; the message is that text.
  bool describe = false;
};

// A case with its arguments and expectations, to be run on several implementations. A case of a
// collective has one problem per rank. The ranks are threads, or this process and other processes
// that run the same cases at the same time.
class Prepared {
 public:
  // The tensors are in the memory of `device` when the op runs; the tensors of rank r are on the
  // r-th device after it. `strided`: unquantised inputs get rows with gaps. `processes`: null, or
  // the other processes, which must outlive this object and make the same calls of run(); results
  // then cover all ranks and are equal on all of them.
  explicit Prepared(const Case& c, Device device = {}, bool strided = false,
                    Processes* processes = nullptr);
  Result run(const std::string& impl_id, const How& how = {});
  // Destroys the communicators of earlier runs; the next run makes new ones.
  void leave_ranks() { communicators_.clear(); }
  // The current contents of all tensors' memory, without guard bytes.
  std::vector<uint8_t> bytes() const;
  // True if `strided` has changed any input.
  bool has_strided_inputs() const { return has_strided_inputs_; }
  // After a successful run: checks that the comparison would detect errors. Returns a description
  // of an undetected error; empty if there is none.
  std::string self_check(const std::string& impl_id);
  Problem& problem() { return *problems_.front(); }  // the problem of rank 0

 private:
  void build(const Case& c, int rank, bool strided);
  void restore();
  Result run_ranks(const std::string& impl_id, const How& how);
  Result run_processes(const std::string& impl_id, const How& how);
  Result run_own_rank(const std::string& impl_id, const How& how);

  std::vector<std::unique_ptr<Problem>> problems_;
  Device device_;
  int ranks_ = 0;
  std::map<std::string, Ranks> communicators_;  // key: implementation
  Processes* processes_ = nullptr;
  bool has_strided_inputs_ = false;
};

}  // namespace te_fl::conformance
