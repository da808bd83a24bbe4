// Tests of communicators that end while another thread runs a collective on them, for any provider
// whose ranks may be threads. A test includes this file and calls check_ending() with its provider.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/state.hpp"
#include "support/expect.hpp"
#include "te_fl/comm.hpp"
#include "te_fl/ops.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::testing {

// Two ranks; rank 0 makes a call that waits for rank 1.
class EndingComms {
 public:
  // The tensors of one rank's call.
  struct Tensors {
    Tensor part = Tensor::zeros({3}, DType::kF32).value();
    Tensor whole = Tensor::zeros({6}, DType::kF32).value();
    Tensor other = Tensor::zeros({6}, DType::kF32).value();
  };
  struct Collective {
    std::string name;
    std::function<Status(const te_fl_communicator*, int rank, const Tensors&)> call;
  };

  EndingComms(const std::string& provider, std::chrono::milliseconds timeout) {
    const std::shared_ptr<Store> store = Store::in_process();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        CommOptions options;
        options.rank = rank, options.size = 2;
        options.store = store;
        options.name = "ending";
        options.provider = provider;
        options.timeout = timeout;
        Result<Comm> made = Comm::create(options);
        EXPECT_OK(made);
        if (made.ok()) ranks[rank] = std::move(*made);
      });
    }
    for (std::thread& t : threads) t.join();
  }
  ~EndingComms() {
    if (caller_.joinable()) caller_.join();
  }

  // Starts rank 0's call on a new thread; returns when the call is inside the provider.
  void begin(const Collective& collective) {
    id = ranks[0].c()->id;
    const std::shared_ptr<Comm::State> rep = comm::find(id);
    ASSERT_NE(rep, nullptr);
    weak_ = rep;
    caller_ = std::thread(
        [this, &collective, c = ranks[0].c()] { status = collective.call(c, 0, tensors[0]); });
    while (rep->since.load() == 0) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  // Returns true if the provider has destroyed rank 0's communicator object.
  bool closed() const {
    const std::shared_ptr<Comm::State> rep = weak_.lock();
    if (rep == nullptr) return true;
    const std::lock_guard lock(rep->life);
    return rep->closed;
  }
  // Waits for rank 0's call to end; returns its status.
  const Status& ended() {
    caller_.join();
    return status;
  }

  Comm ranks[2];
  Tensors tensors[2];
  uint64_t id = 0;
  Status status;

  static const std::vector<Collective>& collectives() {
    static const std::vector<int64_t> rows = {3, 3};
    static const std::vector<Collective> all = {
        {"all_reduce",
         [](const te_fl_communicator* c, int, const Tensors& t) {
           return ops::all_reduce({.input = t.part, .output = t.part, .comm = c});
         }},
        {"all_gather",
         [](const te_fl_communicator* c, int, const Tensors& t) {
           return ops::all_gather({.input = t.part, .output = t.whole, .comm = c});
         }},
        {"reduce_scatter",
         [](const te_fl_communicator* c, int, const Tensors& t) {
           return ops::reduce_scatter({.input = t.whole, .output = t.part, .comm = c});
         }},
        {"all_to_all",
         [](const te_fl_communicator* c, int, const Tensors& t) {
           return ops::all_to_all({.input = t.whole, .output = t.other, .comm = c});
         }},
        {"all_to_all_v",
         [](const te_fl_communicator* c, int, const Tensors& t) {
           return ops::all_to_all_v({.input = t.whole,
                                     .output = t.other,
                                     .comm = c,
                                     .input_rows = rows.data(),
                                     .input_rows_count = 2,
                                     .output_rows = rows.data(),
                                     .output_rows_count = 2});
         }},
        {"moe_dispatch",
         [](const te_fl_communicator* c, int, const Tensors& t) {
           const Tensor from = t.whole.view({6, 1}).value(), to = t.other.view({6, 1}).value();
           return ops::moe_dispatch({.input = from,
                                     .output = to,
                                     .comm = c,
                                     .input_rows = rows.data(),
                                     .input_rows_count = 2,
                                     .output_rows = rows.data(),
                                     .output_rows_count = 2});
         }},
        {"broadcast",
         [](const te_fl_communicator* c, int, const Tensors& t) {
           return ops::broadcast({.data = t.part, .comm = c, .root = 1});
         }},
        {"recv",
         [](const te_fl_communicator* c, int rank, const Tensors& t) {
           return rank == 0 ? ops::recv({.output = t.part, .comm = c, .peer = 1})
                            : ops::send({.input = t.part, .comm = c, .peer = 0});
         }},
        {"barrier", [](const te_fl_communicator* c, int,
                       const Tensors&) { return ops::barrier({.comm = c}); }},
    };
    return all;
  }

 private:
  std::weak_ptr<Comm::State> weak_;
  std::thread caller_;
};

inline void check_ending(const std::string& provider) {
  using std::chrono::milliseconds;
  constexpr milliseconds kLong{20000}, kShort{150};
  for (const EndingComms::Collective& collective : EndingComms::collectives()) {
    SCOPED_TRACE(provider + " " + collective.name);
    {  // Destroys the communicator; the running call continues until the other rank joins.
      EndingComms two(provider, kLong);
      two.begin(collective);
      two.ranks[0] = Comm();
      EXPECT_FALSE(two.closed()) << "under the call";
      EXPECT_OK(collective.call(two.ranks[1].c(), 1, two.tensors[1]));
      EXPECT_OK(two.ended());
      EXPECT_TRUE(two.closed());
      EXPECT_EQ(comm::find(two.id), nullptr);
    }
    {  // Aborts and destroys the communicator; the call ends at once with the reason.
      EndingComms two(provider, kLong);
      two.begin(collective);
      const auto start = std::chrono::steady_clock::now();
      two.ranks[0].abort("the loss is not finite");
      two.ranks[0] = Comm();
      EXPECT_FAILS(two.ended(), kCommFailed, "the loss is not finite");
      EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(10000));
      EXPECT_FAILS(collective.call(two.ranks[1].c(), 1, two.tensors[1]), kCommFailed, "");
    }
    // The cases below wait for time-outs, so they run for two collectives only.
    if (collective.name != "all_reduce" && collective.name != "recv") continue;
    {  // Destroys this rank's communicator while no other rank calls: the time-out ends the call.
      EndingComms two(provider, kShort);
      two.begin(collective);
      two.ranks[0] = Comm();
      EXPECT_FAILS(two.ended(), kCommFailed, collective.name);
    }
    {  // The other rank destroys its communicator: the call ends at the time-out or earlier.
      EndingComms two(provider, kShort);
      two.begin(collective);
      two.ranks[1] = Comm();
      EXPECT_FAILS(two.ended(), kCommFailed, collective.name);
    }
  }
}

}  // namespace te_fl::testing
