#include "binary_cache.hpp"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

namespace te_fl::opencl {
namespace {

namespace fs = std::filesystem;

// File format: this magic, three 8-byte numbers (length of the key, length of the binary, checksum
// of both), the key, and the binary.
constexpr char kMagic[8] = {'t', 'e', '-', 'f', 'l', 'c', 'l', '1'};

uint64_t hash(const void* data, size_t bytes, uint64_t state = 0xcbf29ce484222325u) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) state = (state ^ p[i]) * 0x100000001b3u;
  return state;
}

fs::path file_path(const std::string& key) {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  fs::path folder;
  if (cache != nullptr && fs::path(cache).is_absolute()) {
    folder = cache;
  } else if (home != nullptr && *home != '\0') {
    folder = fs::path(home) / ".cache";
  } else {
    return {};
  }
  char name[32];
  std::snprintf(name, sizeof name, "%016llx.bin",
                static_cast<unsigned long long>(hash(key.data(), key.size())));
  return folder / "te_fl" / "opencl" / name;
}

struct Header {
  char magic[8];
  uint64_t key_bytes, binary_bytes, checksum;
};

Header make_header(const std::string& key, const std::vector<unsigned char>& binary) {
  Header h{};
  std::memcpy(h.magic, kMagic, sizeof kMagic);
  h.key_bytes = key.size();
  h.binary_bytes = binary.size();
  h.checksum = hash(binary.data(), binary.size(), hash(key.data(), key.size()));
  return h;
}

}  // namespace

std::vector<unsigned char> read_binary(const std::string& key) {
  const fs::path path = file_path(key);
  std::error_code error;
  // Opening a folder would throw, and opening a pipe would block.
  if (path.empty() || !fs::is_regular_file(path, error)) return {};
  std::ifstream file(path, std::ios::binary);
  if (!file) return {};
  const std::string all{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (all.size() <= sizeof(Header) + key.size()) return {};
  const char* text = all.data() + sizeof(Header);
  const std::vector<unsigned char> binary(text + key.size(), all.data() + all.size());
  const Header wanted = make_header(key, binary);
  const bool intact = std::memcmp(all.data(), &wanted, sizeof wanted) == 0 &&
                      std::memcmp(text, key.data(), key.size()) == 0;
  return intact ? binary : std::vector<unsigned char>{};
}

void write_binary(const std::string& key, const std::vector<unsigned char>& binary) {
  static std::atomic<unsigned> number{0};
  const fs::path path = file_path(key);
  if (path.empty()) return;
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  if (error) return;
  const fs::path temporary =
      path.string() + "." + std::to_string(getpid()) + "." + std::to_string(number++);
  {
    std::ofstream file(temporary, std::ios::binary);
    const Header h = make_header(key, binary);
    file.write(reinterpret_cast<const char*>(&h), sizeof h);
    file.write(key.data(), static_cast<std::streamsize>(key.size()));
    file.write(reinterpret_cast<const char*>(binary.data()),
               static_cast<std::streamsize>(binary.size()));
    file.close();
    if (!file) {
      fs::remove(temporary, error);
      return;
    }
  }
  fs::rename(temporary, path, error);
  if (error) fs::remove(temporary, error);
}

}  // namespace te_fl::opencl
