#include "plugins/sha256.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "tests/unit/temp_folder.hpp"

namespace te_fl::plugins {
namespace {

std::string hash_of(std::string_view text) {
  Sha256 hash;
  hash.update(text);
  return hash.hex_digest();
}

// The examples that NIST publishes for FIPS 180-4.
constexpr char kAbc[] = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
constexpr char kEmpty[] = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

TEST(Sha256Test, PublishedVectors) {
  EXPECT_EQ(hash_of(""), kEmpty);
  EXPECT_EQ(hash_of("abc"), kAbc);
  EXPECT_EQ(hash_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hash_of("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
                    "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu"),
            "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(hash_of(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256Test, PiecesOfAnySizeGiveTheSame) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += static_cast<char>(i * 7);
  for (std::size_t length = 0; length <= 200; ++length) {
    const std::string whole = hash_of(std::string_view(text).substr(0, length));
    for (const std::size_t piece : {1, 3, 55, 63, 64, 65}) {
      Sha256 hash;
      for (std::size_t at = 0; at < length; at += piece) {
        hash.update(std::string_view(text).substr(at, std::min(piece, length - at)));
      }
      ASSERT_EQ(hash.hex_digest(), whole) << length << " in pieces of " << piece;
    }
  }
}

TEST(Sha256Test, AgreesWithTheSystemsTool) {
  const test::TempFolder folder;
  // Longer than one piece of the file reader, and no multiple of it.
  std::string content(3'000'001, '\0');
  for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<char>(i * i >> 7);
  const std::string file = folder.write("data", content);
  ASSERT_EQ(std::system(("sha256sum '" + file + "' > '" + file + ".sum'").c_str()), 0);
  EXPECT_EQ(sha256_of_file(file).hex, test::read_file(file + ".sum").substr(0, 64));
}

TEST(Sha256Test, FilesThatCannotBeReadSaySo) {
  const test::TempFolder folder;
  EXPECT_EQ(sha256_of_file(folder.write("empty", "")).hex, kEmpty);
  EXPECT_NE(sha256_of_file(folder / "absent").error.find("No such file"), std::string::npos);
  EXPECT_NE(sha256_of_file(folder.path()).error.find("folder"), std::string::npos);
}

// Fresh files are not remembered (see kSettleNs), so let the clock move on.
void let_stamps_settle() { std::this_thread::sleep_for(std::chrono::milliseconds(80)); }

TEST(FileHashCacheTest, HashesAgainOnlyAfterAChange) {
  const test::TempFolder folder;
  const std::string file = folder.write("library", "abc");
  FileHashCache cache;
  EXPECT_FALSE(cache.hash(file).from_cache);
  EXPECT_FALSE(cache.hash(file).from_cache) << "a file this young may change under one stamp";
  let_stamps_settle();
  EXPECT_FALSE(cache.hash(file).from_cache);
  EXPECT_TRUE(cache.hash(file).from_cache);
  EXPECT_EQ(cache.hash(file).hex, kAbc);
  EXPECT_FALSE(cache.hash_afresh(file).from_cache);

  struct stat before {};
  ASSERT_EQ(stat(file.c_str(), &before), 0);
  folder.write("library", "abd");  // same length
  const timespec times[2] = {before.st_atim, before.st_mtim};
  ASSERT_EQ(utimensat(AT_FDCWD, file.c_str(), times, 0), 0);  // and the old mtime, forged
  const FileHash changed = cache.hash(file);
  EXPECT_FALSE(changed.from_cache);
  EXPECT_EQ(changed.hex, hash_of("abd"));

  folder.write("other", "abc");
  ASSERT_EQ(std::rename((folder / "other").c_str(), file.c_str()), 0);
  EXPECT_EQ(cache.hash(file).hex, kAbc);
  ASSERT_EQ(std::remove(file.c_str()), 0);
  EXPECT_EQ(cache.hash(file).hex, "");
  EXPECT_NE(cache.hash(file).error, "");
}

TEST(FileHashCacheTest, OutlivesTheProcessWhenItMay) {
  const test::TempFolder folder;
  const std::string file = folder.write("a library", "abc");
  const std::string storage = folder / "cache/te_fl/hashes";
  let_stamps_settle();
  {
    FileHashCache cache(storage);
    cache.hash(file);
    EXPECT_TRUE(cache.save());
  }
  EXPECT_TRUE(FileHashCache(storage).hash(file).from_cache);
  EXPECT_EQ(FileHashCache(storage).hash(file).hex, kAbc);

  ASSERT_EQ(chmod(storage.c_str(), 0666), 0);  // anybody could have written it now
  EXPECT_FALSE(FileHashCache(storage).hash(file).from_cache);
  ASSERT_EQ(chmod(storage.c_str(), 0600), 0);
  EXPECT_TRUE(FileHashCache(storage).hash(file).from_cache);

  const std::string whole = test::read_file(storage);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    folder.write("cache/te_fl/hashes", whole.substr(0, size));
    ASSERT_EQ(FileHashCache(storage).hash(file).hex, kAbc) << size;
  }
}

TEST(FileHashCacheTest, IsBounded) {
  const test::TempFolder folder;
  const std::string storage = folder / "hashes";
  for (std::size_t i = 0; i < FileHashCache::kMaxEntries + 20; ++i) {
    folder.write("f" + std::to_string(i), "x");
  }
  let_stamps_settle();
  FileHashCache cache(storage);
  for (std::size_t i = 0; i < FileHashCache::kMaxEntries + 20; ++i) {
    cache.hash(folder / ("f" + std::to_string(i)));
  }
  EXPECT_TRUE(cache.save());
  const std::string text = test::read_file(storage);
  EXPECT_EQ(static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n')),
            FileHashCache::kMaxEntries + 1);
}

}  // namespace
}  // namespace te_fl::plugins
