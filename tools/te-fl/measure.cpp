#include "measure.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <new>
#include <set>
#include <thread>

namespace te_fl_tool {
namespace {

namespace devices = te_fl::devices;
using te_fl::Device;
using te_fl::Result;
using te_fl::Status;
using te_fl::bench::BenchTensor;
using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Returns the tensors of arguments that are in host memory on every device.
std::set<const te_fl_tensor*> host_tensors(const te_fl_op_schema& schema, const void* args) {
  std::set<const te_fl_tensor*> found;
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    const bool on_host = (arg.flags & TE_FL_ARG_HOST) != 0;
    if (!on_host || arg.type != TE_FL_ARG_TENSOR) continue;
    const te_fl_tensor* tensor = nullptr;
    std::memcpy(&tensor, static_cast<const char*>(args) + arg.offset, sizeof tensor);
    found.insert(tensor);
  }
  return found;
}

unsigned host_threads() {
  const auto set = te_fl::environment::get("TE_FL_NUM_THREADS");
  const int asked = set.ok() ? std::atoi(set->c_str()) : 0;
  return asked > 0 ? static_cast<unsigned>(asked)
                   : std::max(1u, std::thread::hardware_concurrency());
}

double quantile(const std::vector<double>& sorted, double q) {
  return sorted[static_cast<size_t>(q * static_cast<double>(sorted.size() - 1) + 0.5)];
}

struct Sample {
  double seconds;
  double host_seconds;
};

// Makes calls that rotate through the sets of tensors.
class Calls {
 public:
  Calls(const Device& device, const std::vector<std::unique_ptr<PlacedCase>>& sets)
      : device_(device), sets_(sets) {
    if (device.is_host()) return;
    if (auto made = te_fl::Stream::create(device); made.ok()) stream_ = std::move(made).value();
  }
  Result<Sample> sample(int calls) {
    return timed(calls, [&] { return enqueue(calls); });
  }
  // Launches the graph `launches` times.
  Result<Sample> replay(int launches) {
    return timed(launches * in_graph_, [&]() -> Status {
      for (int i = 0; i < launches; ++i) TE_FL_RETURN_IF_ERROR(graph_.launch());
      return {};
    });
  }
  // Captures the calls; returns the number of calls in the graph, or 0 if the device or the op does
  // not support capture.
  int capture() {
    if (stream_.get() == nullptr) return 0;
    auto capture = te_fl::Capture::begin(device_, stream_.get());
    if (!capture.ok()) return 0;
    const int calls = std::max(20, static_cast<int>(sets_.size()));
    if (!enqueue(calls).ok()) return 0;
    auto graph = capture->end();
    if (!graph.ok()) return 0;
    graph_ = std::move(graph).value();
    return in_graph_ = calls;
  }

 private:
  Status enqueue(int calls) {
    for (int i = 0; i < calls; ++i) {
      TE_FL_RETURN_IF_ERROR(sets_[next_]->call(stream_.get()));
      next_ = (next_ + 1) % sets_.size();
    }
    return {};
  }
  template <class F>
  Result<Sample> timed(int calls, F&& f) {
    TE_FL_RETURN_IF_ERROR(devices::synchronize(device_, stream_.get()));
    const auto start = Clock::now();
    TE_FL_RETURN_IF_ERROR(f());
    const double enqueued = since(start);
    TE_FL_RETURN_IF_ERROR(devices::synchronize(device_, stream_.get()));
    return Sample{since(start) / calls, enqueued / calls};
  }

  Device device_;
  const std::vector<std::unique_ptr<PlacedCase>>& sets_;
  te_fl::Stream stream_;  // null on the host
  te_fl::Graph graph_;
  int in_graph_ = 0;
  size_t next_ = 0;
};

}  // namespace

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : quantile(values, 0.5);
}

int64_t cold_bytes(const Device& device) {
  if (!device.is_host()) return int64_t{256} << 20;
  // Each core complex has its own last-level cache, and the threads may run on several complexes.
  std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
  int64_t kib = 0;
  file >> kib;
  const int64_t one = kib > 0 ? kib << 10 : int64_t{32} << 20;
  const int64_t all = std::max<int64_t>(one, sysconf(_SC_LEVEL3_CACHE_SIZE));
  return 4 * std::min<int64_t>(one * host_threads(), all);
}

Result<std::unique_ptr<PlacedCase>> PlacedCase::make(const te_fl::bench::CaseSpec& spec,
                                                     const te_fl::bench::Shape& extents,
                                                     const Device& device) {
  auto& registry = te_fl::OpManager::instance().registry();
  std::unique_ptr<PlacedCase> made(new PlacedCase);
  made->device_ = device;
  TE_FL_ASSIGN_OR_RETURN(made->op_, registry.find(spec.op));
  try {
    made->case_ = spec.build(extents);
  } catch (const std::bad_alloc&) {
    return Status(te_fl::StatusCode::kOutOfMemory,
                  "the host has no memory for the tensors; give a smaller --shape");
  }
  if (!device.is_host()) TE_FL_RETURN_IF_ERROR(made->move_to_device(*registry.schema(made->op_)));
  return made;
}

Status PlacedCase::move_to_device(const te_fl_op_schema& schema) {
  const auto on_host = host_tensors(schema, case_->raw_args());
  for (BenchTensor& tensor : case_->tensors()) {
    te_fl_tensor& c = tensor.c();
    if (on_host.count(&c) != 0) continue;
    for (const BenchTensor::Part& part : tensor.parts()) {
      const auto bytes = static_cast<size_t>(part.bytes);
      TE_FL_ASSIGN_OR_RETURN(void* const there, devices::allocate(device_, bytes));
      memory_.push_back(there);
      TE_FL_RETURN_IF_ERROR(devices::copy(device_, there, Device(), *part.pointer, bytes));
      *part.pointer = there;
    }
    c.dl.device = device_.to_c();
    c.provider = device_.provider;
  }
  // finishes the copies before their source is freed
  TE_FL_RETURN_IF_ERROR(devices::synchronize(device_));
  for (BenchTensor& tensor : case_->tensors()) {
    if (on_host.count(&tensor.c()) == 0) tensor.drop_memory();
  }
  return {};
}

PlacedCase::~PlacedCase() {
  for (void* data : memory_) devices::free(device_, data);
}

Status PlacedCase::poison() const {
  const te_fl_op_schema& schema = *te_fl::OpManager::instance().registry().schema(op_);
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    const bool plain = arg.type == TE_FL_ARG_TENSOR && (arg.flags & TE_FL_ARG_HOST) == 0;
    if (!plain || arg.role != TE_FL_OUT) continue;
    const te_fl_tensor* output = nullptr;
    std::memcpy(&output, static_cast<const char*>(case_->raw_args()) + arg.offset, sizeof output);
    for (BenchTensor& tensor : case_->tensors()) {
      if (&tensor.c() != output || output->dl.strides != nullptr) continue;
      const auto bytes = static_cast<size_t>(tensor.bytes());
      TE_FL_RETURN_IF_ERROR(devices::fill(device_, tensor.c().dl.data, 0xff, bytes));
      if (output->quant == nullptr || output->quant->columnwise_data == nullptr) continue;
      TE_FL_RETURN_IF_ERROR(devices::fill(device_, output->quant->columnwise_data, 0xff, bytes));
    }
  }
  return devices::synchronize(device_);
}

Status PlacedCase::call(void* stream) const {
  te_fl::CallOptions options;
  options.stream = stream;
  options.rng = {.seed = 17};
  return te_fl::OpManager::instance().call(op_, case_->raw_args(), options);
}

Result<te_fl::Decision> PlacedCase::resolve() const {
  te_fl::CallOptions options;
  options.rng = {.seed = 17};
  return te_fl::OpManager::instance().resolve(op_, case_->raw_args(), options);
}

Result<std::unique_ptr<CopyMeter>> CopyMeter::make(const Device& device) {
  std::unique_ptr<CopyMeter> made(new CopyMeter(device, cold_bytes(device) / 2));
  const auto bytes = static_cast<size_t>(made->half_);
  TE_FL_ASSIGN_OR_RETURN(made->from_, devices::allocate(device, bytes));
  TE_FL_ASSIGN_OR_RETURN(made->to_, devices::allocate(device, bytes));
  TE_FL_RETURN_IF_ERROR(devices::fill(device, made->from_, 0x3c, bytes));
  TE_FL_RETURN_IF_ERROR(devices::fill(device, made->to_, 0x5a, bytes));
  // warms up: the first measurement is not representative
  TE_FL_RETURN_IF_ERROR(made->bandwidth().status());
  return made;
}

CopyMeter::~CopyMeter() {
  devices::free(device_, from_);
  devices::free(device_, to_);
}

Result<double> CopyMeter::bandwidth() const {
  const int times = device_.is_host() ? 1 : 8;
  TE_FL_RETURN_IF_ERROR(devices::synchronize(device_));
  const auto start = Clock::now();
  if (device_.is_host()) {
    const unsigned workers = host_threads();
    const int64_t share = half_ / workers / 4096 * 4096;
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < workers; ++t) {
      const int64_t at = static_cast<int64_t>(t) * share;
      threads.emplace_back([this, at, share] {
        (void)devices::copy(device_, static_cast<char*>(to_) + at, device_,
                            static_cast<const char*>(from_) + at, static_cast<size_t>(share));
      });
    }
    for (std::thread& t : threads) t.join();
    return 2.0 * static_cast<double>(share * workers) / since(start);
  }
  for (int i = 0; i < times; ++i) {
    TE_FL_RETURN_IF_ERROR(devices::copy(device_, to_, device_, from_, static_cast<size_t>(half_)));
  }
  TE_FL_RETURN_IF_ERROR(devices::synchronize(device_));
  return 2.0 * static_cast<double>(half_) * times / since(start);
}

Result<Timing> time_calls(const Device& device,
                          const std::vector<std::unique_ptr<PlacedCase>>& sets, double seconds,
                          const CopyMeter* copy) {
  constexpr int kSamples = 15;
  constexpr double kShort = 1e-3;  // longer calls hide the time of enqueueing
  Calls calls(device, sets);
  // The first calls make plans and touch memory. The next few calls determine how many fit in a
  // sample.
  TE_FL_RETURN_IF_ERROR(calls.sample(2).status());
  TE_FL_ASSIGN_OR_RETURN(Sample probe, calls.sample(3));
  Timing timing;
  timing.samples = kSamples;
  const double per_sample = seconds / kSamples;
  const auto fit = [&](double each) {
    return static_cast<int>(std::clamp(per_sample / each, 1.0, 2000.0));
  };
  timing.calls = fit(probe.seconds);
  int launches = 0;
  if (!device.is_host() && probe.seconds < kShort) {
    TE_FL_ASSIGN_OR_RETURN(probe, calls.sample(100));
    timing.in_graph = calls.capture();
    if (timing.in_graph > 0) {
      TE_FL_ASSIGN_OR_RETURN(const Sample once, calls.replay(1));
      launches = fit(once.seconds * timing.in_graph);
      timing.calls = launches * timing.in_graph;
    }
  }
  std::vector<double> times, host_times, copies;
  for (int i = 0; i < kSamples; ++i) {
    if (copy != nullptr) {
      TE_FL_ASSIGN_OR_RETURN(const double bandwidth, copy->bandwidth());
      copies.push_back(bandwidth);
    }
    TE_FL_ASSIGN_OR_RETURN(const Sample sample,
                           launches > 0 ? calls.replay(launches) : calls.sample(timing.calls));
    times.push_back(sample.seconds);
    host_times.push_back(launches > 0 ? probe.host_seconds : sample.host_seconds);
  }
  std::sort(times.begin(), times.end());
  timing.seconds = quantile(times, 0.5);
  timing.spread = (quantile(times, 0.75) - quantile(times, 0.25)) / timing.seconds;
  timing.host_seconds = device.is_host() ? timing.seconds : median(host_times);
  timing.copy_bandwidth = median(copies);
  return timing;
}

}  // namespace te_fl_tool
