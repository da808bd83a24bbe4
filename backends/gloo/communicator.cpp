#include "communicator.hpp"

#include <gloo/common/error.h>
#include <gloo/common/logging.h>
#include <gloo/transport/address.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/address.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>

#include "signals.hpp"
#include "te_fl/backend.hpp"

namespace te_fl::gloo_ranks {
namespace {

using backend::Error;
using std::chrono::milliseconds;

constexpr milliseconds kForEver = std::chrono::hours(24 * 20);  // Gloo stores it as an int
constexpr char kFailure[] = "failure";
// Prefixes of slots (Gloo's message tags) that Gloo's own collectives do not use.
constexpr uint64_t kPairSlots = uint64_t{0x7e} << 56;
constexpr uint64_t kExchangeSlots = uint64_t{0x7f} << 56;  // for send, recv and exchange()

uint64_t mixed(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9E3779B97F4A7C15u + b;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

uint64_t make_slot(uint64_t kind, uint64_t number, size_t bytes) {
  return kind | (mixed(number, bytes) >> 8);
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

// Removes the source location from a Gloo error message such as "[/path/file.cc:81] text".
std::string without_place(const std::string& text) {
  const size_t end = text.rfind('[', 0) == 0 ? text.find("] ") : std::string::npos;
  return end == std::string::npos ? text : text.substr(end + 2);
}

std::string failure_text(const PeerError& e, const Mesh& mesh) {
  if (e.ranks.empty()) return e.what();
  const std::string text = without_place(e.what());
  return rank_list(mesh.named_in(text, e.ranks)) + " did not answer: " + text;
}

// ---- encoding of a rank's addresses: for each other rank, the length of an address and the
// address

std::string exchange_addresses(Mesh& mesh, WatchedContext& context) {
  std::string blob;
  for (int peer = 0; peer < mesh.size; ++peer) {
    std::vector<char> bytes;
    if (peer != mesh.rank) bytes = context.createPair(peer)->address().bytes();
    const auto length = static_cast<uint32_t>(bytes.size());
    blob.append(reinterpret_cast<const char*>(&length), sizeof length);
    blob.append(bytes.data(), bytes.size());
  }
  return blob;
}

std::vector<char> address_for(int rank, const std::string& blob) {
  size_t at = 0;
  for (int r = 0; at + sizeof(uint32_t) <= blob.size(); ++r) {
    uint32_t length;
    std::memcpy(&length, blob.data() + at, sizeof length);
    at += sizeof length;
    if (at + length > blob.size()) break;
    if (r == rank)
      return {blob.begin() + static_cast<long>(at), blob.begin() + static_cast<long>(at + length)};
    at += length;
  }
  throw Error(TE_FL_COMM_FAILED, "another rank published addresses that are not whole");
}

void set(const te_fl_comm_store& store, const std::string& key, const std::string& value,
         const te_fl_error_sink* errors) {
  const te_fl_status code = store.set(store.host, key.c_str(), value.data(), value.size(), errors);
  if (code != TE_FL_OK)
    throw Error(TE_FL_STATUS_CODE(code), "this rank's addresses cannot be published");
}

std::string get(const te_fl_comm_store& store, const std::string& key, milliseconds timeout,
                const te_fl_error_sink* errors, te_fl_status* code) {
  std::string value(4096, '\0');
  size_t bytes = 0;
  for (int attempt = 0; attempt < 2; ++attempt) {
    *code = store.get(store.host, key.c_str(), static_cast<uint32_t>(timeout.count()), value.data(),
                      value.size(), &bytes, errors);
    if (*code == TE_FL_OK || bytes <= value.size()) break;
    value.resize(bytes);
  }
  value.resize(*code == TE_FL_OK ? bytes : 0);
  return value;
}

}  // namespace

void Mesh::connect(std::shared_ptr<::gloo::transport::Device> device,
                   const te_fl_comm_config& config, milliseconds timeout,
                   const te_fl_error_sink* errors) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const auto left = [&] {
    return std::max(milliseconds(1),
                    std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now()));
  };
  setTimeout(timeout);
  device_ = device;
  auto inner = device->createContext(rank, size);
  inner->setTimeout(timeout);
  transportContext_ = std::make_shared<WatchedContext>(std::move(inner));
  set(*config.store, "addresses/" + std::to_string(rank), exchange_addresses(*this, watched()),
      errors);
  addresses_.resize(static_cast<size_t>(size));
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    const std::string who = "rank " + std::to_string(peer);
    te_fl_status code;
    const std::string blob =
        get(*config.store, "addresses/" + std::to_string(peer), left(), errors, &code);
    if (code != TE_FL_OK)
      throw Error(TE_FL_STATUS_CODE(code), who + " did not publish its address");
    try {
      const std::vector<char> address = address_for(rank, blob);
      addresses_[static_cast<size_t>(peer)] = ::gloo::transport::tcp::Address(address).str();
      getPair(peer)->connect(address);
    } catch (const ::gloo::Exception& e) {
      throw Error(TE_FL_COMM_FAILED,
                  who + " cannot be reached: " + without_place(e.what()) +
                      "; TE_FL_GLOO_INTERFACE names the interface by which the machines see each "
                      "other");
    }
  }
}

std::vector<int> Mesh::named_in(const std::string& text, const std::vector<int>& ranks) const {
  std::vector<int> named;
  for (const int r : ranks) {
    if (text.find(addresses_[static_cast<size_t>(r)]) != std::string::npos) named.push_back(r);
  }
  if (named.empty()) named = ranks;
  std::sort(named.begin(), named.end());
  named.erase(std::unique(named.begin(), named.end()), named.end());
  return named;
}

Parts::Parts(char* data, int ranks, size_t part_bytes)
    : Parts(data, std::vector<size_t>(static_cast<size_t>(ranks), part_bytes)) {}

Parts::Parts(char* data, std::vector<size_t> part_bytes)
    : base(data), bytes(std::move(part_bytes)) {
  size_t at = 0;
  for (const size_t part : bytes) {
    offset.push_back(at);
    at += part;
  }
}

Communicator::Communicator(const te_fl_comm_config& config,
                           std::shared_ptr<::gloo::transport::Device> device,
                           const te_fl_error_sink* errors)
    : name_(config.name),
      rank_(config.rank),
      size_(config.size),
      timeout_(config.timeout_ms == 0
                   ? kForEver
                   : std::min<milliseconds>(kForEver, milliseconds(config.timeout_ms))),
      store_(config.store),
      process_(::getpid()),
      mesh_(std::make_shared<Mesh>(rank_, size_)),
      sent_(static_cast<size_t>(size_)),
      received_(static_cast<size_t>(size_)) {
  const BrokenPipes ignored;
  if (size_ > 1) mesh_->connect(std::move(device), config, timeout_, errors);
}

Communicator::~Communicator() {
  // In a forked child the Mesh is leaked, because the threads of its connections exist only in the
  // parent.
  if (::getpid() != process_) new std::shared_ptr<Mesh>(std::move(mesh_));
}

void Communicator::run(const char* op, const std::function<void()>& f) {
  if (::getpid() != process_) {
    throw Error(TE_FL_FAILED_PRECONDITION | TE_FL_CLEAN,
                "communicator '" + name_ + "' was made by process " + std::to_string(process_) +
                    ", of which this is a child; make one after the fork");
  }
  if (const std::string before = failure(); !before.empty()) throw Error(TE_FL_COMM_FAILED, before);
  std::optional<BrokenPipes> ignored;  // installing it takes four system calls
  if (size_ > 1) ignored.emplace();
  try {
    f();
  } catch (const PeerError& e) {
    fail(op, failure_text(e, *mesh_));
  } catch (const ::gloo::Exception& e) {
    fail(op, without_place(e.what()));
  } catch (const ::gloo::EnforceNotMet& e) {
    fail(op, without_place(e.what()));
  }
}

void Communicator::fail(const char* op, const std::string& why) {
  std::string text = std::string(op) + " of communicator '" + name_ + "' failed on rank " +
                     std::to_string(rank_) + ": " + why;
  if (!mesh_->watched().aborted()) text += reported(text);
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = text;
  }
  throw Error(TE_FL_COMM_FAILED, text);
}

// Reports the failure `mine` through the store. The first rank that fails writes its failure there
// before it closes its connections, because the other ranks would see only closed connections. If
// another rank has failed first, returns its failure as text to append to `mine`.
std::string Communicator::reported(const std::string& mine) {
  const te_fl_status set = store_->set(store_->host, kFailure, mine.data(), mine.size(), nullptr);
  if (set == TE_FL_OK) return "";
  te_fl_status code;
  const std::string first = get(*store_, kFailure, milliseconds(1000), nullptr, &code);
  if (code == TE_FL_OK) return first == mine ? "" : "; the first failure: " + first;
  return "; the store does not answer either: rank 0, which serves it, may have ended first";
}

std::string Communicator::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Communicator::abort() {
  if (::getpid() != process_) return;
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty())
      failure_ = "communicator '" + name_ + "' was aborted by rank " + std::to_string(rank_);
  }
  if (size_ > 1) mesh_->watched().abort();
}

uint32_t Communicator::next_tag(uint64_t kind, uint64_t bytes) {
  return static_cast<uint32_t>(mixed(mixed(++calls_, kind), bytes) >> 32);
}

void Communicator::exchange(uint64_t kind, const Parts& out, const Parts& in) {
  const uint64_t call = mixed(++calls_, kind);
  const auto total = [](const Parts& p) { return p.offset.back() + p.bytes.back(); };
  const auto sender = mesh_->createUnboundBuffer(out.base, total(out));
  const auto receiver = mesh_->createUnboundBuffer(in.base, total(in));
  int sends = 0, receives = 0;
  for (int i = 1; i < size_; ++i) {
    const auto to = static_cast<size_t>((rank_ + i) % size_);
    const auto from = static_cast<size_t>((rank_ - i + size_) % size_);
    if (in.bytes[from] != 0) {
      ++receives;
      receiver->recv(static_cast<int>(from), make_slot(kExchangeSlots, call, in.bytes[from]),
                     in.offset[from], in.bytes[from]);
    }
    if (out.bytes[to] != 0) {
      ++sends;
      sender->send(static_cast<int>(to), make_slot(kExchangeSlots, call, out.bytes[to]),
                   out.offset[to], out.bytes[to]);
    }
  }
  while (receives-- > 0) receiver->waitRecv(timeout_);
  while (sends-- > 0) sender->waitSend(timeout_);
}

Transfer Communicator::begin_send(const void* data, size_t bytes, int peer) {
  const uint64_t number = sent_[static_cast<size_t>(peer)]++;
  if (bytes == 0) return {};
  Transfer t{mesh_->createUnboundBuffer(const_cast<void*>(data), bytes), true};
  t.buffer->send(peer, make_slot(kPairSlots, number, bytes), 0, bytes);
  return t;
}

Transfer Communicator::begin_receive(void* data, size_t bytes, int peer) {
  const uint64_t number = received_[static_cast<size_t>(peer)]++;
  if (bytes == 0) return {};
  Transfer t{mesh_->createUnboundBuffer(data, bytes), false};
  t.buffer->recv(peer, make_slot(kPairSlots, number, bytes), 0, bytes);
  return t;
}

void Communicator::wait(Transfer& transfer) const {
  if (transfer.buffer == nullptr) return;  // the transfer has no bytes
  if (transfer.sends) {
    transfer.buffer->waitSend(timeout_);
  } else {
    transfer.buffer->waitRecv(timeout_);
  }
}

}  // namespace te_fl::gloo_ranks
