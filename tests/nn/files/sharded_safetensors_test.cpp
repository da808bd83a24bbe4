// Models saved as several safetensors files with an index.
#include "te_fl/nn/files/sharded_safetensors.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "nn_test_util.hpp"
#include "support/expect.hpp"

namespace te_fl::nn::testing::sharded_safetensors_test {
namespace {

namespace fs = std::filesystem;

class Sharded : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) / ("sharded_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string at(const std::string& name) const { return (folder_ / name).string(); }
  void put(const std::string& name, const std::string& text) const {
    std::ofstream(at(name), std::ios::binary) << text;
  }
  std::string text(const std::string& name) const {
    std::ostringstream all;
    all << std::ifstream(at(name), std::ios::binary).rdbuf();
    return all.str();
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      names.push_back(entry.path().filename());
    }
    std::ranges::sort(names);
    return names;
  }
  // The tensors take 16, 8, 24 and 4 bytes.
  static std::vector<NamedTensor> tensors() {
    return {{"a", tensor({4}, {1, 2, 3, 4})},
            {"b", tensor({2, 2}, {5, 6, 7, 8}, DType::kBF16)},
            {"c", tensor({2, 3}, {1, 0, -1, 2, -2, 3})},
            {"d", tensor({1}, {9})}};
  }
  static void expect_equal(const SafetensorsFile& file, const std::vector<NamedTensor>& want) {
    ASSERT_EQ(file.tensors.size(), want.size());
    for (const NamedTensor& t : want) {
      const auto found = std::ranges::find(file.tensors, t.name, &NamedTensor::name);
      ASSERT_NE(found, file.tensors.end()) << t.name;
      EXPECT_TRUE(same_bits(found->tensor, t.tensor)) << t.name;
      EXPECT_TRUE(std::ranges::equal(found->tensor.shape(), t.tensor.shape())) << t.name;
    }
  }

  fs::path folder_;
};

TEST_F(Sharded, ComesBackAsItWasWritten) {
  check(save_sharded(folder_.string(), tensors(), {.max_shard_bytes = 24}));
  EXPECT_EQ(files(), (std::vector<std::string>{
                         "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                         "model-00003-of-00003.safetensors", "model.safetensors.index.json"}));
  for (const std::string& path : {folder_.string(), at("model.safetensors.index.json")}) {
    const SafetensorsFile file = take(load_sharded(path));
    expect_equal(file, tensors());
    EXPECT_EQ(file.metadata.at("format"), "pt");
  }
  // Checks the text of the index, which other readers parse.
  const std::string index = text("model.safetensors.index.json");
  EXPECT_HAS(index, "\"total_size\": 52");
  EXPECT_HAS(index, "\"b\": \"model-00001-of-00003.safetensors\"");
  EXPECT_HAS(index, "\"c\": \"model-00002-of-00003.safetensors\"");
  EXPECT_HAS(index, "\"d\": \"model-00003-of-00003.safetensors\"");
}

TEST_F(Sharded, OneFileNeedsNoIndex) {
  check(save_sharded(folder_.string(), tensors(), {.max_shard_bytes = 24}));
  std::vector<NamedTensor> changed = tensors();
  changed[0].tensor = tensor({4}, {4, 3, 2, 1});
  check(save_sharded(folder_.string(), changed));
  // A stale index would take precedence over the new file.
  EXPECT_FALSE(fs::exists(at("model.safetensors.index.json")));
  expect_equal(take(load_sharded(folder_.string())), changed);
  expect_equal(take(load_sharded(at("model.safetensors"))), changed);
  EXPECT_FAILS(load_sharded(folder_.string(), "other"), kNotFound,
               "neither other.safetensors.index.json");
}

// A save that fails in one of its files, or whose process dies during it, leaves the previous model
// intact.
TEST_F(Sharded, HalfASaveChangesNothing) {
  check(save_sharded(folder_.string(), tensors(), {.max_shard_bytes = 24}));
  const std::vector<std::string> before = files();
  for (const uint64_t most : {24, 16, 1000}) {
    for (size_t bad = 0; bad < 4; ++bad) {
      std::vector<NamedTensor> half = {{"a", tensor({4}, Values(4, 7))},
                                       {"b", tensor({2, 2}, Values(4, 7), DType::kBF16)},
                                       {"c", tensor({2, 3}, Values(6, 7))},
                                       {"d", tensor({1}, {7})}};
      half[bad].tensor = Tensor();
      EXPECT_FAILS(save_sharded(folder_.string(), half, {.max_shard_bytes = most}),
                   kInvalidArgument, "is undefined");
      expect_equal(take(load_sharded(folder_.string())), tensors());
      EXPECT_EQ(files(), before);
    }
  }
  std::vector<NamedTensor> longer = tensors();
  longer.push_back({"e", tensor({1024}, Values(1024, 3))});
  const auto save_and_die = [&] {
    const rlimit least{1024, 1024};  // file size limit in bytes; the file of the tensor "e" is
                                     // larger, so its write fails
    (void)::setrlimit(RLIMIT_FSIZE, &least);
    (void)save_sharded(folder_.string(), longer, {.max_shard_bytes = 24});
  };
  EXPECT_EXIT(save_and_die(), ::testing::KilledBySignal(SIGXFSZ), "");
  expect_equal(take(load_sharded(folder_.string())), tensors());
}

// Each save removes the files of the previous save, whether that was one file or several, and no
// other files.
TEST_F(Sharded, TheFilesOfBeforeGo) {
  put("model-other.safetensors", "of somebody else");
  for (const uint64_t most : {24, 24, 16, 1000, 24, 1000, 1000, 1}) {
    std::vector<NamedTensor> changed = tensors();
    changed[3].tensor = tensor({1}, {static_cast<double>(most)});
    check(save_sharded(folder_.string(), changed, {.max_shard_bytes = most}));
    expect_equal(take(load_sharded(folder_.string())), changed);
    const size_t shards = most == 1000 ? 0 : most == 24 ? 3 : 4;
    EXPECT_EQ(files().size(), 1 + 1 + shards) << most;
    // Some readers of this layout look for "model.safetensors" first, so no stale one may remain.
    EXPECT_EQ(fs::exists(at("model.safetensors")), shards == 0);
  }
  EXPECT_EQ(text("model-other.safetensors"), "of somebody else");
}

TEST_F(Sharded, ModulesLoadIt) {
  auto from = take(Linear::create({.in_features = 8, .out_features = 8, .seed = 1}));
  auto to = take(Linear::create({.in_features = 8, .out_features = 8, .seed = 2}));
  check(save_sharded(folder_.string(), from->state(), {.max_shard_bytes = 1, .stem = "weights"}));
  check(to->load_state(take(load_sharded(folder_.string(), "weights")).tensors, "weights"));
  EXPECT_EQ(values_of(find_state(*to, "weight")), values_of(find_state(*from, "weight")));
}

TEST_F(Sharded, MappedTensorsOutliveTheirFileAndDoNotChangeIt) {
  check(save_safetensors(at("one.safetensors"), tensors()));
  const std::string before = text("one.safetensors");
  Tensor kept;
  {
    SafetensorsFile file = take(map_safetensors(at("one.safetensors")));
    expect_equal(file, tensors());
    kept = file.tensors[0].tensor;
  }
  kept.data<float>()[0] = 77;
  EXPECT_EQ(text("one.safetensors"), before);
  fs::remove(at("one.safetensors"));
  EXPECT_EQ(values_of(kept), (Values{77, 2, 3, 4}));
}

// The format does not align tensor data.
TEST_F(Sharded, UnalignedDataIsCopied) {
  const std::string header = R"({"byte":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                             R"("word":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})";
  const uint64_t length = header.size();
  std::string bytes(reinterpret_cast<const char*>(&length), sizeof length);
  const float value = 2.5f;
  bytes += header + std::string(1, '\x07');
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  put("odd.safetensors", bytes);
  const SafetensorsFile file = take(map_safetensors(at("odd.safetensors")));
  EXPECT_EQ(file.tensors[0].tensor.data<uint8_t>()[0], 7);
  EXPECT_EQ(values_of(file.tensors[1].tensor), Values{2.5});
}

TEST_F(Sharded, WhatIsWrongIsNamed) {
  const std::string index = "model.safetensors.index.json";
  const auto load = [&] { return load_sharded(folder_.string()); };
  check(save_sharded(folder_.string(), tensors(), {.max_shard_bytes = 24}));
  const std::string good = text(index);
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = good;
    changed.replace(changed.find(from), from.size(), to);
    put(index, changed);
    return load();
  };
  for (const char* text :
       {"", "{", "[]", "{}", R"({"weight_map": 3})", R"({"weight_map": {"a": 1e999}})"}) {
    put(index, text);
    EXPECT_FAILS(load(), kDataLoss, "is no index");
  }
  for (const char* file : {"3", "\"\"", "\"..\"", "\"../a\"", "\"/etc/passwd\""}) {
    put(index, R"({"weight_map": {"a": )" + std::string(file) + "}}");
    EXPECT_FAILS(load(), kDataLoss, "name of a file beside the index");
  }
  EXPECT_FAILS(with("\"d\"", "\"e\""), kDataLoss, "has the tensor \"d\", which the index");
  EXPECT_FAILS(with("\"weight_map\": {",
                    "\"weight_map\": {\"x\": "
                    "\"model-00001-of-00003.safetensors\","),
               kDataLoss, "tensor \"x\" is not in model-00001");
  EXPECT_FAILS(with("\"b\": \"model-00001", "\"b\": \"model-00002"), kDataLoss,
               "has in model-00002");
  EXPECT_FAILS(with("\"d\": \"model-00003", "\"d\": \"model-00004"), kNotFound, "model-00004");
  put("empty.safetensors", "");
  EXPECT_FAILS(map_safetensors(at("empty.safetensors")), kDataLoss, "empty");
  EXPECT_FAILS(map_safetensors(folder_.string()), kInvalidArgument, "not a regular file");
  put("short.safetensors", "abc");
  EXPECT_FAILS(map_safetensors(at("short.safetensors")), kDataLoss, "at least 8");
  EXPECT_FAILS(save_sharded(folder_.string(), tensors(), {.max_shard_bytes = 0}), kInvalidArgument,
               "max_shard_bytes is 0");
  EXPECT_FAILS(save_sharded(folder_.string(), tensors(), {.stem = "a/b"}), kInvalidArgument,
               "without a folder");
  EXPECT_FAILS(save_sharded(folder_.string(), tensors(), {.max_shard_bytes = 8, .stem = "a\xff"}),
               kInvalidArgument, "is not UTF-8");
  auto twice = tensors();
  twice[3].name = "a";
  EXPECT_FAILS(save_sharded(folder_.string(), twice, {.max_shard_bytes = 8}), kInvalidArgument,
               "\"a\" is given twice");
}

}  // namespace
}  // namespace te_fl::nn::testing::sharded_safetensors_test
