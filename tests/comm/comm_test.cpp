// Communicators whose ranks are threads: creation, refused calls, and the propagation of one rank's
// failure to all ranks.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "comm/process_store.hpp"
#include "support/expect.hpp"
#include "te_fl/comm.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/ops.hpp"
#include "te_fl/policy.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl {
namespace {

using std::chrono::milliseconds;

// Runs f(rank) on one thread per rank.
void on_ranks(int size, const std::function<void(int)>& f) {
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) threads.emplace_back(f, r);
  for (std::thread& t : threads) t.join();
}

class Comms : public ::testing::Test {
 protected:
  CommOptions options(int rank, int size, std::string name = "world") {
    CommOptions o;
    o.rank = rank;
    o.size = size;
    o.store = store;
    o.name = std::move(name);
    o.provider = "threads";
    o.timeout = milliseconds(20000);
    return o;
  }
  std::shared_ptr<Store> store = Store::in_process();
};

Tensor of(const std::vector<float>& values) {
  return Tensor::from_values({static_cast<int64_t>(values.size())}, values).value();
}
std::vector<float> values(const Tensor& t) {
  const auto* first = static_cast<const float*>(t.c()->dl.data);
  return {first, first + t.numel()};
}

te_fl_all_reduce_args in_place(const Comm& comm, const Tensor& t) {
  te_fl_all_reduce_args args;
  args.input = args.output = t.c();
  args.comm = comm.c();
  return args;
}

Status all_reduce(const Comm& comm, const Tensor& t) { return ops::all_reduce(in_place(comm, t)); }

TEST_F(Comms, RanksReduceTogether) {
  on_ranks(3, [&](int rank) {
    Result<Comm> comm = Comm::create(options(rank, 3));
    ASSERT_OK(comm);
    EXPECT_EQ(comm->rank(), rank);
    EXPECT_EQ(comm->provider(), "threads");
    EXPECT_FALSE(comm->implementations().empty());
    const Tensor t = of({static_cast<float>(rank), 2});
    for (int i = 0; i < 3; ++i) ASSERT_OK(all_reduce(*comm, t));
    EXPECT_EQ(values(t), (std::vector<float>{27, 54}));
    EXPECT_OK(comm->status());
  });
}

TEST_F(Comms, AreSplit) {
  on_ranks(4, [&](int rank) {
    Result<Comm> comm = Comm::create(options(rank, 4));
    ASSERT_OK(comm);
    Result<Comm> half = comm->split(rank % 2, -rank, "half");
    ASSERT_OK(half);
    EXPECT_EQ(half->size(), 2);
    EXPECT_EQ(half->rank(), rank < 2 ? 1 : 0) << "in the order of the keys";
    EXPECT_EQ(half->name(), "half." + std::to_string(rank % 2));
    const Tensor t = of({static_cast<float>(rank)});
    ASSERT_OK(all_reduce(*half, t));
    EXPECT_EQ(values(t)[0], rank % 2 == 0 ? 2.0f : 4.0f);
    Result<Comm> some = comm->split(rank == 0 ? -1 : 5, 0, "some");
    ASSERT_OK(some);
    EXPECT_EQ(static_cast<bool>(*some), rank != 0);
    if (rank != 0) {
      ASSERT_OK(all_reduce(*some, t));
    }
  });
}

TEST_F(Comms, KnowWhoseRanksTheyInclude) {
  on_ranks(4, [&](int rank) {
    CommOptions again = options(rank, 4);
    Result<Comm> world = Comm::create(again);
    ASSERT_OK(world);
    again.name = "again";
    Result<Comm> other = Comm::create(again);
    ASSERT_OK(other);
    // Splits ranks into {0, 1} and {2, 3}, then each rank alone; then into {0, 2} and {1, 3}; then
    // all in another order.
    Result<Comm> pair = world->split(rank / 2, rank, "pair");
    ASSERT_OK(pair);
    Result<Comm> one = pair->split(pair->rank(), 0, "one");
    ASSERT_OK(one);
    Result<Comm> across = world->split(rank % 2, rank, "across");
    ASSERT_OK(across);
    Result<Comm> turned = world->split(0, -rank, "turned");
    ASSERT_OK(turned);
    EXPECT_TRUE(world->includes(*world) && world->includes(*pair) && world->includes(*one));
    EXPECT_TRUE(world->includes(*turned) && turned->includes(*world) && turned->includes(*across));
    EXPECT_TRUE(pair->includes(*one) && across->includes(*one)) << "which is this rank";
    EXPECT_FALSE(pair->includes(*world) || pair->includes(*across) || one->includes(*pair));
    EXPECT_FALSE(world->includes(*other) || other->includes(*pair)) << "its ranks are not known";
    EXPECT_FALSE(world->includes(Comm()) || Comm().includes(*world));
  });
}

TEST_F(Comms, ADifferenceBetweenRanksIsRefusedOnAll) {
  on_ranks(3, [&](int rank) {
    PolicySettings settings;
    settings.deterministic = rank == 2;
    const PolicyScope scope(settings);
    const Result<Comm> comm = Comm::create(options(rank, 3));
    EXPECT_FAILS(comm.status(), kFailedPrecondition, "the ranks would not do the same");
    EXPECT_HAS(comm.status().to_string(), "on rank 0");
    EXPECT_HAS(comm.status().to_string(), "on rank 2");
    EXPECT_LACKS(comm.status().to_string(), "on rank 1");
  });
}

// Returns a policy under which no implementation of a collective is allowed.
PolicySettings without_choice() {
  PolicySettings settings;
  settings.per_op["all_reduce"] = {{.type = PolicyToken::Type::kImpl, .name = "vendor.not_here"}};
  settings.strict = true;
  return settings;
}

TEST_F(Comms, APolicyOfOneRankThatCameLaterDecidesNothing) {
  on_ranks(3, [&](int rank) {
    const Result<Comm> comm = Comm::create(options(rank, 3));
    ASSERT_OK(comm);
    const Tensor t = of({1.0f + static_cast<float>(rank)});
    std::optional<PolicyScope> scope;
    ASSERT_OK(all_reduce(*comm, t));
    if (rank == 1) scope.emplace(without_choice());
    ASSERT_OK(all_reduce(*comm, t));
    ASSERT_OK(all_reduce(*comm, t)) << "as a call that is known";
    EXPECT_EQ(values(t), std::vector<float>{54});
    EXPECT_OK(comm->status());
    const te_fl_all_reduce_args args = in_place(*comm, t);
    OpManager& manager = OpManager::instance();
    const Result<Decision> decision = manager.resolve(op::all_reduce, &args);
    ASSERT_OK(decision);
    EXPECT_EQ(decision->impl_id, "reference.host");
    const std::string words = "of communicator 'world', on which its ranks agreed when it was made";
    EXPECT_EQ(decision->policy.find(words) != std::string::npos, rank == 1) << decision->policy;
    EXPECT_OK(manager.prepare(op::all_reduce, &args).status());
    scope.reset();
  });
}

// A collective is deterministic if the call or the rank's current policy requests it.
TEST_F(Comms, DeterministicResultsAreThePresentPolicysToAskFor) {
  const Result<Comm> comm = Comm::create(options(0, 1));
  ASSERT_OK(comm);
  const Tensor t = of({1});
  const te_fl_all_reduce_args args = in_place(*comm, t);
  PolicySettings settings = without_choice();
  settings.deterministic = true;
  const PolicyScope scope(settings);
  const Result<Decision> decision = OpManager::instance().resolve(op::all_reduce, &args);
  ASSERT_OK(decision);
  EXPECT_HAS(decision->policy, "deterministic");
  EXPECT_EQ(decision->impl_id, "reference.host");
  EXPECT_OK(all_reduce(*comm, t));
}

// A split communicator chooses its implementations under the policy at its creation.
TEST_F(Comms, ASplitAgreesAnew) {
  on_ranks(2, [&](int rank) {
    const Result<Comm> comm = Comm::create(options(rank, 2));
    ASSERT_OK(comm);
    Comm part;
    {
      const PolicyScope scope(without_choice());
      Result<Comm> made = comm->split(0, rank, "part");
      ASSERT_OK(made);
      part = std::move(*made);
    }
    const Tensor t = of({1});
    EXPECT_FAILS(all_reduce(part, t), kUnsupported, "vendor.not_here");
    EXPECT_OK(all_reduce(*comm, t));
  });
}

TEST_F(Comms, AnInvalidPolicyIsRefused) {
  ASSERT_OK(environment::set("TE_FL_PER_OP", "all_reduec=reference"));
  const Result<Comm> comm = Comm::create(options(0, 1));
  EXPECT_FAILS(comm.status(), kInvalidArgument, "did you mean 'all_reduce'");
  EXPECT_HAS(comm.status().to_string(), "communicator 'world' cannot be made");
  ASSERT_OK(environment::unset("TE_FL_PER_OP"));
}

TEST_F(Comms, ARankThatDoesNotComeIsNamed) {
  CommOptions o = options(0, 3);
  o.timeout = milliseconds(50);
  const Result<Comm> comm = Comm::create(o);
  EXPECT_FAILS(comm.status(), kTimeout, "these did not arrive: 1, 2");
}

TEST_F(Comms, AMissingRankInACollectiveFailsItOnAll) {
  std::atomic<int> failed{0};
  on_ranks(3, [&](int rank) {
    CommOptions o = options(rank, 3);
    o.timeout = milliseconds(300);
    Result<Comm> comm = Comm::create(o);
    ASSERT_OK(comm);
    const Tensor t = Tensor::zeros({4, 2}, DType::kF32).value();
    ASSERT_OK(all_reduce(*comm, t));
    if (rank == 1) {  // rank 1 does other work for longer than the time-out
      while (failed < 2) std::this_thread::sleep_for(milliseconds(5));
      EXPECT_FAILS(comm->status(), kCommFailed, "world") << "its watchdog saw it, too";
      return;
    }
    const Status status = all_reduce(*comm, t);
    ++failed;
    EXPECT_FAILS(status, kCommFailed, "all_reduce number 2 of f32[4,2] failed");
    EXPECT_HAS(status.to_string(), "rank 1 of communicator 'world' did not reach");
    EXPECT_FAILS(all_reduce(*comm, t), kCommFailed, "number 2") << "it stays failed";
  });
  EXPECT_EQ(failed, 2);
}

TEST_F(Comms, AnAbortedOneIsAbortedWithAllOthers) {
  std::atomic<bool> both{false};
  on_ranks(2, [&](int rank) {
    Result<Comm> comm = Comm::create(options(rank, 2));
    Result<Comm> other = Comm::create(options(rank, 2, "other"));
    ASSERT_OK(comm);
    ASSERT_OK(other);
    const Tensor t = Tensor::zeros({1}, DType::kF32).value();
    if (rank == 0) {
      while (!both) std::this_thread::yield();
      comm->abort("the loss is not finite");
    } else {
      both = true;
      EXPECT_FAILS(all_reduce(*other, t), kCommFailed, "the loss is not finite");
    }
    EXPECT_FAILS(other->status(), kCommFailed, "the loss is not finite");
  });
}

// If the failure of one communicator interrupts a call on another one, the error names the
// interrupted call and the cause, and later calls return the same error.
TEST_F(Comms, AnAbortedCallIsNamed) {
  bool named = false;
  // Rank 0 cannot see when rank 1 is inside its call, so it tries longer and longer pauses.
  for (int pause = 50; !named && pause < 5000; pause *= 4) {
    store = Store::in_process();
    on_ranks(2, [&](int rank) {
      Result<Comm> comm = Comm::create(options(rank, 2));
      Result<Comm> other = Comm::create(options(rank, 2, "other"));
      ASSERT_OK(comm);
      ASSERT_OK(other);
      const Tensor t = Tensor::zeros({1}, DType::kF32).value();
      ASSERT_OK(all_reduce(*other, t));
      if (rank == 0) {
        std::this_thread::sleep_for(milliseconds(pause));
        comm->abort("the loss is not finite");
        return;
      }
      const Status ended = all_reduce(*other, t);
      EXPECT_FAILS(ended, kCommFailed, "the loss is not finite");
      named = ended.to_string().find("all_reduce number 2 of f32[1] failed") != std::string::npos;
      EXPECT_EQ(all_reduce(*other, t).to_string(), ended.to_string()) << "it stays so";
    });
  }
  EXPECT_TRUE(named);
}

TEST_F(Comms, ACallersMistakeChangesNothing) {
  on_ranks(2, [&](int rank) {
    Result<Comm> comm = Comm::create(options(rank, 2));
    ASSERT_OK(comm);
    const Tensor part = Tensor::zeros({2}, DType::kF32).value();
    const Tensor all = Tensor::zeros({3}, DType::kF32).value();
    te_fl_all_gather_args gather;
    gather.input = part.c();
    gather.output = all.c();
    gather.comm = comm->c();
    EXPECT_FAILS(ops::all_gather(gather), kInvalidArgument, "'comm' is of 2 ranks");
    EXPECT_OK(all_reduce(*comm, part)) << "and the ranks are still together";
  });
}

TEST_F(Comms, ValidateComparesBeforeACollectiveBegins) {
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  on_ranks(2, [&](int rank) {
    Result<Comm> comm = Comm::create(options(rank, 2));
    ASSERT_OK(comm);
    const Tensor t = Tensor::zeros({rank + 1}, DType::kF32).value();
    EXPECT_FAILS(all_reduce(*comm, t), kCommFailed, "TE_FL_VALIDATE");
  });
  ASSERT_OK(environment::unset("TE_FL_VALIDATE"));
}

// TE_FL_VALIDATE compares a call between the ranks before the provider can refuse it. A refused
// call does not use up its sequence number: the next call gets that number.
TEST_F(Comms, ValidateGoesOnAfterARefusedCall) {
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  on_ranks(2, [&](int rank) {
    Result<Comm> comm = Comm::create(options(rank, 2));
    ASSERT_OK(comm);
    const Tensor t = of({1, 2, 3, 4}), one = of({1});
    te_fl_broadcast_args broadcast;
    broadcast.data = t.c();
    broadcast.comm = comm->c();
    for (int root : {7, 8, 1}) {
      broadcast.root = root;
      const Status status = ops::broadcast(broadcast);
      EXPECT_EQ(status.code(), root == 1 ? StatusCode::kOk : StatusCode::kInvalidArgument);
    }
    broadcast.root = 7;
    EXPECT_FAILS(ops::broadcast(broadcast), kInvalidArgument, "'root' is rank 7");
    EXPECT_OK(all_reduce(*comm, one)) << "another op as that number";
    broadcast.root = rank == 0 ? 7 : 0;
    if (rank == 0) {
      EXPECT_FAILS(ops::broadcast(broadcast), kInvalidArgument, "'root' is rank 7");
      broadcast.root = 0;
    }
    EXPECT_OK(ops::broadcast(broadcast)) << "again on the rank alone that made the mistake";
    EXPECT_OK(all_reduce(*comm, t));
    EXPECT_EQ(values(one)[0], 2);
  });
  ASSERT_OK(environment::unset("TE_FL_VALIDATE"));
}

// Two ranks call with a different reduction or root: both fail, and each error names the rank's own
// call.
TEST_F(Comms, ValidateComparesReductionsAndRoots) {
  ASSERT_OK(environment::set("TE_FL_VALIDATE", "1"));
  const auto differ = [&](const std::function<Status(const Comm&, int)>& call, const char* mine) {
    store = Store::in_process();
    on_ranks(2, [&](int rank) {
      const Result<Comm> comm = Comm::create(options(rank, 2));
      ASSERT_OK(comm);
      const Status status = call(*comm, rank);
      EXPECT_FAILS(status, kCommFailed, "TE_FL_VALIDATE");
      EXPECT_HAS(status.to_string(), mine);
    });
  };
  differ(
      [](const Comm& comm, int rank) {
        const Tensor t = of({1, 2});
        te_fl_all_reduce_args args = in_place(comm, t);
        args.reduction = rank == 0 ? TE_FL_REDUCTION_SUM : TE_FL_REDUCTION_MAX;
        return ops::all_reduce(args);
      },
      "all_reduce number 1 of f32[2], reduction max");
  differ(
      [](const Comm& comm, int rank) {
        const Tensor t = of({1, 2}), part = of({1});
        te_fl_reduce_scatter_args args;
        args.input = t.c();
        args.output = part.c();
        args.comm = comm.c();
        args.reduction = rank == 0 ? TE_FL_REDUCTION_SUM : TE_FL_REDUCTION_AVG;
        return ops::reduce_scatter(args);
      },
      "reduction avg");
  differ(
      [](const Comm& comm, int rank) {
        const Tensor t = of({1, 2});
        return ops::broadcast({.data = t, .comm = comm.c(), .root = rank});
      },
      "broadcast number 1 of f32[2], root 1");
  differ(
      [](const Comm& comm, int rank) {
        const Tensor in = of({1, 2}), wide = Tensor::zeros({2}, DType::kF64).value();
        const Tensor out = of({0, 0}), wide_out = Tensor::zeros({2}, DType::kF64).value();
        const int64_t rows[] = {1, 1};
        te_fl_all_to_all_v_args args;
        args.input = rank == 0 ? in.c() : wide.c();
        args.output = rank == 0 ? out.c() : wide_out.c();
        args.input_rows = args.output_rows = rows;
        args.input_rows_count = args.output_rows_count = 2;
        args.comm = comm.c();
        return ops::all_to_all_v(args);
      },
      "all_to_all_v number 1 of f64");
  ASSERT_OK(environment::unset("TE_FL_VALIDATE"));
}

// TE_FL_VALIDATE is process-wide and the ranks are threads, so the test changes the variable
// between the ranks' creations. If any rank has it set, all ranks compare their calls, and no rank
// waits for a rank that does not compare.
TEST_F(Comms, ValidateOnOneRankAloneIsForAll) {
  for (int asks = 0; asks < 2; ++asks) {
    store = Store::in_process();
    std::atomic<int> turn{0};
    on_ranks(2, [&](int rank) {
      // A rank reads TE_FL_VALIDATE before it publishes its facts under this key, so the test may
      // change the variable once the key exists.
      const std::string told = "world/facts/" + std::to_string(1 - rank);
      if (rank != asks) {
        EXPECT_TRUE(store->get(told, milliseconds(20000)).ok());
        EXPECT_OK(environment::unset("TE_FL_VALIDATE"));
      } else {
        EXPECT_OK(environment::set("TE_FL_VALIDATE", "1"));
      }
      const Result<Comm> comm = Comm::create(options(rank, 2));
      ASSERT_OK(comm);
      const Tensor t = of({1});
      ASSERT_OK(all_reduce(*comm, t));
      const Tensor other = Tensor::zeros({rank + 1}, DType::kF32).value();
      EXPECT_FAILS(all_reduce(*comm, other), kCommFailed, "TE_FL_VALIDATE");
      ++turn;
    });
  }
}

// TE_FL_VALIDATE is off when the communicator is created and is set later.
TEST_F(Comms, ValidateThatIsSetLaterDoesNotWait) {
  on_ranks(2, [&](int rank) {
    const Result<Comm> comm = Comm::create(options(rank, 2));
    ASSERT_OK(comm);
    const Tensor t = of({1});
    ASSERT_OK(all_reduce(*comm, t));
    if (rank == 0) {
      EXPECT_OK(environment::set("TE_FL_VALIDATE", "1"));
    }
    ASSERT_OK(all_reduce(*comm, t));
    EXPECT_EQ(values(t)[0], 4);
  });
  ASSERT_OK(environment::unset("TE_FL_VALIDATE"));
}

// A store that counts the bytes that it holds.
class CountedStore final : public comm::ProcessStore {
 public:
  Status set(std::string_view key, std::string_view value) override {
    {
      const std::lock_guard lock(mutex);
      held[std::string(key)] = key.size() + value.size();
    }
    return ProcessStore::set(key, value);
  }
  Status forget(std::string_view prefix) override {
    {
      const std::lock_guard lock(mutex);
      std::erase_if(held, [&](const auto& entry) { return entry.first.starts_with(prefix); });
    }
    return ProcessStore::forget(prefix);
  }
  size_t bytes() {
    const std::lock_guard lock(mutex);
    size_t sum = 0;
    for (const auto& [key, size] : held) sum += size;
    return sum;
  }

 private:
  std::mutex mutex;
  std::map<std::string, size_t> held;
};

TEST_F(Comms, SplitsAndComparisonsLeaveNothingInTheStore) {
  for (const char* validate : {"0", "1"}) {
    ASSERT_OK(environment::set("TE_FL_VALIDATE", validate));
    const auto counted = std::make_shared<CountedStore>();
    constexpr int kRounds = 24;
    std::array<size_t, kRounds> bytes{};
    on_ranks(2, [&](int rank) {
      CommOptions o = options(rank, 2);
      o.store = counted;
      Result<Comm> comm = Comm::create(o);
      ASSERT_OK(comm);
      const Tensor t = of({1});
      for (int i = 0; i < kRounds; ++i) {
        {
          Result<Comm> part = comm->split(0, rank, "part" + std::to_string(i));
          ASSERT_OK(part);
          ASSERT_OK(all_reduce(*part, t));
        }
        ASSERT_OK(all_reduce(*comm, t));
        if (rank == 0) bytes[static_cast<size_t>(i)] = counted->bytes();
        ASSERT_OK(all_reduce(*comm, t));
      }
    });
    // The texts of the latest comparison of each rank remain in the store.
    EXPECT_LT(bytes.back(), bytes.front() + kRounds * (*validate == '1' ? 200 : 10)) << validate;
    EXPECT_LT(bytes.front(), 1500u);
  }
  ASSERT_OK(environment::unset("TE_FL_VALIDATE"));
}

// A program's own store, which throws from the named function.
class ThrowingStore final : public comm::ProcessStore {
 public:
  Status set(std::string_view key, std::string_view value) override {
    check("set");
    return ProcessStore::set(key, value);
  }
  Result<std::string> get(std::string_view key, milliseconds timeout) override {
    check("get");
    return ProcessStore::get(key, timeout);
  }
  Result<std::optional<std::string>> look(std::string_view key) override {
    check("look");
    return ProcessStore::look(key);
  }
  Status forget(std::string_view prefix) override {
    check("forget");
    return ProcessStore::forget(prefix);
  }
  std::atomic<const char*> throws{""};

 private:
  void check(std::string_view function) const {
    if (function == throws.load()) throw std::runtime_error("the network is down");
  }
};

TEST_F(Comms, AStoreThatThrowsIsAStatus) {
  for (const char* function : {"set", "get"}) {
    const auto own = std::make_shared<ThrowingStore>();
    own->throws = function;
    on_ranks(2, [&](int rank) {
      CommOptions o = options(rank, 2);
      o.store = own;
      EXPECT_NO_THROW({
        const Result<Comm> comm = Comm::create(o);
        EXPECT_HAS(comm.status().to_string(), std::string(function) + "() threw an exception: the");
      });
    });
  }
  for (const char* function : {"set", "get", "look", "forget"}) {
    const auto own = std::make_shared<ThrowingStore>();
    std::barrier<> turn(2);
    on_ranks(2, [&](int rank) {
      CommOptions o = options(rank, 2);
      o.store = own;
      Result<Comm> comm = Comm::create(o);
      ASSERT_OK(comm);
      Result<Comm> other = comm->split(0, rank, "other");
      ASSERT_OK(other);
      turn.arrive_and_wait();
      own->throws = function;
      if (rank == 0) {
        EXPECT_NO_THROW(other->abort("enough"));
      }
      turn.arrive_and_wait();
      for (Comm* each : {&*comm, &*other}) {
        EXPECT_NO_THROW(EXPECT_EQ(all_reduce(*each, of({1})).code(), StatusCode::kCommFailed));
      }
    });
  }
}

// Several threads create the world communicator at once: the first succeeds, and each other thread
// gets an error.
TEST_F(Comms, OneWorldOfManyThreads) {
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> made{0}, refused{0}, ready{0};
    on_ranks(4, [&](int) {
      ++ready;
      while (ready < 4) std::this_thread::yield();
      const Result<Comm> world = Comm::world(Device());
      if (world.ok()) {
        ++made;
      } else {
        EXPECT_FAILS(world.status(), kFailedPrecondition, "use that one, or split() it");
        ++refused;
      }
      // Keeps the world alive until all threads have tried.
      while (made + refused < 4) std::this_thread::yield();
    });
    EXPECT_EQ(made, 1);
    EXPECT_EQ(refused, 3);
  }
}

TEST_F(Comms, BadOptionsAreNamed) {
  EXPECT_FAILS(Comm::create(options(3, 3)).status(), kInvalidArgument, "rank 3 of 3");
  CommOptions o = options(0, 2);
  o.store = nullptr;
  EXPECT_FAILS(Comm::create(o).status(), kInvalidArgument, "no store");
  o = options(0, 1);
  o.provider = "telegraph";
  EXPECT_FAILS(Comm::create(o).status(), kNotFound, "no provider of collectives 'telegraph'");
  o = options(0, 1);
  o.name = "a/b";
  EXPECT_FAILS(Comm::create(o).status(), kInvalidArgument, "no '/'");
  o = options(0, 1, "twice");
  ASSERT_OK(Comm::create(o));
}

}  // namespace
}  // namespace te_fl
