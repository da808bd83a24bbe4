// Tests of checkpoint paths that are not regular files, and of tensor names that the format cannot
// hold.
#include <sys/stat.h>

#include "nn_test_util.hpp"
#include "support/expect.hpp"
#include "support/temp_folder.hpp"

namespace te_fl::nn::testing::checkpoint_files_test {
namespace {

mode_t kind_of(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0 ? info.st_mode & S_IFMT : 0;
}

TEST(CheckpointFiles, APipeIsNeitherReplacedNorWaitedFor) {
  const test::TempFolder folder;
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const auto linear = take(Linear::create({.in_features = 2, .out_features = 2}));
  const Status saved = save_checkpoint(pipe, *linear);
  EXPECT_FALSE(saved.ok());
  EXPECT_HAS(saved.to_string(), "is a device, a pipe or a socket");
  EXPECT_EQ(kind_of(pipe), mode_t{S_IFIFO});
  // No process writes to this pipe, so opening it for reading would block forever.
  EXPECT_EQ(load_checkpoint(pipe, *linear).status().code(), StatusCode::kInvalidArgument);
}

TEST(CheckpointFiles, ALinkStaysAndItsFileIsWritten) {
  const test::TempFolder folder;
  const std::string file = folder.write("file", "old"), link = folder / "link";
  ASSERT_EQ(::symlink(file.c_str(), link.c_str()), 0);
  const auto linear = take(Linear::create({.in_features = 2, .out_features = 2}));
  ASSERT_OK(save_checkpoint(link, *linear));
  EXPECT_EQ(kind_of(link), mode_t{S_IFLNK});
  ASSERT_OK(load_checkpoint(file, *linear).status());
}

// safetensors headers are JSON, hence UTF-8: a name in another encoding would change on the way to
// the file and back.
TEST(CheckpointFiles, NamesThatAreNoTextAreRefusedBeforeAnythingIsWritten) {
  const test::TempFolder folder;
  const std::string path = folder.write("file", "old");
  const Tensor t = tensor({1}, {1});
  const Status names = save_safetensors(path, {{"a\xff", t}, {"a\xfe", t}});
  EXPECT_FAILS(names, kInvalidArgument, "UTF-8");
  for (const Metadata& metadata :
       {Metadata{{"key\xff", "value"}}, Metadata{{"key", "value\xff"}}}) {
    const Status status = save_safetensors(path, {{"a", t}}, metadata);
    EXPECT_FAILS(status, kInvalidArgument, "key");
  }
  EXPECT_EQ(test::read_file(path), "old");
}

TEST(CheckpointFiles, StepsThatNoOptimizerCountsAreRefused) {
  const test::TempFolder folder;
  const std::string path = folder / "file";
  const auto linear = take(Linear::create({.in_features = 2, .out_features = 2}));
  const auto sgd = take(SGD::create(linear->parameters(), {}));
  ASSERT_OK(save_checkpoint(path, *linear, sgd.get()));
  SafetensorsFile saved = take(load_safetensors(path));
  const Tensor weight = linear->parameters()[0].value();
  for (const char* steps : {"9223372036854775807", "9223372036854775808", "18446744073709551615"}) {
    saved.metadata["te_fl.optimizer_steps"] = steps;
    ASSERT_OK(save_safetensors(path, saved.tensors, saved.metadata));
    set_values(weight, {1, 2, 3, 4});
    EXPECT_FAILS(load_checkpoint(path, *linear, sgd.get()).status(), kDataLoss, steps);
    EXPECT_EQ(values_of(weight), Values({1, 2, 3, 4}));
    EXPECT_EQ(sgd->steps(), 0);
  }
}

}  // namespace
}  // namespace te_fl::nn::testing::checkpoint_files_test
