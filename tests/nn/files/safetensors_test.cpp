// The safetensors reader and writer: round trips, every truncation, corrupt headers, and loading
// into modules. A load that fails must change nothing.
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "nn_test_util.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::safetensors_test {
namespace {

std::string temp_path(const std::string& name) {
  return ::testing::TempDir() + "te_fl_nn_" + std::to_string(::getpid()) + "_" + name;
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string with_header(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

// Removes the file at the end of the test.
struct TempFile {
  explicit TempFile(const std::string& name) : path(temp_path(name)) {}
  ~TempFile() { std::remove(path.c_str()); }
  std::string path;
};

Tensor raw(std::initializer_list<int64_t> shape, DType dtype) {
  Tensor t = take(Tensor::empty(shape, dtype));
  for (int64_t i = 0; i < bytes_for(dtype, t.numel()); ++i) {
    t.data<uint8_t>()[i] = dtype == DType::kBool ? i % 2 : static_cast<uint8_t>(i * 7 + 1);
  }
  return t;
}

TEST(Safetensors, EveryDTypeAndMetadataRoundTrip) {
  TempFile file("round_trip");
  std::vector<NamedTensor> tensors;
  for (DType dtype :
       {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3, DType::kF8E5M2,
        DType::kF8E8M0, DType::kI8, DType::kI16, DType::kI32, DType::kI64, DType::kU8, DType::kU16,
        DType::kU32, DType::kU64, DType::kBool}) {
    tensors.push_back({"t." + std::string(name(dtype)), raw({3, 5}, dtype)});
  }
  tensors.push_back({"empty", raw({0, 4}, DType::kF32)});
  tensors.push_back({"scalar", raw({}, DType::kF32)});
  tensors.push_back({"odd name \"\\ \u00e9", raw({1}, DType::kU8)});
  const Metadata metadata{{"format", "pt"}, {"note", "a \"quoted\" line\n"}};
  ASSERT_OK(save_safetensors(file.path, tensors, metadata));
  const SafetensorsFile loaded = take(load_safetensors(file.path));
  EXPECT_EQ(loaded.metadata, metadata);
  ASSERT_EQ(loaded.tensors.size(), tensors.size());
  for (const NamedTensor& t : tensors) {
    auto found = std::find_if(loaded.tensors.begin(), loaded.tensors.end(),
                              [&](const auto& l) { return l.name == t.name; });
    ASSERT_NE(found, loaded.tensors.end()) << t.name;
    EXPECT_EQ(Shape(found->tensor.shape().begin(), found->tensor.shape().end()),
              Shape(t.tensor.shape().begin(), t.tensor.shape().end()));
    EXPECT_TRUE(same_bits(found->tensor, t.tensor)) << t.name;
  }
}

TEST(Safetensors, TheFileIsWhatTheFormatSays) {
  TempFile file("layout");
  ASSERT_OK(save_safetensors(file.path, {{"a", tensor({2}, {1, 2})}, {"b", raw({3}, DType::kU8)}},
                             {{"k", "v"}}));
  const std::string bytes = read_file(file.path);
  uint64_t length;
  std::memcpy(&length, bytes.data(), 8);
  EXPECT_EQ(length % 8, 0u);
  ASSERT_EQ(bytes.size(), 8 + length + 11);
  const auto json = nlohmann::json::parse(bytes.substr(8, length));
  EXPECT_EQ(json["__metadata__"]["k"], "v");
  EXPECT_EQ(json["a"],
            nlohmann::json::parse(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})"));
  EXPECT_EQ(json["b"],
            nlohmann::json::parse(R"({"dtype":"U8","shape":[3],"data_offsets":[8,11]})"));
  float values[2];
  std::memcpy(values, bytes.data() + 8 + length, 8);
  EXPECT_EQ(values[0], 1);
  EXPECT_EQ(values[1], 2);
}

TEST(Safetensors, StridedTensorsAreWrittenCompact) {
  TempFile file("strided");
  const Tensor t = take(tensor({2, 3}, {1, 2, 3, 4, 5, 6}).transpose(0, 1));
  ASSERT_OK(save_safetensors(file.path, {{"t", t}}));
  EXPECT_EQ(values_of(take(load_safetensors(file.path)).tensors[0].tensor),
            (Values{1, 4, 2, 5, 3, 6}));
}

TEST(Safetensors, EveryTruncationAndExtensionIsAnError) {
  TempFile file("truncated");
  ASSERT_OK(save_safetensors(
      file.path, {{"a", tensor({2, 3}, {1, 2, 3, 4, 5, 6})}, {"b", raw({5}, DType::kI8)}},
      {{"k", "v"}}));
  const std::string whole = read_file(file.path);
  for (size_t n = 0; n < whole.size(); ++n) {
    write_file(file.path, whole.substr(0, n));
    const auto result = load_safetensors(file.path);
    ASSERT_FALSE(result.ok()) << "cut to " << n << " bytes";
    ASSERT_EQ(result.status().code(), StatusCode::kDataLoss) << n;
    ASSERT_NE(result.status().to_string().find(file.path), std::string::npos);
  }
  write_file(file.path, whole + "x");
  ASSERT_FALSE(load_safetensors(file.path).ok());
  write_file(file.path, whole);
  ASSERT_OK(load_safetensors(file.path));
}

TEST(Safetensors, EveryFlippedHeaderByteIsReadOrRefusedNeverWorse) {
  TempFile file("flipped");
  ASSERT_OK(
      save_safetensors(file.path, {{"a", tensor({2}, {1, 2})}, {"b", raw({2, 2}, DType::kI8)}}));
  const std::string whole = read_file(file.path);
  for (size_t i = 0; i < whole.size() - 12; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = whole;
      bad[i] = static_cast<char>(bad[i] ^ (1 << bit));
      const auto bytes = std::as_bytes(std::span(bad));
      const auto header = parse_safetensors_header(bytes, bad.size(), "flipped");
      if (!header.ok()) continue;
      uint64_t covered = 0;
      for (const auto& entry : header->entries) covered += entry.end - entry.begin;
      ASSERT_EQ(covered, bad.size() - header->data_offset);
    }
  }
}

struct BadHeader {
  std::string name, header, data, message;
};

class SafetensorsCorrupt : public ::testing::TestWithParam<BadHeader> {};

TEST_P(SafetensorsCorrupt, IsRefusedNamingFileAndFault) {
  TempFile file("corrupt");
  write_file(file.path, with_header(GetParam().header, GetParam().data));
  const auto result = load_safetensors(file.path);
  ASSERT_FALSE(result.ok());
  const std::string text = result.status().to_string();
  EXPECT_EQ(result.status().code(), StatusCode::kDataLoss) << text;
  EXPECT_HAS(text, file.path);
  EXPECT_HAS(text, GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    All, SafetensorsCorrupt,
    ::testing::Values(
        BadHeader{"byte_order_mark",
                  "\xEF\xBB\xBF{\"v\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
                  "1234", "does not begin with {"},
        BadHeader{"leading_space", R"( {"v":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
                  "1234", "does not begin with {"},
        BadHeader{
            "offsets_twice",
            R"({"u":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"v":{"dtype":"U8","shape":[4],"data_offsets":[0,3],"data_offsets":[0,4]}})",
            "1234", "\"v\" has \"data_offsets\" twice"},
        BadHeader{
            "metadata_twice",
            R"({"__metadata__":{"a":"1","a":"2"},"v":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
            "1234", "\"__metadata__\" has \"a\" twice"},
        BadHeader{"not_json", "{\"a\": ", "", "not valid JSON"},
        BadHeader{"not_object", "[1, 2]", "", "not an object"},
        BadHeader{"nested", "{\"a\":" + std::string(200, '[') + std::string(200, ']') + "}", "",
                  "nested too deeply"},
        BadHeader{"entry_not_object", R"({"w":3})", "", "tensor \"w\" is not described"},
        BadHeader{"no_dtype", R"({"w":{"shape":[1],"data_offsets":[0,4]}})", "1234",
                  "tensor \"w\" has no \"dtype\""},
        BadHeader{"no_offsets", R"({"w":{"dtype":"F32","shape":[1]}})", "1234",
                  "no \"data_offsets\""},
        BadHeader{"unknown_dtype", R"({"w":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}})",
                  "1234", "\"F31\""},
        BadHeader{"negative_extent", R"({"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})",
                  "1234", "extent -1"},
        BadHeader{"fractional_extent",
                  R"({"w":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", "1234",
                  "extent 1.5"},
        BadHeader{"huge_shape",
                  R"({"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}})",
                  "1234", "overflows"},
        BadHeader{"huge_rank",
                  R"({"w":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}})",
                  "1234", "rank 9"},
        BadHeader{"beyond_the_end", R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
                  "1234", "outside the data section of 4 bytes"},
        BadHeader{"reversed", R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", "1234",
                  "outside"},
        BadHeader{"three_offsets", R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}})",
                  "1234", "not two integers"},
        BadHeader{"wrong_size", R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", "1234",
                  "need 8"},
        BadHeader{
            "overlap",
            R"({"v":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"w":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
            "1234", "\"v\" and \"w\" overlap"},
        BadHeader{
            "gap",
            R"({"v":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}})",
            "1234", "2 bytes before tensor \"w\""},
        BadHeader{"trailing", R"({"v":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "1234",
                  "last 3 bytes"},
        BadHeader{
            "twice",
            R"({"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
            "1234", "\"w\" twice"},
        BadHeader{"metadata_number", R"({"__metadata__":{"a":1}})", "", "\"a\" is not a string"},
        BadHeader{"metadata_list", R"({"__metadata__":[]})", "", "__metadata__ is not an object"}),
    [](const auto& info) { return info.param.name; });

TEST(Safetensors, ImpossibleHeaderLengthsAndMissingFiles) {
  TempFile file("length");
  write_file(file.path, std::string(8, '\xff') + "{}");
  EXPECT_HAS(load_safetensors(file.path).status().to_string(), "header length");
  write_file(file.path, std::string("\x40\0\0\0\0\0\0\0", 8) + "{}");
  EXPECT_HAS(load_safetensors(file.path).status().to_string(), "truncated");
  EXPECT_EQ(load_safetensors(file.path + ".absent").status().code(), StatusCode::kNotFound);
  EXPECT_FALSE(load_safetensors(::testing::TempDir()).ok());
}

TEST(Safetensors, WhatCannotBeSavedIsRefusedAndTheOldFileStays) {
  TempFile file("refused");
  write_file(file.path, "old");
  const QuantSpec spec;
  const Shape shape{4, 4};
  const Tensor ok = tensor({1}, {1});
  EXPECT_FALSE(
      save_safetensors(file.path, {{"q", take(Tensor::empty_quantized(shape, spec))}}).ok());
  EXPECT_FALSE(save_safetensors(file.path, {{"u", Tensor()}}).ok());
  EXPECT_FALSE(save_safetensors(file.path, {{"a", ok}, {"a", ok}}).ok());
  EXPECT_FALSE(save_safetensors(file.path, {{"__metadata__", ok}}).ok());
  EXPECT_EQ(read_file(file.path), "old");
  EXPECT_FALSE(save_safetensors("/nonexistent/folder/x", {{"a", ok}}).ok());
}

// ---- loading into modules

TransformerLayerOptions layer_options() {
  return {.hidden_size = 16,
          .ffn_hidden_size = 32,
          .num_attention_heads = 2,
          .hidden_dropout = 0.1f,
          .seed = 9};
}

TEST(ParameterNames, AreTransformerEngines) {
  auto names = [](const Module& module) {
    std::vector<std::string> result;
    for (const NamedParameter& p : module.parameters()) result.push_back(p.name);
    return result;
  };
  EXPECT_EQ(
      names(*take(TransformerLayer::create(layer_options()))),
      (std::vector<std::string>{
          "self_attention.layernorm_qkv.layer_norm_weight",
          "self_attention.layernorm_qkv.layer_norm_bias", "self_attention.layernorm_qkv.weight",
          "self_attention.layernorm_qkv.bias", "self_attention.proj.weight",
          "self_attention.proj.bias", "layernorm_mlp.layer_norm_weight",
          "layernorm_mlp.layer_norm_bias", "layernorm_mlp.fc1_weight", "layernorm_mlp.fc1_bias",
          "layernorm_mlp.fc2_weight", "layernorm_mlp.fc2_bias"}));
  auto llama = take(TransformerLayer::create({.hidden_size = 16,
                                              .ffn_hidden_size = 24,
                                              .num_attention_heads = 4,
                                              .num_gqa_groups = 2,
                                              .activation = Activation::kSwiglu,
                                              .normalization = Normalization::kRMSNorm,
                                              .bias = false}));
  EXPECT_EQ(names(*llama), (std::vector<std::string>{
                               "self_attention.layernorm_qkv.layer_norm_weight",
                               "self_attention.layernorm_qkv.weight", "self_attention.proj.weight",
                               "layernorm_mlp.layer_norm_weight", "layernorm_mlp.fc1_weight",
                               "layernorm_mlp.fc2_weight"}));
  auto shape = [&](const std::string& n) {
    const Tensor t = find_state(*llama, n);
    return Shape(t.shape().begin(), t.shape().end());
  };
  EXPECT_EQ(shape("self_attention.layernorm_qkv.weight"), (Shape{(4 + 2 * 2) * 4, 16}));
  EXPECT_EQ(shape("layernorm_mlp.fc1_weight"), (Shape{48, 16}));
  auto sink =
      take(TransformerLayer::create({.hidden_size = 16,
                                     .ffn_hidden_size = 8,
                                     .num_attention_heads = 2,
                                     .attention = {.softmax_type = SoftmaxType::kLearnable}}));
  EXPECT_EQ(find_state(*sink, "self_attention.core_attention.softmax_offset").numel(), 2);
}

TEST(ParameterInit, DependsOnTheSeedAlone) {
  auto a = take(TransformerLayer::create(layer_options())),
       b = take(TransformerLayer::create(layer_options()));
  auto other_options = layer_options();
  other_options.seed = 10;
  auto c = take(TransformerLayer::create(other_options));
  const auto pa = a->parameters(), pb = b->parameters(), pc = c->parameters();
  for (size_t i = 0; i < pa.size(); ++i) {
    EXPECT_TRUE(same_bits(pa[i].value(), pb[i].value())) << pa[i].name;
    const bool constant = pa[i].value().rank() == 1;
    EXPECT_EQ(same_bits(pa[i].value(), pc[i].value()), constant) << pa[i].name;
  }
  auto big = take(Linear::create({.in_features = 400, .out_features = 250, .init_std = 0.5f}));
  double sum = 0, square = 0;
  for (double v : values_of(big->parameters()[0].value())) sum += v, square += v * v;
  EXPECT_NEAR(sum / 1e5, 0, 5 * 0.5 / std::sqrt(1e5));
  EXPECT_NEAR(std::sqrt(square / 1e5), 0.5, 0.01);
}

TEST(LoadState, ErrorsNameTheTensorAndChangeNothing) {
  TempFile file("load");
  auto source = take(TransformerLayer::create(layer_options()));
  auto other = layer_options();
  other.seed = 77;
  auto target = take(TransformerLayer::create(other));
  const auto good = source->state();
  std::vector<Values> before;
  for (const NamedTensor& t : target->state()) before.push_back(values_of(t.tensor));
  const std::string victim =
      "layernorm_mlp.fc2_bias";  // the last: earlier ones must stay unchanged too
  auto expect_refused = [&](std::vector<NamedTensor> tensors, const std::string& message) {
    const Status status = target->load_state(tensors, "some.safetensors");
    ASSERT_FALSE(status.ok());
    EXPECT_HAS(status.to_string(), "some.safetensors");
    EXPECT_HAS(status.to_string(), message);
    const auto now = target->state();
    for (size_t i = 0; i < now.size(); ++i)
      EXPECT_EQ(values_of(now[i].tensor), before[i]) << now[i].name;
  };
  auto edited = [&](auto edit) {
    std::vector<NamedTensor> tensors = good;
    edit(tensors);
    return tensors;
  };
  expect_refused(edited([](auto& t) { t.pop_back(); }), victim + " is missing");
  expect_refused(edited([](auto& t) {
                   t.back().tensor = tensor({3}, {1, 2, 3});
                 }),
                 victim + " is f32[3] cpu; it must be f32[16]");
  expect_refused(edited([](auto& t) { t.back().tensor = raw({16}, DType::kBF16); }),
                 victim + " is bf16[16] cpu; it must be f32[16]");
  expect_refused(edited([](auto& t) {
                   t.push_back({"layernorm_mlp.fc2_biass", t.back().tensor});
                 }),
                 "the nearest is " + victim);
  const Tensor scale = tensor({2}, {1, 1}), history = tensor({4, 2}, Values(8, 0));
  const std::string site = "layernorm_mlp.fc1_fp8.fwd";
  expect_refused(edited([&](auto& t) {
                   t.push_back({site + ".scale", scale});
                 }),
                 site + ".amax_history is missing");
  expect_refused(
      edited([&](auto& t) {
        t.push_back({site + ".scale", scale}), t.push_back({site + ".amax_history", scale});
      }),
      "f32[length >= 1,2]");
  expect_refused(
      edited([&](auto& t) {
        t.push_back({site + ".scale", history}), t.push_back({site + ".amax_history", history});
      }),
      "f32[2]");
  ASSERT_OK(target->load_state(good, "some.safetensors"));
  const auto now = target->state();
  for (size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(same_bits(now[i].tensor, good[i].tensor));
}

TEST(LoadState, TakesTheModulesOwnTensorsEvenExchanged) {
  auto layer = take(TransformerLayer::create(layer_options()));
  randomize(*layer, 5);
  std::vector<NamedTensor> own = layer->state();
  ASSERT_OK(layer->load_state(own, "itself"));
  const std::string a = "self_attention.proj.bias", b = "layernorm_mlp.fc2_bias";
  const Values old_a = values_of(find_state(*layer, a)), old_b = values_of(find_state(*layer, b));
  ASSERT_NE(old_a, old_b);
  for (NamedTensor& t : own) {
    if (t.name == a || t.name == b) t.name = t.name == a ? b : a;
  }
  ASSERT_OK(layer->load_state(own, "itself"));
  EXPECT_EQ(values_of(find_state(*layer, a)), old_b);
  EXPECT_EQ(values_of(find_state(*layer, b)), old_a);
}

TEST(Checkpoint, TruncatedAnywhereLoadsNothing) {
  TempFile file("checkpoint");
  auto module = take(Linear::create({.in_features = 2, .out_features = 2}));
  auto adam = take(Adam::create(module->parameters(), {}));
  ASSERT_OK(save_checkpoint(file.path, *module, adam.get()));
  const std::string whole = read_file(file.path);
  randomize(*module, 5);
  const Values before = values_of(module->parameters()[0].value());
  for (size_t n = 0; n < whole.size(); ++n) {
    write_file(file.path, whole.substr(0, n));
    ASSERT_FALSE(load_checkpoint(file.path, *module, adam.get()).ok()) << n;
    ASSERT_EQ(values_of(module->parameters()[0].value()), before);
  }
  // Rejects another optimizer's state and a file that is not a checkpoint.
  write_file(file.path, whole);
  auto sgd = take(SGD::create(module->parameters(), {}));
  const auto mismatch = load_checkpoint(file.path, *module, sgd.get());
  EXPECT_HAS(mismatch.status().to_string(), "optimizer.momentum.weight is missing");
  EXPECT_EQ(values_of(module->parameters()[0].value()), before);
  ASSERT_OK(save_safetensors(file.path, module->state()));
  EXPECT_HAS(load_checkpoint(file.path, *module).status().to_string(), "not a te-fl checkpoint");
}

// One training step of a layer on fixed data; returns the loss.
Values train_step(TransformerLayer& layer, Adam& adam, uint64_t step,
                  const std::optional<Recipe>& recipe) {
  const Tensor x = tensor({4, 2, 16}, random_values(128, 1000 + step));
  Ctx ctx;
  Tensor y;
  {
    autocast fp8(recipe.has_value(), recipe.value_or(DelayedScaling{}));
    y = take(layer.forward(x, &ctx));
  }
  (void)take(layer.backward(y, ctx));
  check(backward_end());
  check(adam.step());
  check(layer.zero_grad());
  return values_of(y);
}

class CheckpointContinues : public ::testing::TestWithParam<int> {};

TEST_P(CheckpointContinues, BitForBitWithFp8StateAndDropout) {
  const std::vector<std::optional<Recipe>> recipes = {std::nullopt,
                                                      DelayedScaling{.amax_history_len = 3},
                                                      Float8CurrentScaling{}, Float8BlockScaling{}};
  const auto recipe = recipes[GetParam()];
  TempFile file("continue" + std::to_string(GetParam()));
  const AdamOptions adam_options{.lr = 0.01f, .weight_decay = 0.1f};
  ContextScope scope{Context(7)};
  auto layer = take(TransformerLayer::create(layer_options()));
  auto adam = take(Adam::create(layer->parameters(), adam_options));
  for (uint64_t step = 0; step < 3; ++step) (void)train_step(*layer, *adam, step, recipe);
  ASSERT_OK(save_checkpoint(file.path, *layer, adam.get(), {{"mine", "kept"}}));
  std::vector<Values> want;
  for (uint64_t step = 3; step < 6; ++step) want.push_back(train_step(*layer, *adam, step, recipe));

  ContextScope fresh{Context(12345)};
  auto options = layer_options();
  options.seed = 4321;
  auto resumed = take(TransformerLayer::create(options));
  auto resumed_adam = take(Adam::create(resumed->parameters(), adam_options));
  // Gives the optimizer another state, which loading must replace.
  (void)train_step(*resumed, *resumed_adam, 50, recipe);
  EXPECT_EQ(take(load_checkpoint(file.path, *resumed, resumed_adam.get())),
            (Metadata{{"mine", "kept"}}));
  EXPECT_EQ(resumed_adam->steps(), 3);
  for (uint64_t step = 3; step < 6; ++step) {
    EXPECT_EQ(train_step(*resumed, *resumed_adam, step, recipe), want[step - 3]) << "step " << step;
  }
  const auto a = layer->state(), b = resumed->state();
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_TRUE(same_bits(a[i].tensor, b[i].tensor)) << a[i].name;
  if (GetParam() == 1) {
    EXPECT_EQ(find_state(*resumed, "layernorm_mlp.fc1_fp8.fwd.amax_history").size(0), 3);
    EXPECT_EQ(find_state(*resumed, "self_attention.layernorm_qkv.fp8.bwd.scale").numel(), 1);
  }
}

INSTANTIATE_TEST_SUITE_P(All, CheckpointContinues, ::testing::Range(0, 4));

}  // namespace
}  // namespace te_fl::nn::testing::safetensors_test
