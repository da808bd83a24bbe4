// The CUDA plugin called through its entry point, without te-fl's host code. These tests need no
// GPU: each call is refused or described before the driver is used.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "entered_plugin.hpp"
#include "support/expect.hpp"
#include "te_fl/ops/activation.h"
#include "te_fl/ops/attention.h"
#include "te_fl/ops/gemm.h"
#include "te_fl/ops/norm.h"
#include "te_fl/ops/quantize.h"
#include "te_fl/plugin.h"

namespace {

using namespace te_fl::cuda::entered;

struct Product {
  Fake a, b, d{{16, 16}, kF32};
  te_fl_generic_gemm_args args;
  te_fl_context ctx{};
  Text errors;
  explicit Product(te_fl_dtype dtype = kF32, uint32_t scaling = TE_FL_SCALING_NONE)
      : a({16, 32}, dtype, scaling), b({16, 32}, dtype, scaling) {
    args.a = &a.tensor, args.b = &b.tensor, args.d = &d.tensor, args.trans_b = 1;
    ctx.struct_size = sizeof ctx;
    ctx.device = {TE_FL_DEVICE_CUDA, 0};
    ctx.errors = &errors.sink;
  }
  te_fl_status run(const te_fl_op_desc& op) { return op.run(op.self, &ctx, &args); }
};

TEST(CudaEntry, ScratchThatIsTooSmallIsRefused) {
  Plugin plugin;
  const te_fl_op_desc& op = plugin.op("generic_gemm");
  Product call;
  size_t wanted = 0;
  ASSERT_EQ(op.workspace(op.self, &call.ctx, &call.args, &wanted), TE_FL_OK);
  ASSERT_GT(wanted, 0u);
  EXPECT_EQ(call.run(op), TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN);
  EXPECT_HAS(call.errors.text,
             "generic_gemm: ctx.workspace has 0 bytes, must have " + std::to_string(wanted));
  EXPECT_HAS(call.errors.text, "pass as many bytes as workspace() returns");
  call.errors.text.clear();
  call.ctx.workspace = Fake::memory();
  call.ctx.workspace_bytes = wanted - 1;
  EXPECT_EQ(call.run(op), TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN);
  call.errors.text.clear();
  call.ctx.workspace = static_cast<char*>(Fake::memory()) + 16;
  call.ctx.workspace_bytes = wanted;
  EXPECT_EQ(call.run(op), TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN);
  EXPECT_HAS(call.errors.text, "not aligned to 256 bytes");
}

// describe() reads metadata only (rule R31), also if the plugin's functions are wrapped for NVTX.
TEST(CudaEntry, EveryOpSaysByWhichKernelItGoes) {
  Plugin plugin;
  const std::vector<const te_fl_op_desc*> ops = plugin.all_ops();
  EXPECT_GT(ops.size(), 70u);
  for (const te_fl_op_desc* op : ops) {
    EXPECT_NE(op->describe, nullptr)
        << op->impl_id << " of " << op->op_name
        << " has no describe(), so te-fl explain cannot name its kernel";
  }
}

TEST(CudaEntry, ProductsSayByWhichKernelsTheyGo) {
  for (const char* ranges : {"0", "1"}) {
    Plugin plugin(Plugin::Settings{{"TE_FL_CUDA_NVTX", ranges}});
    const te_fl_op_desc& op = plugin.op("generic_gemm");
    ASSERT_NE(op.describe, nullptr);
    Product call;
    const auto words = [&] {
      Text description;
      EXPECT_EQ(op.describe(op.self, &call.ctx, &call.args, &description.sink), TE_FL_OK)
          << call.errors.text;
      return description.text;
    };
    // No plan exists yet, and describe() does not create one.
    EXPECT_EQ(words(),
              "cuBLASLt, which writes the result; algorithm chosen by cuBLASLt's heuristic at "
              "first use");
    Fake pre({16, 16}, kF32);
    call.args.gelu = 1;
    call.args.pre_gelu_out = &pre.tensor;
    if (!plugin.has_device()) {
      EXPECT_EQ(words(),
                "cuBLASLt, which writes the product, then the kernel of GELU; algorithm chosen by "
                "cuBLASLt's heuristic at first use; not fused_gemm: the "
                "kernel is for GPUs of compute capability 9.0 (Hopper)");
    }
    call.args.pre_gelu_out = nullptr;
    call.args.residual = &pre.tensor;
    EXPECT_HAS(words(), "into FP32 scratch, then the epilogue's kernel: the library's GELU");
  }
}

// The file that TE_FL_CUDA_GEMM_FILE names does not exist, so no GEMM algorithm has been measured.
TEST(CudaEntry, ProductsSayThatTheirAlgorithmWillBeMeasured) {
  Plugin plugin(Plugin::Settings{{"TE_FL_CUDA_GEMM_TUNE", "1"},
                                 {"TE_FL_CUDA_GEMM_FILE", "/tmp/te_fl_no_choices_yet.json"}});
  const te_fl_op_desc& op = plugin.op("generic_gemm");
  Product call;
  Text description;
  EXPECT_EQ(op.describe(op.self, &call.ctx, &call.args, &description.sink), TE_FL_OK)
      << call.errors.text;
  EXPECT_EQ(description.text,
            "cuBLASLt, which writes the result; algorithm measured at first use "
            "(TE_FL_CUDA_GEMM_TUNE)");
}

TEST(CudaEntry, QuantisationAndActivationsSayByWhichKernelsTheyGo) {
  Plugin plugin;
  Fake x({32, 64}, kF32), codes({32, 64}, kE4M3, TE_FL_SCALING_TENSOR), bias({64}, kF32);
  te_fl_context ctx{};
  Text errors;
  ctx.struct_size = sizeof ctx;
  ctx.device = {TE_FL_DEVICE_CUDA, 0};
  ctx.errors = &errors.sink;
  const auto words = [&](const char* name, const void* args) {
    const te_fl_op_desc& op = plugin.op(name);
    Text description;
    EXPECT_EQ(op.describe(op.self, &ctx, args, &description.sink), TE_FL_OK) << errors.text;
    return description.text;
  };
  te_fl_quantize_args quantize;
  quantize.input = &x.tensor, quantize.output = &codes.tensor;
  EXPECT_EQ(words("quantize", &quantize),
            "tensor_kernel: one scale, and memory for accesses of 16 bytes");
  te_fl_dbias_dgelu_args gradient;
  gradient.grad = gradient.input = gradient.output = &x.tensor;
  gradient.dbias = &bias.tensor;
  EXPECT_EQ(words("dbias_dgelu", &gradient),
            "plain_kernel, which sums the columns: no codes, and memory for accesses of 16 bytes");
}

TEST(CudaEntry, AStreamThatIsAnotherInEachThreadGetsNoScratch) {
  Plugin plugin;
  const te_fl_op_desc& op = plugin.op("generic_gemm");
  Product call;
  ASSERT_EQ(op.workspace(op.self, &call.ctx, &call.args, &call.ctx.workspace_bytes), TE_FL_OK);
  call.ctx.workspace = Fake::memory();
  call.ctx.stream = reinterpret_cast<void*>(uintptr_t{2});  // cudaStreamPerThread
  EXPECT_EQ(call.run(op), TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN);
  EXPECT_HAS(call.errors.text, "generic_gemm: ctx.stream is cudaStreamPerThread");
  EXPECT_HAS(call.errors.text, "give a stream made by");
}

// Workspace queries read metadata only (rules R8, R10), so they also work without a GPU.
TEST(CudaEntry, ScratchOfTheNormsIsSizedWithoutTheDriver) {
  Plugin plugin;
  Fake x({4096, 1024}, kF32), gamma({1024}, kF32), statistics({4096}, kF32);
  te_fl_context ctx{};
  Text errors;
  ctx.struct_size = sizeof ctx;
  ctx.device = {TE_FL_DEVICE_CUDA, 0};
  ctx.errors = &errors.sink;
  te_fl_layernorm_bwd_args layer;
  layer.dz = layer.x = layer.dx = &x.tensor;
  layer.mu = layer.rsigma = &statistics.tensor;
  layer.gamma = layer.dgamma = layer.dbeta = &gamma.tensor;
  te_fl_rmsnorm_bwd_args rms;
  rms.dz = rms.x = rms.dx = &x.tensor;
  rms.rsigma = &statistics.tensor;
  rms.gamma = rms.dgamma = &gamma.tensor;
  const auto bytes = [&](const char* name, const void* args) {
    const te_fl_op_desc& op = plugin.op(name);
    size_t wanted = 0;
    EXPECT_EQ(op.workspace(op.self, &ctx, args, &wanted), TE_FL_OK) << errors.text;
    return wanted;
  };
  const size_t many = bytes("layernorm_bwd", &layer);
  EXPECT_GE(many, size_t{2 * 1024 * 4 * 160}) << "two rows of sums for every multiprocessor";
  EXPECT_GE(bytes("rmsnorm_bwd", &rms), size_t{2 * 1024 * 4 * 160});
  x.shape[0] = statistics.shape[0] = 4;
  EXPECT_LT(bytes("layernorm_bwd", &layer), many / 10) << "few rows need little";
}

TEST(CudaEntry, Fp8ProductsNeedTheHardware) {
  Plugin plugin;
  if (plugin.has_device()) GTEST_SKIP() << "there is a GPU here; the rule is in cuda_limits_test";
  Product call(kE4M3, TE_FL_SCALING_TENSOR);
  const te_fl_op_desc& op = plugin.op("generic_gemm");
  EXPECT_EQ(op.supports(op.self, &call.ctx, &call.args), TE_FL_UNSUPPORTED);
  // The error depends on which is found missing first: a device or the library.
  EXPECT_TRUE(te_fl::testing::contains(call.errors.text, "compute capability 8.9") ||
              te_fl::testing::contains(call.errors.text, "cuBLASLt was not found"))
      << call.errors.text;
}

// FP8 attention on packed sequences, which no library supports: the plugin uses its own kernel.
// Reads metadata only.
TEST(CudaEntry, Fp8AttentionIsSupportedAndItsScratchSized) {
  Plugin plugin;
  const auto codes = [](te_fl_dtype dtype) {
    Fake t({40, 4, 24}, dtype, TE_FL_SCALING_TENSOR);
    t.quant.scale = t.quant.amax = static_cast<float*>(Fake::memory());
    return t;
  };
  Fake q = codes(kE4M3), k = codes(kE4M3), v = codes(kE4M3), o = codes(kE4M3);
  Fake lse({40, 4}, kF32), lengths({3}, {TE_FL_CODE_INT, 32, 1});
  for (Fake* t : {&q, &k, &v, &o})
    t->tensor.quant = &t->quant, t->tensor.dl.shape = t->shape.data();
  te_fl_context ctx{};
  Text errors;
  ctx.struct_size = sizeof ctx;
  ctx.device = {TE_FL_DEVICE_CUDA, 0};
  ctx.errors = &errors.sink;
  te_fl_fused_attn_fwd_args fwd;
  te_fl_fused_attn_bwd_args bwd;
  fwd.q = bwd.q = &q.tensor, fwd.k = bwd.k = &k.tensor, fwd.v = bwd.v = &v.tensor;
  fwd.o = bwd.o = bwd.d_o = &o.tensor, fwd.softmax_lse = bwd.softmax_lse = &lse.tensor;
  bwd.dq = bwd.dk = bwd.dv = &o.tensor;
  fwd.layout = bwd.layout = TE_FL_LAYOUT_THD;
  fwd.cu_seqlens_q = fwd.cu_seqlens_kv = &lengths.tensor;
  bwd.cu_seqlens_q = bwd.cu_seqlens_kv = &lengths.tensor;
  const te_fl_op_desc &forward = plugin.op("fused_attn_fwd"),
                      &backward = plugin.op("fused_attn_bwd");
  EXPECT_EQ(forward.supports(forward.self, &ctx, &fwd), TE_FL_OK) << errors.text;
  EXPECT_EQ(backward.supports(backward.self, &ctx, &bwd), TE_FL_OK) << errors.text;
  Text description;
  EXPECT_EQ(forward.describe(forward.self, &ctx, &fwd, &description.sink), TE_FL_OK) << errors.text;
  EXPECT_HAS(description.text, "attention kernels scalar: the tensor-core kernels ");
  const auto bytes = [&](const te_fl_op_desc& op, const void* args) {
    size_t wanted = 0;
    EXPECT_EQ(op.workspace(op.self, &ctx, args, &wanted), TE_FL_OK) << errors.text;
    return wanted;
  };
  const size_t rows = (40 * 4 * 8 + 255) / 256 * 256, values = 40 * 4 * 24 * 4;
  EXPECT_EQ(bytes(forward, &fwd), 0u) << "codes under a given scale are written as they come";
  EXPECT_EQ(bytes(backward, &bwd), rows);
  o.quant.flags = TE_FL_QUANT_COMPUTE_SCALE;
  EXPECT_EQ(bytes(forward, &fwd), 256 + values) << "the amax, and the values before their codes";
  EXPECT_EQ(bytes(backward, &bwd), rows + 3 * (256 + values));
  o.quant.flags = 0;
  o.quant.columnwise_data = Fake::memory();
  EXPECT_EQ(bytes(forward, &fwd), 256 + values);
  q.tensor.dl.data = nullptr;
  EXPECT_EQ(forward.supports(forward.self, &ctx, &fwd), TE_FL_UNSUPPORTED);
  EXPECT_HAS(errors.text, "reads row-wise data only");
}

// Returns true if the plugin refuses cuDNN's attention backward because of the sequence length; it
// checks this before it looks for cuDNN. With `tokens`, layout thd: `batch` sequences of up to
// `length` in `tokens` tokens.
bool too_long_for_cudnn(int64_t batch, int64_t length, int64_t heads, int64_t tokens = 0) {
  Plugin plugin;
  const te_fl_dtype bf16{TE_FL_CODE_BFLOAT, 16, 1}, i32{TE_FL_CODE_INT, 32, 1};
  const bool thd = tokens != 0;
  const std::vector<int64_t> shape = thd ? std::vector<int64_t>{tokens, heads, 128}
                                         : std::vector<int64_t>{batch, length, heads, 128};
  const Fake t(shape, bf16), ends({batch + 1}, i32),
      lse(thd ? std::vector<int64_t>{tokens, heads} : std::vector<int64_t>{batch, heads, length},
          kF32);
  te_fl_fused_attn_bwd_args args{};
  args.q = args.k = args.v = args.o = args.d_o = args.dq = args.dk = args.dv = &t.tensor;
  args.softmax_lse = &lse.tensor;
  args.layout = TE_FL_LAYOUT_BSHD;
  if (thd) {
    args.layout = TE_FL_LAYOUT_THD, args.mask_type = TE_FL_MASK_TYPE_PADDING;
    args.cu_seqlens_q = args.cu_seqlens_kv = &ends.tensor;
    args.max_seqlen_q = args.max_seqlen_kv = length;
  }
  Text errors;
  te_fl_context ctx{};
  ctx.struct_size = sizeof ctx;
  ctx.device = {TE_FL_DEVICE_CUDA, 0};
  ctx.errors = &errors.sink;
  const te_fl_op_desc& op = plugin.op("fused_attn_bwd", "vendor.cuda.cudnn");
  return op.supports(op.self, &ctx, &args) == TE_FL_UNSUPPORTED &&
         te_fl::testing::contains(errors.text, "2^31 elements");
}

TEST(CudaEntry, LongBackwardsOfAttentionAreNotForCudnn) {
  EXPECT_FALSE(too_long_for_cudnn(4, 2048, 32));
  EXPECT_FALSE(too_long_for_cudnn(8191, 128, 16));
  EXPECT_TRUE(too_long_for_cudnn(8192, 128, 16));
  EXPECT_TRUE(too_long_for_cudnn(8192, 2, 16)) << "its scratch is in tiles of 128 queries";
  EXPECT_FALSE(too_long_for_cudnn(64, 2048, 16, 64 * 2048));
  EXPECT_TRUE(too_long_for_cudnn(1024, 2048, 16, 64 * 2048))
      << "its scratch has the longest length for each sequence";
}

// Returns the plugin's answer for an FP8 forward of `batch` sequences of 128 queries with 16 heads
// of size 128: the reason why cuDNN does not support it (kSupports), the attention enquiry's answer
// (kEnquiry), or the description of the kernel (kDescribe).
enum class Ask { kSupports, kEnquiry, kDescribe };
std::string answer_of_fp8_forward(int64_t batch, Ask ask) {
  Plugin plugin;
  Fake heads({batch, 128, 16, 128}, kE4M3, TE_FL_SCALING_TENSOR),
      inner({1}, kE4M3, TE_FL_SCALING_TENSOR), answer({1}, {TE_FL_CODE_INT, 32, 1});
  heads.quant.scale = inner.quant.scale = static_cast<float*>(Fake::memory());
  te_fl_fused_attn_fwd_args args{};
  args.q = args.k = args.v = &heads.tensor, args.s_quant = &inner.tensor;
  args.layout = TE_FL_LAYOUT_BSHD;
  Fake out({batch, 128, 16, 128}, kE4M3, TE_FL_SCALING_TENSOR);
  out.tensor.dl.data = static_cast<char*>(Fake::memory()) + (int64_t{1} << 40);
  args.o = &out.tensor;
  te_fl_get_fused_attn_backend_args asked{};
  asked.q = asked.k = asked.v = &heads.tensor, asked.backend = &answer.tensor;
  asked.layout = TE_FL_LAYOUT_BSHD;
  Text errors;
  te_fl_context ctx{};
  ctx.struct_size = sizeof ctx;
  ctx.device = {TE_FL_DEVICE_CUDA, 0};
  ctx.errors = &errors.sink;
  const bool enquiry = ask == Ask::kEnquiry;
  const te_fl_op_desc& op =
      plugin.op(enquiry ? "get_fused_attn_backend" : "fused_attn_fwd", "vendor.cuda.cudnn");
  if (ask == Ask::kDescribe) {
    Text description;
    EXPECT_EQ(op.describe(op.self, &ctx, &args, &description.sink), TE_FL_OK) << errors.text;
    return description.text;
  }
  op.supports(op.self, &ctx,
              enquiry ? static_cast<const void*>(&asked) : static_cast<const void*>(&args));
  return errors.text;
}

// Runs once for each fake cuDNN (tests/backends/cuda/CMakeLists.txt), as a process loads only one
// cuDNN.
TEST(CudaCudnn, AnFp8ForwardOf2To31ElementsGoesByVersion) {
  const char* version = std::getenv("TE_FL_TEST_CUDNN");
  if (version == nullptr) GTEST_SKIP() << "run by ctest as cuda_cudnn_914 and cuda_cudnn_919";
  constexpr int64_t kFits = 8191, kLong = 8192;  // sequences of 2^18 elements each
  const std::string too_long = "FP8 of 2^31 elements or more";
  for (const Ask ask : {Ask::kSupports, Ask::kEnquiry}) {
    EXPECT_LACKS(answer_of_fp8_forward(kFits, ask), too_long);
    EXPECT_EQ(te_fl::testing::contains(answer_of_fp8_forward(kLong, ask), too_long),
              std::string(version) == "91400")
        << answer_of_fp8_forward(kLong, ask);
  }
  EXPECT_EQ(answer_of_fp8_forward(2, Ask::kDescribe),
            std::string(std::string(version) == "91400" ? "cuDNN 9.14.0" : "cuDNN 9.19.0") +
                ": graph of the forward in FP8: no dropout, bias, ALiBi, sinks or mask tensor");
  std::vector<std::string> texts;
  Plugin().findings(texts);
  std::string all;
  for (const std::string& t : texts) all += t + "\n";
  EXPECT_HAS(all, std::string(version) == "91400" ? "cuDNN | 9.14.0" : "cuDNN | 9.19.0");
}

TEST(CudaEntry, SaysWhatIsThereAndWhatIsMissing) {
  Plugin plugin;
  std::vector<std::string> texts;
  const auto findings = plugin.findings(texts);
  ASSERT_EQ(findings.size(), texts.size());
  std::string all;
  for (const std::string& t : texts) all += t + "\n";
  EXPECT_HAS(all, plugin.has_device() ? "NVIDIA driver | for CUDA" : "no CUDA device");
  EXPECT_HAS(all, "cuBLASLt | ");
  EXPECT_HAS(all, "cuDNN | ");
  for (size_t i = 0; i < findings.size(); ++i) {
    const bool good = findings[i].level == TE_FL_FINDING_OK;
    EXPECT_EQ(findings[i].disables == nullptr, good) << texts[i];
    EXPECT_EQ(findings[i].remedy == nullptr, good) << texts[i];
  }
}

TEST(CudaEntry, SaysThatTheFileOfChoicesCannotBeRead) {
  Plugin plugin(Plugin::Settings{{"TE_FL_CUDA_GEMM_FILE", "/nonexistent/choices.json"}});
  std::vector<std::string> texts;
  const auto findings = plugin.findings(texts);
  bool found = false;
  for (size_t i = 0; i < texts.size(); ++i) {
    if (!te_fl::testing::contains(texts[i], "choices of products | ")) continue;
    found = true;
    EXPECT_EQ(findings[i].level, uint32_t{TE_FL_FINDING_PROBLEM});
    EXPECT_HAS(texts[i],
               "/nonexistent/choices.json cannot be read: No such file or directory | products");
    EXPECT_HAS(texts[i], "| name a file that TE_FL_CUDA_GEMM_TUNE=1 has written");
  }
  EXPECT_TRUE(found);
  std::vector<std::string> others;
  Plugin sound;
  sound.findings(others);
  for (const std::string& text : others) EXPECT_LACKS(text, "choices of products");
}

// Runs in its own process. The search path contains another NCCL, which is too old.
TEST(CudaLibraries, TheOneThatTheProcessHoldsIsReported) {
  const char* held = std::getenv("TE_FL_TEST_HELD_NCCL");
  if (held == nullptr) GTEST_SKIP() << "run by ctest as cuda_held_library";
  ASSERT_NE(dlopen(held, RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
  Plugin plugin;
  std::vector<std::string> texts;
  plugin.findings(texts);
  std::string all;
  for (const std::string& t : texts) all += t + "\n";
  EXPECT_HAS(all, "NCCL | 2.27.3, " + std::string(held) + " |");
}

// Runs in its own process (tests/backends/cuda/CMakeLists.txt), as NVTX looks for its profiler only
// once per process.
TEST(CudaNvtx, RangesAreMarkedWhereWanted) {
  const char* tool = std::getenv("NVTX_INJECTION64_PATH");
  if (tool == nullptr) GTEST_SKIP() << "run by ctest as cuda_nvtx";
  void* recorder = dlopen(tool, RTLD_NOW);
  ASSERT_NE(recorder, nullptr) << dlerror();
  const auto text = reinterpret_cast<const char* (*)()>(dlsym(recorder, "nvtx_recorder_text"));
  {
    Plugin off;
    Product call;
    EXPECT_NE(call.run(off.op("generic_gemm")), TE_FL_OK);
    EXPECT_STREQ(text(), "");
  }
  Plugin on(Plugin::Settings{{"TE_FL_CUDA_NVTX", "1"}});
  Product call;
  EXPECT_NE(call.run(on.op("generic_gemm")), TE_FL_OK);
  EXPECT_STREQ(text(), "[te-fl:generic_gemm vendor.cuda]");
  EXPECT_NE(on.op("gelu").run, nullptr);  // an op without scratch is wrapped too
  EXPECT_NE(on.op("gelu").self, nullptr);
}

}  // namespace
