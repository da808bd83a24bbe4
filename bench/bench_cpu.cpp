// Benchmarks every op of the catalogue on the CPU backend against the reference backend and against
// the machine's limits: copy bandwidth for memory-bound ops, direct oneDNN calls for matrix
// products. See bench/README.md.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <oneapi/dnnl/dnnl.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <thread>
#include <unordered_map>

#include "backends/cpu/cache_size.hpp"
#include "bench/cases/case.hpp"
#include "core/op/op_table.hpp"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

extern "C" const te_fl_plugin_header* te_fl_cpu_query(const te_fl_host_info*);
extern "C" const te_fl_plugin_header* te_fl_reference_query(const te_fl_host_info*);

namespace te_fl::bench {
namespace {

using Clock = std::chrono::steady_clock;

double measure_seconds(const std::function<void()>& f) {
  const auto start = Clock::now();
  f();
  return std::chrono::duration<double>(Clock::now() - start).count();
}
double best_seconds(int times, const std::function<void()>& f) {
  double best = measure_seconds(f);
  for (int i = 1; i < times; ++i) best = std::min(best, measure_seconds(f));
  return best;
}

int threads() {
  const char* set = std::getenv("TE_FL_NUM_THREADS");
  const int n = set != nullptr ? std::atoi(set) : 0;
  return n > 0 ? n : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

// Returns the total last-level cache available to the threads. They may run on several core
// complexes, each with its own cache; the C library reports the sum over the whole socket.
int64_t last_level_cache() {
  const int64_t one = cpu::last_level_cache_bytes();
  const int64_t socket = std::max<int64_t>(one, sysconf(_SC_LEVEL3_CACHE_SIZE));
  return std::min(one * threads(), socket);
}

// ---- copy bandwidth

void streaming_copy(char* to, const char* from, size_t bytes) {
#if defined(__SSE2__)
  for (size_t i = 0; i + 64 <= bytes; i += 64) {
    const auto* in = reinterpret_cast<const __m128i*>(from + i);
    auto* out = reinterpret_cast<__m128i*>(to + i);
    for (int j = 0; j < 4; ++j) _mm_stream_si128(out + j, _mm_loadu_si128(in + j));
  }
  _mm_sfence();
#else
  std::memcpy(to, from, bytes);
#endif
}

// Measures copy bandwidth: a copy on all threads, with the faster of memcpy and streaming stores,
// of four times the size of the last-level cache.
class Copy {
 public:
  Copy() : half_(2 * last_level_cache()), from_({half_}, TE_FL_U8), to_({half_}, TE_FL_U8) {
    const double streaming = best_seconds(5, [&] { run(&streaming_copy); });
    best_ = best_seconds(5, [&] { run(&plain); }) < streaming ? &plain : &streaming_copy;
  }
  // Measures one copy; returns bytes read plus bytes written per second.
  double bandwidth() {
    return 2.0 * static_cast<double>(half_) / measure_seconds([&] { run(best_); });
  }

 private:
  static void plain(char* to, const char* from, size_t bytes) { std::memcpy(to, from, bytes); }
  void run(void (*copy)(char*, const char*, size_t)) {
    const int64_t share = half_ / threads() / 4096 * 4096;
    std::vector<std::thread> workers;
    for (int t = 0; t < threads(); ++t) {
      workers.emplace_back([=, this] {
        copy(to_.data<char>() + t * share, from_.data<char>() + t * share,
             static_cast<size_t>(share));
      });
    }
    for (std::thread& w : workers) w.join();
  }
  int64_t half_;
  BenchTensor from_, to_;
  void (*best_)(char*, const char*, size_t) = nullptr;
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// ---- implementations

class Backend {
 public:
  explicit Backend(const te_fl_plugin_header* header) {
    te_fl_host_api host{};
    host.struct_size = sizeof host;
    host.setting = [](void*, const char* name) -> const char* { return std::getenv(name); };
    host_ = host;
    uint32_t n = 0;
    const te_fl_op_desc* const* list = nullptr;
    if (header->api->create(&host_, &instance_, nullptr) != TE_FL_OK ||
        header->api->ops(instance_, &n, &list, nullptr) != TE_FL_OK) {
      std::fprintf(stderr, "backend %s cannot be created\n", header->name);
      std::exit(1);
    }
    for (uint32_t i = 0; i < n; ++i) ops_[list[i]->op_name] = list[i];
  }
  // Prepares the op for call(). Returns "" on success, otherwise the reason why the op cannot run.
  std::string prepare(const std::string& op, const Case& c) {
    const auto found = ops_.find(op);
    if (found == ops_.end()) return "not implemented";
    desc_ = found->second;
    args_ = c.raw_args();
    ctx_ = te_fl_context{};
    ctx_.struct_size = sizeof ctx_;
    ctx_.device = {TE_FL_DEVICE_CPU, 0};
    ctx_.rng = &rng_;
    ctx_.errors = &sink_;
    text_.clear();
    if (desc_->supports != nullptr && desc_->supports(desc_->self, &ctx_, args_) != TE_FL_OK) {
      return text_;
    }
    size_t bytes = 0;
    if (desc_->workspace != nullptr &&
        desc_->workspace(desc_->self, &ctx_, args_, &bytes) != TE_FL_OK) {
      return text_;
    }
    if (bytes > 0) {
      workspace_ = std::make_unique<BenchTensor>(Shape{static_cast<int64_t>(bytes)}, TE_FL_U8);
      ctx_.workspace = workspace_->data<void>();
      ctx_.workspace_bytes = bytes;
    }
    return call();
  }
  std::string call() {
    return desc_->run(desc_->self, &ctx_, args_) == TE_FL_OK ? ""
           : text_.empty()                                   ? "failed"
                                                             : text_;
  }

 private:
  te_fl_host_api host_;
  void* instance_ = nullptr;
  std::map<std::string, const te_fl_op_desc*> ops_;
  const te_fl_op_desc* desc_ = nullptr;
  const void* args_ = nullptr;
  te_fl_rng rng_{.seed = 17};
  te_fl_context ctx_{};
  std::unique_ptr<BenchTensor> workspace_;
  std::string text_;
  te_fl_error_sink sink_{sizeof(te_fl_error_sink), 0, &text_, [](void* host, const char* text) {
                           *static_cast<std::string*>(host) += text;
                         }};
};

// ---- direct oneDNN calls on oneDNN's own threads

double direct_product(const Case::Product& p) {
  using dnnl::memory;
  const auto dtype = p.bf16 ? memory::data_type::bf16 : memory::data_type::f32;
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const memory::desc a({p.m, p.k}, dtype, memory::format_tag::ab);
  const memory::desc b({p.k, p.n}, dtype,
                       p.trans_b ? memory::format_tag::ba : memory::format_tag::ab);
  const memory::desc c({p.m, p.n}, dtype, memory::format_tag::ab);
#if DNNL_VERSION_MAJOR >= 3
  const dnnl::matmul::primitive_desc desc(engine, a, b, c);
#else
  const dnnl::matmul::primitive_desc desc(dnnl::matmul::desc(a, b, c), engine);
#endif
  dnnl::matmul matmul(desc);
  const int index = p.bf16 ? TE_FL_BF16 : TE_FL_F32;
  BenchTensor a_data({p.m, p.k}, index), b_data({p.k, p.n}, index), c_data({p.m, p.n}, index);
  const std::unordered_map<int, memory> args = {
      {DNNL_ARG_SRC, memory(a, engine, a_data.data<void>())},
      {DNNL_ARG_WEIGHTS, memory(b, engine, b_data.data<void>())},
      {DNNL_ARG_DST, memory(c, engine, c_data.data<void>())}};
  const auto run = [&] {
    matmul.execute(stream, args);
    stream.wait();
  };
  run();
  return best_seconds(7, run);
}

// ---- one row

struct Peers {
  Backend cpu{te_fl_cpu_query(nullptr)};
  Backend reference{te_fl_reference_query(nullptr)};
  Copy copy;
};

// Returns a number of rows, a multiple of `step`, with which the tensors take about `memory` bytes.
int64_t rows_for(const CaseSpec& spec, int64_t memory, int64_t step) {
  const int64_t per_row = std::max<int64_t>(1, spec.build(512)->memory / 512);
  return std::max<int64_t>(step, (memory / per_row + step) / step * step);
}

// Measures bytes per second with tensors that fit in half of the threads' L2 caches. Main memory is
// not accessed, so this rate is the limit that arithmetic sets.
double in_cache_bandwidth(Backend& backend, const CaseSpec& spec) {
  const int64_t second_level = std::max<int64_t>(256 << 10, sysconf(_SC_LEVEL2_CACHE_SIZE));
  const auto built = spec.build(rows_for(spec, threads() * second_level / 2, 128));
  const Case& c = *built;
  if (!backend.prepare(spec.op, c).empty()) return 0;
  const double once = best_seconds(10, [&] { backend.call(); });
  const double best =
      best_seconds(std::min(2000, static_cast<int>(0.05 / once)), [&] { backend.call(); });
  return static_cast<double>(c.bytes) / std::min(once, best);
}

// Returns the reference backend's time for the same work. That backend is compute-bound, so the
// time is scaled up from a small part of a large case.
double reference_seconds(Peers& peers, const CaseSpec& spec, int64_t rows, const Case& whole) {
  const bool arithmetic = !spec.memory_bound && whole.flops > 0;
  const auto built = spec.build(spec.memory_bound ? std::max<int64_t>(512, rows / 64)
                                : arithmetic      ? rows / 8
                                                  : rows);
  const Case& part = *built;
  if (!peers.reference.prepare(spec.op, part).empty()) return 0;
  const double seconds = best_seconds(whole.flops > 0 ? 1 : 2, [&] { peers.reference.call(); });
  const double work =
      whole.flops > 0 ? whole.flops / part.flops : static_cast<double>(whole.bytes) / part.bytes;
  return seconds * work;
}

void run_case(benchmark::State& state, Peers& peers, const CaseSpec& spec) {
  const int64_t rows =
      spec.memory_bound ? rows_for(spec, 4 * last_level_cache(), 512) : spec.fixed_rows;
  const auto built = spec.build(rows);
  const Case& c = *built;
  const std::string refusal = peers.cpu.prepare(spec.op, c);
  if (!refusal.empty()) return state.SkipWithError(refusal.c_str());
  double best = 1e9;
  // measures the copy bandwidth before every call, because the load by other programs changes
  std::vector<double> copies, ratios;
  for (auto _ : state) {
    const double copy = spec.memory_bound ? peers.copy.bandwidth() : 0;
    const double seconds = measure_seconds([&] { peers.cpu.call(); });
    state.SetIterationTime(seconds);
    best = std::min(best, seconds);
    copies.push_back(copy);
    ratios.push_back(static_cast<double>(c.bytes) / seconds / copy);
  }
  auto& out = state.counters;
  out["best_us"] = best * 1e6;
  if (spec.memory_bound) {
    out["GB_per_s"] = static_cast<double>(c.bytes) / best / 1e9;
    out["copy_GB_per_s"] = median(copies) / 1e9;
    out["of_copy"] = median(ratios);
    out["in_cache_GB_per_s"] = in_cache_bandwidth(peers.cpu, spec) / 1e9;
  } else if (c.flops > 0) {
    out["GFLOP_per_s"] = c.flops / best / 1e9;
    if (c.product.m > 0) out["of_onednn"] = direct_product(c.product) / best;
  }
  const double reference = reference_seconds(peers, spec, rows, c);
  if (reference > 0) out["times_reference"] = reference / best;
}

// Checks that every op of the catalogue has a benchmark case. Collectives are exempt: their speed
// depends on several ranks.
bool covers_catalogue(const std::vector<CaseSpec>& cases) {
  bool all = true;
  for (const te_fl_op_schema* schema : core::catalogue()) {
    if ((schema->flags & TE_FL_SCHEMA_COLLECTIVE) != 0) continue;
    const auto same = [&](const CaseSpec& spec) { return spec.op == schema->name; };
    if (std::none_of(cases.begin(), cases.end(), same)) {
      std::fprintf(stderr, "bench_cpu has no case for %s\n", schema->name);
      all = false;
    }
  }
  return all;
}

}  // namespace
}  // namespace te_fl::bench

int main(int argc, char** argv) {
  using namespace te_fl::bench;
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  const std::vector<CaseSpec>& cases = all_cases();
  if (!covers_catalogue(cases)) return 1;
  static Peers peers;
  benchmark::AddCustomContext("threads", std::to_string(threads()));
  benchmark::AddCustomContext("last_level_cache", std::to_string(last_level_cache()));
  for (const CaseSpec& spec : cases) {
    benchmark::RegisterBenchmark((spec.op + "/" + spec.variant).c_str(),
                                 [&spec](benchmark::State& state) { run_case(state, peers, spec); })
        ->Iterations(spec.memory_bound || spec.fixed_rows > 16 ? 10 : 1000)
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
