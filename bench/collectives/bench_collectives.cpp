// Times a collective of te-fl against the same call of the library that its provider uses (Gloo on
// hosts, NCCL on NVIDIA GPUs), alternately and on the same memory. See bench/README.md.
//   tools/launch.py -n 4 -- build/release/bin/bench_collectives --json gloo.json
//   TE_FL_PLUGIN_MODULES=.../libte_fl_cuda.so build/release/bin/bench_collectives --device cuda
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "peer.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl::bench_collectives {
namespace {

using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// Returns the CPU time of all threads of this process, Gloo's threads included.
double cpu_us() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_nsec) / 1e3;
}

[[noreturn]] void end(const Status& why) {
  std::fprintf(stderr, "bench_collectives: %s\n", why.to_string().c_str());
  std::exit(1);
}
void check(const Status& status) {
  if (!status.ok()) end(status);
}
template <class T>
T value_or_exit(Result<T> result) {
  if (!result.ok()) end(result.status());
  return std::move(result).value();
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

struct Times {
  // Host time until the call returned, time until all of its work was done, and CPU time of this
  // process.
  double host_us = 0, whole_us = 0, cpu_us = 0;
};

Times middle(const std::vector<Times>& rounds) {
  const auto of = [&](double Times::*field) {
    std::vector<double> v;
    for (const Times& t : rounds) v.push_back(t.*field);
    return median(v);
  };
  return {of(&Times::host_us), of(&Times::whole_us), of(&Times::cpu_us)};
}

const char* name_of(Op op) {
  switch (op) {
    case Op::kAllReduce:
      return "all_reduce";
    case Op::kAllGather:
      return "all_gather";
    case Op::kReduceScatter:
      return "reduce_scatter";
    case Op::kAllToAll:
      return "all_to_all";
    case Op::kBroadcast:
      return "broadcast";
  }
  return "";
}

struct Options {
  std::string device = "cpu";
  std::string json;
  size_t least = 1024, most = size_t{64} << 20;
  int rounds = 15;
  size_t queued = 8;
};

struct Row {
  Op op;
  size_t bytes;
  int calls;
  Times te_fl, peer;
  double ratio, spread;  // of whole_us, te-fl over the peer library: median over the rounds, and
                         // interquartile range
};

class Bench {
 public:
  explicit Bench(Options options) : options_(std::move(options)) {
    job_ = value_or_exit(Job::from_environment());
    if (options_.device == "cuda") device_ = Device{TE_FL_DEVICE_CUDA, job_.local_rank, 0};
    store_ = job_.store_address.empty()
                 ? Store::in_process()  // a single rank
                 : value_or_exit(Store::open(job_.store_address, job_.rank, job_.size,
                                             std::chrono::milliseconds(60000)));
    CommOptions made;
    made.device = device_;
    made.rank = job_.rank;
    made.size = job_.size;
    made.store = store_;
    if (on_host()) made.provider = "gloo";
    comm_ = value_or_exit(Comm::create(made));
    std::string why;
    peer_ = on_host() ? make_gloo(store_, job_.rank, job_.size, why)
                      : make_nccl(store_, job_.rank, job_.size, job_.local_rank, why);
    if (peer_ == nullptr) end(Status(StatusCode::kUnsupported, why));
    if (!on_host()) stream_ = value_or_exit(Stream::create(device_));
    meet_ = value_or_exit(Tensor::zeros({1}, DType::kF32, device_));
  }

  void run() {
    for (const Op op :
         {Op::kAllReduce, Op::kAllGather, Op::kReduceScatter, Op::kAllToAll, Op::kBroadcast}) {
      if (!peer_->has(op)) continue;
      for (size_t bytes = options_.least; bytes <= options_.most; bytes *= 4)
        rows_.push_back(measure(op, bytes));
    }
    if (job_.rank == 0) print();
  }

 private:
  bool on_host() const { return device_.is_host(); }
  void wait() const {
    if (!on_host()) check(stream_.synchronize());
  }

  // Calls te-fl's collective once.
  void call(Op op, const Tensor& in, const Tensor& out) {
    CallOptions o;
    o.stream = stream_.get();
    const te_fl_communicator* const c = comm_.c();
    Status status;
    if (op == Op::kAllReduce) {
      status = ops::all_reduce({.input = in, .output = out, .comm = c}, o);
    } else if (op == Op::kAllGather) {
      status = ops::all_gather({.input = in, .output = out, .comm = c}, o);
    } else if (op == Op::kReduceScatter) {
      status = ops::reduce_scatter({.input = in, .output = out, .comm = c}, o);
    } else if (op == Op::kAllToAll) {
      status = ops::all_to_all({.input = in, .output = out, .comm = c}, o);
    } else {
      status = ops::broadcast({.data = out, .comm = c, .root = 0}, o);
    }
    check(status);
  }

  // Times one block. A small all_reduce of the peer library first makes all ranks begin at about
  // the same time.
  Times block(int calls, const std::function<void()>& one) {
    peer_->call(Op::kAllReduce, meet_.data<float>(), meet_.data<float>(), 1, stream_.get());
    wait();
    const double cpu = cpu_us();
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < calls; ++i) one();
    const double host = us_since(start);
    wait();
    return {host / calls, us_since(start) / calls, (cpu_us() - cpu) / calls};
  }

  Row measure(Op op, size_t bytes) {
    const auto n = static_cast<int64_t>(bytes / sizeof(float));
    const int64_t part = n / job_.size;
    const Tensor in =
        value_or_exit(Tensor::zeros({op == Op::kAllGather ? part : n}, DType::kF32, device_));
    const Tensor out =
        value_or_exit(Tensor::zeros({op == Op::kReduceScatter ? part : n}, DType::kF32, device_));
    const auto elements = static_cast<size_t>(n);
    const auto ours = [&] { call(op, in, out); };
    const auto theirs = [&] {
      peer_->call(op, in.data<float>(), out.data<float>(), elements, stream_.get());
    };
    // Number of calls in a block. It depends on the size alone, so it is the same on all ranks.
    // Small transfers get many calls; a device's queue must hold them all without blocking the
    // host. Large transfers get at least a few queued calls, as in nccl-tests, because a single
    // call would measure the host's latency as well as the bandwidth.
    const size_t least = on_host() ? 1 : options_.queued;
    const int calls = static_cast<int>(std::clamp<size_t>((size_t{4} << 20) / bytes, least, 100));
    for (const auto& one : {std::function<void()>(ours), std::function<void()>(theirs)})
      (void)block(std::min(calls, 10), one);
    std::vector<Times> times[2];
    for (int round = 0; round < options_.rounds; ++round) {
      for (int turn = 0; turn < 2; ++turn) {
        const int who = (round + turn) % 2;
        times[who].push_back(who == 0 ? block(calls, ours) : block(calls, theirs));
      }
    }
    std::vector<double> ratios;
    for (size_t i = 0; i < times[0].size(); ++i)
      ratios.push_back(times[0][i].whole_us / times[1][i].whole_us);
    std::sort(ratios.begin(), ratios.end());
    const double spread = ratios[ratios.size() * 3 / 4] - ratios[ratios.size() / 4];
    return {op, bytes, calls, middle(times[0]), middle(times[1]), median(ratios), spread};
  }

  static nlohmann::json to_json(const Times& t) {
    return {{"us", t.whole_us}, {"host_us", t.host_us}, {"cpu_us", t.cpu_us}};
  }

  void print() const {
    std::printf("%d rank(s) on %s, te-fl's '%s' beside %s, medians of %d rounds on rank 0\n",
                job_.size, to_string(device_).c_str(), comm_.provider().c_str(),
                peer_->name().c_str(), options_.rounds);
    std::printf("%-15s %10s %11s %11s %7s %7s %9s %9s %9s\n", "op", "bytes", "te-fl us", "peer us",
                "ratio", "spread", "+ us", "+ host us", "of CPU");
    nlohmann::json rows = nlohmann::json::array();
    for (const Row& r : rows_) {
      std::printf("%-15s %10zu %11.2f %11.2f %7.3f %7.3f %9.2f %9.2f %9.3f\n", name_of(r.op),
                  r.bytes, r.te_fl.whole_us, r.peer.whole_us, r.ratio, r.spread,
                  r.te_fl.whole_us - r.peer.whole_us, r.te_fl.host_us - r.peer.host_us,
                  r.te_fl.cpu_us / r.peer.cpu_us);
      rows.push_back({{"op", name_of(r.op)},
                      {"bytes", r.bytes},
                      {"calls", r.calls},
                      {"te_fl", to_json(r.te_fl)},
                      {"peer", to_json(r.peer)},
                      {"ratio", r.ratio},
                      {"spread", r.spread}});
    }
    if (options_.json.empty()) return;
    std::ofstream file(options_.json);
    file << nlohmann::json{{"ranks", job_.size},           {"device", to_string(device_)},
                           {"provider", comm_.provider()}, {"peer", peer_->name()},
                           {"rounds", options_.rounds},    {"rows", rows}}
                .dump(1)
         << "\n";
    if (!file.flush()) end(invalid_argument("--json " + options_.json + " cannot be written"));
  }

  Options options_;
  Job job_;
  Device device_;
  std::shared_ptr<Store> store_;
  Comm comm_;
  std::unique_ptr<Peer> peer_;
  Stream stream_;
  Tensor meet_;
  std::vector<Row> rows_;
};

int run(int argc, char** argv) {
  CLI::App app("Collectives of te-fl beside the same calls of Gloo or NCCL");
  Options o;
  app.add_option("--device", o.device, "where the tensors are: cpu (Gloo) or cuda (NCCL)")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--json", o.json, "file that rank 0 writes the rows to");
  app.add_option("--least", o.least, "bytes of the smallest tensor (1024); the next has 4 times")
      ->check(CLI::Range(1024, 1 << 30));
  app.add_option("--most", o.most, "bytes of the largest tensor (64 MiB)")
      ->check(CLI::Range(1024, 1 << 30));
  app.add_option("--rounds", o.rounds, "blocks of calls of each of the two (15)")
      ->check(CLI::Range(1, 10000));
  app.add_option("--queued", o.queued, "calls at least in a device's queue; 1: one at a time (8)")
      ->check(CLI::Range(1, 100));
  CLI11_PARSE(app, argc, argv);
  Bench bench(o);
  bench.run();
  return 0;
}

}  // namespace
}  // namespace te_fl::bench_collectives

int main(int argc, char** argv) {
  try {
    return te_fl::bench_collectives::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_collectives: %s\n", e.what());
    return 1;
  }
}
