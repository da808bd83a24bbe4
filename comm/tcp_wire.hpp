#pragma once

#include <cstdint>
#include <cstring>
#include <string>

// The messages between a TcpStore and the server in rank 0's process. Each message is a fixed
// header, followed by a body whose length the header gives. Integers are little-endian.
namespace te_fl::comm::wire {

constexpr char kMagic[8] = {'T', 'E', '_', 'F', 'L', 'K', 'V', '\n'};
constexpr uint32_t kVersion = 2;
constexpr uint32_t kMostKeyBytes = 4096;
constexpr uint32_t kMostTextBytes = 4096;  // limit of an error text

// The first message of a connection. `process` is a random token of the process, by which two
// processes that claim one rank are detected. `generation` is that of StoreRank.
struct Hello {
  char magic[8];
  uint32_t version;
  uint32_t size;
  uint32_t rank;
  uint32_t generation;
  uint64_t process;
};

// The server's answer to Hello, followed by a Reply.
struct Welcome {
  char magic[8];
  uint32_t version;
  uint32_t zero;
};

enum class Verb : uint32_t { kSet = 1, kGet = 2, kLook = 3, kForget = 4 };

// A request, followed by the key and, for kSet, the value. For kForget the key is a prefix.
struct Request {
  Verb verb;
  uint32_t key_bytes;
  uint64_t value_bytes;
  uint32_t timeout_ms;  // time limit of a kGet
  uint32_t zero;
};

// A reply, followed by the value if `code` is OK and `found` is 1, otherwise by the error text.
struct Reply {
  uint32_t code;   // te_fl_code
  uint32_t found;  // 1: the key is set
  uint64_t bytes;
};

static_assert(sizeof(Hello) == 32 && sizeof(Welcome) == 16 && sizeof(Request) == 24 &&
              sizeof(Reply) == 16);

template <class T>
void append(std::string& out, const T& head) {
  out.append(reinterpret_cast<const char*>(&head), sizeof head);
}
template <class T>
T read_header(const std::string& in) {
  T head;
  std::memcpy(&head, in.data(), sizeof head);
  return head;
}

}  // namespace te_fl::comm::wire
