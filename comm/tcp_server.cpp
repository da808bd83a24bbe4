#include "comm/tcp_server.hpp"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <list>
#include <map>
#include <new>
#include <system_error>
#include <vector>

#include "comm/tcp_wire.hpp"

namespace te_fl::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMostConnections = 16384;
constexpr uint64_t kMostBytesHeld = uint64_t{1} << 30;  // total size of all values
constexpr auto kHelloTime = std::chrono::seconds(10);   // for the hello message of a new connection
constexpr size_t kChunk = 65536;
constexpr const char* kEnded = "rank 0 has ended, which serves this store";

struct Connection {
  Socket socket;
  std::string in, out;
  Deadline deadline = Clock::now() + kHelloTime;  // for the hello, later for a pending get
  bool welcomed = false;
  bool waits = false;    // a get for `key` is pending
  bool closing = false;  // close after `out` has been sent
  bool gone = false;
  std::string key;
};

}  // namespace

class TcpServer::Loop {
 public:
  Loop(Socket listening, const StoreRank& rank)
      : listening_(std::move(listening)), rank_(rank), wake_(::eventfd(0, EFD_CLOEXEC)) {
    if (!wake_) throw std::system_error(errno, std::generic_category(), "eventfd");
  }

  void stop() const {
    const uint64_t one = 1;
    (void)!::write(wake_.fd(), &one, sizeof one);
  }

  void run() noexcept {
    try {
      while (poll_all()) serve_all();
    } catch (const std::bad_alloc&) {  // the ranks get the same error as if rank 0 had ended
    }
    say_goodbye();
  }

 private:
  void serve_all() {
    if (entries_[1].revents != 0) accept_all();
    size_t i = 2;
    for (Connection& c : connections_) {
      if (i == entries_.size()) break;  // accepted after poll(), so it has no entry
      serve(c, entries_[i++].revents);
    }
    connections_.remove_if([](const Connection& c) { return c.gone; });
  }

  // Waits for events. False if stop() was called.
  bool poll_all() {
    entries_.clear();
    entries_.push_back({wake_.fd(), POLLIN, 0});
    const bool room = connections_.size() < kMostConnections;
    entries_.push_back({room ? listening_.fd() : -1, POLLIN, 0});
    Deadline next = Deadline::max();
    for (const Connection& c : connections_) {
      const short events =
          static_cast<short>((c.closing ? 0 : POLLIN) | (c.out.empty() ? 0 : POLLOUT));
      entries_.push_back({c.socket.fd(), events, 0});
      if (!c.welcomed || c.waits) next = std::min(next, c.deadline);
    }
    int wait_ms = -1;
    if (next != Deadline::max()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
      wait_ms = static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
    }
    if (::poll(entries_.data(), entries_.size(), wait_ms) < 0)
      for (pollfd& entry : entries_) entry.revents = 0;
    return entries_[0].revents == 0;
  }

  void accept_all() {
    for (;;) {
      Socket socket(::accept4(listening_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) break;
      connections_.emplace_back().socket = std::move(socket);
    }
    if (errno == EMFILE || errno == ENFILE) ::usleep(10000);  // until file descriptors become free
  }

  void serve(Connection& c, short events) {
    if (c.gone) return;
    if ((events & (POLLIN | POLLHUP | POLLERR)) != 0 && !c.closing) receive(c);
    while (!c.gone && !c.waits && !c.closing && take_message(c)) {
    }
    if (Clock::now() >= c.deadline) {
      if (c.waits) {
        c.waits = false;
        answer(c, TE_FL_TIMEOUT, {});
      } else if (!c.welcomed) {
        c.gone = true;
      }
    }
    if (!c.gone && !c.out.empty()) send(c);
    if (c.closing && c.out.empty()) c.gone = true;
  }

  static void receive(Connection& c) {
    char chunk[kChunk];
    const ssize_t got = ::recv(c.socket.fd(), chunk, sizeof chunk, 0);
    if (got > 0) c.in.append(chunk, static_cast<size_t>(got));
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) c.gone = true;
    // A client sends one request at a time, so a request during a pending get is a violation.
    if (c.waits && got > 0) c.gone = true;
  }

  static void send(Connection& c) {
    const ssize_t sent = ::send(c.socket.fd(), c.out.data(), c.out.size(), MSG_NOSIGNAL);
    if (sent > 0) c.out.erase(0, static_cast<size_t>(sent));
    if (sent < 0 && errno != EAGAIN && errno != EINTR) c.gone = true;
  }

  static void answer(Connection& c, uint32_t code, std::string_view bytes, bool found = false) {
    wire::append(c.out, wire::Reply{code, found ? 1u : 0u, bytes.size()});
    c.out += bytes;
  }

  // Processes a complete message. False if there is none.
  bool take_message(Connection& c) {
    if (!c.welcomed) {
      if (c.in.size() < sizeof(wire::Hello)) return false;
      const auto hello = wire::read_header<wire::Hello>(c.in);
      c.in.erase(0, sizeof hello);
      welcome(c, hello);
      return true;
    }
    if (c.in.size() < sizeof(wire::Request)) return false;
    const auto request = wire::read_header<wire::Request>(c.in);
    if (request.key_bytes > wire::kMostKeyBytes || request.value_bytes > kMostValueBytes ||
        request.verb < wire::Verb::kSet || request.verb > wire::Verb::kForget) {
      c.gone = true;  // invalid; clients never send this
      return false;
    }
    const size_t bytes = sizeof request + request.key_bytes + request.value_bytes;
    if (c.in.size() < bytes) return false;
    std::string key = c.in.substr(sizeof request, request.key_bytes);
    std::string value = c.in.substr(sizeof request + request.key_bytes, request.value_bytes);
    c.in.erase(0, bytes);
    serve_request(c, request, std::move(key), std::move(value));
    return true;
  }

  void welcome(Connection& c, const wire::Hello& hello) {
    if (std::memcmp(hello.magic, wire::kMagic, sizeof hello.magic) != 0) {
      c.gone = true;
      return;
    }
    wire::Welcome welcome{{}, wire::kVersion, 0};
    std::memcpy(welcome.magic, wire::kMagic, sizeof welcome.magic);
    wire::append(c.out, welcome);
    std::string why;
    const uint32_t code = admit(hello, why);
    answer(c, code, why);
    c.welcomed = code == TE_FL_OK;
    c.closing = !c.welcomed;
  }

  uint32_t admit(const wire::Hello& hello, std::string& why) {
    if (hello.version != wire::kVersion) {
      why = "rank 0 speaks version " + std::to_string(wire::kVersion) + " of the protocol, rank " +
            std::to_string(hello.rank) + " version " + std::to_string(hello.version) +
            "; install the same te-fl on all machines";
      return TE_FL_INCOMPATIBLE;
    }
    if (hello.size != static_cast<uint32_t>(rank_.size) || hello.rank >= hello.size) {
      why = "rank 0 serves a job of " + std::to_string(rank_.size) + " ranks there, and rank " +
            std::to_string(hello.rank) + " is of one of " + std::to_string(hello.size) +
            "; another job uses this port: give each its own";
      return TE_FL_FAILED_PRECONDITION;
    }
    if (hello.generation > rank_.generation)
      return TE_FL_BUSY;  // rank 0 still uses the previous generation
    if (hello.generation < rank_.generation) {
      why = "rank 0 has ended the store that rank " + std::to_string(hello.rank) +
            " is to open, and opened the next";
      return TE_FL_FAILED_PRECONDITION;
    }
    const auto [at, first] = processes_.emplace(hello.rank, hello.process);
    if (first || at->second == hello.process) return TE_FL_OK;
    why = "another process has connected as rank " + std::to_string(hello.rank) +
          " already; another job uses this port, or two processes have the same TE_FL_RANK";
    return TE_FL_ALREADY_EXISTS;
  }

  void serve_request(Connection& c, const wire::Request& request, std::string key,
                     std::string value) {
    if (request.verb == wire::Verb::kSet) return set(c, std::move(key), std::move(value));
    if (request.verb == wire::Verb::kForget) return forget(c, key);
    const auto at = values_.find(key);
    if (at != values_.end()) return answer(c, TE_FL_OK, at->second, true);
    if (request.verb == wire::Verb::kLook) return answer(c, TE_FL_OK, {});
    c.waits = true;
    c.key = std::move(key);
    c.deadline = Clock::now() + std::chrono::milliseconds(request.timeout_ms);
  }

  void set(Connection& c, std::string key, std::string value) {
    if (const auto at = values_.find(key); at != values_.end())
      return answer(c, at->second == value ? TE_FL_OK : TE_FL_ALREADY_EXISTS, {});
    if (held_ + key.size() + value.size() > kMostBytesHeld)
      return answer(c, TE_FL_OUT_OF_MEMORY, "the store holds all that it may, 1 GiB");
    held_ += key.size() + value.size();
    answer(c, TE_FL_OK, {});
    const std::string& kept = values_.emplace(key, std::move(value)).first->second;
    for (Connection& other : connections_) {
      if (!other.waits || other.key != key) continue;
      other.waits = false;
      answer(other, TE_FL_OK, kept, true);
      send(other);
    }
  }

  void forget(Connection& c, const std::string& prefix) {
    auto at = values_.lower_bound(prefix);
    while (at != values_.end() && at->first.starts_with(prefix)) {
      held_ -= at->first.size() + at->second.size();
      at = values_.erase(at);
    }
    answer(c, TE_FL_OK, {});
  }

  // Writes only what each socket accepts immediately, so that a rank that does not read blocks
  // nothing.
  void say_goodbye() {
    for (Connection& c : connections_) {
      if (c.waits) answer(c, TE_FL_COMM_FAILED, kEnded);
      if (!c.out.empty()) send(c);
      ::shutdown(c.socket.fd(), SHUT_RDWR);
    }
    ::shutdown(listening_.fd(), SHUT_RDWR);
  }

  Socket listening_;
  StoreRank rank_;
  Socket wake_;
  std::list<Connection> connections_;
  std::vector<pollfd> entries_;
  std::map<std::string, std::string> values_;
  std::map<uint32_t, uint64_t> processes_;  // process token by rank
  uint64_t held_ = 0;
};

TcpServer::TcpServer(Socket listening, const StoreRank& rank)
    : loop_(std::make_unique<Loop>(std::move(listening), rank)), process_(::getpid()) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::make_unique<std::thread>([loop = loop_.get()] { loop->run(); });
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

TcpServer::~TcpServer() {
  if (::getpid() != process_) {
    (void)thread_.release();  // a forked child does not have the thread
    return;
  }
  loop_->stop();
  thread_->join();
}

}  // namespace te_fl::comm
