// Times calls of an op, and measures the two rates of a device that bound them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/cases/case.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool {

// A case with its tensors in a device's memory, except those that the op requires on the host.
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
  // Sets all bits of the outputs (of quantised outputs: of their data), so that elements that a
  // call fails to write are noticed.
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

// Copies within a device's memory with the device's own functions; on the host with as many threads
// as the backends use.
class CopyMeter {
 public:
  static te_fl::Result<std::unique_ptr<CopyMeter>> make(const te_fl::Device& device);
  ~CopyMeter();
  CopyMeter(const CopyMeter&) = delete;
  CopyMeter& operator=(const CopyMeter&) = delete;
  // Makes a few copies; returns bytes read plus written per second.
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
  double seconds = 0;       // seconds per call, median over the samples
  double spread = 0;        // interquartile range divided by the median
  double host_seconds = 0;  // host seconds to enqueue a single call; equal to `seconds` on the host
  int calls = 0;            // calls per sample
  int in_graph = 0;         // calls in the graph that a sample launches; 0: no graph
  int samples = 0;
  double copy_bandwidth = 0;  // median over the copies made between the samples
};

// Returns the bytes that successive calls must touch before they reuse the first tensors, so that
// no cache holds these: four times the host's last-level cache, 256 MiB on an accelerator.
int64_t cold_bytes(const te_fl::Device& device);

// Times calls that rotate through `sets`, for about `seconds` in total. The device is synchronised
// before and after each sample; if `copy` is given, a copy is measured before each. If the device
// can capture and calls are short, a sample launches a graph of many calls, so that the time is the
// device's and excludes enqueueing.
te_fl::Result<Timing> time_calls(const te_fl::Device& device,
                                 const std::vector<std::unique_ptr<PlacedCase>>& sets,
                                 double seconds, const CopyMeter* copy);

double median(std::vector<double> values);

}  // namespace te_fl_tool
