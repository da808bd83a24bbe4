#include "comm/tcp_store.hpp"

#include <unistd.h>

#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "comm/random_bits.hpp"
#include "comm/tcp_server.hpp"
#include "comm/tcp_wire.hpp"

namespace te_fl::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kGrace = std::chrono::seconds(10);  // extra time for the reply to a request
constexpr milliseconds kConnectTime = std::chrono::seconds(10);

// A token that differs between processes, a forked child and its parent included.
uint64_t process_token() {
  static const uint64_t drawn = random_bits();
  return drawn ^ (static_cast<uint64_t>(::getpid()) * 0x9E3779B97F4A7C15u);
}

struct Answer {
  wire::Reply reply{};
  std::string bytes;
};

class TcpStore final : public Store {
 public:
  TcpStore(std::string host, int port, const StoreRank& rank)
      : host_(std::move(host)), port_(port), rank_(rank), process_(::getpid()) {}

  Status serve() {
    auto listening = listen_on(host_, port_);
    if (!listening.ok()) {
      return failed_precondition("rank 0 cannot serve the store " + address() + ": " +
                                 listening.status().message() + "; name a free port of rank 0's " +
                                 "machine (TE_FL_STORE; tools/launch.py finds one)");
    }
    try {
      server_ = std::make_unique<TcpServer>(std::move(*listening), rank_);
    } catch (const std::system_error& e) {
      return failed_precondition("rank 0 cannot serve the store " + address() + ": " + e.what());
    }
    return {};
  }

  // Makes the first connection. Retries, since rank 0 may not have started yet.
  Status join(milliseconds timeout) {
    const Deadline deadline = deadline_after(timeout);
    std::string why = "no attempt was made";
    for (milliseconds pause(1);; pause = std::min(pause * 2, milliseconds(50))) {
      auto connected = connect(std::min(deadline, Clock::now() + kConnectTime), why);
      if (!connected.ok()) return connected.status();
      if (*connected) {
        give_back(std::move(*connected));
        return {};
      }
      if (Clock::now() >= deadline) break;
      std::this_thread::sleep_until(std::min(deadline, Clock::now() + pause));
    }
    return Status(StatusCode::kTimeout,
                  "rank " + std::to_string(rank_.rank) + ": no server answers at " + address() +
                      " (" + why + "), tried for " + std::to_string(timeout.count()) +
                      " ms; rank 0 serves the store there: see that it runs, that host " + host_ +
                      " is its machine, and that port " + std::to_string(port_) +
                      " is not blocked");
  }

  Status set(std::string_view key, std::string_view value) override {
    TE_FL_RETURN_IF_ERROR(check_value_size(key, value.size()));
    TE_FL_ASSIGN_OR_RETURN(const Answer answer, ask(wire::Verb::kSet, key, value, milliseconds(0)));
    if (answer.reply.code == TE_FL_ALREADY_EXISTS) return set_before(key, address());
    return to_status(answer);
  }

  Result<std::string> get(std::string_view key, milliseconds timeout) override {
    TE_FL_ASSIGN_OR_RETURN(Answer answer, ask(wire::Verb::kGet, key, {}, timeout));
    if (answer.reply.code == TE_FL_TIMEOUT) return key_timeout(key, address(), timeout);
    TE_FL_RETURN_IF_ERROR(to_status(answer));
    return std::move(answer.bytes);
  }

  Result<std::optional<std::string>> look(std::string_view key) override {
    TE_FL_ASSIGN_OR_RETURN(Answer answer, ask(wire::Verb::kLook, key, {}, milliseconds(0)));
    TE_FL_RETURN_IF_ERROR(to_status(answer));
    if (answer.reply.found == 0) return std::optional<std::string>();
    return std::optional<std::string>(std::move(answer.bytes));
  }

  Status forget(std::string_view prefix) override {
    TE_FL_ASSIGN_OR_RETURN(const Answer answer,
                           ask(wire::Verb::kForget, prefix, {}, milliseconds(0)));
    return to_status(answer);
  }

  std::string address() const override {
    const bool brackets = host_.find(':') != std::string::npos;
    return "tcp://" + (brackets ? "[" + host_ + "]" : host_) + ":" + std::to_string(port_);
  }

 private:
  Status refused(uint32_t code, const std::string& why) const {
    return Status::from_c(static_cast<te_fl_status>(code), "the store " + address() + ": " + why);
  }

  Status to_status(const Answer& answer) const {
    if (answer.reply.code == TE_FL_OK) return {};
    return refused(answer.reply.code, answer.bytes);
  }

  Status lost() const {
    return Status(StatusCode::kCommFailed,
                  "the store " + address() +
                      " is gone: rank 0, whose process serves it, has ended or cannot be reached");
  }

  // Makes one attempt to connect. An empty socket means that a later attempt may succeed, and `why`
  // has the reason; an error is permanent.
  Result<Socket> connect(Deadline deadline, std::string& why) const {
    Socket socket = connect_once(host_, port_, deadline, why);
    if (!socket) return socket;
    wire::Hello hello{{},
                      wire::kVersion,
                      static_cast<uint32_t>(rank_.size),
                      static_cast<uint32_t>(rank_.rank),
                      rank_.generation,
                      process_token()};
    std::memcpy(hello.magic, wire::kMagic, sizeof hello.magic);
    wire::Welcome welcome{};
    Answer answer;
    Transfer state = send_all(socket, &hello, sizeof hello, deadline);
    if (state == Transfer::kDone) state = receive_all(socket, &welcome, sizeof welcome, deadline);
    if (state == Transfer::kDone && std::memcmp(welcome.magic, wire::kMagic, 8) != 0) {
      return failed_precondition("at " + address() +
                                 " another program answers, not a te-fl store; " +
                                 "name a free port (TE_FL_STORE)");
    }
    if (state == Transfer::kDone) state = receive(socket, answer, deadline);
    if (state != Transfer::kDone) {
      why = state == Transfer::kClosed
                ? "a program there closed the connection"
                : "a program there accepted the connection and does not answer";
      return Socket();
    }
    if (answer.reply.code == TE_FL_BUSY) {
      why = "rank 0 has not opened the next store yet";
      return Socket();
    }
    TE_FL_RETURN_IF_ERROR(to_status(answer));
    return socket;
  }

  static Transfer receive(const Socket& socket, Answer& answer, Deadline deadline) {
    Transfer state = receive_all(socket, &answer.reply, sizeof answer.reply, deadline);
    if (state != Transfer::kDone) return state;
    if (answer.reply.bytes > kMostValueBytes) return Transfer::kClosed;  // no server sends this
    answer.bytes.resize(answer.reply.bytes);
    return receive_all(socket, answer.bytes.data(), answer.bytes.size(), deadline);
  }

  // Sends a request and waits for its reply. Concurrent requests use different connections.
  Result<Answer> ask(wire::Verb verb, std::string_view key, std::string_view value,
                     milliseconds timeout) {
    if (::getpid() != process_) {
      return failed_precondition("the store " + address() +
                                 " was opened before a fork; the child opens its own");
    }
    if (key.empty() || key.size() > wire::kMostKeyBytes) {
      return invalid_argument("a key of " + std::to_string(key.size()) + " bytes for the store " +
                              address() + "; it has 1 to " + std::to_string(wire::kMostKeyBytes));
    }
    const auto wait = std::clamp<int64_t>(timeout.count(), 0, UINT32_MAX);
    TE_FL_ASSIGN_OR_RETURN(Socket socket, take());
    std::string message;
    wire::append(message, wire::Request{verb, static_cast<uint32_t>(key.size()), value.size(),
                                        static_cast<uint32_t>(wait), 0});
    message += key;
    message += value;
    const Deadline deadline = deadline_after(milliseconds(wait) + kGrace);
    Answer answer;
    Transfer state = send_all(socket, message.data(), message.size(), deadline);
    if (state == Transfer::kDone) state = receive(socket, answer, deadline);
    if (state == Transfer::kDone) {
      give_back(std::move(socket));
      return answer;
    }
    if (state == Transfer::kClosed) return lost();
    return Status(StatusCode::kTimeout, "the store " + address() + " did not answer in " +
                                            std::to_string(wait + kGrace.count()) +
                                            " ms; rank 0, whose process serves it, hangs or is " +
                                            "cut off");
  }

  Result<Socket> take() {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        Socket socket = std::move(idle_.back());
        idle_.pop_back();
        return socket;
      }
    }
    std::string why;
    TE_FL_ASSIGN_OR_RETURN(Socket socket, connect(deadline_after(kConnectTime), why));
    if (!socket) return lost();
    return socket;
  }

  void give_back(Socket socket) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(socket));
  }

  std::string host_;
  int port_;
  StoreRank rank_;
  pid_t process_;
  std::mutex mutex_;
  std::vector<Socket> idle_;
  std::unique_ptr<TcpServer> server_;  // on rank 0 only
};

}  // namespace

Result<std::shared_ptr<Store>> open_tcp_store(const std::string& host, int port,
                                              const StoreRank& rank, milliseconds timeout) {
  auto store = std::make_shared<TcpStore>(host, port, rank);
  if (rank.rank == 0) TE_FL_RETURN_IF_ERROR(store->serve());
  TE_FL_RETURN_IF_ERROR(store->join(timeout));
  return std::shared_ptr<Store>(std::move(store));
}

}  // namespace te_fl::comm
