// Collectives of ranks that are threads: order of summation, and errors when one rank's call
// differs from the others'. The conformance tests check the collectives' results in general.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <thread>

#include "support/reference_ops.hpp"
#include "te_fl/ops/collective.h"

namespace te_fl::testing {
namespace {

// An in-process store with the C interface that the host passes to create().
class OneProcessStore {
 public:
  OneProcessStore() {
    store_.host = this;
    store_.set = [](void* host, const char* key, const void* value, size_t bytes,
                    const te_fl_error_sink*) -> te_fl_status {
      auto& self = *static_cast<OneProcessStore*>(host);
      const std::lock_guard lock(self.mutex_);
      self.values_[key] = std::string(static_cast<const char*>(value), bytes);
      self.changed_.notify_all();
      return TE_FL_OK;
    };
    store_.get = [](void* host, const char* key, uint32_t timeout_ms, void* value, size_t capacity,
                    size_t* bytes, const te_fl_error_sink* errors) -> te_fl_status {
      auto& self = *static_cast<OneProcessStore*>(host);
      std::unique_lock lock(self.mutex_);
      if (!self.changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                                  [&] { return self.values_.count(key) != 0; })) {
        errors->write(errors->host, "nobody has set it");
        return TE_FL_TIMEOUT;
      }
      const std::string& found = self.values_[key];
      *bytes = found.size();
      if (capacity < found.size()) return TE_FL_INVALID_ARGUMENT;
      std::memcpy(value, found.data(), found.size());
      return TE_FL_OK;
    };
  }
  const te_fl_comm_store* c() const { return &store_; }
  std::string& operator[](const std::string& key) { return values_[key]; }

 private:
  te_fl_comm_store store_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

const te_fl_comm_desc& provider() {
  static const te_fl_comm_desc* const found = [] {
    static void* instance = nullptr;
    static const te_fl_host_api host{};
    const te_fl_plugin_api& api = *te_fl_reference_query(nullptr)->api;
    uint32_t count = 0;
    const te_fl_comm_desc* const* list = nullptr;
    EXPECT_EQ(api.create(&host, &instance, nullptr), TE_FL_OK);
    EXPECT_EQ(api.comms(instance, &count, &list, nullptr), TE_FL_OK);
    EXPECT_EQ(count, 1u);
    return list[0];
  }();
  return *found;
}

// Runs `f` with an error sink; returns its status and the sink's text.
Outcome run_for_outcome(const std::function<te_fl_status(const te_fl_error_sink*)>& f) {
  Outcome outcome;
  const te_fl_error_sink sink{sizeof(te_fl_error_sink), 0, &outcome.text,
                              [](void* host, const char* text) {
                                *static_cast<std::string*>(host) += std::string(text) + "\n";
                              }};
  outcome.status = f(&sink);
  return outcome;
}

// The communicator of one rank.
class Rank {
 public:
  Outcome create(const te_fl_comm_store* store, int rank, int size, uint32_t timeout_ms = 20000) {
    te_fl_comm_config config;
    config.rank = comm_.rank = rank;
    config.size = comm_.size = size;
    config.name = "world";
    config.store = store;
    config.timeout_ms = timeout_ms;
    comm_.id = 1;
    comm_.maker = "reference";
    return run_for_outcome([&](const te_fl_error_sink* sink) {
      return provider().api->create(provider().self, &config, &comm_.self, sink);
    });
  }
  Rank() = default;
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  ~Rank() { destroy(); }
  void destroy() {
    if (comm_.self != nullptr) provider().api->destroy(comm_.self);
    comm_.self = nullptr;
  }
  void abort() { provider().api->abort(comm_.self); }
  Outcome async_error() {
    return run_for_outcome([&](const te_fl_error_sink* sink) {
      return provider().api->async_error(comm_.self, sink);
    });
  }

  template <class Args>
  Outcome call(const char* op, Args args) {
    args.comm = &comm_;
    const te_fl_op_desc& desc = reference_op(op);
    return run_for_outcome([&](const te_fl_error_sink* sink) {
      te_fl_context ctx{};
      ctx.struct_size = sizeof ctx;
      ctx.device = {TE_FL_DEVICE_CPU, 0};
      ctx.errors = sink;
      const te_fl_status refused = desc.supports(desc.self, &ctx, &args);
      return refused != TE_FL_OK ? refused : desc.run(desc.self, &ctx, &args);
    });
  }
  Outcome all_reduce(const te_fl_tensor* input, const te_fl_tensor* output,
                     te_fl_reduction reduction = TE_FL_REDUCTION_SUM) {
    te_fl_all_reduce_args args;
    args.input = input;
    args.output = output;
    args.reduction = reduction;
    return call("all_reduce", args);
  }
  Outcome all_gather(const te_fl_tensor* input, const te_fl_tensor* output) {
    te_fl_all_gather_args args;
    args.input = input;
    args.output = output;
    return call("all_gather", args);
  }
  Outcome send(const te_fl_tensor* input, int peer) {
    te_fl_send_args args;
    args.input = input;
    args.peer = peer;
    return call("send", args);
  }
  Outcome recv(const te_fl_tensor* output, int peer) {
    te_fl_recv_args args;
    args.output = output;
    args.peer = peer;
    return call("recv", args);
  }
  Outcome barrier() { return call("barrier", te_fl_barrier_args()); }

 private:
  te_fl_communicator comm_;
};

// Runs f(rank, its number) on one thread per rank.
void on_ranks(int size, const std::function<void(Rank&, int)>& f, uint32_t timeout_ms = 20000) {
  OneProcessStore store;
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      Rank rank;
      EXPECT_OK(rank.create(store.c(), r, size, timeout_ms));
      f(rank, r);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

te_fl_status group_start() { return provider().api->group_start(provider().self, nullptr); }
Outcome group_end() {
  return run_for_outcome([](const te_fl_error_sink* sink) {
    return provider().api->group_end(provider().self, sink);
  });
}

TEST(ThreadRanks, TheProviderListsWhatItSupports) {
  EXPECT_STREQ(provider().name, "threads");
  EXPECT_EQ(provider().kind, static_cast<uint32_t>(TE_FL_KIND_REFERENCE));
  EXPECT_EQ(provider().flags, static_cast<uint32_t>(TE_FL_COMM_THREADS_ONLY));
  EXPECT_NE(provider().device_types & (uint64_t{1} << TE_FL_DEVICE_CPU), 0u);
}

// 1e30 and -1e30 cancel exactly only if the sum runs in rank order and in double.
TEST(ThreadRanks, SumsInTheOrderOfRanksAndInDouble) {
  on_ranks(4, [](Rank& rank, int r) {
    const double values[] = {1e30, 3, -1e30, 1};
    Array in(TE_FL_F32, {3}, {values[r], 1 + r * 0x1p-24, r == 2 ? NAN : r});
    EXPECT_OK(rank.all_reduce(in, in));
    EXPECT_EQ(in.get(0), 1.0) << "1e30 + 3 - 1e30 is 0 in double, then comes 1";
    EXPECT_EQ(in.get(1), static_cast<float>(4 + 6 * 0x1p-24));
    EXPECT_TRUE(std::isnan(in.get(2)));
    Array out(TE_FL_F32, {2}), more(TE_FL_F32, {2}, {r == 1 ? NAN : r, -r - 1.0});
    EXPECT_OK(rank.all_reduce(more, out, TE_FL_REDUCTION_MAX));
    EXPECT_TRUE(std::isnan(out.get(0)));
    EXPECT_EQ(out.get(1), -1);
    EXPECT_OK(rank.all_reduce(more, out, TE_FL_REDUCTION_AVG));
    EXPECT_EQ(out.get(1), -2.5);
  });
}

TEST(ThreadRanks, SumsOfIntegersWrap) {
  on_ranks(2, [](Rank& rank, int) {
    Array in(TE_FL_I32, {1});
    in.data<int32_t>()[0] = std::numeric_limits<int32_t>::max();
    EXPECT_OK(rank.all_reduce(in, in));
    EXPECT_EQ(in.data<int32_t>()[0], -2);
  });
}

TEST(ThreadRanks, AGroupSendsBothWays) {
  on_ranks(3, [](Rank& rank, int r) {
    const int next = (r + 1) % 3, before = (r + 2) % 3;
    Array out(TE_FL_F32, {2}, {r + 0.5, r + 0.25}), in(TE_FL_F32, {2}), sum(TE_FL_F32, {1}, {1});
    Array later(TE_FL_F32, {2});
    EXPECT_EQ(group_start(), TE_FL_OK);
    EXPECT_EQ(group_start(), TE_FL_OK) << "groups may be nested";
    EXPECT_OK(rank.send(out, next));
    EXPECT_OK(rank.send(in, next));
    EXPECT_OK(rank.recv(in, before));
    EXPECT_OK(rank.recv(later, before));
    EXPECT_OK(rank.all_reduce(sum, sum));
    EXPECT_OK(group_end());
    EXPECT_EQ(sum.get(0), 1) << "nothing runs before the group ends";
    EXPECT_OK(group_end());
    EXPECT_EQ(in.get(0), before + 0.5);
    EXPECT_EQ(in.get(1), before + 0.25);
    EXPECT_EQ(sum.get(0), 3);
  });
  EXPECT_FAILS(group_end(), kFailedPrecondition, "without group_start()");
}

// ---- errors of one rank

TEST(ThreadRanks, AnotherOrderFailsOnEveryRank) {
  on_ranks(3, [](Rank& rank, int r) {
    Array in(TE_FL_F32, {4}, {1, 2, 3, 4}), out(TE_FL_F32, {12});
    EXPECT_OK(rank.barrier());
    const Outcome outcome = r == 1 ? rank.all_gather(in, out) : rank.all_reduce(in, in);
    EXPECT_FAILS(
        outcome, kCommFailed,
        "communicator 'world' differ in call 2: rank 0 has all_reduce of 4 f32 (sum), rank "
        "1 has all_gather of 4 f32, rank 2 has all_reduce of 4 f32 (sum)");
    EXPECT_FAILS(rank.barrier(), kCommFailed, "differ in call 2") << "for ever";
    EXPECT_FAILS(rank.async_error(), kCommFailed, "differ in call 2");
    EXPECT_EQ(in.get(0), 1) << "and nothing is written";
  });
}

TEST(ThreadRanks, AnotherSizeTypeReductionOrRootFails) {
  const auto differ = [](const std::function<Outcome(Rank&, int)>& f, const std::string& text) {
    on_ranks(2, [&](Rank& rank, int r) { EXPECT_FAILS(f(rank, r), kCommFailed, text); });
  };
  differ(
      [](Rank& rank, int r) {
        Array in(TE_FL_F32, {4 + r});
        return rank.all_reduce(in, in);
      },
      "rank 0 has all_reduce of 4 f32 (sum), rank 1 has all_reduce of 5 f32 (sum)");
  differ(
      [](Rank& rank, int r) {
        Array in(r == 0 ? TE_FL_F16 : TE_FL_BF16, {4});
        return rank.all_reduce(in, in, TE_FL_REDUCTION_AVG);
      },
      "rank 0 has all_reduce of 4 f16 (avg), rank 1 has all_reduce of 4 bf16 (avg)");
  differ(
      [](Rank& rank, int r) {
        Array in(TE_FL_F32, {4});
        return rank.all_reduce(in, in, r == 0 ? TE_FL_REDUCTION_SUM : TE_FL_REDUCTION_MAX);
      },
      "rank 0 has all_reduce of 4 f32 (sum), rank 1 has all_reduce of 4 f32 (max)");
  differ(
      [](Rank& rank, int r) {
        Array in(TE_FL_U8, {4});
        te_fl_broadcast_args args;
        args.data = in;
        args.root = r;
        return rank.call("broadcast", args);
      },
      "rank 0 has broadcast of 4 u8 from rank 0, rank 1 has broadcast of 4 u8 from rank 1");
  differ(
      [](Rank& rank, int r) {
        Array in(TE_FL_F32, {4 + r});
        return r == 0 ? rank.send(in, 1) : rank.recv(in, 0);
      },
      "rank 0 of communicator 'world' calls send of 4 f32 to rank 1, and rank 1 calls recv of 5 "
      "f32 "
      "from rank 0");
  differ(
      [](Rank& rank, int r) {
        const int64_t out[] = {1, 2}, in[] = {1, 1 + r};
        Array from(TE_FL_F32, {3, 2}), to(TE_FL_F32, {2 + r, 2});
        te_fl_all_to_all_v_args args;
        args.input = from;
        args.output = to;
        args.input_rows = out;
        args.output_rows = in;
        args.input_rows_count = args.output_rows_count = 2;
        return rank.call("all_to_all_v", args);
      },
      "rank 0 has 2 rows for rank 1, which waits for 1 of them in all_to_all_v");
  const auto dispatch = [](Rank& rank, int64_t columns, const std::vector<int64_t>& out,
                           const std::vector<int64_t>& in) {
    const auto sum = [](const std::vector<int64_t>& rows) {
      return std::accumulate(rows.begin(), rows.end(), int64_t{0});
    };
    Array from(TE_FL_F32, {sum(out), columns}), to(TE_FL_F32, {sum(in), columns});
    te_fl_moe_dispatch_args args;
    args.input = from;
    args.output = to;
    args.input_rows = out.data();
    args.output_rows = in.data();
    args.input_rows_count = static_cast<int64_t>(out.size());
    args.output_rows_count = static_cast<int64_t>(in.size());
    return rank.call("moe_dispatch", args);
  };
  differ(
      [&](Rank& rank, int r) {
        return r == 0 ? dispatch(rank, 2, {1, 1, 2, 0}, {1, 1, 0, 0})
                      : dispatch(rank, 2, {0, 0, 1, 1}, {1, 1, 1, 1});
      },
      "rank 0 has 2 rows for rank 1 and its expert 0, which waits for 1 of them in moe_dispatch");
  differ(
      [&](Rank& rank, int r) {
        return dispatch(rank, 2 + r, {1, 1}, {1, 1});
      },
      "moe_dispatch has on rank 1 rows of 12 bytes, and on rank 0 8");
  differ(
      [&](Rank& rank, int r) {
        return r == 0 ? dispatch(rank, 2, {1, 1}, {1, 1})
                      : dispatch(rank, 2, {1, 0, 1, 0}, {1, 0, 1, 0});
      },
      "moe_dispatch has on rank 1 4 experts, and on rank 0 2");
}

TEST(ThreadRanks, OneThatNeverComesIsNamed) {
  const auto start = std::chrono::steady_clock::now();
  on_ranks(
      3,
      [](Rank& rank, int r) {
        Array in(TE_FL_F32, {4});
        if (r == 2) {
          EXPECT_FAILS(rank.recv(in, 0), kCommFailed, "communicator 'world'");
          return;
        }
        const Outcome outcome = rank.all_reduce(in, in);
        EXPECT_EQ(outcome.status, TE_FL_COMM_FAILED);
        EXPECT_HAS(outcome.text, "communicator 'world' did not reach ");
        EXPECT_HAS(outcome.text, "within 200 ms");
      },
      200);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  OneProcessStore store;
  Rank alone, other;
  std::thread second([&] { EXPECT_OK(other.create(store.c(), 1, 2, 200)); });
  EXPECT_OK(alone.create(store.c(), 0, 2, 200));
  second.join();
  EXPECT_FAILS(alone.barrier(), kCommFailed,
               "rank 1 of communicator 'world' did not reach barrier, call 1, within 200 ms; rank "
               "0 did");
  EXPECT_FAILS(other.barrier(), kCommFailed, "rank 1 of communicator");
}

TEST(ThreadRanks, AbortWakesThoseThatWait) {
  OneProcessStore store;
  Rank waiting, other;
  std::thread second([&] { EXPECT_OK(other.create(store.c(), 1, 2)); });
  EXPECT_OK(waiting.create(store.c(), 0, 2));
  second.join();
  std::thread wait([&] { EXPECT_FAILS(waiting.barrier(), kCommFailed, "was aborted by rank 1"); });
  EXPECT_OK(waiting.async_error());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  other.abort();
  other.abort();
  wait.join();
  EXPECT_FAILS(other.barrier(), kCommFailed, "was aborted by rank 1");
  EXPECT_FAILS(waiting.async_error(), kCommFailed, "was aborted by rank 1");
}

TEST(ThreadRanks, AreDestroyedInAnyOrder) {
  for (const int first : {0, 1, 2}) {
    on_ranks(3, [&](Rank& rank, int r) {
      EXPECT_OK(rank.barrier());
      if (r == first) return rank.destroy();
      const std::string gone = "rank " + std::to_string(first) + " has destroyed communicator";
      EXPECT_FAILS(rank.barrier(), kCommFailed, gone);
    });
    on_ranks(2, [&](Rank& rank, int r) {
      Array in(TE_FL_F32, {4});
      if (r == 1) return rank.destroy();
      EXPECT_FAILS(first == 1 ? rank.send(in, 1) : rank.recv(in, 1), kCommFailed,
                   "rank 1 has destroyed communicator");
    });
  }
}

// ---- creating a communicator

TEST(ThreadRanks, OneOfOneNeedsNoOther) {
  on_ranks(1, [](Rank& rank, int) {
    Array in(TE_FL_BF16, {3}, {1, 2, 3}), out(TE_FL_BF16, {3});
    EXPECT_OK(rank.all_reduce(in, out));
    EXPECT_EQ(out.get(2), 3);
    EXPECT_OK(rank.all_gather(in, in));
    EXPECT_REFUSED(rank.send(in, 0), "this very rank");
    EXPECT_REFUSED(rank.send(in, 1), "must be less");
  });
}

TEST(ThreadRanks, WhoDoesNotMakeItIsNamed) {
  OneProcessStore store;
  Rank first, second, again;
  std::thread thread([&] {
    EXPECT_FAILS(second.create(store.c(), 1, 3, 200), kTimeout,
                 "rank 2 of 3 did not make communicator 'world' within 200 ms");
  });
  const Outcome outcome = first.create(store.c(), 0, 3, 200);
  thread.join();
  EXPECT_FAILS(outcome, kTimeout, "rank 2 of 3 did not make communicator 'world'");
  OneProcessStore empty;
  const Outcome lost = again.create(empty.c(), 1, 2, 10);
  EXPECT_FAILS(lost, kTimeout, "rank 0 of communicator 'world' did not publish its token");
  EXPECT_HAS(lost.text, "nobody has set it");
}

TEST(ThreadRanks, AnotherSizeOrARankThatComesTwiceIsRefused) {
  OneProcessStore store;
  Rank first, second, twice, larger;
  std::thread thread([&] { EXPECT_OK(first.create(store.c(), 0, 2)); });
  EXPECT_REFUSED(larger.create(store.c(), 1, 3), "is of 2 ranks for rank 0 and of 3 for rank 1");
  EXPECT_OK(second.create(store.c(), 1, 2));
  thread.join();
  EXPECT_REFUSED(twice.create(store.c(), 1, 2), "rank 1 of communicator 'world' is there already");
}

TEST(ThreadRanks, AnotherProcessIsRefused) {
  OneProcessStore store;
  store["meeting"] = "process 1 of 12345: 1";
  Rank rank;
  EXPECT_FAILS(rank.create(store.c(), 1, 2), kFailedPrecondition,
               "provider 'threads' supports those that are threads of one");
}

TEST(ThreadRanks, AChildIsRefused) {
  on_ranks(1, [](Rank& rank, int) {
    const pid_t child = fork();
    if (child == 0) {
      const bool refused = rank.barrier().status == TE_FL_FAILED_PRECONDITION;
      rank.abort();
      rank.destroy();
      Rank own;  // a communicator of its own works
      OneProcessStore store;
      _exit(refused && own.create(store.c(), 0, 1).status == TE_FL_OK &&
                    own.barrier().status == TE_FL_OK
                ? 0
                : 1);
    }
    int status = 1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    EXPECT_OK(rank.barrier());
  });
}

// ---- memory that collectives refuse

TEST(ThreadRanks, MemoryMustBeOwnPartsAndWholeBytes) {
  on_ranks(1, [](Rank& rank, int) {
    Array whole(TE_FL_F32, {8}), strided(whole, TE_FL_F32, {2, 2}, {4, 1});
    Array first(whole, TE_FL_F32, {4}), second(whole, TE_FL_F32, {4}, {}, 2);
    EXPECT_REFUSED(rank.all_reduce(strided, strided), "'input' is not compact");
    EXPECT_REFUSED(rank.all_reduce(first, second), "without being part 0");
    EXPECT_REFUSED(rank.all_gather(first, second), "without being part 0");
  });
  on_ranks(2, [](Rank& rank, int r) {
    Array whole(TE_FL_F32, {4}, {-1, -1, -1, -1}), wrong(whole, TE_FL_F32, {2}, {}, r == 0 ? 2 : 0);
    Array part(whole, TE_FL_F32, {2}, {}, 2 * r);
    whole.set(static_cast<size_t>(2 * r), r);
    whole.set(static_cast<size_t>(2 * r + 1), r);
    EXPECT_REFUSED(rank.all_gather(wrong, whole), "without being part " + std::to_string(r));
    EXPECT_OK(rank.all_gather(part, whole));
    EXPECT_EQ(whole.get(0) * 1000 + whole.get(1) * 100 + whole.get(2) * 10 + whole.get(3), 11);
    Array nibbles(TE_FL_F4E2M1, {3}), all(TE_FL_F4E2M1, {6});
    EXPECT_REFUSED(rank.all_gather(nibbles, all), "do not fill whole bytes");
  });
}

}  // namespace
}  // namespace te_fl::testing
