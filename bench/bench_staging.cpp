// Times the overhead of running an op on host copies of a device's tensors. Compares a call
// with one input and one output of N bytes, whose implementation returns at once, with copying N
// bytes to pinned host memory and back by hand on the same stream. Alternates both; medians.
//   bench_staging [--device cuda:0]      (with TE_FL_PLUGIN_MODULES naming the plugin; default: the
//                                         far device of the tests, whose copies are memcpy)
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "support/dispatch_fixture.hpp"
#include "support/far_device.hpp"
#include "te_fl/te_fl.hpp"

namespace {

using te_fl::Device;
using te_fl::DType;
using te_fl::Status;
using te_fl::Tensor;
using te_fl::testing::SaveArgs;
using Clock = std::chrono::steady_clock;

Device device;

void must(const Status& status) {
  if (!status.ok()) te_fl::die(status);
}

template <class T>
T must(te_fl::Result<T> result) {
  must(result.status());
  return std::move(result).value();
}

template <class F>
double seconds(F&& f) {
  const auto start = Clock::now();
  f();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void staged(benchmark::State& state) {
  const int64_t bytes = state.range(0);
  te_fl::OpRegistry registry;
  te_fl::OpManager manager(registry);
  te_fl_op_desc d;
  d.op_name = "test::save_fwd";  // one input and one output
  d.impl_id = "default.nothing";
  d.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_STATIC_SUPPORT;
  d.device_types = uint64_t{1} << TE_FL_DEVICE_CPU;
  d.run = [](void*, const te_fl_context*, const void*) -> te_fl_status { return TE_FL_OK; };
  d.schema = &te_fl::testing::save_schema(true);
  must(registry.register_op(d));
  const te_fl::OpId op = must(registry.find("test::save_fwd"));
  const Tensor x = must(Tensor::zeros({bytes}, DType::kU8, device));
  const Tensor y = must(Tensor::zeros({bytes}, DType::kU8, device));
  SaveArgs args;
  args.x = x.c();
  args.y = y.c();
  const auto size = static_cast<size_t>(bytes);
  char* const buffer = static_cast<char*>(must(te_fl::devices::allocate_pinned(device, 2 * size)));
  const auto by_hand = [&] {
    must(te_fl::devices::copy(Device{}, buffer, device, x.raw_data(), size));
    must(te_fl::devices::synchronize(device));
    must(te_fl::devices::copy(device, y.raw_data(), Device{}, buffer + size, size));
    must(te_fl::devices::synchronize(device));
  };
  const auto call = [&] { must(manager.call(op, &args)); };
  call();
  by_hand();
  std::vector<double> calls, copies;
  for (auto _ : state) {
    calls.push_back(seconds(call));
    copies.push_back(seconds(by_hand));
    state.SetIterationTime(calls.back());
  }
  te_fl::devices::free_pinned(device, buffer);
  const double one = median(calls), other = median(copies);
  state.counters["call_us"] = one * 1e6;
  state.counters["copies_us"] = other * 1e6;
  state.counters["ratio"] = one / other;
  state.counters["GB/s"] = 2 * static_cast<double>(bytes) / one / 1e9;
}

BENCHMARK(staged)
    ->RangeMultiplier(8)
    ->Range(1 << 10, 1 << 28)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  static te_fl::testing::FarDevice far;
  if (argc == 3 && std::strcmp(argv[1], "--device") == 0) {
    te_fl::OpManager::instance();  // loads the plugins, which register devices
    device = must(te_fl::parse_device(argv[2]));
  } else if (argc == 1) {
    device = must(te_fl::devices::add(&far.desc));
  } else {
    benchmark::ReportUnrecognizedArguments(argc, argv);
    return 2;
  }
  must(te_fl::devices::find(device).status());
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
