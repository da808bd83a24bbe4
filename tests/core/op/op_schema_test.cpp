// CompiledOp::compile() on valid and invalid schemas from plugins, and the grammar of shape rules.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "core/op/shape_rule.hpp"
#include "op_fixture.hpp"
#include "support/expect.hpp"

namespace te_fl::core {
namespace {

// x [N] -> y [N].
SchemaBuilder good() {
  SchemaBuilder b;
  b.tensor("x", "N");
  b.tensor("y", "N", TE_FL_OUT);
  return b;
}

// Expects compile() to refuse the valid schema after `change`, with `part` in the message.
template <class F>
void refused(F change, const char* part) {
  SchemaBuilder b;
  b.tensor("x", "N");
  b.tensor("y", "N", TE_FL_OUT);
  change(b);
  const auto result = b.compile();
  ASSERT_FALSE(result.ok()) << part;
  EXPECT_FAILS(result, kInvalidArgument, part) << result.status().message() << "\n lacks " << part;
}

using B = SchemaBuilder;

TEST(Schema, AGoodOneCompiles) {
  SchemaBuilder b;
  b.tensor("x", "N");
  b.tensor("y", "N", TE_FL_OUT);
  const auto op = b.compile();
  ASSERT_OK(op);
  const Tensor x = f32({3}), y = f32({3}), z = f32({4});
  const PointerArgs fine{x, y}, wrong{x, z};
  EXPECT_EQ(check(**op, &fine), "");
  EXPECT_EQ(check(**op, &wrong),
            "acme::op: argument 'y' has shape [4], must be [3] (rule \"N\", set by 'x')");
}

TEST(Schema, ItIsCopiedDeeply) {
  std::string name = "acme::op", arg = "x", rule = "N";
  std::unique_ptr<const CompiledOp> op;
  {
    SchemaBuilder b(name.c_str());
    b.tensor(arg.c_str(), rule.c_str());
    op = b.compile().value();
  }
  name.assign(name.size(), '#'), arg = "#", rule = "#";
  EXPECT_STREQ(op->schema().name, "acme::op");
  EXPECT_STREQ(op->schema().args[0]->name, "x");
  EXPECT_STREQ(op->schema().args[0]->shape, "N");
}

TEST(Schema, AnOpWithoutTensorsRunsOnTheHost) {
  SchemaBuilder b;
  b.add("level", TE_FL_ARG_I32, TE_FL_IN, 4, nullptr);
  b.schema.args_size = 8;
  const auto op = b.compile().value();
  const struct {
    uint32_t size = 8;
    int32_t level = 3;
  } args;
  Signature s;
  EXPECT_EQ(check(*op, &args, &s), "");
  EXPECT_EQ(s.device, Device{});
  EXPECT_EQ(s.dtypes, 0u);
}

TEST(Schema, Names) {
  for (const char* name : {"", "a b", "9gelu", "a::", "::b", "a::b::c", "a:b", "caf\xc3\xa9"}) {
    refused([&](B& b) { b.schema.name = name; }, "is not a name such as gelu or vendor::op");
  }
  refused([](B& b) { b.schema.name = nullptr; }, "its name is NULL");
  const std::string longest(100000, 'x');
  refused([&](B& b) { b.schema.name = longest.c_str(); }, "is not a name");
  refused([](B& b) { b.descs[0].name = nullptr; }, "argument 0: its name is NULL");
  refused([](B& b) { b.descs[0].name = "a-b"; }, "its name is not an identifier");
  refused([](B& b) { b.descs[1].name = "x"; }, "two arguments are named 'x'");
}

TEST(Schema, SizesAndCounts) {
  refused([](B& b) { b.schema.struct_size = 8; }, "struct_size 8, must be from");
  refused([](B& b) { b.descs[1].struct_size = 0; },
          "argument 1: its description has struct_size 0");
  refused([](B& b) { b.schema.args_size = 3; }, "args_size is 3");
  refused([](B& b) { b.schema.args_size = 1u << 30; }, "args_size is 1073741824");
  refused([](B& b) { b.schema.least_args_size = 100; },
          "least_args_size is 100, must be from 4 to args_size");
  refused([](B& b) { b.schema.least_args_size = 8; },
          "it is of the op's first form but lies beyond least_args_size");
  SchemaBuilder many;
  for (int i = 0; i < 65; ++i) many.tensor("x", "any");
  EXPECT_HAS(many.compile().status().message(), "65 arguments are more than 64");
  SchemaBuilder null = good();
  te_fl_op_schema schema = null.build();
  schema.args = nullptr;
  EXPECT_HAS(CompiledOp::compile(schema).status().message(), "args is NULL");
  const te_fl_arg_desc* holes[2] = {nullptr, nullptr};
  schema.args = holes;
  EXPECT_HAS(CompiledOp::compile(schema).status().message(), "its description is NULL");
}

TEST(Schema, Layout) {
  refused([](B& b) { b.descs[1].offset = 12; }, "offset 12 must be a multiple of 8");
  refused(
      [](B& b) {
        b.schema.args_size = 20;
        b.schema.least_args_size = 20;
      },
      "inside args_size 20");
  refused([](B& b) { b.descs[1].offset = 8; }, "members 'x' and 'y' overlap");
  refused([](B& b) { b.descs[0].offset = 0; }, "members 'struct_size' and 'x' overlap");
  for (const uint32_t offset : {UINT32_MAX, UINT32_MAX - 7, UINT32_MAX - 3}) {
    refused(
        [&](B& b) {
          b.descs[1].offset = offset;
          b.schema.args_size = 24;
          b.schema.least_args_size = 24;
        },
        "inside args_size");
  }
  refused(
      [](B& b) {
        auto& list = b.add("zs", TE_FL_ARG_TENSOR_LIST, TE_FL_IN, 24);
        list.count_offset = 16;
        b.schema.args_size = 40;
      },
      "overlap");
  refused(
      [](B& b) {
        auto& list = b.add("zs", TE_FL_ARG_TENSOR_LIST, TE_FL_IN, 24);
        list.count_offset = UINT32_MAX - 7;
        b.schema.args_size = 40;
      },
      "inside args_size");
}

TEST(Schema, TypesRolesFlagsAndMasks) {
  refused([](B& b) { b.descs[0].type = 11; }, "argument 'x': type 11 is unknown");
  refused([](B& b) { b.descs[0].role = 3; }, "role 3 is unknown");
  refused([](B& b) { b.descs[0].flags = 1u << 10; }, "flags has bits");
  refused([](B& b) { b.descs[1].flags |= TE_FL_ARG_LATER; }, "must be optional");
  refused(
      [](B& b) { b.descs[0].flags |= TE_FL_ARG_OPTIONAL | TE_FL_ARG_LATER; },
      "argument 'y': it belongs to the op's first form and must come before its later arguments");
  refused([](B& b) { b.descs[0].dtypes = 0; }, "dtypes is not a mask");
  refused([](B& b) { b.descs[0].dtypes = TE_FL_BIT(TE_FL_DTYPE_COUNT); }, "dtypes is not a mask");
  refused([](B& b) { b.descs[0].scalings = 0; }, "scalings is not a mask");
  refused([](B& b) { b.descs[0].scalings = 1u << TE_FL_SCALING_COUNT; }, "scalings is not a mask");
  refused(
      [](B& b) {
        b.descs[0].type = TE_FL_ARG_SAVED;
        b.descs[1].type = TE_FL_ARG_SAVED;
      },
      "one saved argument at most");
  refused([](B& b) { b.descs[1].type = TE_FL_ARG_F64; }, "a scalar's role must be in");
}

TEST(Schema, Scalars) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const auto scalar = [](te_fl_arg_type type, double low, double high, double neutral,
                         const char* enums = nullptr) {
    SchemaBuilder b;
    auto& d = b.add("s", type, TE_FL_IN, 8, nullptr);
    d.min = low, d.max = high, d.neutral = neutral, d.enum_names = enums;
    const auto result = b.compile();
    return result.ok() ? std::string() : result.status().message();
  };
  EXPECT_HAS(scalar(TE_FL_ARG_F32, 2, 1, 0), "min is above max");
  EXPECT_HAS(scalar(TE_FL_ARG_F32, nan, 1, 0), "must not be NaN");
  EXPECT_HAS(scalar(TE_FL_ARG_F32, 0, 1, nan), "must not be NaN");
  EXPECT_HAS(scalar(TE_FL_ARG_ENUM, 0, 0, 0), "1 to 256 enum_names");
  EXPECT_HAS(scalar(TE_FL_ARG_ENUM, 0, 0, 0, "  "), "1 to 256 enum_names");
  EXPECT_EQ(scalar(TE_FL_ARG_ENUM, 0, 0, 0, "a b"), "");
  EXPECT_HAS(scalar(TE_FL_ARG_I32, 0.25, 0.75, 0), "no value lies between");
  EXPECT_HAS(scalar(TE_FL_ARG_I32, 1e300, 1e301, 0), "no value lies between");
  EXPECT_EQ(scalar(TE_FL_ARG_I64, -1e300, 1e300, 0), "");
  EXPECT_EQ(scalar(TE_FL_ARG_I64, 9.3e18, 1e19, 0).empty(), false);
  EXPECT_EQ(scalar(TE_FL_ARG_F64, -std::numeric_limits<double>::infinity(), 0, 0), "");
}

TEST(Schema, References) {
  refused([](B& b) { b.descs[1].flags = TE_FL_ARG_SAME_DTYPE; },
          "same_as must name another tensor");
  for (const char* other : {"z", "y", ""}) {
    refused(
        [&](B& b) {
          b.descs[1].flags = TE_FL_ARG_SAME_DTYPE;
          b.descs[1].same_as = other;
        },
        "same_as must name another tensor");
  }
  refused(
      [](B& b) {
        b.descs[1].inout_if = "x";
        b.descs[1].role = TE_FL_INOUT;
      },
      "inout_if needs");
  refused(
      [](B& b) {
        b.descs[1].inout_if = "nobody";
        b.descs[1].role = TE_FL_INOUT;
      },
      "inout_if needs");
  refused([](B& b) { b.descs[0].inout_if = "y"; }, "inout_if needs");
  refused([](B& b) { b.descs[1].aliases = "x nobody"; }, "aliases: 'nobody' is not another tensor");
  refused([](B& b) { b.descs[1].aliases = "y"; }, "aliases: 'y' is not another tensor");
  refused([](B& b) { b.descs[0].aliases = "y"; }, "aliases: 'y' is not");
  refused([](B& b) { b.descs[1].shape = "flag ? N : M"; }, "'flag' is not a bool argument");
  refused([](B& b) { b.descs[1].shape = "x ? N : M"; }, "'x' is not a bool argument");
}

TEST(Schema, BadShapeRulesNameTheTerm) {
  const std::pair<const char*, const char*> cases[] = {
      {"N ...", "term '...' of the shape rule: it may only stand first"},
      {"... ...", "it may only stand first"},
      {"-1", "term '-1'"},
      {"0*N", "the factor must not be 0"},
      {"2*", "'' is not a name"},
      {"*N", "'' is not a number"},
      {"N+", "'' is not a number"},
      {"N+M", "'M' is not a number"},
      {"2*3", "'3' is not a name"},
      {"?", "'' is not a name"},
      {"?_", "'_' is not a name"},
      {"N!", "'N!' is not a name"},
      {"99999999999999999999", "is not a number from 0 to 2147483648"},
      {"a b c d e f g h i", "at most 8 dimensions"},
      {"x ? N", "'x' is not a bool argument"},
      {"x is y ? N : M", "'x' is not an enum argument"},
      {"@.../", "'' is not a number"},
      {"@.../0", "the divisor must not be 0"},
      {"#x", "'x' is no list of tensors"},
  };
  for (const auto& c : cases) refused([&](B& b) { b.descs[1].shape = c.first; }, c.second);
}

TEST(Schema, TooManyNames) {
  SchemaBuilder b;
  std::deque<std::string> rules, names;
  for (int i = 0; i < 4; ++i) {
    std::string& rule = rules.emplace_back();
    for (int k = 0; k < 8; ++k) rule += "n" + std::to_string(8 * i + k) + " ";
    b.tensor(names.emplace_back("t" + std::to_string(i)).c_str(), rule.c_str());
  }
  EXPECT_HAS(b.compile().status().message(), "at most 24 names");
}

// Structs of random bytes. Only the pointers stay valid, as compile() cannot check them.
TEST(Schema, RandomGarbageIsSurvived) {
  std::mt19937_64 random(20240617);
  const char* const texts[] = {nullptr, "",          "x",        "y",     "N",    "...",
                               "@...",  "x ? N : M", "\xff\xfe", "2*N+1", "a b c"};
  const auto text = [&] { return texts[random() % std::size(texts)]; };
  int compiled = 0;
  for (int round = 0; round < 20000; ++round) {
    SchemaBuilder b = good();
    for (te_fl_arg_desc& d : b.descs) {
      const auto keep = d;
      auto* bytes = reinterpret_cast<unsigned char*>(&d);
      for (size_t i = 0; i < offsetof(te_fl_arg_desc, name); ++i) {
        if (random() % 8 == 0) bytes[i] = static_cast<unsigned char>(random());
      }
      if (random() % 4 != 0) d.struct_size = keep.struct_size;
      if (random() % 4 == 0) d.name = text();
      if (random() % 2 == 0) d.shape = text();
      if (random() % 4 == 0) d.inout_if = text();
      if (random() % 4 == 0) d.aliases = text();
      if (random() % 4 == 0) d.same_as = text();
      if (random() % 4 == 0) d.enum_names = text();
      const uint64_t number = random();
      if (random() % 4 == 0) std::memcpy(&d.min, &number, 8);
      if (random() % 4 == 0) std::memcpy(&d.max, &number, 8);
    }
    if (random() % 4 == 0) b.schema.args_size = static_cast<uint32_t>(random());
    if (random() % 4 == 0) b.schema.least_args_size = static_cast<uint32_t>(random());
    b.build();
    if (b.schema.args_size < 4096) b.schema.args_size &= ~7u;
    const auto op = CompiledOp::compile(b.schema);
    if (!op.ok()) {
      EXPECT_FALSE(op.status().message().empty());
      continue;
    }
    ++compiled;
    std::vector<uint64_t> zero((*op)->schema().args_size / 8 + 1);
    std::memcpy(zero.data(), &(*op)->schema().args_size, 4);
    check(**op, zero.data());
  }
  EXPECT_GT(compiled, 0);
}

// difference() compares every member (R17) and names the first difference with both values.
TEST(Schema, ADifferenceIsNamed) {
  SchemaBuilder a = good(), b = good();
  const auto op = a.compile().value();
  EXPECT_EQ(op->difference(b.build()), "");
  static const uint32_t kTwo = op->schema().args_size;  // equals args_size of the schema from
                                                        // good()
  const auto differs = [&](auto change) {
    SchemaBuilder c = good();
    change(c);
    return op->difference(c.build());
  };
  const auto expect_named = [&](const std::string& words, auto change) {
    const std::string text = differs(change);
    EXPECT_EQ(text.rfind(words + " is ", 0), 0u) << words << ": " << text;
  };
  expect_named("name", [](B& c) { c.schema.name = "acme::other"; });
  expect_named("flags", [](B& c) { c.schema.flags = 1; });
  expect_named("arg_count", [](B& c) {
    c.tensor("z", "any");
    c.schema.args_size = c.schema.least_args_size = kTwo;
  });
  expect_named("summary", [](B& c) { c.schema.summary = "reworded"; });
  expect_named("formula", [](B& c) { c.schema.formula = "y = 2"; });
  expect_named("source", [](B& c) { c.schema.source = "elsewhere"; });
  expect_named("gradient", [](B& c) { c.schema.gradient = "acme::backward x=y"; });
  expect_named("operations", [](B& c) { c.schema.operations = "99*M"; });
  const std::string x = std::string("argument '") + a.descs[0].name + "': ",
                    y = std::string("argument '") + a.descs[1].name + "': ";
  expect_named(y + "flags", [](B& c) { c.descs[1].flags = TE_FL_ARG_OPTIONAL; });
  expect_named(x + "dtypes", [](B& c) { c.descs[0].dtypes = 1; });
  expect_named(x + "shape", [](B& c) { c.descs[0].shape = "M"; });
  expect_named(x + "shape", [](B& c) { c.descs[0].shape = nullptr; });
  expect_named(y + "aliases", [](B& c) { c.descs[1].aliases = "x"; });
  expect_named(y + "extents", [](B& c) { c.descs[1].extents = "M of x"; });
  expect_named(x + "neutral", [](B& c) { c.descs[0].neutral = 1; });
  EXPECT_EQ(differs([](B& c) { c.descs[0].struct_size = 8; }).rfind(x + "the other has struct", 0),
            0u);
  EXPECT_EQ(differs([](B& c) { c.schema.gradient = "acme::backward"; }),
            "gradient is none, not 'acme::backward'");
}

// ---- evaluation of shape rules that the catalogue does not use

std::string two(const char* first, std::initializer_list<int64_t> a, const char* second,
                std::initializer_list<int64_t> b) {
  SchemaBuilder s;
  s.tensor("x", first);
  s.tensor("y", second, TE_FL_OUT);
  const auto op = s.compile();
  if (!op.ok()) return op.status().to_string();
  const Tensor x = f32(a), y = f32(b);
  const PointerArgs args{x, y};
  return check(**op, &args);
}

TEST(ShapeRule, Evaluation) {
  EXPECT_EQ(two("N+1", {5}, "N", {4}), "");
  EXPECT_EQ(two("N", {4}, "N+1", {5}), "");
  EXPECT_HAS(two("N", {4}, "N+1", {4}), "must be [5]");
  EXPECT_HAS(two("N+3", {2}, "any", {1}), "must be [N+3]");
  EXPECT_EQ(two("3*N", {12}, "N", {4}), "");
  EXPECT_EQ(two("N", {4}, "3*N", {12}), "");
  EXPECT_HAS(two("3*N", {13}, "N", {4}), "must be [3*N]");
  EXPECT_EQ(two("", {}, "2 _", {2, 9}), "");
  EXPECT_HAS(two("", {1}, "any", {1}), "has shape [1], must be [] (rule \"\")");
  EXPECT_EQ(two("N N", {3, 3}, "N", {3}), "");
  EXPECT_HAS(two("N N", {3, 4}, "N", {3}), "must be [3, 3]");
  EXPECT_EQ(two("... 2 H", {5, 2, 7}, "@... H", {5, 7}), "");
  EXPECT_HAS(two("... 2 H", {5, 2, 7}, "@... H", {4, 7}), "must be [5, 7]");
  EXPECT_EQ(two("... 2", {2}, "@...", {1}), "") << "the product of nothing is 1";
}

TEST(ShapeRule, AProductMayBeDivided) {
  EXPECT_EQ(two("...", {3, 3}, "@.../8", {2}), "");
  EXPECT_EQ(two("...", {2, 4}, "@.../8", {1}), "");
  EXPECT_EQ(two("...", {}, "@.../8", {1}), "") << "the product of nothing is 1";
  EXPECT_EQ(two("...", {0, 3}, "@.../8", {0}), "");
  EXPECT_HAS(two("...", {3, 3}, "@.../8", {1}),
             "argument 'y' has shape [1], must be [2] (rule \"@.../8\", set by 'x')");
  EXPECT_EQ(two("@.../8", {2}, "...", {3, 3}), "") << "it may stand before the dimensions";
  EXPECT_HAS(two("@.../8", {3}, "...", {3, 3}), "argument 'x' has shape [3], must be [2]");
}

// Op arguments: x, y and an enum whose value selects the extents of x.
TEST(ShapeRule, AnEnumChooses) {
  SchemaBuilder s;
  s.tensor("x", "how is whole ? A B : how is turned ? B A : A");
  s.tensor("y", "A", TE_FL_OUT);
  te_fl_arg_desc& how = s.add("how", TE_FL_ARG_ENUM, TE_FL_IN, 24, nullptr);
  how.enum_names = "whole turned flat odd";
  s.schema.args_size = 32;
  const auto op = s.compile().value();
  struct {
    uint32_t struct_size = 32;
    const te_fl_tensor* x;
    const te_fl_tensor* y;
    int32_t how = 0, unused = 0;
  } args;
  const Tensor x = f32({3, 4}), flat = f32({3}), three = f32({3}), four = f32({4});
  const auto with = [&](int32_t value, const Tensor& a, const Tensor& b) {
    args.how = value, args.x = a, args.y = b;
    return check(*op, &args);
  };
  EXPECT_EQ(with(0, x, three), "");
  EXPECT_EQ(with(1, x, four), "");
  EXPECT_EQ(with(2, flat, three), "");
  EXPECT_HAS(with(0, x, four), "argument 'y' has shape [4], must be [3] (rule \"A\", set by 'x')");
  EXPECT_HAS(with(1, flat, three), "argument 'x' has shape [3], must be [B, A]");
  EXPECT_HAS(with(1, flat, three), ", how is turned)");
  EXPECT_HAS(with(3, x, three), "argument 'x' has shape [3, 4], must be [A]");
  EXPECT_HAS(with(4, x, three), "argument 'how' is 4, must be from 0 to 3");
  s.descs[0].shape = "how is nothing ? A : B";
  EXPECT_HAS(s.compile().status().message(), "'nothing' is not a value of 'how'");
  s.descs[0].shape = "how is whole ? A : how is turned ? B : how is flat ? A B : A";
  EXPECT_HAS(s.compile().status().message(), "a shape rule has at most 2 '?'");
}

TEST(ShapeRule, TheProductMayStandBeforeTheDimensions) {
  EXPECT_EQ(two("@...", {6}, "... H", {2, 3, 4}), "");
  EXPECT_HAS(two("@...", {5}, "... H", {2, 3, 4}),
             "argument 'x' has shape [5], must be [6] (rule \"@...\", set by 'y')");
}

TEST(ShapeRule, OneOrTheNameMayStandFirst) {
  EXPECT_EQ(two("?N", {1}, "N", {7}), "");
  EXPECT_EQ(two("?N", {7}, "N", {7}), "");
  EXPECT_HAS(two("?N", {6}, "N", {7}), "argument 'x' has shape [6], must be [1 or 7]");
}

}  // namespace
}  // namespace te_fl::core
