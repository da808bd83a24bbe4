// open_library() prefers the library that the process has already loaded, whatever the search path
// contains and whichever name comes first; for example PyTorch's NCCL and not the system's. Run by
// ctest, which puts the other library on the search path.
#include "backends/cuda/device/open_library.hpp"
#include "support/expect.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>

namespace te_fl::cuda {
namespace {

constexpr char kHeld[] = TE_FL_HELD_LIBRARY, kOther[] = TE_FL_OTHER_LIBRARY;

std::string file_of(void* handle) { return path_of(dlsym(handle, "ncclGetVersion")); }

TEST(OpenLibrary, WhatTheProcessHoldsComesFirst) {
  std::string reason;
  ASSERT_EQ(open_library({"libnccl_of_nobody.so.2"}, reason), nullptr);
  EXPECT_HAS(reason, "libnccl_of_nobody.so.2");
  ASSERT_EQ(dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_NOW), nullptr);

  ASSERT_NE(dlopen(kHeld, RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
  void* handle = open_library({"libnccl.so.2"}, reason);
  ASSERT_NE(handle, nullptr) << reason;
  EXPECT_EQ(file_of(handle), kHeld);
  handle = open_library({kOther, kHeld}, reason);
  ASSERT_NE(handle, nullptr) << reason;
  EXPECT_EQ(file_of(handle), kHeld);
  // If none of the named libraries is loaded yet, open_library() loads the first name that exists.
  handle = open_library({"libnccl_of_nobody.so.2", kOther}, reason);
  ASSERT_NE(handle, nullptr) << reason;
  EXPECT_EQ(file_of(handle), kOther);
}

}  // namespace
}  // namespace te_fl::cuda
