// Files are read and replaced as a whole, or the call is refused.
#include "core/base/file.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>

#include "support/expect.hpp"
#include "support/sanitizers.hpp"
#include "support/temp_folder.hpp"

namespace {
std::string g_synced;  // log of fsync() calls: 'f' for a file, 'd' for a folder
}
// Replaces the C library's fsync() to record its calls.
extern "C" int fsync(int fd) {
  struct stat st {};
  g_synced += fstat(fd, &st) == 0 && S_ISDIR(st.st_mode) ? 'd' : 'f';
  return static_cast<int>(syscall(SYS_fsync, fd));
}

namespace te_fl::core {
namespace {

TEST(WholeFile, IsReplacedAndOnTheDiskBeforeItHasItsName) {
  const test::TempFolder folder;
  const std::string path = folder.write("a", "old");
  g_synced.clear();
  const std::string large(3 << 20, 'x');
  FileReplacement file(path);
  file.write("new ");
  file.write(large);
  file.write(" end");
  EXPECT_EQ(test::read_file(path), "old") << "until it is complete";
  ASSERT_OK(file.commit());
  EXPECT_EQ(test::read_file(path), "new " + large + " end");
  EXPECT_EQ(g_synced, "fd") << "the contents, then the folder that has the name";
  EXPECT_EQ(read_file(path, 4 << 20).value(), "new " + large + " end");
}

TEST(WholeFile, IsAsItWasIfItIsNotCompleted) {
  const test::TempFolder folder;
  const std::string path = folder.write("a", "old");
  { FileReplacement(path).write("new"); }
  EXPECT_EQ(test::read_file(path), "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(WholeFile, ALinkStaysAndWhatItLeadsToIsMade) {
  const test::TempFolder folder;
  std::filesystem::create_directory(folder / "there");
  const std::string target = folder / "there/a", near = folder / "there/near", far = folder / "far";
  std::filesystem::create_symlink("a", near);  // relative to the link's folder
  std::filesystem::create_symlink("there/near", far);
  ASSERT_OK(replace_file(far, "new"));
  EXPECT_EQ(test::read_file(target), "new");
  EXPECT_TRUE(std::filesystem::is_symlink(far));
  EXPECT_TRUE(std::filesystem::is_symlink(near));
  // A cycle of links has no target, and replace_file() does not replace any of its links.
  std::filesystem::create_symlink(folder / "one", folder / "other");
  std::filesystem::create_symlink(folder / "other", folder / "one");
  EXPECT_FALSE(replace_file(folder / "one", "new").ok());
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "one"));
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "other"));
}

TEST(WholeFile, ANameMayBeAsLongAsTheSystemAllows) {
  for (const size_t length : {1, 230, 250, 255}) {
    const test::TempFolder folder;
    const std::string path = folder / std::string(length, 'n');
    ASSERT_OK(replace_file(path, "new")) << length;
    EXPECT_EQ(test::read_file(path), "new");
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
  }
  const test::TempFolder folder;
  EXPECT_FAILS(replace_file(folder / std::string(256, 'n'), "new"), kFailedPrecondition,
               "too long");
}

TEST(WholeFile, ALinkStaysAndWhatItLeadsToIsReplaced) {
  const test::TempFolder folder;
  const std::string target = folder.write("there/a", "old"), link = folder / "link";
  std::filesystem::create_symlink(target, link);
  ASSERT_OK(replace_file(link, "new"));
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(test::read_file(target), "new");
}

TEST(WholeFile, OnlyRegularFilesAreReadOrReplaced) {
  const test::TempFolder folder;
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {folder.path(), pipe}) {
    EXPECT_HAS(replace_file(path, "x").message(), "is a ") << path;
    EXPECT_HAS(read_file(path, 10).status().message(), "is a ") << path;
  }
  struct stat st {};
  ASSERT_EQ(stat(pipe.c_str(), &st), 0);
  EXPECT_TRUE(S_ISFIFO(st.st_mode));
  EXPECT_EQ(read_file(folder / "none", 10).status().code(), StatusCode::kNotFound);
  EXPECT_HAS(read_file(folder.write("long", "12345"), 4).status().message(),
             "has 5 bytes, and may have 4");
  EXPECT_HAS(replace_file(folder / "no/folder/a", "x").message(), "No such file");
}

TEST(WholeFile, AFullDiskLeavesItAsItWas) {
  TE_FL_SKIP_FORK_THEN_THREADS();
  const test::TempFolder folder;
  const std::string path = folder.write("a", "old");
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{4096, 4096};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(2);
    const Status status = replace_file(path, std::string(1 << 16, 'x'));
    _exit(testing::contains(status.message(), "File too large") ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(test::read_file(path), "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

}  // namespace
}  // namespace te_fl::core
