// Tests the CUDA plugin's reports of invalid values in device memory, and the rules for RoPE's
// integers. Needs no GPU and no CUDA.
#include "backends/cuda/common/value_errors.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "backends/cuda/pointwise/rope_positions.hpp"
#include "support/expect.hpp"

namespace te_fl::cuda::value_errors_test {
namespace {

using Slots = std::vector<ValueErrorSlot>;

ValueError index_error(int64_t at) {
  return {"embedding_fwd", nullptr, ValueRule::kIndex, at, 99, 0, 11};
}
// Stores an error in the slot, as value_errors.cuh does in a kernel. Returns false if the slot
// already holds an error that has not been reported yet.
bool note(ValueErrorSlot* slot, const ValueError& error) {
  uint32_t reported = std::atomic_ref(slot->reported).load(std::memory_order_acquire);
  if (!std::atomic_ref(slot->claimed).compare_exchange_strong(reported, reported + 1)) return false;
  slot->error = error;
  std::atomic_ref(slot->written).store(reported + 1, std::memory_order_release);
  return true;
}
const void* stream(uintptr_t number) { return reinterpret_cast<const void*>(number * 4096); }

TEST(CudaValueErrors, AreReportedOnceToAWaitForTheirStream) {
  Slots slots(ValueErrorBoard::kSlots);
  ValueErrorBoard board(slots.data());
  EXPECT_FALSE(board.take(stream(1))) << "nothing has run there";
  ASSERT_TRUE(note(board.slot_of(stream(1)), index_error(3)));
  EXPECT_FALSE(note(board.slot_of(stream(1)), index_error(4))) << "the first one is kept";
  board.slot_of(stream(2));
  EXPECT_FALSE(board.take(stream(2)));
  EXPECT_FALSE(board.take(nullptr));
  const auto reported = board.take(stream(1));
  ASSERT_TRUE(reported);
  EXPECT_EQ(reported->at, 3);
  EXPECT_FALSE(board.take(stream(1)));
  ASSERT_TRUE(note(board.slot_of(stream(1)), index_error(5)))
      << "and the next call's are seen again";
  EXPECT_EQ(board.take(stream(1))->at, 5);
}

TEST(CudaValueErrors, OfAnyStreamForWhoWaitsForAnEvent) {
  Slots slots(ValueErrorBoard::kSlots);
  ValueErrorBoard board(slots.data());
  EXPECT_FALSE(board.take_any());
  note(board.slot_of(stream(1)), index_error(1));
  note(board.slot_of(stream(2)), index_error(2));
  std::set<int64_t> reported;
  while (const auto error = board.take_any()) reported.insert(error->at);
  EXPECT_EQ(reported, (std::set<int64_t>{1, 2}));
}

TEST(CudaValueErrors, TheDefaultStreamHasTwoNames) {
  Slots slots(ValueErrorBoard::kSlots);
  ValueErrorBoard board(slots.data());
  const void* const legacy = reinterpret_cast<const void*>(uintptr_t{1});
  EXPECT_EQ(board.slot_of(nullptr), board.slot_of(legacy));
  note(board.slot_of(legacy), index_error(1));
  EXPECT_TRUE(board.take(nullptr));
}

TEST(CudaValueErrors, ManyStreamsShareTheLastSlot) {
  Slots slots(ValueErrorBoard::kSlots);
  ValueErrorBoard board(slots.data());
  std::set<ValueErrorSlot*> own;
  for (uintptr_t i = 1; i < ValueErrorBoard::kSlots; ++i) own.insert(board.slot_of(stream(i)));
  EXPECT_EQ(own.size(), ValueErrorBoard::kSlots - 1u);
  ValueErrorSlot* const shared = board.slot_of(stream(1000));
  EXPECT_EQ(own.count(shared), 0u);
  EXPECT_EQ(board.slot_of(stream(1001)), shared);
  note(shared, index_error(7));
  EXPECT_FALSE(board.take(stream(1)));
  EXPECT_EQ(board.take(stream(1001))->at, 7) << "rather to a neighbour than to nobody";
}

TEST(CudaValueErrors, EachErrorIsReportedOnceAcrossThreads) {
  Slots slots(ValueErrorBoard::kSlots);
  ValueErrorBoard board(slots.data());
  constexpr int kThreads = 4, kErrors = 2000;
  std::atomic<int> noted{0}, reported{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const void* const mine = stream(static_cast<uintptr_t>(t % 2 + 1));  // two threads per stream
      for (int i = 0; i < kErrors; ++i) {
        const ValueError error{"op", nullptr, ValueRule::kIndex, i, i, i, i};
        if (note(board.slot_of(mine), error)) ++noted;
        if (const auto e = i % 3 == 0 ? board.take_any() : board.take(mine)) {
          ++reported;
          EXPECT_TRUE(e->value == e->at && e->more == e->at && e->bound == e->at);
        }
      }
    });
  }
  for (std::thread& t : threads) t.join();
  while (board.take_any()) ++reported;
  EXPECT_EQ(noted.load(), reported.load());
  EXPECT_GT(noted.load(), 0);
}

TEST(CudaValueErrors, SayValueRuleAndWayOut) {
  EXPECT_EQ(value_error_text(index_error(3)),
            "indices[3] is 99; it must lie in [0, 11), the rows of weight");
  const std::string late = late_value_error_text(index_error(3));
  for (const char* part : {"embedding_fwd by vendor.cuda: indices[3] is 99", "NaN",
                           "TE_FL_VALIDATE=1 refuses", "TE_FL_SYNC=1 finds it"}) {
    EXPECT_HAS(late, part);
  }
  EXPECT_EQ(value_error_text({"", nullptr, ValueRule::kTarget, 0, -1, 0, 7}),
            "targets[0] is -1; it must lie in [0, 7), the classes, or be ignore_index");
  // These errors carry no text from a kernel, which would lie in device memory.
  EXPECT_EQ(value_error_text({"", nullptr, ValueRule::kExpert, 5, 9, 0, 8}),
            "indices[5] is 9; it must lie in [0, 8), the experts");
  EXPECT_EQ(value_error_text({"", nullptr, ValueRule::kChosenExpert, 2, -1, 0, 4}),
            "topk_indices[2] is -1; it must lie in [0, 4), the experts");
}

// Returns the error texts of a call's sequences, "" for a valid sequence.
std::vector<std::string> broken(const PositionRules& rules) {
  std::vector<std::string> texts;
  for (int64_t b = 0; b < rules.batch; ++b) {
    ValueError error;
    texts.push_back(find_position_error(rules, b, error) ? value_error_text(error) : "");
  }
  return texts;
}
using Texts = std::vector<std::string>;

TEST(CudaRopePositions, StartsAndTables) {
  const int32_t starts[] = {0, 6, 7, -1};
  PositionRules rules;
  rules.starts = starts, rules.batch = 4, rules.length = 4;
  rules.tables[0] = "freqs", rules.rows[0] = 10;
  EXPECT_EQ(broken(rules),
            (Texts{"", "", "freqs has 10 positions, but position 10 is needed (sequence 2)",
                   "start_positions[3] is -1, expected 0 or more"}));
  rules.tables[0] = "q_freqs", rules.rows[0] = 100, rules.tables[1] = "k_freqs", rules.rows[1] = 9;
  rules.batch = 2;
  EXPECT_EQ(broken(rules),
            (Texts{"", "k_freqs has 9 positions, but position 9 is needed (sequence 1)"}));
  rules.length = 0;
  EXPECT_EQ(broken(rules), (Texts{"", ""})) << "no token, no position";
}

TEST(CudaRopePositions, RaggedSequences) {
  const int32_t cu[] = {0, 4, 2, 13, -4, -4};
  PositionRules rules;
  rules.cu = cu, rules.batch = 5, rules.tokens = 12;
  rules.tables[0] = "freqs", rules.rows[0] = 4;
  const Texts got = broken(rules);
  EXPECT_EQ(got[0], "");
  EXPECT_EQ(got[1],
            "sequence 1 of cu_seqlens spans tokens 4 to 2, expected non-decreasing values from "
            "0 to 12 (the input's tokens times cp_size)");
  EXPECT_HAS(got[2], "spans tokens 2 to 13");
  EXPECT_HAS(got[3], "spans tokens 13 to -4");
  EXPECT_HAS(got[4], "spans tokens -4 to -4");
}

TEST(CudaRopePositions, SharedAmongRanks) {
  const int32_t cu[] = {0, 8, 11, 12, 20, 26};
  PositionRules rules;
  rules.cu = cu, rules.batch = 5, rules.tokens = 13, rules.cp_size = 2;
  rules.tables[0] = "freqs", rules.rows[0] = 8;
  const Texts got = broken(rules);
  EXPECT_EQ(got[0], "");
  EXPECT_HAS(got[1], "spans tokens 8 to 11, expected multiples of cp_size, 2");
  EXPECT_HAS(got[2], "spans tokens 11 to 12, expected multiples");
  EXPECT_EQ(got[3], "");
  EXPECT_HAS(got[4], "sequence 4 of cu_seqlens has 3 tokens on this rank, expected an even number");
  // With 8 tokens in four chunks, rank 0 holds tokens 0, 1, 6, 7 and rank 1 holds tokens 2 to 5.
  EXPECT_EQ(last_position(4, 2, 0), 7);
  EXPECT_EQ(last_position(4, 2, 1), 5);
  EXPECT_EQ(last_position(4, 1, 0), 3);
  EXPECT_EQ(last_position(0, 2, 0), -1);
}

}  // namespace
}  // namespace te_fl::cuda::value_errors_test
