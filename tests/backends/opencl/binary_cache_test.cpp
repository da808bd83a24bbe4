// Tests the cache of compiled OpenCL kernels with intact, damaged and incomplete files: an
// incomplete file is recompiled. Needs no OpenCL.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

// Includes this source file of the plugin, because test programs do not link the plugin.
#include "backends/opencl/binary_cache.cpp"
#include "support/temp_folder.hpp"

namespace te_fl::opencl {
namespace {

using Bytes = std::vector<unsigned char>;

class BinaryCache : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* value = std::getenv("XDG_CACHE_HOME");
    before_ = value == nullptr ? "" : value;
    setenv("XDG_CACHE_HOME", folder_.path().c_str(), 1);
  }
  void TearDown() override {
    if (before_.empty()) {
      unsetenv("XDG_CACHE_HOME");
    } else {
      setenv("XDG_CACHE_HOME", before_.c_str(), 1);
    }
  }
  std::string file() const {
    for (const auto& entry : fs::recursive_directory_iterator(folder_.path())) {
      if (!entry.is_directory()) return entry.path().string();
    }
    return {};
  }
  void put(const std::string& text) const { std::ofstream(file(), std::ios::binary) << text; }

  test::TempFolder folder_;
  std::string before_;
  const Bytes binary_ = {1, 2, 3, 250};
};

TEST_F(BinaryCache, WhatIsNotWholeIsAsIfItWereNotThere) {
  EXPECT_TRUE(read_binary("key").empty());
  write_binary("key", binary_);
  EXPECT_EQ(read_binary("key"), binary_);
  const std::string path = file(), whole = test::read_file(path);
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    put(whole.substr(0, bytes));
    EXPECT_TRUE(read_binary("key").empty()) << bytes;
  }
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    put(damaged);
    EXPECT_TRUE(read_binary("key").empty()) << at;
  }
  put("something else altogether, and longer than what belongs there");
  EXPECT_TRUE(read_binary("key").empty());
  write_binary("key", binary_);
  EXPECT_EQ(read_binary("key"), binary_) << "written over";
  fs::remove(path);
  fs::create_directory(path);
  EXPECT_TRUE(read_binary("key").empty());
  write_binary("key", binary_);
  EXPECT_TRUE(read_binary("key").empty());
  EXPECT_EQ(file(), "") << "nothing half-written is left";
}

TEST_F(BinaryCache, AFullDiskLeavesTheOldOne) {
  write_binary("key", binary_);
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1024, 1024};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(2);
    write_binary("key", Bytes(1 << 16, 7));
    write_binary("other", Bytes(1 << 16, 7));
    _exit(read_binary("key") == binary_ && read_binary("other").empty() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  const fs::path folder = fs::path(file()).parent_path();
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), {}), 1) << "nothing else is left";
}

TEST_F(BinaryCache, AFolderThatCannotBeMadeIsNoError) {
  setenv("XDG_CACHE_HOME", folder_.write("file", "x").c_str(), 1);
  write_binary("key", binary_);
  EXPECT_TRUE(read_binary("key").empty());
}

}  // namespace
}  // namespace te_fl::opencl
