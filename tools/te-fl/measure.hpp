// Timing calls of an op, and the two rates of a device that bound them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/cases/case.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool {

// A case whose tensors are in a device's memory, those that the op wants on the host aside.
class PlacedCase {
 public:
  static te_fl::Result<std::unique_ptr<PlacedCase>> make(const te_fl::bench::CaseSpec& spec,
                                                         const te_fl::bench::Shape& extents,
                                                         const te_fl::Device& device);
  ~PlacedCase();
  PlacedCase(const PlacedCase&) = delete;
  PlacedCase& operator=(const PlacedCase&) = delete;
  const te_fl::bench::Case& work() const { return *case_; }
  te_fl::Status call(void* stream = nullptr) const;
  // Fills the plain outputs' and the codes' memory with ones, so that what a call leaves out shows.
  te_fl::Status poison() const;
  te_fl::Result<te_fl::Decision> resolve() const;

 private:
  PlacedCase() = default;
  te_fl::Status move_to_device(const te_fl_op_schema& schema);

  te_fl::OpId op_;
  te_fl::Device device_;
  std::unique_ptr<te_fl::bench::Case> case_;
  std::vector<void*> memory_;
};

// Copies within a device's memory, through the functions that the device provides; on the host by
// as many threads as its backends use.
class CopyMeter {
 public:
  static te_fl::Result<std::unique_ptr<CopyMeter>> make(const te_fl::Device& device);
  ~CopyMeter();
  CopyMeter(const CopyMeter&) = delete;
  CopyMeter& operator=(const CopyMeter&) = delete;
  // Bytes read plus written per second, of a few copies made now.
  te_fl::Result<double> bandwidth() const;
  int64_t bytes() const { return 2 * half_; }

 private:
  CopyMeter(const te_fl::Device& device, int64_t half) : device_(device), half_(half) {}
  te_fl::Device device_;
  int64_t half_;
  void* from_ = nullptr;
  void* to_ = nullptr;
};

struct Timing {
  double seconds = 0;       // of one call, median over the samples
  double spread = 0;        // interquartile range over the median
  double host_seconds = 0;  // of enqueueing one call by itself; on the host the same as `seconds`
  int calls = 0;            // per sample
  int in_graph = 0;         // calls in the graph that a sample launches; 0: no graph
  int samples = 0;
  double copy_bandwidth = 0;  // median of the copies made between the samples
};

// Bytes that calls in a row have to touch before they come back to the first, so that no cache
// serves them: four times the last-level cache of the host, 256 MiB on an accelerator.
int64_t cold_bytes(const te_fl::Device& device);

// Times calls that go round `sets`, for about `seconds` in all. Every sample lies between two
// synchronisations of the device; before each one a copy is measured, if `copy` is given. Where
// the device can capture and a call is short, the calls of a sample are launches of a graph that
// holds many, so that the time is the device's and not that of enqueueing.
te_fl::Result<Timing> time_calls(const te_fl::Device& device,
                                 const std::vector<std::unique_ptr<PlacedCase>>& sets,
                                 double seconds, const CopyMeter* copy);

double median(std::vector<double> values);

}  // namespace te_fl_tool
