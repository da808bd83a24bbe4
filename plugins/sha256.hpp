// SHA-256 (FIPS 180-4), and a cache that hashes a file again only when it changed.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

namespace te_fl::plugins {

// Incremental hash. Not thread-safe; give each thread its own.
class Sha256 {
 public:
  void update(std::span<const std::uint8_t> bytes);
  void update(std::string_view text);
  // Ends the message and returns the digest. The object must not be used afterwards.
  std::array<std::uint8_t, 32> digest();
  // digest() as 64 lower-case hex digits.
  std::string hex_digest();

 private:
  void compress(const std::uint8_t* block);

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::uint8_t, 64> block_{};
  std::uint64_t length_ = 0;  // bytes so far
};

struct FileHash {
  std::string hex;    // empty on failure
  std::string error;  // what failed, without the path
  bool from_cache = false;
};

// Hash of the whole file, read in pieces.
FileHash sha256_of_file(const std::string& path);

// Remembers hashes by path, device, inode, size, mtime and ctime. Thread-safe.
//
// With a file name the memory outlives the process: the file is read when the cache is made and
// replaced atomically by save(). It is trusted like a plugin: ignored when others can write it,
// when somebody else owns it, or when the process' privileges are elevated. A change that keeps all
// of size, mtime and ctime goes unseen; only an administrator can make one.
class FileHashCache {
 public:
  static constexpr std::size_t kMaxEntries = 256;

  // An empty name keeps the cache in memory only.
  explicit FileHashCache(std::string storage = {});
  FileHash hash(const std::string& path);
  // Hashes even when the cache knows the file (`te-fl doctor`), and stores the result.
  FileHash hash_afresh(const std::string& path);
  // Writes what was learnt; does nothing in memory-only use or without news. Creates the folder
  // (mode 0700) if absent. False when it could not be written, which costs only time later.
  bool save();

 private:
  struct Stamp {
    std::uint64_t device = 0, inode = 0, size = 0;
    std::int64_t mtime_ns = 0, ctime_ns = 0;
    bool operator==(const Stamp&) const = default;
  };
  struct Entry {
    Stamp stamp;
    std::string hex;
  };

  FileHash lookup(const std::string& path, bool use_cache);
  static bool stamp_of(const std::string& path, Stamp& stamp, std::string& error);
  void load();

  std::mutex mutex_;
  std::string storage_;
  std::map<std::string, Entry> entries_;
  bool changed_ = false;
};

// $XDG_CACHE_HOME/te_fl/plugin_hashes or ~/.cache/te_fl/plugin_hashes; empty when neither variable
// holds an absolute path or when privileges are elevated.
std::string default_hash_cache_file();

}  // namespace te_fl::plugins
