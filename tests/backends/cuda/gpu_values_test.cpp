// Invalid values in GPU memory, such as an index out of range. A kernel checks the values, and the
// call does not wait for it; the next synchronisation of the stream reports the error. Part of
// gpu_errors_test. Skipped without a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "support/expect.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl {
namespace {

const Device kCuda{TE_FL_DEVICE_CUDA, 0, 0};

constexpr int64_t kRows = 11, kWidth = 64, kBad = 99;

class GpuValues : public ::testing::Test {
 protected:
  void SetUp() override {
    OpManager::instance();
    if (!devices::find(kCuda).ok()) GTEST_SKIP() << "no GPU, or TE_FL_PLUGIN_MODULES is not set";
    stream = std::move(Stream::create(kCuda)).value();
    other = std::move(Stream::create(kCuda)).value();
    table = Tensor::zeros({kRows, kWidth}, DType::kF32, kCuda).value();
    good = integers({1, 2, 3, 4});
    bad = integers({1, 2, 3, kBad});
    rows = filled({4, kWidth}, 7);
  }
  void TearDown() override {
    for (const char* name : {"TE_FL_VALIDATE", "TE_FL_SYNC"}) EXPECT_OK(environment::unset(name));
  }
  static Tensor integers(std::initializer_list<int64_t> values) {
    const auto t = Tensor::empty({static_cast<int64_t>(values.size())}, DType::kI32).value();
    int32_t* at = t.data<int32_t>();
    for (const int64_t v : values) *at++ = static_cast<int32_t>(v);
    const Tensor there = t.to(kCuda).value();
    // te-fl's streams do not synchronise with the default stream, so the test waits explicitly.
    EXPECT_OK(devices::synchronize(kCuda));
    return there;
  }
  static Tensor filled(std::initializer_list<int64_t> shape, float value,
                       DType dtype = DType::kF32) {
    const auto t = Tensor::empty(shape, dtype, kCuda).value();
    const te_fl_fill_args args{.output = t, .value = value};
    EXPECT_OK(OpManager::instance().call(op::fill, &args));
    EXPECT_OK(devices::synchronize(kCuda));
    return t;
  }
  static std::vector<float> numbers(const Tensor& t) {
    const Tensor host = t.to(Device{}).value();
    const float* at = host.data<float>();
    return {at, at + host.numel()};
  }
  Status run(OpId op, const void* args, const Stream& on) {
    CallOptions options;
    options.stream = on.get();
    return OpManager::instance().call(op, args, options);
  }
  Status look_up(const Tensor& indices, const Stream& on) {
    const te_fl_embedding_fwd_args args{.indices = indices, .weight = table, .output = rows};
    return run(op::embedding_fwd, &args, on);
  }

  Stream stream, other;
  Tensor table, good, bad, rows;
};

TEST_F(GpuValues, TheWaitForTheStreamReports) {
  EXPECT_OK(look_up(bad, stream));
  const Status told = stream.synchronize();
  EXPECT_FAILS(told, kInvalidArgument,
               "embedding_fwd by vendor.cuda: indices[3] is 99; it must lie in [0, 11)");
  EXPECT_HAS(told.to_string(), "TE_FL_VALIDATE=1");
  EXPECT_HAS(told.to_string(), "TE_FL_SYNC=1");
  EXPECT_OK(stream.synchronize());  // the error is reported once, and the device stays usable
  const std::vector<float> y = numbers(rows);
  EXPECT_EQ(y[0], 0);
  EXPECT_EQ(y[3 * kWidth - 1], 0);
  for (int64_t i = 3 * kWidth; i < 4 * kWidth; ++i)
    EXPECT_TRUE(std::isnan(y[static_cast<size_t>(i)]));
  EXPECT_OK(look_up(good, stream));
  EXPECT_OK(stream.synchronize());
}

TEST_F(GpuValues, ValidateRefusesBeforeAnythingIsWritten) {
  EXPECT_OK(environment::set("TE_FL_VALIDATE", "1"));
  EXPECT_FAILS(look_up(bad, stream), kInvalidArgument,
               "indices[3] is 99; it must lie in [0, 11), the rows of weight");
  EXPECT_OK(stream.synchronize());
  for (const float y : numbers(rows)) EXPECT_EQ(y, 7);
  EXPECT_OK(look_up(good, stream));
}

TEST_F(GpuValues, SyncNamesTheOp) {
  EXPECT_OK(environment::set("TE_FL_SYNC", "1"));
  EXPECT_FAILS(look_up(bad, stream), kInvalidArgument,
               "op 'embedding_fwd' in 'vendor.cuda' failed after it was");
}

TEST_F(GpuValues, AnotherStreamsWaitDoesNotReport) {
  EXPECT_OK(look_up(good, other));
  EXPECT_OK(look_up(bad, stream));
  EXPECT_OK(other.synchronize());
  EXPECT_OK(look_up(good, other));
  EXPECT_OK(devices::synchronize(kCuda));  // waits for the default stream
  EXPECT_FAILS(stream.synchronize(), kInvalidArgument, "indices[3] is 99");
}

TEST_F(GpuValues, TheWaitForAnEventReports) {
  Event event = std::move(Event::create(kCuda)).value();
  EXPECT_OK(look_up(bad, stream));
  EXPECT_OK(event.record(stream.get()));
  EXPECT_OK(other.wait(event));
  EXPECT_FAILS(event.synchronize(), kInvalidArgument, "indices[3] is 99");
  EXPECT_OK(stream.synchronize());
}

// A framework may wait with CUDA's functions instead of te-fl's, so the next te-fl call on the
// stream reports the error.
TEST_F(GpuValues, TheNextCallOnTheStreamReports) {
  EXPECT_OK(look_up(bad, stream));
  Event event = std::move(Event::create(kCuda)).value();
  EXPECT_OK(event.record(stream.get()));
  EXPECT_OK(other.wait(event));
  EXPECT_OK(other.synchronize());  // the call above has finished by now, so its error is known
  EXPECT_FAILS(look_up(good, stream), kInvalidArgument,
               "an earlier call on this stream: embedding_fwd");
  EXPECT_OK(look_up(good, stream));
  EXPECT_OK(stream.synchronize());
}

TEST_F(GpuValues, CopiesToTheHostReport) {
  EXPECT_OK(look_up(bad, stream));
  EXPECT_FAILS(rows.to(Device{}, stream.get()).status(), kInvalidArgument, "indices[3] is 99");
}

TEST_F(GpuValues, ACapturedCallReportsAtEachLaunch) {
  EXPECT_OK(look_up(good, stream));
  Capture capture = std::move(Capture::begin(kCuda, stream.get())).value();
  EXPECT_OK(look_up(bad, stream));
  const Graph graph = std::move(capture.end()).value();
  EXPECT_OK(stream.synchronize());
  for (int i = 0; i < 3; ++i) {
    EXPECT_OK(graph.launch());
    EXPECT_FAILS(stream.synchronize(), kInvalidArgument, "indices[3] is 99");
  }
  EXPECT_OK(devices::copy(kCuda, bad.raw_data(), kCuda, good.raw_data(), 16, stream.get()));
  EXPECT_OK(graph.launch());
  EXPECT_OK(stream.synchronize());
}

TEST_F(GpuValues, EveryKernelThatReadsIndices) {
  struct Try {
    const char* what;
    DType table, out;
    int64_t width;
  };
  for (const Try& t : {Try{"in pieces of 16 bytes", DType::kBF16, DType::kBF16, 64},
                       Try{"element by element", DType::kF16, DType::kF32, 33}}) {
    const Tensor weight = filled({kRows, t.width}, 1, t.table);
    const Tensor out = filled({4, t.width}, 7, t.out), grad = filled({4, t.width}, 1, t.out);
    const te_fl_embedding_fwd_args forward{.indices = bad, .weight = weight, .output = out};
    EXPECT_OK(run(op::embedding_fwd, &forward, stream));
    EXPECT_FAILS(stream.synchronize(), kInvalidArgument,
                 "embedding_fwd by vendor.cuda: indices[3] is 99");
    const te_fl_embedding_bwd_args backward{
        .indices = bad, .grad_output = grad, .grad_weight = weight};
    EXPECT_OK(run(op::embedding_bwd, &backward, stream));
    EXPECT_FAILS(stream.synchronize(), kInvalidArgument,
                 "embedding_bwd by vendor.cuda: indices[3] is 99");
    EXPECT_OK(environment::set("TE_FL_VALIDATE", "1"));
    EXPECT_FAILS(run(op::embedding_fwd, &forward, stream), kInvalidArgument, "indices[3] is 99");
    EXPECT_FAILS(run(op::embedding_bwd, &backward, stream), kInvalidArgument, "indices[3] is 99");
    EXPECT_OK(environment::unset("TE_FL_VALIDATE"));
    EXPECT_OK(stream.synchronize());
  }
}

TEST_F(GpuValues, EveryKernelThatReadsTargets) {
  for (const int64_t classes : {int64_t{33}, int64_t{5000}}) {
    const Tensor logits = filled({4, classes}, 1), dx = filled({4, classes}, 7);
    const Tensor loss = filled({4}, 7), lse = filled({4}, 7), grad = filled({4}, 1);
    // Index 1 is ignored, index 2 is out of range.
    const Tensor targets = integers({0, -100, 7000, 1});
    const te_fl_cross_entropy_fwd_args forward{
        .logits = logits, .targets = targets, .loss = loss, .lse = lse};
    const std::string words = "targets[2] is 7000; it must lie in [0, " + std::to_string(classes);
    EXPECT_OK(run(op::cross_entropy_fwd, &forward, stream));
    EXPECT_FAILS(stream.synchronize(), kInvalidArgument,
                 "cross_entropy_fwd by vendor.cuda: " + words);
    const std::vector<float> losses = numbers(loss);
    EXPECT_TRUE(std::isnan(losses[2]) && losses[1] == 0 && losses[0] > 0) << classes;
    const te_fl_cross_entropy_bwd_args backward{
        .grad_loss = grad, .logits = logits, .targets = targets, .lse = lse, .grad_logits = dx};
    EXPECT_OK(run(op::cross_entropy_bwd, &backward, stream));
    EXPECT_FAILS(stream.synchronize(), kInvalidArgument,
                 "cross_entropy_bwd by vendor.cuda: " + words);
    const std::vector<float> gradient = numbers(dx);
    EXPECT_TRUE(std::isnan(gradient[static_cast<size_t>(2 * classes)]));
    EXPECT_FALSE(std::isnan(gradient[static_cast<size_t>(3 * classes)]));
    EXPECT_OK(environment::set("TE_FL_VALIDATE", "1"));
    EXPECT_FAILS(run(op::cross_entropy_fwd, &forward, stream), kInvalidArgument, words);
    EXPECT_FAILS(run(op::cross_entropy_bwd, &backward, stream), kInvalidArgument, words);
    EXPECT_OK(environment::unset("TE_FL_VALIDATE"));
  }
}

TEST_F(GpuValues, PositionsOfRope) {
  // Layout bshd: two sequences of 3 tokens, a table of 10 positions.
  const Tensor x = filled({2, 3, 1, 8}, 1), y = filled({2, 3, 1, 8}, 7);
  const Tensor freqs = filled({10, 1, 1, 8}, 0.5f);
  te_fl_rope_rope_args args{.input = x, .freqs = freqs, .output = y};
  args.layout = TE_FL_LAYOUT_BSHD;
  // In the second sequence, the first or the last token has a position outside the table of angles.
  const auto at = [&](const Tensor& starts, bool first_is_wrong, const std::string& words) {
    args.start_positions = starts;
    EXPECT_OK(run(op::fused_rope_forward, &args, stream));
    EXPECT_FAILS(stream.synchronize(), kInvalidArgument,
                 "fused_rope_forward by vendor.cuda: " + words);
    const std::vector<float> values = numbers(y);
    EXPECT_FALSE(std::isnan(values[0]));
    EXPECT_EQ(std::isnan(values[3 * 8]), first_is_wrong);
    EXPECT_EQ(std::isnan(values[5 * 8]), !first_is_wrong);
    EXPECT_OK(environment::set("TE_FL_VALIDATE", "1"));
    EXPECT_FAILS(run(op::fused_rope_forward, &args, stream), kInvalidArgument, words);
    EXPECT_OK(environment::unset("TE_FL_VALIDATE"));
  };
  at(integers({0, 8}), false, "freqs has 10 positions, but position 10 is needed (sequence 1)");
  at(integers({0, -2}), true, "start_positions[1] is -2, expected 0 or more");
  const Tensor right = integers({0, 7});
  args.start_positions = right;
  EXPECT_OK(run(op::fused_rope_forward, &args, stream));
  EXPECT_OK(stream.synchronize());
  // Errors that need no device values are reported by the call itself.
  const Tensor few = filled({2, 1, 1, 8}, 0.5f);
  args.freqs = few;
  EXPECT_FAILS(run(op::fused_rope_forward, &args, stream), kInvalidArgument, "P is 2 (in 'freqs')");
  // Layout thd.
  const Tensor t = filled({6, 1, 8}, 1), u = filled({6, 1, 8}, 7);
  te_fl_rope_rope_args ragged{.input = t, .freqs = freqs, .output = u};
  ragged.layout = TE_FL_LAYOUT_THD;
  for (const auto& [ends, words] : {std::pair{integers({0, 4, 2}), "spans tokens 4 to 2"},
                                    std::pair{integers({0, 4, 9}), "spans tokens 4 to 9"}}) {
    ragged.cu_seqlens = ends;
    EXPECT_OK(run(op::fused_rope_backward, &ragged, stream));
    EXPECT_FAILS(stream.synchronize(), kInvalidArgument, words);
  }
  const Tensor ends = integers({0, 4, 6});
  ragged.cu_seqlens = ends;
  EXPECT_OK(run(op::fused_rope_backward, &ragged, stream));
  EXPECT_OK(stream.synchronize());
}

}  // namespace
}  // namespace te_fl
