// The Gloo plugin called through its C table, with one process per rank. Checks results against
// sums in double, and errors when a rank dies, hangs, or calls something else.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <stdexcept>
#include <thread>
#include <type_traits>

#include "support/temp_folder.hpp"
#include "te_fl/comm.hpp"
#include "te_fl/numeric.hpp"
#include "te_fl/ops/collective.h"
#include "te_fl/ops/moe.h"
#include "te_fl/plugin.h"

namespace te_fl {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// The plugin of this build, loaded in this process.
struct Plugin {
  const te_fl_plugin_api* api = nullptr;
  void* instance = nullptr;
  const te_fl_comm_desc* provider = nullptr;
  std::map<std::string, const te_fl_op_desc*> ops;
  te_fl_host_api host{};
  Plugin() {
    void* library = dlopen(TE_FL_GLOO_PLUGIN, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    const auto query =
        reinterpret_cast<te_fl_plugin_query_fn>(dlsym(library, TE_FL_PLUGIN_QUERY_SYMBOL));
    te_fl_host_info info{sizeof info, TE_FL_ABI_MAJOR, TE_FL_ABI_MINOR, 0, "0"};
    api = query(&info)->api;
    host.struct_size = sizeof host;
    uint32_t count = 0;
    const te_fl_comm_desc* const* comms = nullptr;
    const te_fl_op_desc* const* list = nullptr;
    if (api->create(&host, &instance, nullptr) != TE_FL_OK ||
        api->comms(instance, &count, &comms, nullptr) != TE_FL_OK || count != 1)
      throw std::runtime_error("the plugin does not start");
    provider = comms[0];
    (void)api->ops(instance, &count, &list, nullptr);
    for (uint32_t i = 0; i < count; ++i) ops[list[i]->op_name] = list[i];
  }
};

// Exposes a te_fl::Store through the C interface that a provider gets.
struct CStore {
  std::shared_ptr<Store> store;
  te_fl_comm_store c;
  explicit CStore(std::shared_ptr<Store> s) : store(std::move(s)) {
    c.host = this;
    c.set = [](void* host, const char* key, const void* value, size_t bytes,
               const te_fl_error_sink*) {
      return static_cast<CStore*>(host)
          ->store->set(key, std::string_view(static_cast<const char*>(value), bytes))
          .to_c();
    };
    c.get = [](void* host, const char* key, uint32_t timeout_ms, void* value, size_t capacity,
               size_t* bytes, const te_fl_error_sink*) -> te_fl_status {
      auto got = static_cast<CStore*>(host)->store->get(key, std::chrono::milliseconds(timeout_ms));
      if (!got.ok()) return got.status().to_c();
      *bytes = got->size();
      if (got->size() > capacity) return TE_FL_INVALID_ARGUMENT;
      std::memcpy(value, got->data(), got->size());
      return TE_FL_OK;
    };
  }
};

struct Answer {
  te_fl_status status = TE_FL_OK;
  std::string text;
  bool failed_with(std::initializer_list<const char*> parts) const {
    bool all = TE_FL_STATUS_CODE(status) == TE_FL_COMM_FAILED;
    for (const char* part : parts) all = all && text.find(part) != std::string::npos;
    if (!all) std::cerr << "status " << status << ": " << text << "\n";
    return all;
  }
};

te_fl_error_sink make_sink(Answer& answer) {
  return {sizeof(te_fl_error_sink), 0, &answer.text,
          [](void* host, const char* text) { *static_cast<std::string*>(host) += text; }};
}

struct Rank {
  Plugin plugin;
  CStore face;
  te_fl_communicator comm;
  Answer made;
  Rank(std::shared_ptr<Store> store, int rank, int size, uint32_t timeout_ms)
      : face(std::move(store)) {
    te_fl_comm_config config;
    config.rank = comm.rank = rank;
    config.size = comm.size = size;
    config.name = "world";
    config.store = &face.c;
    config.timeout_ms = timeout_ms;
    const te_fl_error_sink sink = make_sink(made);
    made.status = plugin.provider->api->create(plugin.provider->self, &config, &comm.self, &sink);
  }
  ~Rank() {
    if (comm.self != nullptr) plugin.provider->api->destroy(comm.self);
    plugin.api->destroy(plugin.instance);
  }

  template <class Args>
  Answer call(const char* op, Args args) {
    args.comm = &comm;
    Answer answer;
    const te_fl_error_sink sink = make_sink(answer);
    te_fl_context ctx{};
    ctx.struct_size = sizeof ctx;
    ctx.errors = &sink;
    const te_fl_op_desc& desc = *plugin.ops.at(op);
    answer.status = desc.supports(desc.self, &ctx, &args);
    if (answer.status != TE_FL_OK) return answer;
    std::vector<char> scratch;
    if (desc.workspace != nullptr) {
      size_t bytes = 0;
      (void)desc.workspace(desc.self, &ctx, &args, &bytes);
      scratch.resize(bytes);
      ctx.workspace = scratch.data();
      ctx.workspace_bytes = bytes;
    }
    answer.status = desc.run(desc.self, &ctx, &args);
    return answer;
  }
};

// A std::vector, and a te_fl_tensor that uses its memory.
template <class T>
struct Values {
  std::vector<T> v;
  int64_t shape[1];
  te_fl_tensor t{};
  explicit Values(size_t n) : v(n) { view(v.data(), n); }
  Values(T* data, size_t n) { view(data, n); }
  void view(T* data, size_t n) {
    shape[0] = static_cast<int64_t>(n);
    t.struct_size = sizeof t;
    t.dl.data = data;
    t.dl.ndim = 1;
    t.dl.shape = shape;
    const uint8_t code = std::is_integral_v<T> ? 0 : std::is_same_v<T, numeric::bfloat16> ? 4 : 2;
    t.dl.dtype = {code, static_cast<uint8_t>(sizeof(T) * 8), 1};
  }
};

#define CHECK(condition)                                                                      \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      std::cerr << __FILE__ << ":" << __LINE__ << ": rank " << r.comm.rank << ": " #condition \
                << "\n";                                                                      \
      return 1;                                                                               \
    }                                                                                         \
  } while (false)

// Runs f in one process per rank; returns the exit codes.
std::vector<int> as_processes(int size, const std::function<int(Rank&)>& f,
                              uint32_t timeout_ms = 20000) {
  const test::TempFolder folder;
  const std::string address = "file:" + folder.path() + "/store";
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    children.push_back(::fork());
    if (children.back() != 0) continue;
    ::alarm(60);
    auto store = Store::open(address, rank, size, 20s);
    int code = 99;
    if (store.ok()) {
      Rank r(*store, rank, size, timeout_ms);
      if (r.made.status != TE_FL_OK) std::cerr << r.made.text << "\n";
      code = r.made.status == TE_FL_OK ? f(r) : 98;
    }
    ::_exit(code);
  }
  std::vector<int> codes;
  for (const pid_t child : children) {
    int state = 0;
    ::waitpid(child, &state, 0);
    codes.push_back(WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state));
  }
  return codes;
}

// ---- results

template <class T>
T value(int rank, size_t i) {  // element i of the input of `rank`; sums of these values are exact
                               // in every dtype
  const int x = static_cast<int>((i * 7 + static_cast<size_t>(rank) * 5) % 16);
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<T>(x);
  } else {
    return numeric::from_float<T>(static_cast<float>(x));
  }
}
template <class T>
double number(T x) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<double>(x);
  } else {
    return numeric::to_double(x);
  }
}
double reduced(int reduction, int size, const std::function<double(int)>& x) {
  double all = x(0);
  for (int r = 1; r < size; ++r)
    all = reduction == TE_FL_REDUCTION_MAX ? std::max(all, x(r)) : all + x(r);
  return reduction == TE_FL_REDUCTION_AVG ? all / size : all;
}
// Returns true if `got` equals the exact sum `wanted`, rounded once to T.
template <class T>
bool close(T got, double wanted) {
  if constexpr (std::is_integral_v<T>) {
    return number(got) == wanted;
  } else {
    return number(got) == number(numeric::from_double<T>(wanted));
  }
}

template <class T>
int reductions(Rank& r, size_t n, int reduction, bool in_place) {
  const int size = r.comm.size;
  const auto ranks = static_cast<size_t>(size);
  const auto mine = static_cast<size_t>(r.comm.rank);
  Values<T> in(n), out(n);
  for (size_t i = 0; i < n; ++i) in.v[i] = value<T>(r.comm.rank, i);
  te_fl_all_reduce_args all;
  all.input = &in.t;
  all.output = in_place ? &in.t : &out.t;
  all.reduction = reduction;
  CHECK(r.call("all_reduce", all).status == TE_FL_OK);
  const auto& got = in_place ? in.v : out.v;
  for (size_t i = 0; i < n; ++i)
    CHECK(close(got[i], reduced(reduction, size, [&](int p) { return number(value<T>(p, i)); })));

  Values<T> whole(n * ranks), part(n);
  for (size_t i = 0; i < n * ranks; ++i) whole.v[i] = value<T>(r.comm.rank, i);
  Values<T> own(whole.v.data() + mine * n, n);
  te_fl_reduce_scatter_args scatter;
  scatter.input = &whole.t;
  scatter.output = in_place ? &own.t : &part.t;
  scatter.reduction = reduction;
  CHECK(r.call("reduce_scatter", scatter).status == TE_FL_OK);
  const T* at = in_place ? whole.v.data() + mine * n : part.v.data();
  for (size_t i = 0; i < n; ++i) {
    CHECK(close(
        at[i], reduced(reduction, size, [&](int p) { return number(value<T>(p, mine * n + i)); })));
  }
  return 0;
}

template <class T>
int all_reductions(Rank& r) {
  for (const size_t n : {0, 1, 3, 1001, sizeof(T) == 4 ? 70000 : 515}) {
    for (const int reduction : {TE_FL_REDUCTION_SUM, TE_FL_REDUCTION_MAX, TE_FL_REDUCTION_AVG}) {
      if (std::is_integral_v<T> && reduction == TE_FL_REDUCTION_AVG) continue;
      for (const bool in_place : {false, true})
        CHECK(reductions<T>(r, n, reduction, in_place) == 0);
    }
  }
  return 0;
}

int copies(Rank& r, size_t n) {
  const int size = r.comm.size, me = r.comm.rank;
  const auto ranks = static_cast<size_t>(size);
  const auto at = [](int from, int to, size_t i) {
    return static_cast<uint8_t>(static_cast<size_t>(from * 50 + to * 10) + i);
  };
  Values<uint8_t> in(n * ranks), out(n * ranks);
  for (int to = 0; to < size; ++to)
    for (size_t i = 0; i < n; ++i) in.v[static_cast<size_t>(to) * n + i] = at(me, to, i);
  te_fl_all_to_all_args a2a;
  a2a.input = &in.t;
  a2a.output = &out.t;
  CHECK(r.call("all_to_all", a2a).status == TE_FL_OK);
  for (int from = 0; from < size; ++from)
    for (size_t i = 0; i < n; ++i)
      CHECK(out.v[static_cast<size_t>(from) * n + i] == at(from, me, i));

  for (const bool in_place : {false, true}) {
    Values<uint8_t> all(n * ranks), mine(n);
    Values<uint8_t> own(all.v.data() + static_cast<size_t>(me) * n, n);
    uint8_t* const source = in_place ? all.v.data() + static_cast<size_t>(me) * n : mine.v.data();
    for (size_t i = 0; i < n; ++i) source[i] = at(me, 0, i);
    te_fl_all_gather_args gather;
    gather.input = in_place ? &own.t : &mine.t;
    gather.output = &all.t;
    CHECK(r.call("all_gather", gather).status == TE_FL_OK);
    for (int from = 0; from < size; ++from)
      for (size_t i = 0; i < n; ++i)
        CHECK(all.v[static_cast<size_t>(from) * n + i] == at(from, 0, i));
  }

  for (int root = 0; root < size; ++root) {
    Values<uint8_t> data(n);
    for (size_t i = 0; i < n; ++i) data.v[i] = at(me, 3, i);
    te_fl_broadcast_args cast;
    cast.data = &data.t;
    cast.root = root;
    CHECK(r.call("broadcast", cast).status == TE_FL_OK);
    for (size_t i = 0; i < n; ++i) CHECK(data.v[i] == at(root, 3, i));
  }
  return 0;
}

// Rank f sends f + t rows of 3 bytes to rank t, and none if f is t + 1.
int rows(Rank& r) {
  const int size = r.comm.size, me = r.comm.rank;
  const auto count = [](int from, int to) { return from == to + 1 ? 0 : from + to; };
  std::vector<int64_t> to, from;
  std::vector<uint8_t> sent, wanted;
  for (int p = 0; p < size; ++p) {
    to.push_back(count(me, p));
    from.push_back(count(p, me));
    sent.insert(sent.end(), static_cast<size_t>(3 * to.back()), static_cast<uint8_t>(me * 16 + p));
    wanted.insert(wanted.end(), static_cast<size_t>(3 * from.back()),
                  static_cast<uint8_t>(p * 16 + me));
  }
  Values<uint8_t> in(sent.size()), out(wanted.size());
  in.v = sent;
  in.t.dl.data = in.v.data();
  int64_t in_shape[] = {static_cast<int64_t>(sent.size() / 3), 3};
  int64_t out_shape[] = {static_cast<int64_t>(wanted.size() / 3), 3};
  in.t.dl.shape = in_shape;
  out.t.dl.shape = out_shape;
  in.t.dl.ndim = out.t.dl.ndim = 2;
  te_fl_all_to_all_v_args args;
  args.input = &in.t;
  args.output = &out.t;
  args.input_rows = to.data();
  args.output_rows = from.data();
  args.input_rows_count = args.output_rows_count = size;
  CHECK(r.call("all_to_all_v", args).status == TE_FL_OK);
  CHECK(out.v == wanted);
  return 0;
}

// moe_dispatch of rows whose bytes say their sender and expert, with two experts on each rank, and
// moe_combine, which must bring them back.
int rows_of_experts(Rank& r) {
  constexpr int kExperts = 2;
  const int size = r.comm.size, me = r.comm.rank;
  const auto count = [](int from, int expert) {
    return static_cast<int64_t>(from * 3 + expert * 2) % 4;
  };
  std::vector<int64_t> sent, received;
  Values<uint8_t> in(0), out(0), back(0);
  const auto put = [&](std::vector<uint8_t>& to, int from, int expert) {
    to.insert(to.end(), static_cast<size_t>(3 * count(from, expert)),
              static_cast<uint8_t>(from * 16 + expert));
  };
  std::vector<uint8_t> wanted;
  for (int e = 0; e < size * kExperts; ++e) {
    sent.push_back(count(me, e));
    received.push_back(count(e / kExperts, me * kExperts + e % kExperts));
    put(in.v, me, e);
  }
  for (int e = me * kExperts; e < (me + 1) * kExperts; ++e) {
    for (int from = 0; from < size; ++from) put(wanted, from, e);
  }
  out.v.resize(wanted.size());
  back.v.resize(in.v.size());
  int64_t shapes[3][2];
  int i = 0;
  for (Values<uint8_t>* v : {&in, &out, &back}) {
    v->t.dl.data = v->v.data();
    shapes[i][0] = static_cast<int64_t>(v->v.size() / 3);
    shapes[i][1] = 3;
    v->t.dl.shape = shapes[i++];
    v->t.dl.ndim = 2;
  }
  te_fl_moe_transfer_args args;
  args.input = &in.t;
  args.output = &out.t;
  args.input_rows = sent.data();
  args.output_rows = received.data();
  args.input_rows_count = args.output_rows_count = size * kExperts;
  CHECK(r.call("moe_dispatch", args).status == TE_FL_OK);
  CHECK(out.v == wanted);
  args.input = &out.t;
  args.output = &back.t;
  std::swap(args.input_rows, args.output_rows);
  CHECK(r.call("moe_combine", args).status == TE_FL_OK);
  CHECK(back.v == in.v);
  return 0;
}

// Every rank sends to the next before it receives; for large tensors this deadlocks outside of a
// group.
int ring(Rank& r) {
  const int size = r.comm.size, me = r.comm.rank;
  if (size == 1) return 0;
  constexpr size_t kLarge = 1 << 20;
  Values<int32_t> out(kLarge), in(kLarge);
  for (size_t i = 0; i < kLarge; ++i) out.v[i] = me + static_cast<int>(i);
  te_fl_send_args send;
  send.input = &out.t;
  send.peer = (me + 1) % size;
  te_fl_recv_args recv;
  recv.output = &in.t;
  recv.peer = (me + size - 1) % size;
  const te_fl_comm_api& api = *r.plugin.provider->api;
  CHECK(api.group_start(r.plugin.provider->self, nullptr) == TE_FL_OK);
  CHECK(r.call("send", send).status == TE_FL_OK);
  CHECK(r.call("recv", recv).status == TE_FL_OK);
  CHECK(api.group_end(r.plugin.provider->self, nullptr) == TE_FL_OK);
  for (size_t i = 0; i < kLarge; ++i) CHECK(in.v[i] == recv.peer + static_cast<int>(i));
  return 0;
}

TEST(Gloo, EveryOpOfEveryRank) {
  for (const int size : {1, 3, 4}) {
    const auto codes = as_processes(size, [](Rank& r) {
      CHECK(all_reductions<float>(r) == 0);
      CHECK(all_reductions<numeric::bfloat16>(r) == 0);
      if (r.comm.size == 3) {
        CHECK(all_reductions<double>(r) == 0);
        CHECK(all_reductions<numeric::half>(r) == 0);
        CHECK(all_reductions<int32_t>(r) == 0);
        CHECK(all_reductions<int64_t>(r) == 0);
      }
      for (const size_t n : {0, 1, 7, 100000}) CHECK(copies(r, n) == 0);
      CHECK(rows(r) == 0);
      CHECK(rows_of_experts(r) == 0);
      CHECK(ring(r) == 0);
      CHECK(r.call("barrier", te_fl_barrier_args{}).status == TE_FL_OK);
      return 0;
    });
    EXPECT_EQ(codes, std::vector<int>(static_cast<size_t>(size), 0)) << size << " ranks";
  }
}

// Sums that round have the same bits on every rank and in a second run; a NaN stays in a maximum;
// FP16 is summed in F32, so that no intermediate sum overflows.
template <class T>
int rounded(Rank& r) {
  constexpr size_t kCount = 10007;
  Values<T> in(kCount), first(kCount), second(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    in.v[i] = numeric::from_double<T>(std::sin(static_cast<double>(i + 1) * (r.comm.rank + 1)));
  }
  te_fl_all_reduce_args all;
  all.input = &in.t;
  all.output = &first.t;
  CHECK(r.call("all_reduce", all).status == TE_FL_OK);
  all.output = &second.t;
  CHECK(r.call("all_reduce", all).status == TE_FL_OK);
  const std::string bits(reinterpret_cast<const char*>(first.v.data()), kCount * sizeof(T));
  CHECK(std::memcmp(bits.data(), second.v.data(), bits.size()) == 0);
  const std::string key = "bits" + std::to_string(sizeof(T));
  CHECK(r.face.store->set(key, bits).ok());  // set() fails if another rank has set a different
                                             // value for the key
  in.v[5] = numeric::from_float<T>(r.comm.rank == 1 ? NAN : 1.0f);
  all.reduction = TE_FL_REDUCTION_MAX;
  CHECK(r.call("all_reduce", all).status == TE_FL_OK);
  CHECK(std::isnan(number(second.v[5])));
  CHECK(!std::isnan(number(second.v[6])));
  return 0;
}

TEST(Gloo, SameBitsOnEveryRank) {
  const auto codes = as_processes(4, [](Rank& r) {
    CHECK(rounded<float>(r) == 0);
    CHECK(rounded<double>(r) == 0);
    CHECK(rounded<numeric::half>(r) == 0);
    Values<numeric::half> large(3);
    for (auto& x : large.v) x = numeric::from_float<numeric::half>(60000.0f);
    te_fl_all_reduce_args mean;
    mean.input = mean.output = &large.t;
    mean.reduction = TE_FL_REDUCTION_AVG;
    CHECK(r.call("all_reduce", mean).status == TE_FL_OK);
    for (const auto x : large.v) CHECK(number(x) == 60000.0);
    return 0;
  });
  EXPECT_EQ(codes, std::vector<int>(4, 0));
}

// ---- errors

Answer reduce_some(Rank& r, size_t n) {
  Values<float> x(n);
  te_fl_all_reduce_args all;
  all.input = all.output = &x.t;
  return r.call("all_reduce", all);
}

// Calls collectives until one fails, then aborts, as the host does.
Answer until_it_fails(Rank& r) {
  Answer answer;
  while (answer.status == TE_FL_OK) answer = reduce_some(r, 100000);
  r.plugin.provider->api->abort(r.comm.self);
  return answer;
}

TEST(Gloo, KilledRankIsNamedByTheOthersWithinASecond) {
  const auto codes = as_processes(4, [](Rank& r) {
    for (int i = 0; i < 5; ++i) CHECK(reduce_some(r, 100000).status == TE_FL_OK);
    if (r.comm.rank == 2) ::raise(SIGKILL);
    const auto start = Clock::now();
    const Answer answer = until_it_fails(r);
    CHECK(ms_since(start) < 1000);
    CHECK(answer.failed_with({"all_reduce of communicator 'world'", "rank 2 did not answer"}));
    CHECK(reduce_some(r, 1).failed_with({"world"}));
    Answer state;
    const te_fl_error_sink sink = make_sink(state);
    state.status = r.plugin.provider->api->async_error(r.comm.self, &sink);
    CHECK(state.failed_with({"world"}));
    return 0;
  });
  EXPECT_EQ(codes, (std::vector<int>{0, 0, 128 + SIGKILL, 0}));
}

TEST(Gloo, HungRankIsATimeOut) {
  const auto codes = as_processes(
      3,
      [](Rank& r) {
        if (r.comm.rank == 1) {
          std::this_thread::sleep_for(1500ms);
          return 0;
        }
        const auto start = Clock::now();
        const Answer answer = until_it_fails(r);
        CHECK(ms_since(start) < 1400);
        CHECK(answer.failed_with({"Timed out", "rank 1 did not answer"}));
        return 0;
      },
      300);
  EXPECT_EQ(codes, std::vector<int>(3, 0));
}

TEST(Gloo, AbortEndsWhatWaits) {
  const auto codes = as_processes(2, [](Rank& r) {
    if (r.comm.rank == 1) {
      const auto start = Clock::now();
      // Rank 0 has aborted and thereby closed its connections.
      CHECK(until_it_fails(r).failed_with({"rank 0 did not answer"}));
      CHECK(ms_since(start) < 2000);
      return 0;
    }
    std::thread aborting([&] {
      std::this_thread::sleep_for(100ms);
      r.plugin.provider->api->abort(r.comm.self);
    });
    Values<float> x(3);
    te_fl_recv_args recv;
    recv.output = &x.t;
    recv.peer = 1;
    const auto start = Clock::now();
    const Answer answer = r.call("recv", recv);
    aborting.join();
    CHECK(ms_since(start) < 1000);
    CHECK(answer.failed_with({"aborted"}));
    CHECK(reduce_some(r, 1).failed_with({"aborted"}));
    return 0;
  });
  EXPECT_EQ(codes, std::vector<int>(2, 0));
}

// Ranks whose calls differ in size or op never exchange data: both time out, and nothing is written
// out of bounds.
TEST(Gloo, OtherSizesAndOpsNeverMeet) {
  const auto codes = as_processes(
      2,
      [](Rank& r) {
        CHECK(reduce_some(r, r.comm.rank == 0 ? 1000 : 1001).failed_with({"did not answer"}));
        return 0;
      },
      200);
  EXPECT_EQ(codes, std::vector<int>(2, 0));
  const auto sizes = as_processes(
      2,
      [](Rank& r) {
        Values<float> x(r.comm.rank == 0 ? 100 : 10);
        te_fl_send_args send;
        te_fl_recv_args recv;
        send.input = recv.output = &x.t;
        send.peer = recv.peer = 1 - r.comm.rank;
        const Answer answer = r.comm.rank == 0 ? r.call("send", send) : r.call("recv", recv);
        CHECK(answer.failed_with({"did not answer"}));
        return 0;
      },
      200);
  EXPECT_EQ(sizes, std::vector<int>(2, 0));
}

template <class T>
Answer reduce_as(Rank& r, size_t n, int reduction) {
  Values<T> in(n), out(n);
  te_fl_all_reduce_args args;
  args.input = &in.t;
  args.output = &out.t;
  args.reduction = reduction;
  return r.call("all_reduce", args);
}

template <class T>
Answer scatter_as(Rank& r, size_t n, int reduction) {
  Values<T> in(n * static_cast<size_t>(r.comm.size)), out(n);
  te_fl_reduce_scatter_args args;
  args.input = &in.t;
  args.output = &out.t;
  args.reduction = reduction;
  return r.call("reduce_scatter", args);
}

template <class T>
Answer gather_as(Rank& r) {
  Values<T> in(8), out(8 * static_cast<size_t>(r.comm.size));
  te_fl_all_gather_args args;
  args.input = &in.t;
  args.output = &out.t;
  return r.call("all_gather", args);
}

template <class T>
Answer spread_as(Rank& r) {
  Values<T> in(8), out(8);
  te_fl_all_to_all_args args;
  args.input = &in.t;
  args.output = &out.t;
  return r.call("all_to_all", args);
}

Answer broadcast_from(Rank& r, size_t n, int root) {
  Values<float> data(n);
  te_fl_broadcast_args args;
  args.data = &data.t;
  args.root = root;
  return r.call("broadcast", args);
}

// Ranks whose calls agree in op and bytes but differ in reduction, root or dtype fail with each of
// Gloo's algorithms: ring, recursive halving, single exchange.
TEST(Gloo, OtherReductionsRootsAndTypesNeverMeet) {
  using numeric::bfloat16;
  const std::vector<std::function<Answer(Rank&, bool)>> calls = {
      [](Rank& r, bool other) { return reduce_as<float>(r, 100, other ? 1 : 0); },
      [](Rank& r, bool other) { return reduce_as<int64_t>(r, 100, other ? 1 : 0); },
      [](Rank& r, bool other) { return reduce_as<bfloat16>(r, 100, other ? 2 : 0); },
      [](Rank& r, bool other) { return scatter_as<float>(r, 100, other ? 2 : 0); },
      [](Rank& r, bool other) { return scatter_as<bfloat16>(r, 100, other ? 1 : 2); },
      [](Rank& r, bool other) { return broadcast_from(r, 10, other ? 1 : 0); },
      [](Rank& r, bool other) { return broadcast_from(r, 1 << 20, other ? 1 : 0); },
      [](Rank& r, bool other) { return other ? gather_as<float>(r) : gather_as<int32_t>(r); },
      [](Rank& r, bool other) { return other ? spread_as<float>(r) : spread_as<int32_t>(r); },
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    const auto codes = as_processes(
        2,
        [&](Rank& r) {
          CHECK(calls[i](r, false).status == TE_FL_OK);
          CHECK(calls[i](r, r.comm.rank == 1).failed_with({"did not answer"}));
          return 0;
        },
        200);
    EXPECT_EQ(codes, std::vector<int>(2, 0)) << "call " << i;
  }
}

// A rank's data arrives even if the rank destroys its communicator right after the call.
TEST(Gloo, RankMayLeaveAfterItsLastOp) {
  const auto codes = as_processes(2, [](Rank& r) {
    Values<int32_t> x(1 << 20);
    if (r.comm.rank == 0) {
      for (size_t i = 0; i < x.v.size(); ++i) x.v[i] = static_cast<int32_t>(i);
      te_fl_send_args send;
      send.input = &x.t;
      send.peer = 1;
      CHECK(r.call("send", send).status == TE_FL_OK);
      r.plugin.provider->api->destroy(std::exchange(r.comm.self, nullptr));
      return 0;
    }
    te_fl_recv_args recv;
    recv.output = &x.t;
    recv.peer = 0;
    const Answer answer = r.call("recv", recv);
    if (answer.status != TE_FL_OK) std::cerr << answer.text << "\n";
    CHECK(answer.status == TE_FL_OK);
    for (size_t i = 0; i < x.v.size(); ++i) CHECK(x.v[i] == static_cast<int32_t>(i));
    return 0;
  });
  EXPECT_EQ(codes, std::vector<int>(2, 0));
}

TEST(Gloo, ChildOfAForkIsRefused) {
  const auto codes = as_processes(2, [](Rank& r) {
    const pid_t child = ::fork();
    if (child == 0) {
      const Answer answer = reduce_some(r, 10);
      r.plugin.provider->api->destroy(std::exchange(r.comm.self, nullptr));
      ::_exit(TE_FL_STATUS_CODE(answer.status) == TE_FL_FAILED_PRECONDITION ? 0 : 1);
    }
    int state = 0;
    ::waitpid(child, &state, 0);
    CHECK(state == 0);
    CHECK(reduce_some(r, 10).status == TE_FL_OK);
    return 0;
  });
  EXPECT_EQ(codes, std::vector<int>(2, 0));
}

TEST(Gloo, RankThatDoesNotComeIsNamed) {
  const auto start = Clock::now();
  const Rank alone(Store::in_process(), 0, 2, 100);
  EXPECT_EQ(TE_FL_STATUS_CODE(alone.made.status), TE_FL_TIMEOUT);
  EXPECT_NE(alone.made.text.find("rank 1 did not publish its address"), std::string::npos)
      << alone.made.text;
  EXPECT_LT(ms_since(start), 1000);
}

}  // namespace
}  // namespace te_fl
