// Compares the call memos with the full check: a call that a memo recognises is valid by the check
// and has the same signature. Calls are changed in one place at a time, both as bytes and as
// fields.
#include "core/op/call_memo.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <functional>
#include <random>

#include "core/base/settings.hpp"
#include "memo_check.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/rounds.hpp"
#include "te_fl/ops/optimizer.h"

namespace te_fl::core {
namespace {

alignas(4096) char g_memory[4096 * 32];

struct Item {
  te_fl_tensor t{};
  te_fl_quant quant{};
  int64_t shape[8] = {};
  int64_t strides[8] = {};
};

// A valid call of an op whose tensors can be changed.
class CallUnderTest {
 public:
  CallUnderTest(const te_fl_op_schema& schema, std::vector<std::vector<int64_t>> shapes)
      : op_(CompiledOp::compile(schema).value()), args_(schema.args_size / 8 + 1) {
    const uint32_t size = schema.args_size;
    std::memcpy(args_.data(), &size, sizeof size);
    size_t next = 0;
    for (uint32_t i = 0; i < schema.arg_count; ++i) {
      const te_fl_arg_desc& arg = *schema.args[i];
      if (arg.type == TE_FL_ARG_F32) {
        const auto value = static_cast<float>(arg.neutral);
        std::memcpy(bytes() + arg.offset, &value, sizeof value);
      }
      if (arg.type == TE_FL_ARG_I64) {
        const auto value = static_cast<int64_t>(arg.neutral);
        std::memcpy(bytes() + arg.offset, &value, sizeof value);
      }
      if (arg.type == TE_FL_ARG_SAVED) {
        add_record(arg);
        continue;
      }
      if (arg.type == TE_FL_ARG_TENSOR_LIST && next < shapes.size() && !shapes[next].empty()) {
        add_list(arg, shapes[next++]);
        continue;
      }
      if (arg.type == TE_FL_ARG_TENSOR_LIST) ++next;  // the list is NULL
      if (arg.type != TE_FL_ARG_TENSOR || next >= shapes.size()) continue;
      const std::vector<int64_t>& shape = shapes[next++];
      if (shape.empty()) continue;  // the tensor is NULL
      te_fl_tensor* t = &add_item(shape).t;
      if ((arg.dtypes & TE_FL_BIT(TE_FL_F32)) == 0) t->dl.dtype = {TE_FL_CODE_INT, 32, 1};
      std::memcpy(bytes() + arg.offset, &t, sizeof t);
      offsets_.push_back(arg.offset);
    }
  }
  // Makes the first `count` tensors FP8.
  CallUnderTest& quantise(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      Item& item = items_[i];
      auto* const parts = reinterpret_cast<float*>(g_memory + 4096 * (8 + i));
      item.t.dl.dtype = {TE_FL_CODE_FLOAT8_E4M3FN, 8, 1};
      item.quant.scaling = TE_FL_SCALING_TENSOR;
      item.quant.scale_inv = parts;
      item.quant.scale = parts + 1;
      item.quant.amax = parts + 2;
      item.t.quant = &item.quant;
    }
    return *this;
  }
  const CompiledOp& op() const { return *op_; }
  const void* args() const { return args_.data(); }
  unsigned char* bytes() { return reinterpret_cast<unsigned char*>(args_.data()); }
  std::deque<Item>& items() { return items_; }

  // Changes one thing; returns a function that undoes the change.
  std::function<void()> change(std::mt19937_64& random) {
    const auto keep = [](auto& place) { return [&place, old = place] { place = old; }; };
    Item& item = items_[random() % items_.size()];
    te_fl_dltensor& dl = item.t.dl;
    const size_t d = random() % 3;
    switch (random() % 22) {
      case 0: {
        auto undo = keep(item.shape[d]);
        item.shape[d] = static_cast<int64_t>(random() % 9) - 1;
        return undo;
      }
      case 1: {
        auto undo = keep(dl.ndim);
        dl.ndim = static_cast<int32_t>(random() % 6) - 1;
        return undo;
      }
      case 2: {
        auto undo = keep(dl.shape);
        dl.shape = random() % 2 == 0 ? nullptr : items_[random() % items_.size()].shape;
        return undo;
      }
      case 3: {
        auto undo = keep(dl.strides);
        item.strides[2] = 1;
        item.strides[1] = random() % 2 == 0 ? 1 : item.shape[2];
        item.strides[0] = item.shape[1] * static_cast<int64_t>(random() % 3);
        dl.strides = random() % 3 == 0 ? nullptr : item.strides;
        return undo;
      }
      case 4: {
        auto undo = keep(item.strides[d]);
        item.strides[d] = static_cast<int64_t>(random() % 20) - 2;
        return undo;
      }
      case 5: {
        auto undo = keep(dl.data);
        dl.data = random() % 9 == 0
                      ? nullptr
                      : g_memory + 4096 * (random() % 8) + (random() % 4 == 0 ? 2 : 0);
        return undo;
      }
      case 6: {
        auto undo = keep(dl.byte_offset);
        dl.byte_offset = random() % 3 * 4 + (random() % 5 == 0);
        return undo;
      }
      case 7: {
        auto undo = keep(dl.dtype);
        const te_fl_dtype types[] = {{TE_FL_CODE_FLOAT, 16, 1},
                                     {TE_FL_CODE_BFLOAT, 16, 1},
                                     {TE_FL_CODE_FLOAT, 64, 1},
                                     {TE_FL_CODE_FLOAT8_E4M3FN, 8, 1},
                                     {77, 3, 9},
                                     {TE_FL_CODE_FLOAT, 32, 1}};
        dl.dtype = types[random() % std::size(types)];
        return undo;
      }
      case 8: {
        auto undo = keep(dl.device);
        dl.device = {static_cast<int32_t>(random() % 4), static_cast<int32_t>(random() % 2)};
        return undo;
      }
      case 9: {
        auto undo = keep(item.t.provider);
        item.t.provider = static_cast<uint32_t>(random() % 2);
        return undo;
      }
      case 10: {
        auto undo = keep(item.t.struct_size);
        item.t.struct_size = static_cast<uint32_t>(random() % 100);
        return undo;
      }
      case 11: {
        auto undo = keep(item.t.quant);
        item.t.quant = random() % 2 == 0 ? nullptr : &item.quant;
        return undo;
      }
      case 12: {  // another tensor, or NULL
        const uint32_t offset = offsets_[random() % offsets_.size()];
        if (offset == 0) return change_list(random);
        unsigned char* at = bytes() + offset;
        const te_fl_tensor* old;
        std::memcpy(&old, at, sizeof old);
        const te_fl_tensor* next =
            random() % 2 == 0 ? nullptr : &items_[random() % items_.size()].t;
        std::memcpy(at, &next, sizeof next);
        return [at, old] { std::memcpy(at, &old, sizeof old); };
      }
      case 13: {
        unsigned char* at = bytes();
        uint32_t old;
        std::memcpy(&old, at, sizeof old);
        const auto next = static_cast<uint32_t>(random() % (old + 8));
        std::memcpy(at, &next, sizeof next);
        return [at, old] { std::memcpy(at, &old, sizeof old); };
      }
      case 14:
        return change_record(random);
      case 15: {  // the memory of another tensor
        auto undo = keep(dl.data);
        dl.data = items_[random() % items_.size()].t.dl.data;
        return undo;
      }
      case 16: {
        auto undo = keep(item.quant.scaling);
        item.quant.scaling = static_cast<uint32_t>(random() % 7);
        return undo;
      }
      case 17: {
        auto undo = keep(item.quant.flags);
        item.quant.flags = static_cast<uint32_t>(random() % 5);
        return undo;
      }
      case 18: {
        auto undo = keep(item.quant.scale_inv);
        item.quant.scale_inv =
            random() % 3 == 0 ? nullptr : g_memory + 4096 * 11 + random() % 3 * 2;
        return undo;
      }
      case 19: {
        auto undo = keep(item.quant.scale);
        item.quant.scale = random() % 3 == 0 ? nullptr : item.quant.amax;
        return undo;
      }
      case 20: {
        auto undo = keep(item.quant.columnwise_data);
        item.quant.columnwise_data = g_memory + 4096 * (random() % 8);
        return undo;
      }
      case 21: {
        auto undo = keep(item.quant.struct_size);
        item.quant.struct_size = static_cast<uint32_t>(random() % 70);
        return undo;
      }
      default: {  // a byte of a scalar
        const uint32_t size = op_->schema().args_size;
        std::vector<uint32_t> scalars;
        for (uint32_t i = 0; i < op_->schema().arg_count; ++i) {
          const te_fl_arg_desc& arg = *op_->schema().args[i];
          const bool scalar = arg.type != TE_FL_ARG_TENSOR && arg.type != TE_FL_ARG_TENSOR_LIST &&
                              arg.type != TE_FL_ARG_SAVED;
          if (scalar && arg.offset + 4 <= size) scalars.push_back(arg.offset);
        }
        if (scalars.empty()) return [] {};
        unsigned char* at = bytes() + scalars[random() % scalars.size()] + random() % 4;
        const unsigned char old = *at;
        *at = static_cast<unsigned char>(random() % 3);
        return [at, old] { *at = old; };
      }
    }
  }

 private:
  Item& add_item(const std::vector<int64_t>& shape) {
    Item& item = items_.emplace_back();
    std::copy(shape.begin(), shape.end(), item.shape);
    item.t.dl.ndim = static_cast<int32_t>(shape.size());
    item.t.dl.shape = item.shape;
    item.t.dl.dtype = {TE_FL_CODE_FLOAT, 32, 1};
    item.t.dl.device = {TE_FL_DEVICE_CPU, 0};
    item.t.dl.data = g_memory + 4096 * (items_.size() < 8 ? items_.size() : items_.size() + 4);
    return item;
  }
  void add_record(const te_fl_arg_desc& arg) {
    Item& storage = add_item({16});
    storage.t.dl.dtype = {TE_FL_CODE_UINT, 8, 1};
    record_.storage = &storage.t;
    has_record_ = true;
    const te_fl_saved* record = &record_;
    std::memcpy(bytes() + arg.offset, &record, sizeof record);
  }
  // Changes one field of the saved record.
  std::function<void()> change_record(std::mt19937_64& random) {
    const te_fl_saved old = record_;
    if (!has_record_) return [] {};
    switch (random() % 5) {
      case 0:
        record_.struct_size = static_cast<uint32_t>(random() % 40);
        break;
      case 1:
        record_.opaque = static_cast<uint32_t>(random() % 2);
        break;
      case 2:
        record_.producer = random() % 2 == 0 ? "vendor.of.a.name" : "default.x";
        break;
      case 3:
        record_.storage = nullptr;
        break;
      default:
        record_.storage = &items_[random() % items_.size()].t;
    }
    return [this, old] { record_ = old; };
  }
  // Changes the list's count, or sets the list to NULL.
  std::function<void()> change_list(std::mt19937_64& random) {
    const bool count = random() % 2 == 0;
    unsigned char* at = bytes() + (count ? list_->count_offset : list_->offset);
    uint64_t old;
    std::memcpy(&old, at, sizeof old);
    const uint64_t next = count ? random() % 4 - 1 : 0;
    std::memcpy(at, &next, sizeof next);
    return [at, old] { std::memcpy(at, &old, sizeof old); };
  }
  // Adds a list of two tensors of this shape.
  void add_list(const te_fl_arg_desc& arg, const std::vector<int64_t>& shape) {
    auto& list = lists_.emplace_back();
    for (int k = 0; k < 2; ++k) list.push_back(&add_item(shape).t);
    list.push_back(list[1]);  // lies beyond the list's count
    const te_fl_tensor* const* first = list.data();
    const int64_t count = 2;
    std::memcpy(bytes() + arg.offset, &first, sizeof first);
    std::memcpy(bytes() + arg.count_offset, &count, sizeof count);
    offsets_.push_back(0);
    list_ = &arg;
  }

  std::unique_ptr<const CompiledOp> op_;
  std::vector<uint64_t> args_;
  std::deque<Item> items_;
  std::deque<std::vector<const te_fl_tensor*>> lists_;
  const te_fl_arg_desc* list_ = nullptr;  // the list added last
  te_fl_saved record_;
  bool has_record_ = false;
  std::vector<uint32_t> offsets_;  // offsets of tensor arguments in the struct; 0 for a list
};

const te_fl_op_schema& find_schema(std::string_view name) {
  for (const te_fl_op_schema* schema : catalogue()) {
    if (schema->name == name) return *schema;
  }
  ADD_FAILURE() << name;
  return *catalogue()[0];
}

std::deque<CallUnderTest> good_calls() {
  std::deque<CallUnderTest> calls;
  calls.emplace_back(find_schema("gelu"), std::vector<std::vector<int64_t>>{{2, 3, 4}, {2, 3, 4}});
  calls.emplace_back(find_schema("layernorm_fwd"),
                     std::vector<std::vector<int64_t>>{{6, 4}, {4}, {4}, {6, 4}, {6}, {6}});
  calls.emplace_back(find_schema("generic_gemm"),
                     std::vector<std::vector<int64_t>>{{4, 4}, {4, 4}, {4, 4}});
  calls
      .emplace_back(find_schema("generic_gemm"),
                    std::vector<std::vector<int64_t>>{{4, 4}, {4, 4}, {4, 4}})
      .quantise(2);
  calls.emplace_back(find_schema("multi_tensor_unscale_l2norm"),
                     std::vector<std::vector<int64_t>>{{4, 4}, {1}, {1}});
  calls.emplace_back(find_schema("multi_tensor_scale"),
                     std::vector<std::vector<int64_t>>{{4, 4}, {4, 4}, {1}});
  calls.emplace_back(
      find_schema("multi_tensor_adam"),
      std::vector<std::vector<int64_t>>{{4, 4}, {4, 4}, {4, 4}, {4, 4}, {}, {1}, {1}});
  calls.emplace_back(testing::save_schema(true), std::vector<std::vector<int64_t>>{{2, 4}, {2, 4}});
  calls.emplace_back(testing::save_schema(false),
                     std::vector<std::vector<int64_t>>{{2, 4}, {2, 4}});
  return calls;
}

TEST(Memo, RecognisesNothingThatTheCheckRefuses) {
  std::mt19937_64 random(3);
  for (CallUnderTest& call : good_calls()) {
    const std::string name = call.op().schema().name;
    TestMemo memo;
    Signature plain, quick;
    ASSERT_TRUE(call.op().check(call.args(), plain))
        << name << ": " << call.op().check_status(call.args()).to_string();
    int good = 0, bad = 0;
    for (int i = 0; i < testing::rounds(60000); ++i) {
      std::vector<std::function<void()>> undo;
      for (uint64_t n = random() % 3; n > 0; --n) undo.push_back(call.change(random));
      const bool expected = call.op().check(call.args(), plain);
      const bool got = check_by(memo, call.op(), call.args(), quick);
      ASSERT_EQ(got, expected) << name << " round " << i << ": "
                               << call.op().check_status(call.args()).to_string();
      if (got) {
        ASSERT_EQ(quick, plain) << name;
      }
      ++(got ? good : bad);
      while (!undo.empty()) {
        undo.back()();
        undo.pop_back();
      }
    }
    EXPECT_GT(good, testing::rounds(10000)) << name;
    EXPECT_GT(bad, testing::rounds(10000)) << name;
  }
}

TEST(ExactMemo, RecognisesOnlyTheCallItself) {
  std::mt19937_64 random(5);
  for (CallUnderTest& call : good_calls()) {
    const std::string name = call.op().schema().name;
    ExactMemo memo;
    Signature signature, now;
    EXPECT_FALSE(memo.is(call.args()));
    EXPECT_FALSE(memo.is(nullptr));
    ASSERT_TRUE(call.op().check(call.args(), signature));
    memo.take(call.op(), call.args());
    int same = 0, other = 0;
    const bool expects_hits = call.op().layout().lists.empty() &&
                              call.op().layout().saved.offset == 0 &&
                              call.op().schema().args_size <= ExactMemo::kMaxArgs &&
                              call.op().schema().args_size % 8 == 0;
    for (int i = 0; i < testing::rounds(30000); ++i) {
      const auto undo = call.change(random);
      if (memo.is(call.args())) {
        ++same;
        ASSERT_TRUE(call.op().check(call.args(), now))
            << name << ": " << call.op().check_status(call.args()).to_string();
        ASSERT_EQ(now, signature) << name;
      } else {
        ++other;
      }
      undo();
      ASSERT_EQ(memo.is(call.args()), expects_hits) << name;
    }
    EXPECT_GT(other, testing::rounds(1000)) << name;
    EXPECT_GE(same, expects_hits ? testing::rounds(1000) : 0) << name;
  }
}

TEST(ExactMemo, IsNotUsedWhileArgumentsAreValidated) {
  CallUnderTest call(find_schema("gelu"), {{2, 3}, {2, 3}});
  ExactMemo memo;
  memo.take(call.op(), call.args());
  EXPECT_TRUE(memo.is(call.args()));
  g_validate = true;
  EXPECT_FALSE(memo.is(call.args()));
  g_validate = false;
}

TEST(ExactMemo, LeavesOutWhatItCannotCompare) {
  CallUnderTest call(find_schema("gelu"), {{2, 3}, {2, 3}});
  ExactMemo memo;
  call.items()[0].strides[0] = 3;
  call.items()[0].strides[1] = 1;
  call.items()[0].t.dl.strides = call.items()[0].strides;
  memo.take(call.op(), call.args());
  EXPECT_FALSE(memo.is(call.args()));
}

TEST(Memo, OpsOfOneAddressAreNotMixedUp) {
  // A custom op may be destroyed and another compiled at the same address; their ids differ.
  TestMemo memo;
  Signature s;
  for (int round = 0; round < 50; ++round) {
    CallUnderTest call(find_schema(round % 2 == 0 ? "gelu" : "geglu"),
                       round % 2 == 0 ? std::vector<std::vector<int64_t>>{{2, 8}, {2, 8}}
                                      : std::vector<std::vector<int64_t>>{{2, 8}, {2, 4}});
    EXPECT_TRUE(check_by(memo, call.op(), call.args(), s));
    call.items()[1].shape[1] = round % 2 == 0 ? 4 : 8;  // a shape that is valid for the other op
                                                        // only
    EXPECT_FALSE(check_by(memo, call.op(), call.args(), s));
  }
}

// A call with two lists of F32 tensors of four elements, on memory that the test chooses.
struct TwoLists {
  explicit TwoLists(int64_t count) : items(static_cast<size_t>(2 * count)) {
    for (Item& item : items) {
      item.shape[0] = 4;
      item.t.dl.ndim = 1;
      item.t.dl.shape = item.shape;
      item.t.dl.dtype = {TE_FL_CODE_FLOAT, 32, 1};
      item.t.dl.device = {TE_FL_DEVICE_CPU, 0};
      pointers.push_back(&item.t);
    }
    flag.shape[0] = 1;
    flag.t.dl = items[0].t.dl;
    flag.t.dl.dtype = {TE_FL_CODE_INT, 32, 1};
    flag.t.dl.shape = flag.shape;
    flag.t.dl.data = g_memory;
    args.inputs = pointers.data();
    args.outputs = pointers.data() + count;
    args.inputs_count = args.outputs_count = count;
    args.noop_flag = &flag.t;
    move(1);
  }
  // Gives each tensor a new address, which is never accessed.
  void move(uintptr_t where) {
    for (size_t i = 0; i < items.size(); ++i) {
      items[i].t.dl.data = reinterpret_cast<void*>((where << 40) + (i + 1) * 256);
    }
  }
  te_fl_dltensor& input(size_t k) { return items[k].t.dl; }
  te_fl_dltensor& output(size_t k) { return items[items.size() / 2 + k].t.dl; }

  std::deque<Item> items;
  Item flag;
  std::vector<const te_fl_tensor*> pointers;
  te_fl_multi_tensor_scale_args args;
};

class MovingLists : public ::testing::TestWithParam<int64_t> {
 protected:
  // Returns whether the memo recognises the call; expects the full check to return `good`.
  bool knows(bool good = true) {
    Signature s;
    bool known = false;
    EXPECT_EQ(check_by(memo, *op, &lists.args, s, &known), good);
    return known;
  }
  const std::unique_ptr<const CompiledOp> op =
      CompiledOp::compile(find_schema("multi_tensor_scale")).value();
  TestMemo memo;
  TwoLists lists{GetParam()};
  const size_t last = static_cast<size_t>(GetParam()) - 1;
};

TEST_P(MovingLists, AreKnown) {
  EXPECT_FALSE(knows());
  for (uintptr_t where = 2; where < 6; ++where) {
    lists.move(where);
    EXPECT_TRUE(knows()) << where;
    EXPECT_TRUE(knows()) << where;
  }
  lists.output(last).data = lists.input(last).data;  // the output is the input's memory, which the
                                                     // op allows
  EXPECT_TRUE(knows());
}

TEST_P(MovingLists, AreCheckedWhereTheyShareWhatTheyMayNot) {
  EXPECT_FALSE(knows());
  lists.move(2);
  lists.output(last).data = lists.flag.t.dl.data;
  EXPECT_FALSE(knows(false));
  lists.move(3);
  EXPECT_FALSE(knows());  // the memo has evicted it
  lists.flag.t.dl.data = lists.output(last).data;
  EXPECT_FALSE(knows(false));
}

TEST_P(MovingLists, AreCheckedWhereTheyAreLessAligned) {
  EXPECT_FALSE(knows());
  lists.input(last).byte_offset = 2;
  EXPECT_FALSE(knows(false));
  lists.input(last).byte_offset = 4;
  EXPECT_FALSE(knows());
  lists.input(last).data = nullptr;
  EXPECT_FALSE(knows(false));
}

TEST_P(MovingLists, SayWhatMattersToAPlan) {
  uint64_t hash = 0;
  EXPECT_FALSE(knows());
  auto* slot = memo.find(op->layout(), &lists.args, hash);
  ASSERT_NE(slot, nullptr);
  const auto keeps_plan = [&] {
    slot->known.has_plan = true;
    return memo.find(op->layout(), &lists.args, hash) == slot && slot->known.has_plan;
  };
  lists.move(2);
  EXPECT_TRUE(keeps_plan());
  lists.input(last).byte_offset = 64;  // aligned to 64 bytes only
  EXPECT_FALSE(keeps_plan());
  lists.move(3);
  EXPECT_TRUE(keeps_plan());
  lists.output(last).data = lists.input(last).data;
  lists.output(last).byte_offset = 64;
  EXPECT_FALSE(keeps_plan());  // in place now
}

INSTANTIATE_TEST_SUITE_P(Counts, MovingLists, ::testing::Values(1, 2, 63, 64, 65, 131));

}  // namespace
}  // namespace te_fl::core
