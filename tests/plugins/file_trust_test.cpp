// Tests whether te-fl finds other users who could change the target of a path, or a plugin's
// libraries.
#include "plugins/file_trust.hpp"

#include <grp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "plugins/load_trust.hpp"
#include "support/expect.hpp"
#include "support/library_fixture.hpp"

namespace te_fl::plugins {
namespace {

namespace fs = std::filesystem;

constexpr gid_t kOthers = 12345;

void mode(const std::string& path, mode_t bits) { ASSERT_EQ(chmod(path.c_str(), bits), 0) << path; }

class FileTrust : public ::testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "only root can give files away";
    file_ = folder_.write("a/b/file", "x");
  }
  test::TempFolder folder_;
  std::string file_;
};

TEST_F(FileTrust, NoOtherUserMayWriteTheFileOrAParentFolder) {
  EXPECT_EQ(file_trust_problem(file_), "");
  for (const std::string& path : {file_, folder_ / "a/b", folder_ / "a", folder_.path()}) {
    struct stat before {};
    ASSERT_EQ(stat(path.c_str(), &before), 0);
    const mode_t bits = before.st_mode & 0777;
    mode(path, bits | S_IWOTH);
    EXPECT_HAS(file_trust_problem(file_), "by everybody") << path;
    EXPECT_HAS(file_trust_problem(file_), "run: chmod o-w " + path);
    ASSERT_EQ(chown(path.c_str(), 0, kOthers), 0);
    mode(path, bits | S_IWGRP);
    EXPECT_HAS(file_trust_problem(file_), "by the group 12345") << path;
    EXPECT_HAS(file_trust_problem(file_), "run: chmod g-w " + path);
    mode(path, bits);
    EXPECT_EQ(file_trust_problem(file_), "");
    ASSERT_EQ(chown(path.c_str(), 12345, 0), 0);
    EXPECT_HAS(file_trust_problem(file_), path + " belongs to 12345") << path;
    EXPECT_HAS(file_trust_problem(file_), "run: chown root " + path);
    ASSERT_EQ(chown(path.c_str(), 0, 0), 0);
  }
}

// Many systems give each user a private group and make files writable by that group.
TEST_F(FileTrust, AUsersPrivateGroupMayWrite) {
  const group* own = getgrgid(0);
  if (own == nullptr || own->gr_mem[0] != nullptr) GTEST_SKIP() << "root's group has members";
  mode(file_, 0664);
  mode(folder_ / "a", 0775);
  EXPECT_EQ(file_trust_problem(file_), "");
}

TEST_F(FileTrust, EveryFolderAndLinkOfAChainOfLinksCounts) {
  // in/first links to open/second, which links to a/b/file, so anyone who may write to open
  // controls the target.
  folder_.write("in/x", "");
  folder_.write("open/x", "");
  fs::create_symlink("../open/second", folder_ / "in/first");
  fs::create_symlink(folder_ / "open/../a/b/file", folder_ / "open/second");
  const std::string path = folder_ / "in/first";
  EXPECT_EQ(file_trust_problem(path), "");
  mode(folder_ / "open", 0777);
  EXPECT_HAS(file_trust_problem(path), "run: chmod o-w " + folder_ / "open");
  // With the sticky bit, other users may add links, but cannot replace this one.
  mode(folder_ / "open", 01777);
  EXPECT_EQ(file_trust_problem(path), "");
  ASSERT_EQ(lchown((folder_ / "open/second").c_str(), 12345, 0), 0);
  EXPECT_HAS(file_trust_problem(path), "the link " + folder_ / "open/second belongs to");
  // The path contains a symbolic link to a folder.
  fs::create_directory_symlink("../a", folder_ / "in/folder");
  EXPECT_EQ(file_trust_problem(folder_ / "in/folder/b/file"), "");
  mode(folder_ / "a", 0777);
  EXPECT_HAS(file_trust_problem(folder_ / "in/folder/b/file"), folder_ / "a");
  // ".." after a link means the parent of the link's target.
  mode(folder_ / "a", 0755);
  mode(folder_ / "in", 0755);
  EXPECT_EQ(file_trust_problem(folder_ / "in/folder/../a/b/file"), "");
  fs::create_symlink("circle", folder_ / "in/circle");
  EXPECT_HAS(file_trust_problem(folder_ / "in/circle"), "circle");
  EXPECT_EQ(file_trust_problem(folder_ / "in/none/at/all"), "");
}

TEST_F(FileTrust, OfAFolderInWhichNamesAreLookedForTheStickyBitIsNoHelp) {
  EXPECT_EQ(folder_trust_problem(folder_ / "a"), "");
  EXPECT_EQ(folder_trust_problem(folder_ / "a/none"), "");
  mode(folder_ / "a", 01777);
  EXPECT_HAS(folder_trust_problem(folder_ / "a"), "could add a library");
  EXPECT_HAS(folder_trust_problem(folder_ / "a/none/deeper"), "could create");
  EXPECT_EQ(folder_trust_problem(folder_ / "a/b"), "") << "nobody else can replace it";
}

class LoadTrust : public test::LibraryFixture {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "only root can give files away";
    fs::create_directories(folder_ / "dep");
    build("dep/libdep.so", "extern \"C\" int dep() { return 1; }", "-Wl,-soname,libdep.so");
  }
  // Builds a library that needs libdep.so, with `run_path` as its RUNPATH.
  std::string plugin(const std::string& run_path) {
    return build("plugin.so", "extern \"C\" int dep(); extern \"C\" int f() { return dep(); }",
                 "-Ldep -ldep -Wl,--enable-new-dtags,-rpath,'" + run_path + "'");
  }
  std::string problem(const std::string& path) { return load_trust_problem(path, rules_); }

  SearchRules rules_ = SearchRules::of_process();
};

TEST_F(LoadTrust, ALibraryInAFolderThatOthersWriteIsRefused) {
  const std::string path = plugin("$ORIGIN/dep");
  EXPECT_EQ(problem(path), "");
  mode(folder_ / "dep", 0777);
  EXPECT_HAS(problem(path), "it needs libdep.so");
  EXPECT_HAS(problem(path), "run: chmod o-w " + folder_ / "dep");
  mode(folder_ / "dep", 0755);
  mode(folder_ / "dep/libdep.so", 0666);
  EXPECT_HAS(problem(path), "run: chmod o-w " + folder_ / "dep/libdep.so");
}

TEST_F(LoadTrust, AFolderThatIsSearchedBeforeCountsThoughItIsEmptyOrAbsent) {
  fs::create_directories(folder_ / "open");
  const std::string path = plugin("$ORIGIN/open:$ORIGIN/dep");
  EXPECT_EQ(problem(path), "");
  mode(folder_ / "open", 0777);
  EXPECT_HAS(problem(path), folder_ / "open");
  mode(folder_ / "open", 01777);
  EXPECT_HAS(problem(path), "could add a library");
  EXPECT_HAS(problem(plugin("$ORIGIN/open/later:$ORIGIN/dep")), "could create");
  EXPECT_EQ(problem(plugin("$ORIGIN/dep:$ORIGIN/open")), "") << "it is found before";
  EXPECT_HAS(problem(plugin("dep")), "a relative folder");
}

TEST_F(LoadTrust, TwinsOfGlibcHwcapsCount) {
  const std::string level = folder_ / "dep/glibc-hwcaps/x86-64-v3";
  fs::create_directories(level);
  const std::string path = plugin("$ORIGIN/dep");
  EXPECT_EQ(problem(path), "");
  mode(level, 0777);
  EXPECT_HAS(problem(path), level);
  mode(level, 0755);
  mode(folder_ / "dep/glibc-hwcaps", 0777);
  EXPECT_HAS(problem(path), "glibc-hwcaps");
  mode(folder_ / "dep/glibc-hwcaps", 0755);
  fs::copy(folder_ / "dep/libdep.so", level + "/libdep.so");
  EXPECT_EQ(problem(path), "");
  mode(level + "/libdep.so", 0666);
  EXPECT_HAS(problem(path), level + "/libdep.so");
}

TEST_F(LoadTrust, WhatALibraryNeedsInItsTurnCounts) {
  fs::create_directories(folder_ / "far");
  build("far/libfar.so", "extern \"C\" int far() { return 1; }", "-Wl,-soname,libfar.so");
  build("dep/libdep.so", "extern \"C\" int far(); extern \"C\" int dep() { return far(); }",
        "-Wl,-soname,libdep.so -Lfar -lfar -Wl,--enable-new-dtags,-rpath,'$ORIGIN/../far'");
  const std::string path = plugin("$ORIGIN/dep");
  EXPECT_EQ(problem(path), "");
  mode(folder_ / "far", 0777);
  EXPECT_HAS(problem(path), "it needs libfar.so");
}

TEST_F(LoadTrust, WhatTheLoaderWouldNotSearchAndWhatItCannotFindAreLeftToIt) {
  const std::string path = plugin("$ORIGIN/dep");
  fs::remove(folder_ / "dep/libdep.so");
  EXPECT_EQ(problem(path), "");
  EXPECT_EQ(problem(folder_.write("text.so", "no library")), "");
  EXPECT_EQ(problem(folder_ / "none.so"), "");
}

TEST_F(LoadTrust, ALibraryOfLdLibraryPathIsJudgedByItself) {
  const std::string path = plugin("$ORIGIN/nowhere");
  rules_.library_path = {folder_ / "dep"};
  EXPECT_EQ(problem(path), "");
  mode(folder_ / "dep/libdep.so", 0666);
  EXPECT_HAS(problem(path), folder_ / "dep/libdep.so");
}

}  // namespace
}  // namespace te_fl::plugins
