// Rules between arguments: their grammar, the calls that they refuse and the messages, the rules of
// the catalogue, and lists of integers.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "core/op/constraint.hpp"
#include "core/op/op_table.hpp"
#include "memo_check.hpp"
#include "op_fixture.hpp"
#include "te_fl/ops/activation.h"
#include "te_fl/ops/attention.h"
#include "te_fl/ops/gemm.h"
#include "te_fl/ops/moe.h"
#include "te_fl/ops/norm.h"
#include "te_fl/ops/optimizer.h"
#include "te_fl/ops/quantize.h"
#include "te_fl/ops/rope.h"
#include "te_fl/ops/tensor.h"

namespace te_fl::core {
namespace {

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// x, an optional y, and scalars of every kind.
struct RuledArgs {
  uint32_t struct_size = sizeof(RuledArgs);
  int32_t flag = 0;
  const te_fl_tensor* x = nullptr;
  const te_fl_tensor* y = nullptr;
  int64_t m = 0, n = 0;
  float rate = 0;
  int32_t mode = 0;
  const int64_t* sizes = nullptr;
  int64_t sizes_count = 0;
};

SchemaBuilder ruled(const char* rules, uint32_t size_flags = TE_FL_ARG_OPTIONAL) {
  SchemaBuilder b("test::ruled");
  b.add("x", TE_FL_ARG_TENSOR, TE_FL_IN, offsetof(RuledArgs, x)).dtypes = TE_FL_MASK_ANY_DTYPE;
  b.add("y", TE_FL_ARG_TENSOR, TE_FL_OUT, offsetof(RuledArgs, y)).flags = TE_FL_ARG_OPTIONAL;
  b.add("flag", TE_FL_ARG_BOOL, TE_FL_IN, offsetof(RuledArgs, flag), nullptr);
  b.add("m", TE_FL_ARG_I64, TE_FL_IN, offsetof(RuledArgs, m), nullptr);
  b.add("n", TE_FL_ARG_I64, TE_FL_IN, offsetof(RuledArgs, n), nullptr);
  b.add("rate", TE_FL_ARG_F32, TE_FL_IN, offsetof(RuledArgs, rate), nullptr);
  b.add("mode", TE_FL_ARG_ENUM, TE_FL_IN, offsetof(RuledArgs, mode), nullptr).enum_names =
      "plain wide tall";
  te_fl_arg_desc& sizes =
      b.add("sizes", TE_FL_ARG_I64_LIST, TE_FL_IN, offsetof(RuledArgs, sizes), nullptr);
  sizes.count_offset = offsetof(RuledArgs, sizes_count);
  sizes.flags = size_flags;
  sizes.min = 1, sizes.max = 100;
  b.schema.args_size = sizeof(RuledArgs);
  b.schema.rules = rules;
  return b;
}

// Returns the error message for a call of test::ruled after `change`, "" if it is valid.
std::string outcome(const char* rules, const std::function<void(RuledArgs&)>& change,
                    const Tensor& x = f32({2}), uint32_t size_flags = TE_FL_ARG_OPTIONAL) {
  SchemaBuilder b = ruled(rules, size_flags);
  const auto op = b.compile();
  if (!op.ok()) return op.status().to_string();
  RuledArgs args;
  args.x = x;
  change(args);
  return check(**op, &args);
}

TEST(Rules, RequiresHoldsWhereItsLeftSideDoesNot) {
  const char* rule = "y requires flag";
  const Tensor y = f32({3});
  EXPECT_EQ(outcome(rule, [](RuledArgs&) {}), "");
  EXPECT_EQ(outcome(rule, [](RuledArgs& a) { a.flag = 1; }), "");
  EXPECT_EQ(outcome(rule, [&](RuledArgs& a) { a.y = y, a.flag = 1; }), "");
  EXPECT_EQ(outcome(rule, [&](RuledArgs& a) { a.y = y; }),
            "test::ruled: argument 'y' is f32[3] cpu, 'flag' is 0, which breaks the rule \"y "
            "requires flag\"; give what it requires, or leave 'y' out");
}

TEST(Rules, OneOfSeveralAlternativesIsEnough) {
  const char* rule = "sizes requires mode is wide|tall or flag";
  const int64_t one[] = {1};
  const auto with = [&](int32_t mode, int32_t flag) {
    return outcome(rule, [&](RuledArgs& a) {
      a.sizes = one, a.sizes_count = 1, a.mode = mode, a.flag = flag;
    });
  };
  EXPECT_EQ(with(1, 0), "");
  EXPECT_EQ(with(2, 0), "");
  EXPECT_EQ(with(0, 1), "");
  EXPECT_TRUE(has(with(0, 0), "'sizes' is a list of 1, 'mode' is plain, 'flag' is 0"))
      << with(0, 0);
}

TEST(Rules, Excludes) {
  const char* rule = "flag excludes rate";
  EXPECT_EQ(outcome(rule, [](RuledArgs& a) { a.flag = 1; }), "");
  EXPECT_EQ(outcome(rule, [](RuledArgs& a) { a.rate = 0.5f; }), "");
  const std::string both = outcome(rule, [](RuledArgs& a) { a.flag = 1, a.rate = 0.5f; });
  EXPECT_TRUE(has(both, "argument 'flag' is 1, 'rate' is 0.5")) << both;
  EXPECT_TRUE(has(both, "leave one of them out")) << both;
}

TEST(Rules, OneTensorHoldsWhatAnotherDoes) {
  const auto with = [&](const Tensor& y) {
    return outcome(
        "x holds y", [&](RuledArgs& a) { a.y = y; }, f32({2}));
  };
  EXPECT_EQ(outcome("x holds y", [](RuledArgs&) {}), "") << "y is not given";
  EXPECT_EQ(with(f32({2})), "");
  EXPECT_TRUE(has(with(f32({3})), "'x' is f32[2] cpu, 'y' is f32[3] cpu, which breaks the rule"))
      << with(f32({3}));
  for (const char* wrong :
       {"x holds flag", "x holds flag times y", "x holds y times y", "x holds"}) {
    EXPECT_FALSE(ruled(wrong).compile().ok()) << wrong;
  }
}

TEST(Rules, DtypesAndScalingModes) {
  const auto on = [](const char* rule, const Tensor& x) {
    return outcome(
        rule, [](RuledArgs& a) { a.flag = 1; }, x);
  };
  const Tensor half = Tensor::zeros({2}, DType::kF16).value();
  EXPECT_EQ(on("flag excludes x is f16|bf16", f32({2})), "");
  EXPECT_TRUE(has(on("flag excludes x is f16|bf16", half), "'x' is f16[2]"));
  EXPECT_EQ(on("flag requires x is none", half), "");
  EXPECT_EQ(on("flag excludes x is tensor", half), "");
  EXPECT_TRUE(has(on("flag requires x is tensor", half), "'x' is f16[2]"));
  // A rule fails on a tensor that is not given.
  EXPECT_TRUE(has(on("flag requires y is f32", half), "'y' is missing (NULL)"));
}

// The masks of dtypes and of scaling modes have 64 bits each; a mask of one kind must not be used
// as the other.
TEST(Rules, DtypesAndScalingModesHaveMasksOfTheirOwn) {
  te_fl_arg_desc x{};
  x.struct_size = sizeof x;
  x.name = "x";
  x.type = TE_FL_ARG_TENSOR;
  const auto condition = [&](const std::string& words) {
    return parse_constraints("x is " + words, {&x}, {}).value().at(0).left;
  };
  for (int i = 0; i < TE_FL_DTYPE_COUNT; ++i) {
    const Condition c = condition(std::string(name(static_cast<DType>(i))));
    EXPECT_EQ(c.dtypes, uint64_t{1} << i);
    EXPECT_EQ(c.scalings | c.values, 0u);
  }
  for (int i = 0; i < TE_FL_SCALING_COUNT; ++i) {
    const Condition c = condition(std::string(name(static_cast<Scaling>(i))));
    EXPECT_EQ(c.scalings, uint64_t{1} << i);
    EXPECT_EQ(c.dtypes | c.values, 0u);
  }
  static_assert(sizeof(Condition::dtypes) == sizeof(te_fl_arg_desc::dtypes));
  static_assert(sizeof(Condition::scalings) >= sizeof(te_fl_arg_desc::scalings));
}

TEST(Rules, Comparisons) {
  const auto with = [](const char* rule, int64_t m, int64_t n) {
    return outcome(rule, [&](RuledArgs& a) { a.m = m, a.n = n; }).empty();
  };
  EXPECT_TRUE(with("m < n", 1, 2));
  EXPECT_FALSE(with("m < n", 2, 2));
  EXPECT_TRUE(with("m <= n", 2, 2));
  EXPECT_FALSE(with("m > n", 2, 2));
  EXPECT_TRUE(with("m >= n", 2, 2));
  EXPECT_FALSE(with("m == n", 1, 2));
  EXPECT_TRUE(with("m != n", 1, 2));
  EXPECT_TRUE(with("m multiple_of n", 12, 4));
  EXPECT_FALSE(with("m multiple_of n", 13, 4));
  EXPECT_FALSE(with("m multiple_of n", 13, 0));
  EXPECT_TRUE(with("m multiple_of n", INT64_MIN, -1));
  // Compares integers exactly: as doubles, both values would round to the same number.
  EXPECT_FALSE(with("m == n", (int64_t{1} << 53) + 1, int64_t{1} << 53));
  EXPECT_TRUE(has(outcome("m < n", [](RuledArgs& a) { a.m = 3, a.n = 2; }),
                  "argument 'm' is 3, 'n' is 2, which breaks the rule \"m < n\""));
  EXPECT_FALSE(outcome("mode is wide|tall", [](RuledArgs&) {}).empty());
  EXPECT_TRUE(outcome("mode is wide|tall", [](RuledArgs& a) { a.mode = 2; }).empty());
}

TEST(Rules, OneOfSeveralMustBeGiven) {
  const char* rule = "y or flag or mode is tall (a reason)";
  EXPECT_EQ(outcome(rule, [](RuledArgs& a) { a.flag = 1; }), "");
  EXPECT_EQ(outcome(rule, [](RuledArgs& a) { a.mode = 2; }), "");
  EXPECT_EQ(outcome(rule, [](RuledArgs&) {}),
            "test::ruled: argument 'y' is missing (NULL), 'flag' is 0, 'mode' is plain, which "
            "breaks the rule \"y or flag or mode is tall (a reason)\"; give one of them");
}

// The outcome of a call with x of rule "A 2*H" and y of rule "N H".
std::string outcome_of_extents(const char* rules, const Tensor& x, const te_fl_tensor* y, int64_t m,
                               int64_t n = 0) {
  SchemaBuilder b = ruled(rules);
  b.descs[0].shape = "A 2*H", b.descs[1].shape = "N H";
  const auto op = b.compile();
  if (!op.ok()) return op.status().to_string();
  RuledArgs args;
  args.x = x, args.y = y, args.m = m, args.n = n;
  return check(**op, &args);
}

TEST(Rules, ComparisonsOfExtents) {
  const Tensor x = f32({3, 8}), y = f32({5, 4});
  EXPECT_EQ(outcome_of_extents("H multiple_of m", x, y, 2), "");
  EXPECT_EQ(outcome_of_extents("H multiple_of m (blocks)", x, y, 3),
            "test::ruled: H is 4 (in 'x'), 'm' is 3, which breaks the rule \"H multiple_of m "
            "(blocks)\"");
  EXPECT_EQ(outcome_of_extents("m requires H multiple_of m", x, y, 0), "");
  EXPECT_TRUE(has(outcome_of_extents("m requires H multiple_of m", x, y, 3),
                  "argument 'm' is 3, H is 4 (in 'x'), which breaks the rule \"m requires H "
                  "multiple_of m\"; give what it requires, or leave 'm' out"));
  EXPECT_EQ(outcome_of_extents("2 * A + m * H - 1 == n", x, y, 10, 45), "");
  EXPECT_TRUE(has(outcome_of_extents("2 * A + m * H - 1 == n", x, y, 10, 44),
                  "A is 3 (in 'x'), 'm' is 10, H is 4 (in 'x'), 'n' is 44, which"));
  EXPECT_EQ(outcome_of_extents("N == m", x, y, 5), "");
  EXPECT_EQ(outcome_of_extents("N == m", x, nullptr, 4), "") << "N has no value";
  EXPECT_FALSE(outcome_of_extents("N == m", x, y, 4).empty());
  EXPECT_FALSE(outcome_of_extents("A * m * m <= 9", x, y, int64_t{1} << 62).empty())
      << "a product that overflows is large";
}

TEST(Rules, SumsOfListsAndListsOfEqualLength) {
  const int64_t sizes[] = {1, 100}, more[] = {2, 100, 7};
  const auto with = [&](const char* rule, int64_t m, const int64_t* others, int64_t count) {
    struct Args {
      uint32_t struct_size = sizeof(Args);
      const int64_t *a, *b;
      int64_t a_count, b_count, m;
    } args{.a = sizes, .b = others, .a_count = 2, .b_count = count, .m = m};
    SchemaBuilder b("test::lists");
    const auto list = [&](const char* name, uint32_t offset, uint32_t count_offset) {
      b.add(name, TE_FL_ARG_I64_LIST, TE_FL_IN, offset, nullptr).count_offset = count_offset;
    };
    list("a", offsetof(Args, a), offsetof(Args, a_count));
    list("b", offsetof(Args, b), offsetof(Args, b_count));
    b.add("m", TE_FL_ARG_I64, TE_FL_IN, offsetof(Args, m), nullptr);
    b.schema.args_size = sizeof(Args);
    b.schema.rules = rule;
    return check(*b.compile().value(), &args);
  };
  EXPECT_EQ(with("m == sum(a)", 101, more, 2), "");
  EXPECT_TRUE(has(with("m == sum(a)", 102, more, 2), "'m' is 102, the sum of 'a' is 101, which"));
  EXPECT_EQ(with("a <= b", 0, more, 2), "");
  EXPECT_TRUE(has(with("a < b", 0, more, 2), "argument 'a'[1] is 100, 'b'[1] is 100, which"));
  EXPECT_TRUE(has(with("a <= b", 0, more, 3), "argument 'a' is a list of 2, 'b' is a list of 3"));
}

TEST(Rules, ATensorHoldsANumberOfElementsOrThoseOfAList) {
  EXPECT_EQ(outcome("x holds 2", [](RuledArgs&) {}), "");
  EXPECT_TRUE(has(outcome("x holds 3", [](RuledArgs&) {}), "argument 'x' is f32[2] cpu, which"));
  EXPECT_FALSE(ruled("x holds sizes").compile().ok());
  EXPECT_FALSE(ruled("x holds 0.5").compile().ok());
}

TEST(Rules, ANumberFitsADtype) {
  const Tensor x = Tensor::zeros({2}, DType::kU8).value();
  const auto with = [](const Tensor& x, float rate) {
    return outcome(
        "rate fits x", [&](RuledArgs& a) { a.rate = rate; }, x);
  };
  EXPECT_EQ(with(x, 255.9f), "");
  EXPECT_EQ(with(x, -0.9f), "");
  EXPECT_EQ(with(f32({2}), 1e9f), "");
  EXPECT_EQ(with(x, 256),
            "test::ruled: argument 'rate' is 256, 'x' is u8[2] cpu, which breaks the "
            "rule \"rate fits x\"; u8 takes numbers from 0 to below 256");
  EXPECT_FALSE(with(x, -1).empty());
  EXPECT_FALSE(ruled("x fits y").compile().ok());
  EXPECT_FALSE(ruled("rate fits sizes").compile().ok());
}

TEST(Rules, TheFirstBrokenOneIsNamed) {
  const char* rules = "m < n; flag excludes rate";
  EXPECT_TRUE(has(outcome(rules, [](RuledArgs& a) { a.n = 1, a.flag = 1, a.rate = 1; }),
                  "\"flag excludes rate\""));
  EXPECT_TRUE(has(outcome(rules, [](RuledArgs& a) { a.flag = 1, a.rate = 1; }), "\"m < n\""));
}

TEST(Rules, ArgumentsBeyondAShorterStructAreNeutral) {
  SchemaBuilder b = ruled("flag requires m > 3");
  b.schema.least_args_size = offsetof(RuledArgs, m);
  for (te_fl_arg_desc& d : b.descs) {
    if (d.offset < offsetof(RuledArgs, m)) continue;
    d.flags |= TE_FL_ARG_LATER;
    if (std::string(d.name) == "m") d.neutral = 4;
  }
  const auto op = b.compile();
  ASSERT_TRUE(op.ok()) << op.status().to_string();
  RuledArgs args;
  const Tensor x = f32({2});
  args.x = x, args.flag = 1;
  EXPECT_TRUE(has(check(**op, &args), "'m' is 0"));
  args.struct_size = offsetof(RuledArgs, m);
  EXPECT_EQ(check(**op, &args), "");
}

TEST(Rules, WrongOnesAreRefusedAtRegistration) {
  const auto refusal = [](const char* rules) { return ruled(rules).compile().status().message(); };
  EXPECT_TRUE(has(refusal("z requires x"), "'z' does not begin with an argument's name"));
  EXPECT_TRUE(has(refusal("x"), "must be 'A requires B'"));
  EXPECT_TRUE(has(refusal("x requires"), "rule \"x requires\""));
  EXPECT_TRUE(has(refusal("mode is huge"), "'huge' is neither"));
  EXPECT_TRUE(has(refusal("x is f33"), "'f33' is neither"));
  EXPECT_TRUE(has(refusal("m is 3"), "'3' is neither"));
  EXPECT_TRUE(has(refusal("m ~ n"), "'~' is neither 'is' nor a comparison"));
  EXPECT_TRUE(has(refusal("m < z"), "'z' is neither an argument, a name of a shape rule nor"));
  EXPECT_TRUE(has(refusal("m < x"), "'x' is no number"));
  EXPECT_TRUE(has(refusal("x < 3"), "'x' is no number"));
  EXPECT_TRUE(has(refusal("rate multiple_of n"), "multiple_of takes integers"));
  EXPECT_TRUE(has(refusal("m + rate < 3"), "+ - * take integers"));
  EXPECT_TRUE(has(refusal("m + < 3"), "is incomplete"));
  EXPECT_TRUE(has(refusal("m / n < 3"), "'/' is neither + nor - nor *"));
  EXPECT_TRUE(has(refusal("1 < 2"), "needs an argument or a name"));
  EXPECT_TRUE(has(refusal("m == sum(m)"), "'sum(m)' is no sum of a list of integers"));
  EXPECT_TRUE(has(refusal("flag excludes x or y"), "excludes takes one condition"));
  EXPECT_TRUE(has(refusal("flag requires x or y or m or n or rate"), "too many alternatives"));
  EXPECT_TRUE(has(refusal("m < n;m < n"), "rule \"m < n;m < n\""));
}

TEST(Rules, TheyArePartOfADescription) {
  SchemaBuilder b = ruled("m < n"), same = ruled("m < n"), other = ruled("m <= n"),
                none = ruled(nullptr);
  const auto op = b.compile().value();
  EXPECT_EQ(op->difference(same.build()), "");
  EXPECT_EQ(op->difference(other.build()), "rules is 'm < n', not 'm <= n'");
  EXPECT_EQ(op->difference(none.build()), "rules is 'm < n', not none");
  // The schema struct of an older header version has no `rules` member.
  te_fl_op_schema older = same.build();
  older.struct_size = offsetof(te_fl_op_schema, rules);
  EXPECT_EQ(op->difference(older), "rules is 'm < n', not none");
}

TEST(Rules, NamesOfListElementsHaveNoSingleValue) {
  SchemaBuilder b("test::elements");
  b.tensor("x", "A");
  te_fl_arg_desc& list = b.add("list", TE_FL_ARG_TENSOR_LIST, TE_FL_IN, 16, "A B");
  list.count_offset = 24;
  b.schema.args_size = 32;
  b.schema.rules = "A < 3";
  EXPECT_TRUE(b.compile().ok());
  b.schema.rules = "B < 3";
  EXPECT_TRUE(has(b.compile().status().message(), "'B' has a value for each element of a list"));
}

// A remembered call that comes with another number is checked by the rules about extents again.
TEST(Rules, ApplyToRememberedCallsWithOtherNumbers) {
  const auto op = compile("scaled_swiglu");
  const Tensor x = f32({2, 8}), s = f32({2}), y = f32({2, 4});
  te_fl_scaled_swiglu_args args;
  args.input = x, args.act_scales = s, args.output = y;
  TestMemo memo;
  Signature signature;
  bool known = false;
  EXPECT_TRUE(check_by(memo, *op, &args, signature));
  args.glu_interleave_size = 2;
  EXPECT_TRUE(check_by(memo, *op, &args, signature, &known));
  EXPECT_TRUE(known);
  args.glu_interleave_size = 3;
  EXPECT_FALSE(check_by(memo, *op, &args, signature));
}

TEST(Integers, AListIsChecked) {
  const int64_t good[] = {1, 100}, bad[] = {1, 101};
  const auto with = [](const int64_t* sizes, int64_t count, uint32_t flags = TE_FL_ARG_OPTIONAL) {
    return outcome(
        nullptr, [&](RuledArgs& a) { a.sizes = sizes, a.sizes_count = count; }, f32({2}), flags);
  };
  EXPECT_EQ(with(good, 2), "");
  EXPECT_EQ(with(nullptr, 0), "");
  EXPECT_EQ(with(bad, 2), "test::ruled: argument 'sizes'[1] is 101, must be from 1 to 100");
  EXPECT_TRUE(has(with(nullptr, 2), "'sizes' is NULL but its count is 2"));
  EXPECT_TRUE(has(with(good, -1), "has count -1, must not be negative"));
  EXPECT_TRUE(has(with(good, int64_t{1} << 40), "must be at most"));
  EXPECT_TRUE(has(with(nullptr, 0, 0), "has count 0, must have one integer at least"));
}

TEST(Integers, ALaterOneMustBeOptional) {
  SchemaBuilder b = ruled(nullptr, 0);
  b.descs.back().flags |= TE_FL_ARG_LATER;
  EXPECT_TRUE(has(b.compile().status().message(), "must be optional"));
}

TEST(Classes, AnOpIsAnEnquiryOrACollective) {
  SchemaBuilder b = ruled(nullptr);
  EXPECT_EQ(class_of(b.build()), OpClass::kCompute);
  b.schema.flags = TE_FL_SCHEMA_COLLECTIVE;
  EXPECT_EQ(class_of(b.compile().value()->schema()), OpClass::kCollective);
  b.schema.flags |= TE_FL_SCHEMA_ENQUIRY;
  EXPECT_TRUE(has(b.compile().status().message(), "not both"));
}

// ---- the catalogue's rules: each is broken by one call, and its error must quote the rule

class Broken {
 public:
  template <class Args>
  void by(const char* op, Args args, const std::function<void(Args&)>& spoil, const char* rule) {
    const auto compiled = compile(op);
    EXPECT_EQ(check(*compiled, &args), "") << op;
    spoil(args);
    const std::string text = check(*compiled, &args);
    EXPECT_TRUE(has(text, "breaks the rule \"" + std::string(rule) + "\"")) << op << ": " << text;
    seen_.insert(std::string(op) + ": " + rule);
  }
  // Returns the op's rules that no call has broken yet.
  std::vector<std::string> left(const char* op) const {
    std::vector<std::string> result;
    std::string rules = catalogue_schema(op)->rules;
    for (size_t at = 0; at < rules.size();) {
      const size_t end = std::min(rules.find("; ", at), rules.size());
      const std::string rule = rules.substr(at, end - at);
      if (!seen_.contains(std::string(op) + ": " + rule)) result.push_back(rule);
      at = end + 2;
    }
    return result;
  }

 private:
  std::set<std::string> seen_;
};

const std::vector<std::string> kNone;

TEST(CatalogueRules, Gemm) {
  using Args = te_fl_generic_gemm_args;
  const char* op = "generic_gemm";
  const Tensor m = f32({4, 4}), v = f32({4}), d = f32({4, 4}), out = f32({4, 4}), sum = f32({4});
  const Tensor q = quantised({4, 4}, {.scaling = Scaling::kTensor});
  const Tensor a8 = quantised({4, 4}, {.scaling = Scaling::kBlock128x128});
  const Tensor b8 = quantised({4, 4}, {.scaling = Scaling::kBlock128x128});
  Args args;
  args.a = args.b = m, args.d = d;
  Args with_block_a = args, with_block_b = args;
  with_block_a.a = a8, with_block_b.b = b8;
  Broken broken;
  broken.by<Args>(
      op, args, [&](Args& x) { x.d = q, x.accumulate = 1; },
      "accumulate excludes d is f8e4m3|f8e5m2");
  broken.by<Args>(
      op, args, [&](Args& x) { x.pre_gelu_out = out; }, "pre_gelu_out requires gelu");
  broken.by<Args>(
      op, args, [&](Args& x) { x.pre_gelu_in = m, x.gelu = 1; }, "pre_gelu_in excludes gelu");
  broken.by<Args>(
      op, args, [&](Args& x) { x.pre_gelu_in = m, x.bias = v; }, "pre_gelu_in excludes bias");
  broken.by<Args>(
      op, args, [&](Args& x) { x.accumulate_bias_grad = 1; },
      "accumulate_bias_grad requires bias_grad");
  broken.by<Args>(
      op, args, [&](Args& x) { x.d_sum = sum, x.accumulate = 1; }, "d_sum excludes accumulate");
  broken.by<Args>(
      op, with_block_a, [&](Args& x) { x.b = b8; }, "a is block128x128 excludes b is block128x128");
  broken.by<Args>(
      op, with_block_a, [&](Args& x) { x.gelu = 1; }, "gelu excludes a is block1x128|block128x128");
  broken.by<Args>(
      op, with_block_b, [&](Args& x) { x.gelu = 1; }, "gelu excludes b is block1x128|block128x128");
  broken.by<Args>(
      op, with_block_a, [&](Args& x) { x.bias_grad = sum; },
      "bias_grad excludes a is block1x128|block128x128");
  broken.by<Args>(
      op, with_block_b, [&](Args& x) { x.bias_grad = sum; },
      "bias_grad excludes b is block1x128|block128x128");
  EXPECT_EQ(broken.left(op), kNone);
}

TEST(CatalogueRules, Norms) {
  using Args = te_fl_rmsnorm_fwd_args;
  const Tensor x = f32({2, 4}), g = f32({4}), z = f32({2, 4}), r = f32({2}), more = f32({2, 4});
  Args args;
  args.x = x, args.gamma = g, args.z = z, args.rsigma = r;
  Broken broken;
  broken.by<Args>(
      "rmsnorm_fwd", args, [&](Args& a) { a.residual = more; }, "residual requires sum");
  broken.by<Args>(
      "rmsnorm_fwd", args, [&](Args& a) { a.sum = more; }, "sum requires residual");
  EXPECT_EQ(broken.left("rmsnorm_fwd"), kNone);
  args.epsilon = -1;
  EXPECT_TRUE(has(check(*compile("rmsnorm_fwd"), &args), "'epsilon' is -1, must be from 0"));
}

TEST(CatalogueRules, Optimizers) {
  using Adam = te_fl_multi_tensor_adam_args;
  const Tensor g = f32({2}), p = f32({2}), m = f32({2}), v = f32({2}), norm = f32({1});
  const Tensor flag = Tensor::zeros({1}, DType::kI32).value();
  const te_fl_tensor *gs[] = {g}, *ps[] = {p}, *ms[] = {m}, *vs[] = {v};
  Adam adam;
  adam.grads = gs, adam.params = ps, adam.exp_avgs = ms, adam.exp_avg_sqs = vs;
  adam.grads_count = adam.params_count = adam.exp_avgs_count = adam.exp_avg_sqs_count = 1;
  Broken broken;
  broken.by<Adam>(
      "multi_tensor_adam", adam, [](Adam& a) { a.beta1 = 1; },
      "bias_correction requires beta1 < 1");
  broken.by<Adam>(
      "multi_tensor_adam", adam, [](Adam& a) { a.beta2 = 1; },
      "bias_correction requires beta2 < 1");
  EXPECT_EQ(broken.left("multi_tensor_adam"), kNone);
  using Scale = te_fl_multi_tensor_scale_args;
  Scale scale;
  scale.inputs = gs, scale.outputs = ps, scale.inputs_count = scale.outputs_count = 1;
  scale.noop_flag = flag;
  broken.by<Scale>(
      "multi_tensor_scale", scale, [&](Scale& a) { a.norm = norm; }, "norm requires max_norm > 0");
  EXPECT_EQ(broken.left("multi_tensor_scale"), kNone);
}

TEST(CatalogueRules, DropoutsMaskAndSumsOfBytes) {
  using Add = te_fl_add_args;
  const Tensor x = f32({8}), y = f32({8});
  Add add;
  add.a = add.b = x, add.output = y;
  Broken broken;
  broken.by<Add>(
      "add", add, [](Add& a) { a.p = 0.5f; }, "p requires mask");
  EXPECT_EQ(broken.left("add"), kNone);
  using Turn = te_fl_fp8_transpose_args;
  const Tensor u = Tensor::zeros({2, 3}, DType::kU8).value();
  const Tensor t = Tensor::zeros({3, 2}, DType::kU8).value(), sums = f32({3});
  Turn turn;
  turn.input = u, turn.output = t;
  broken.by<Turn>(
      "fp8_transpose", turn, [&](Turn& a) { a.column_sums = sums; },
      "column_sums excludes input is u8");
  EXPECT_EQ(broken.left("fp8_transpose"), kNone);
}

TEST(CatalogueRules, Rope) {
  using Args = te_fl_rope_rope_args;
  const Tensor x = f32({4, 1, 2, 8}), y = f32({4, 1, 2, 8}), freqs = f32({4, 1, 1, 8});
  const Tensor tokens = f32({4, 2, 8}), tokens_out = f32({4, 2, 8});
  const Tensor cu = Tensor::zeros({2}, DType::kI32).value();
  Args args;
  args.input = x, args.output = y, args.freqs = freqs;
  Broken broken;
  const char* op = "fused_rope_forward";
  broken.by<Args>(
      op, args,
      [&](Args& a) { a.layout = TE_FL_LAYOUT_THD, a.input = tokens, a.output = tokens_out; },
      "layout is thd requires cu_seqlens");
  broken.by<Args>(
      op, args, [&](Args& a) { a.cu_seqlens = cu; }, "cu_seqlens requires layout is thd");
  broken.by<Args>(
      op, args, [](Args& a) { a.cp_rank = 1; }, "cp_rank < cp_size");
  const Tensor wide = f32({4, 1, 1, 10}), few = f32({3, 1, 1, 8}), odd = f32({3, 1, 2, 8}),
               odd_out = f32({3, 1, 2, 8});
  broken.by<Args>(
      op, args, [&](Args& a) { a.freqs = wide; },
      "2 * R <= D (freqs has no more columns than a head)");
  broken.by<Args>(
      op, args, [&](Args& a) { a.input = odd, a.output = odd_out, a.cp_size = 2; },
      "cp_size > 1 requires S multiple_of 2 (a rank holds two chunks of equal length)");
  const std::string rows =
      "B > 0 requires 2 * P >= 2 * S * cp_size - S * cp_rank (freqs has a row for each position)";
  broken.by<Args>(
      op, args, [&](Args& a) { a.freqs = few; }, rows.c_str());
  // Rank 1 of 2 holds the positions 2 to 5 of the first 8; rank 0 holds the last of them.
  const Tensor six = f32({6, 1, 1, 8}), eight = f32({8, 1, 1, 8});
  args.freqs = eight, args.cp_size = 2;
  broken.by<Args>(
      op, args, [&](Args& a) { a.freqs = six; }, rows.c_str());
  args.freqs = six, args.cp_rank = 1;
  EXPECT_EQ(check(*compile(op), &args), "");
  EXPECT_EQ(broken.left(op), kNone);
  using Packed = te_fl_fused_qkv_rope_forward_args;
  const Tensor qkv = f32({4, 1, 2, 16}), q = f32({4, 1, 4, 4}), k = f32({4, 1, 2, 4}),
               v = f32({4, 1, 2, 4}), angles = f32({4, 1, 1, 4});
  Packed packed;
  packed.qkv_input = qkv, packed.q_out = q, packed.k_out = k, packed.v_out = v;
  packed.q_freqs = packed.k_freqs = angles;
  packed.q_dim = 8, packed.k_dim = packed.v_dim = 4;
  op = "fused_qkv_rope_forward";
  broken.by<Packed>(
      op, packed, [](Packed& a) { a.layout = TE_FL_LAYOUT_THD; }, "layout is sbhd|bshd");
  broken.by<Packed>(
      op, packed, [](Packed& a) { a.q_dim = 7; }, "q_dim multiple_of k_dim");
  broken.by<Packed>(
      op, packed, [](Packed& a) { a.cp_rank = 1; }, "cp_rank < cp_size");
  const Tensor heads = f32({4, 1, 6, 4}), values = f32({4, 1, 2, 5}),
               short_angles = f32({3, 1, 1, 4}), wide_angles = f32({4, 1, 1, 6});
  broken.by<Packed>(
      op, packed, [&](Packed& a) { a.q_out = heads; },
      "N * k_dim == G * q_dim (each group has q_dim / k_dim heads of queries)");
  broken.by<Packed>(
      op, packed, [](Packed& a) { a.k_dim = 2, a.q_dim = 4; }, "D == k_dim");
  broken.by<Packed>(
      op, packed, [&](Packed& a) { a.v_out = values; }, "V == v_dim");
  broken.by<Packed>(
      op, packed, [&](Packed& a) { a.v_out = values, a.v_dim = 5; }, "E == q_dim + k_dim + v_dim");
  broken.by<Packed>(
      op, packed, [&](Packed& a) { a.q_freqs = wide_angles; },
      "2 * Q <= k_dim (q_freqs has no more columns than a head)");
  broken.by<Packed>(
      op, packed, [&](Packed& a) { a.k_freqs = wide_angles; },
      "2 * K <= k_dim (k_freqs has no more columns than a head)");
  broken.by<Packed>(
      op, packed, [&](Packed& a) { a.q_freqs = short_angles; },
      "B > 0 requires 2 * P >= 2 * S * cp_size - S * cp_rank (q_freqs has a row for each "
      "position)");
  broken.by<Packed>(
      op, packed, [&](Packed& a) { a.k_freqs = short_angles; },
      "B > 0 requires 2 * L >= 2 * S * cp_size - S * cp_rank (k_freqs has a row for each "
      "position)");
  const Tensor qkv3 = f32({3, 1, 2, 16}), q3 = f32({3, 1, 4, 4}), k3 = f32({3, 1, 2, 4}),
               v3 = f32({3, 1, 2, 4}), angles6 = f32({6, 1, 1, 4});
  packed.q_freqs = packed.k_freqs = angles6;
  broken.by<Packed>(
      op, packed,
      [&](Packed& a) {
        a.qkv_input = qkv3, a.q_out = q3, a.k_out = k3, a.v_out = v3, a.cp_size = 2;
      },
      "cp_size > 1 requires S multiple_of 2 (a rank holds two chunks of equal length)");
  EXPECT_EQ(broken.left(op), kNone);
}

TEST(CatalogueRules, Router) {
  using Args = te_fl_fused_topk_with_score_function_fwd_args;
  const char* op = "fused_topk_with_score_function_fwd";
  const Tensor logits = f32({3, 8}), probs = f32({3, 8}), saved = f32({3, 8}), bias = f32({8});
  const auto u8 = [](std::initializer_list<int64_t> s) {
    return Tensor::zeros(s, DType::kU8).value();
  };
  const Tensor no_bits = u8({3, 0}), two_bytes = u8({3, 2}),
               indices = Tensor::zeros({3, 2}, DType::kI16).value();
  Args args, soft;
  args.logits = logits, args.probs = probs, args.intermediate_output = saved, args.topk = 2;
  soft = args, soft.score_function = TE_FL_SCORE_FUNCTION_SOFTMAX;
  Broken broken;
  broken.by<Args>(
      op, soft, [&](Args& a) { a.expert_bias = bias; },
      "expert_bias excludes score_function is softmax");
  broken.by<Args>(
      op, args, [](Args& a) { a.use_pre_softmax = 1; },
      "use_pre_softmax requires score_function is softmax");
  broken.by<Args>(
      op, args, [](Args& a) { a.num_groups = 2; }, "num_groups requires group_topk");
  broken.by<Args>(
      op, args, [](Args& a) { a.group_topk = 2; }, "group_topk requires num_groups");
  broken.by<Args>(
      op, args, [](Args& a) { a.num_groups = 2, a.group_topk = 3; }, "group_topk <= num_groups");
  broken.by<Args>(
      op, args, [](Args& a) { a.topk = 9; }, "topk <= E");
  broken.by<Args>(
      op, args, [&](Args& a) { a.routing_bits = no_bits; },
      "8 * B >= E (routing_bits has a bit for each expert)");
  broken.by<Args>(
      op, args, [&](Args& a) { a.routing_bits = two_bytes; },
      "8 * B < E + 8 (routing_bits has a bit for each expert)");
  broken.by<Args>(
      op, args, [&](Args& a) { a.topk_indices = indices, a.topk = 3; },
      "N == topk (topk_indices has topk experts of each token)");
  const Tensor many = f32({3, 32769}), many_probs = f32({3, 32769}), many_saved = f32({3, 32769});
  broken.by<Args>(
      op, args,
      [&](Args& a) {
        a.logits = many, a.probs = many_probs, a.intermediate_output = many_saved;
        a.topk_indices = indices;
      },
      "topk_indices is i16 requires E <= 32768 (i16 numbers 32768 experts, so give i32 or i64)");
  broken.by<Args>(
      op, args, [](Args& a) { a.num_groups = 3, a.group_topk = 1; },
      "num_groups requires E multiple_of num_groups (groups have equally many experts)");
  broken.by<Args>(
      op, args, [](Args& a) { a.num_groups = 4, a.group_topk = 1, a.topk = 3; },
      "num_groups requires topk * num_groups <= group_topk * E (the chosen groups have topk "
      "experts)");
  EXPECT_EQ(broken.left(op), kNone);
}

TEST(CatalogueRules, GroupsOfRows) {
  using Args = te_fl_fused_multi_row_padding_args;
  const char* op = "fused_multi_row_padding";
  const Tensor rows = f32({5, 2}), padded = f32({8, 2}), more = f32({6, 2});
  const int64_t plain[] = {2, 3}, whole[] = {4, 4}, less[] = {6, 2};
  Args args;
  args.input = rows, args.output = padded;
  args.input_rows = plain, args.padded_rows = whole;
  args.input_rows_count = args.padded_rows_count = 2;
  Broken broken;
  broken.by<Args>(
      op, args, [&](Args& a) { a.padded_rows = less; },
      "input_rows <= padded_rows (a padded group has no fewer rows)");
  broken.by<Args>(
      op, args, [&](Args& a) { a.input = more; },
      "N == sum(input_rows) (the groups cover the input)");
  broken.by<Args>(
      op, args, [&](Args& a) { a.output = more; },
      "M == sum(padded_rows) (the groups cover the output)");
  EXPECT_EQ(broken.left(op), kNone);
}

TEST(CatalogueRules, Attention) {
  using Fwd = te_fl_fused_attn_fwd_args;
  using Bwd = te_fl_fused_attn_bwd_args;
  const Tensor x = f32({2, 4, 2, 8}), o = f32({2, 4, 2, 8}), t = f32({8, 2, 8}),
               to = f32({8, 2, 8});
  const Tensor bias = f32({1, 2, 4, 4}), sink = f32({2}), lse = f32({2, 2, 4});
  const Tensor cu = Tensor::zeros({3}, DType::kI32).value(),
               cu2 = Tensor::zeros({3}, DType::kI32).value();
  const Tensor mask = Tensor::zeros({1, 1, 4, 4}, DType::kU8).value();
  const Tensor scale = quantised({1});
  const std::string padding = "mask_type is padding|padding_causal|padding_causal_bottom_right";
  Broken broken;
  // attention_fwd and attention_bwd have the same arguments except for the outputs.
  const auto both = [&](const char* op, auto dense, auto thd) {
    using Args = decltype(dense);
    const auto no = [&](const Args& from, const std::function<void(Args&)>& spoil,
                        const std::string& rule) {
      broken.by<Args>(op, from, spoil, rule.c_str());
    };
    thd.cu_seqlens_q = cu, thd.cu_seqlens_kv = cu2, thd.layout = TE_FL_LAYOUT_THD;
    Args padded = dense;
    padded.cu_seqlens_q = cu, padded.cu_seqlens_kv = cu2;
    padded.mask_type = TE_FL_MASK_TYPE_PADDING;
    no(
        thd, [](Args& a) { a.cu_seqlens_q = nullptr; }, "layout is thd requires cu_seqlens_q");
    no(
        thd, [](Args& a) { a.cu_seqlens_kv = nullptr; }, "layout is thd requires cu_seqlens_kv");
    no(
        padded, [](Args& a) { a.cu_seqlens_q = nullptr; }, padding + " requires cu_seqlens_q");
    no(
        padded, [](Args& a) { a.cu_seqlens_kv = nullptr; }, padding + " requires cu_seqlens_kv");
    no(
        dense, [&](Args& a) { a.cu_seqlens_q = cu; },
        "cu_seqlens_q requires layout is thd or " + padding);
    no(
        dense, [&](Args& a) { a.cu_seqlens_kv = cu; },
        "cu_seqlens_kv requires layout is thd or " + padding);
    no(
        dense, [&](Args& a) { a.cu_seqlens_q_padded = cu; },
        "cu_seqlens_q_padded requires layout is thd");
    no(
        dense, [&](Args& a) { a.cu_seqlens_kv_padded = cu; },
        "cu_seqlens_kv_padded requires layout is thd");
    no(
        thd, [&](Args& a) { a.bias = bias; }, "bias excludes layout is thd");
    no(
        thd, [](Args& a) { a.mask_type = TE_FL_MASK_TYPE_ARBITRARY; },
        "layout is thd excludes mask_type is arbitrary");
    no(
        dense, [](Args& a) { a.mask_type = TE_FL_MASK_TYPE_ARBITRARY; },
        "mask_type is arbitrary requires attn_mask");
    no(
        dense, [&](Args& a) { a.attn_mask = mask; }, "attn_mask requires mask_type is arbitrary");
    no(
        dense, [](Args& a) { a.softmax_type = TE_FL_SOFTMAX_TYPE_LEARNABLE; },
        "softmax_type is learnable requires softmax_sink");
    no(
        dense, [&](Args& a) { a.softmax_sink = sink; },
        "softmax_sink requires softmax_type is learnable");
    no(
        dense, [&](Args& a) { a.s_quant = scale; }, "s_quant requires q is f8e4m3|f8e5m2");
  };
  Fwd fwd, fwd_thd;
  fwd.q = fwd.k = fwd.v = x, fwd.o = o, fwd.layout = TE_FL_LAYOUT_BSHD;
  fwd_thd.q = fwd_thd.k = fwd_thd.v = t, fwd_thd.o = to;
  both("fused_attn_fwd", fwd, fwd_thd);
  EXPECT_EQ(broken.left("fused_attn_fwd"), kNone);
  const Tensor dq = f32({2, 4, 2, 8}), dk = f32({2, 4, 2, 8}), dv = f32({2, 4, 2, 8});
  const Tensor tq = f32({8, 2, 8}), tk = f32({8, 2, 8}), tv = f32({8, 2, 8}), rows = f32({8, 2});
  Bwd bwd, bwd_thd;
  bwd.d_o = bwd.q = bwd.k = bwd.v = bwd.o = x, bwd.softmax_lse = lse;
  bwd.dq = dq, bwd.dk = dk, bwd.dv = dv, bwd.layout = TE_FL_LAYOUT_BSHD;
  bwd_thd.d_o = bwd_thd.q = bwd_thd.k = bwd_thd.v = bwd_thd.o = t, bwd_thd.softmax_lse = rows;
  bwd_thd.dq = tq, bwd_thd.dk = tk, bwd_thd.dv = tv;
  both("fused_attn_bwd", bwd, bwd_thd);
  const char* op = "fused_attn_bwd";
  const Tensor dp = quantised({1}), dbias = f32({1, 2, 4, 4}), dsink = f32({2});
  broken.by<Bwd>(
      op, bwd, [&](Bwd& a) { a.dp_quant = dp; }, "dp_quant requires q is f8e4m3|f8e5m2");
  broken.by<Bwd>(
      op, bwd, [&](Bwd& a) { a.dbias = dbias; }, "dbias requires bias");
  broken.by<Bwd>(
      op, bwd, [&](Bwd& a) { a.dsink = dsink; }, "dsink requires softmax_sink");
  EXPECT_EQ(broken.left(op), kNone);
  fwd.window_left = -2;
  EXPECT_TRUE(has(check(*compile("fused_attn_fwd"), &fwd), "'window_left' is -2, must be from -1"));
}

}  // namespace
}  // namespace te_fl::core
