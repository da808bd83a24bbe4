// Compares the call memo with the full check over random calls, most of them valid: the memo never
// recognises a call that the check refuses, and both fill the same signature.
#include "core/op/call_memo.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <random>

#include "core/op/compiled_op.hpp"
#include "core/op/op_finder.hpp"
#include "memo_check.hpp"
#include "op_fixture.hpp"
#include "support/expect.hpp"
#include "support/rounds.hpp"
#include "te_fl/ops/activation.h"
#include "te_fl/ops/gemm.h"
#include "te_fl/ops/norm.h"
#include "te_fl/ops/optimizer.h"

namespace te_fl::core {
namespace {

// A compiled op with access to its implementation.
struct Insides {
  CompiledOp::Impl impl;
  std::unique_ptr<const CompiledOp> compiled;
  explicit Insides(const te_fl_op_schema& schema) : compiled(CompiledOp::compile(schema).value()) {
    EXPECT_OK(impl.compile(schema));
  }
};

class Spoiler {
 public:
  explicit Spoiler(uint64_t seed) : random_(seed) {}

  // Makes one call of the op with random, mostly valid arguments and compares both checks.
  void round(const Insides& op) {
    tensors_.clear();
    extents_.clear();
    std::vector<uint64_t> args(op.impl.schema.args_size / 8 + 1);
    auto* bytes = reinterpret_cast<unsigned char*>(args.data());
    const uint32_t size = one_in(20) ? op.impl.schema.least_args_size : op.impl.schema.args_size;
    std::memcpy(bytes, &size, 4);
    fill_scalars(op, bytes);
    for (size_t i = 0; i < op.impl.args.size(); ++i) {
      const Arg& arg = op.impl.args[i];
      if (!arg.is_tensor()) continue;
      if ((arg.is(TE_FL_ARG_OPTIONAL) && one_in(2)) || one_in(60)) continue;
      const te_fl_tensor* t = make(op, arg, bytes);
      std::memcpy(bytes + arg.offset, &t, sizeof t);
    }
    compare(op, args.data());
  }

  int accepted = 0, known = 0, refused = 0;

 private:
  bool one_in(uint64_t n) { return random_() % n == 0; }

  void fill_scalars(const Insides& op, unsigned char* bytes) {
    for (const uint8_t i : op.impl.scalars) {
      const Arg& arg = op.impl.args[i];
      unsigned char* at = bytes + arg.offset;
      const auto put = [&](auto value) { std::memcpy(at, &value, sizeof value); };
      const bool wild = one_in(40);
      const double sane = std::max(arg.low, std::min(arg.high, arg.neutral));
      switch (arg.type) {
        case TE_FL_ARG_F32:
          put(wild ? std::bit_cast<float>(static_cast<uint32_t>(random_()))
                   : static_cast<float>(sane));
          break;
        case TE_FL_ARG_F64:
          put(wild ? std::bit_cast<double>(random_()) : sane);
          break;
        case TE_FL_ARG_I64:
          put(wild ? static_cast<int64_t>(random_()) : static_cast<int64_t>(sane));
          break;
        default:
          put(wild ? static_cast<int32_t>(random_() % 5) - 1
                   : static_cast<int32_t>(random_() % (arg.int_high > 0 ? 2 : 1)));
      }
      if (!wild && (arg.type == TE_FL_ARG_I32)) put(static_cast<int32_t>(sane));
    }
  }

  // Returns extents that satisfy the argument's shape rule; each name of the rule gets one of a few
  // values.
  std::vector<int64_t> shape_for(const Insides& op, const Arg& arg, const unsigned char* args) {
    std::vector<int64_t> shape;
    if (arg.shape.any) {
      for (uint64_t n = random_() % 4; n > 0; --n)
        shape.push_back(static_cast<int64_t>(random_() % 5));
      return shape;
    }
    const Dims& dims = arg.shape.chosen([&](uint8_t i) {
      int32_t value = 0;
      std::memcpy(&value, args + op.impl.args[i].offset, sizeof value);
      return value;
    });
    if (dims.leading) shape = {2, 3};
    for (int i = 0; i < dims.count; ++i) {
      const Term& term = dims.terms[static_cast<size_t>(i)];
      const int64_t value = 4 + term.symbol;
      switch (term.kind) {
        case Term::kConst:
          shape.push_back(term.value);
          break;
        case Term::kAny:
          shape.push_back(3);
          break;
        case Term::kName:
          shape.push_back(value);
          break;
        case Term::kTimes:
          shape.push_back(value * term.value);
          break;
        case Term::kPlus:
          shape.push_back(value + term.value);
          break;
        case Term::kOneOr:
          shape.push_back(one_in(2) ? 1 : value);
          break;
        case Term::kProduct:
          shape.push_back(rounded_up(6, term.value));
          break;
        case Term::kCount: {
          int64_t count = 0;
          std::memcpy(&count, args + op.impl.args[term.symbol].count_offset, sizeof count);
          shape.push_back(count);
          break;
        }
      }
    }
    if (one_in(40) && !shape.empty()) {
      const int64_t odd[] = {0, 1, 2, -1, 1 << 20, int64_t{1} << 40, INT64_MAX, INT64_MIN};
      shape[random_() % shape.size()] = odd[random_() % std::size(odd)];
    }
    if (one_in(80)) shape.push_back(2);
    return shape;
  }

  const te_fl_tensor* make(const Insides& op, const Arg& arg, const unsigned char* args) {
    Item& item = tensors_.emplace_back();
    const auto shape = shape_for(op, arg, args);
    std::copy_n(shape.begin(), std::min<size_t>(shape.size(), kMaxRank), item.shape);
    te_fl_tensor& t = item.t;
    t.dl = {};
    t.dl.ndim = static_cast<int32_t>(std::min<size_t>(shape.size(), kMaxRank));
    t.dl.shape = item.shape;
    t.dl.device = {TE_FL_DEVICE_CPU, 0};
    t.dl.data = memory_ + 4096 * (tensors_.size() % 40);
    if (one_in(30)) t.dl.data = memory_ + 4096 * (random_() % 40);
    uint32_t dtype = TE_FL_F32;
    while ((arg.dtypes >> dtype & 1) == 0)
      dtype = static_cast<uint32_t>(random_() % TE_FL_DTYPE_COUNT);
    if (one_in(5)) dtype = static_cast<uint32_t>(random_() % TE_FL_DTYPE_COUNT);
    t.dl.dtype = to_c(static_cast<DType>(dtype));
    if (one_in(60))
      t.dl.dtype = {static_cast<uint8_t>(random_()), static_cast<uint8_t>(random_()),
                    static_cast<uint16_t>(random_() % 3)};
    if ((kScaledDTypes >> dtype & 1) != 0 ? !one_in(4) : one_in(60)) quantise(item);
    if (one_in(6)) give_strides(item);
    spoil(item);
    return &t;
  }

  struct Item {
    te_fl_tensor t;
    te_fl_quant quant;
    int64_t shape[kMaxRank] = {1, 1, 1, 1, 1, 1, 1, 1};
    int64_t strides[kMaxRank] = {};
  };

  void quantise(Item& item) {
    te_fl_quant& q = item.quant;
    auto* part = reinterpret_cast<float*>(memory_ + 4096 * 41);
    q.scaling = one_in(3) ? static_cast<uint32_t>(random_() % 7)
                          : static_cast<uint32_t>(TE_FL_SCALING_TENSOR);
    q.flags = static_cast<uint32_t>(random_() % 4);
    if (!one_in(8)) q.scale_inv = part;
    if (!one_in(8)) q.scale = part + 1;
    if (!one_in(8)) q.amax = part + 2;
    if (one_in(4)) q.columnwise_data = part + 8;
    if (one_in(2)) q.columnwise_scale_inv = part + 3;
    if (one_in(60)) q.struct_size = static_cast<uint32_t>(random_() % 100);
    item.t.quant = &q;
  }

  void give_strides(Item& item) {
    int64_t step = 1;
    for (int i = item.t.dl.ndim - 1; i >= 0; --i) {
      item.strides[i] = step;
      if (item.shape[i] > 0 && item.shape[i] < 1000) step *= item.shape[i];
      if (one_in(8)) item.strides[i] = static_cast<int64_t>(random_() % 64) - 8;
      if (one_in(60)) item.strides[i] = static_cast<int64_t>(random_());
    }
    item.t.dl.strides = item.strides;
  }

  void spoil(Item& item) {
    te_fl_tensor& t = item.t;
    if (one_in(80)) t.struct_size = static_cast<uint32_t>(random_() % 100);
    if (one_in(80)) t.dl.ndim = static_cast<int32_t>(random_() % 12) - 2;
    if (one_in(120)) t.dl.shape = nullptr;
    if (one_in(80)) t.dl.data = nullptr;
    if (one_in(80)) t.dl.byte_offset = random_() % 16;
    if (one_in(80)) t.dl.device.type = static_cast<int32_t>(random_() % 13);
    if (one_in(120)) t.dl.device.index = 1;
    if (one_in(120)) t.provider = 2;
  }

  // Compares the memo's check with the full check. On the second check, the memo recognises a valid
  // call.
  void compare(const Insides& op, const void* args) {
    Signature exact, quick;
    const bool good = Finder(op.impl, args).run(exact);
    ++(good ? accepted : refused);
    for (int time = 0; time < 2; ++time) {
      bool by_memo = false;
      ASSERT_EQ(check_by(memo_, *op.compiled, args, quick, &by_memo), good)
          << op.impl.schema.name << (by_memo ? ": known" : "") << ", time " << time << ": "
          << op.compiled->check_status(args).to_string();
      known += by_memo;
      if (good) {
        ASSERT_EQ(exact, quick) << op.impl.schema.name;
      }
    }
  }

  std::mt19937_64 random_;
  TestMemo memo_;
  std::deque<Item> tensors_;
  std::vector<int64_t> extents_;
  alignas(4096) inline static char memory_[4096 * 42];
};

TEST(MemoOverRandomCalls, NeverKnowsWhatTheCheckRefuses) {
  Spoiler spoiler(7);
  for (const te_fl_op_schema* schema : catalogue()) {
    const Insides op(*schema);
    if (!op.impl.lists.empty()) continue;
    for (int i = 0; i < testing::rounds(4000); ++i) {
      spoiler.round(op);
      if (HasFatalFailure()) return;
    }
  }
  // The comparison is meaningful only if all outcomes are frequent.
  EXPECT_GT(spoiler.known, testing::rounds(10000));
  EXPECT_GT(spoiler.accepted, testing::rounds(10000));
  EXPECT_GT(spoiler.refused, testing::rounds(10000));
}

// Combinations of rules and types that the catalogue lacks.
TEST(MemoOverRandomCalls, OddSchemas) {
  const char* const rules[] = {
      "N",     "M",      "N M", "2*N",   "N+1", "?N", "... N", "...",   "@...",    "3*M _",
      "_ N+2", "@... N", "1",   "... 2", "any", "",   "M N M", "?M ?N", "... 2*M", "f ? N M : M N"};
  const char* const between[] = {"",
                                 "f requires b; b requires f or g > 1",
                                 "b excludes g; c requires d; d excludes c is f32",
                                 "a is tensor excludes b is tensor; f excludes a is tensor",
                                 "a is none requires f; a is tensor requires g == 0",
                                 "g requires c or d; g <= 2"};
  std::mt19937_64 random(11);
  Spoiler spoiler(13);
  for (int round = 0; round < testing::rounds(400); ++round) {
    SchemaBuilder b;
    const char* const names[] = {"a", "b", "c", "d", "e"};
    for (const char* name : names) {
      auto& d = b.tensor(name, rules[random() % std::size(rules)],
                         static_cast<te_fl_arg_role>(random() % 3));
      d.dtypes = TE_FL_BIT(TE_FL_F32) | static_cast<uint32_t>(random() & TE_FL_MASK_ANY_DTYPE);
      d.scalings = 1u | static_cast<uint32_t>(random() % 64);
      d.flags =
          static_cast<uint32_t>(random()) &
          (TE_FL_ARG_OPTIONAL | TE_FL_ARG_RAW_FP8 | TE_FL_ARG_ALLOW_OVERLAP |
           TE_FL_ARG_STRIDED_CODES |
           (random() % 4 == 0 ? TE_FL_ARG_HOST | TE_FL_ARG_ANY_MEMORY | TE_FL_ARG_QUANT_ONLY : 0u));
      if (d.role != TE_FL_IN && name != names[0]) d.aliases = names[0];
      // Lets a random scalar argument, of any type, decide whether an argument's contents are read
      // (inout_if).
      if (d.role == TE_FL_INOUT && random() % 2 == 0) d.inout_if = random() % 2 == 0 ? "g" : "f";
      if (name != names[0] && random() % 3 == 0)
        d.flags |= TE_FL_ARG_SAME_DTYPE, d.same_as = names[0];
    }
    b.add("f", TE_FL_ARG_BOOL, TE_FL_IN, 48, nullptr);
    b.add("g", TE_FL_ARG_F32, TE_FL_IN, 56, nullptr).max = 3;
    b.schema.args_size = 64;
    b.schema.rules = between[random() % std::size(between)];
    b.schema.flags = random() % 4 == 0 ? TE_FL_SCHEMA_ENQUIRY : 0;
    const Insides op(b.build());
    for (int i = 0; i < 500 && !HasFatalFailure(); ++i) spoiler.round(op);
  }
  EXPECT_GT(spoiler.known, testing::rounds(1000));
}

// Calls that matter for speed are recognised the second time, also in place and on other memory.
class MemoOf : public ::testing::Test {
 protected:
  bool known(const CompiledOp& op, const void* args) {
    Signature s;
    bool by_memo = false;
    EXPECT_TRUE(check_by(memo_, op, args, s, &by_memo)) << op.check_status(args).to_string();
    return by_memo;
  }
  TestMemo memo_;
};

TEST_F(MemoOf, NormsAreKnownOnOtherMemoryAndInPlace) {
  const auto op = CompiledOp::compile(*catalogue_schema("layernorm_fwd")).value();
  const Tensor x = f32({64, 256}), gamma = f32({256}), beta = f32({256}), z = f32({64, 256}),
               other = f32({64, 256}), mu = f32({64}), rsigma = f32({64});
  te_fl_layernorm_fwd_args args;
  args.x = x, args.gamma = gamma, args.beta = beta, args.z = z, args.mu = mu, args.rsigma = rsigma;
  EXPECT_FALSE(known(*op, &args));
  EXPECT_TRUE(known(*op, &args));
  args.z = other;
  EXPECT_TRUE(known(*op, &args)) << "other memory";
  args.z = x;
  EXPECT_TRUE(known(*op, &args)) << "in place";
  args.epsilon = 1e-3f;
  EXPECT_TRUE(known(*op, &args)) << "another number";
  args.beta = nullptr;
  EXPECT_FALSE(known(*op, &args));
  EXPECT_TRUE(known(*op, &args));
}

TEST_F(MemoOf, ProductsAreKnownInFp8AndWithStrides) {
  const auto op = CompiledOp::compile(*catalogue_schema("generic_gemm")).value();
  const Tensor a = quantised({64, 128}), b = quantised({32, 128}), d = f32({64, 32}),
               c = quantised({64, 128});
  te_fl_generic_gemm_args args;
  args.a = a, args.b = b, args.d = d, args.trans_b = 1;
  EXPECT_FALSE(known(*op, &args));
  EXPECT_TRUE(known(*op, &args));
  args.a = c;
  EXPECT_TRUE(known(*op, &args)) << "other codes and scales";
  Raw strided(d);
  args.d = &strided.strided().t;
  EXPECT_FALSE(known(*op, &args));
  EXPECT_TRUE(known(*op, &args));
}

// If beta is nonzero, the op reads d, which then needs its scale_inv. So the memo must compare
// beta's value.
TEST_F(MemoOf, ANumberThatDecidesWhatIsReadIsNotJustANumber) {
  SchemaBuilder b;
  b.tensor("x", "N");
  te_fl_arg_desc& d = b.tensor("d", "N", TE_FL_INOUT);
  d.dtypes = TE_FL_MASK_FP8;
  d.scalings = TE_FL_BIT(TE_FL_SCALING_TENSOR);
  d.inout_if = "beta";
  b.add("beta", TE_FL_ARG_F32, TE_FL_IN, 24, nullptr);
  b.schema.args_size = 32;
  const auto op = b.compile().value();
  struct {
    uint32_t struct_size = 32;
    const te_fl_tensor* x;
    const te_fl_tensor* d;
    float beta = 0;
    float unused = 0;
  } args;
  const Tensor x = f32({16});
  float scale = 1;
  uint8_t codes[16];
  int64_t shape[] = {16};
  te_fl_quant quant;
  quant.scaling = TE_FL_SCALING_TENSOR;
  quant.scale = &scale;
  quant.columnwise_scale_inv = &scale;  // sufficient for an output, but not for an input
  te_fl_tensor out{};
  out.dl.data = codes;
  out.dl.device = {TE_FL_DEVICE_CPU, 0};
  out.dl.ndim = 1;
  out.dl.dtype = to_c(DType::kF8E4M3);
  out.dl.shape = shape;
  out.quant = &quant;
  args.x = x, args.d = &out;
  EXPECT_FALSE(known(*op, &args));
  EXPECT_TRUE(known(*op, &args));
  args.beta = 1;
  Signature ignored;
  EXPECT_FALSE(check_by(memo_, *op, &args, ignored));
}

TEST_F(MemoOf, ShapesInTurnAreAllKnown) {
  const auto op = CompiledOp::compile(*catalogue_schema("gelu")).value();
  std::vector<std::pair<Tensor, Tensor>> tensors;
  for (int64_t n = 1; n <= 128; ++n) tensors.emplace_back(f32({n, 8}), f32({n, 8}));
  int hits = 0;
  for (int round = 0; round < 2; ++round) {
    for (const auto& [x, y] : tensors) {
      te_fl_activation_act_fwd_args args;
      args.input = x, args.output = y;
      hits += known(*op, &args);
    }
  }
  EXPECT_GT(hits, 64) << "of 128 calls like an earlier one";
}

// A call with a long list evicts other entries of the memo; check results stay right.
TEST_F(MemoOf, LongListsAreKnownWithinABound) {
  const auto op = CompiledOp::compile(*catalogue_schema("multi_tensor_l2norm")).value();
  const Tensor x = f32({4}), norm = f32({1});
  std::vector<const te_fl_tensor*> all(20000, x);
  te_fl_multi_tensor_l2norm_args args;
  args.inputs = all.data();
  args.norm = norm;
  for (int64_t count = 19990; count < 20000; ++count) {
    args.inputs_count = count;
    EXPECT_FALSE(known(*op, &args)) << count;
    EXPECT_TRUE(known(*op, &args)) << count;
  }
}

}  // namespace
}  // namespace te_fl::core
