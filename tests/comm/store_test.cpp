#include "te_fl/comm.hpp"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "comm/socket.hpp"
#include "support/temp_folder.hpp"

namespace te_fl {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using StorePtr = std::shared_ptr<Store>;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// Returns a TCP port that the kernel has just chosen as free.
int free_port() {
  auto socket = comm::listen_on("127.0.0.1", 0);
  EXPECT_TRUE(socket.ok());
  sockaddr_in at{};
  socklen_t bytes = sizeof at;
  ::getsockname(socket->fd(), reinterpret_cast<sockaddr*>(&at), &bytes);
  return ntohs(at.sin_port);
}
std::string free_address() { return "tcp://127.0.0.1:" + std::to_string(free_port()); }

void as_threads(int ranks, const std::function<void(int)>& f) {
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) threads.emplace_back([&f, r] { f(r); });
  for (std::thread& t : threads) t.join();
}

// Runs f in a forked child, which exits with f's result; returns the child's process id.
pid_t in_child(const std::function<int()>& f) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(f());
  return child;
}
int exit_code(pid_t child) {
  int state = 0;
  EXPECT_EQ(::waitpid(child, &state, 0), child);
  return WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
}

void expect_text(const Status& status, StatusCode code, std::initializer_list<const char*> parts) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  for (const char* part : parts)
    EXPECT_NE(status.message().find(part), std::string::npos) << part << " in " << status.message();
}

// Exchanges values through a store of any kind, with any number of ranks.
void exchange(Store& store, int rank, int size) {
  const std::string large(size_t{1} << 20, static_cast<char>('a' + rank));
  const std::string mine = std::to_string(rank);
  ASSERT_TRUE(store.set("world/" + mine, large).ok());
  ASSERT_TRUE(store.set("empty." + mine, "").ok());
  for (int r = 0; r < size; ++r) {
    auto got = store.get("world/" + std::to_string(r), 5000ms);
    ASSERT_TRUE(got.ok()) << got.status().to_string();
    EXPECT_EQ(*got, std::string(size_t{1} << 20, static_cast<char>('a' + r)));
  }
  auto seen = store.look("world/" + mine);
  ASSERT_TRUE(seen.ok());
  EXPECT_EQ(*seen, large);
  auto empty = store.get("empty." + mine, 1000ms);
  ASSERT_TRUE(empty.ok());
  EXPECT_EQ(*empty, "");
  EXPECT_TRUE(store.set("world/" + mine, large).ok());  // setting an equal value again is allowed
  expect_text(store.set("world/" + mine, "other"), StatusCode::kAlreadyExists,
              {("world/" + mine).c_str(), store.address().c_str()});
  auto none = store.look("never");
  ASSERT_TRUE(none.ok());
  EXPECT_FALSE(none->has_value());
  expect_text(store.get("never", 30ms).status(), StatusCode::kTimeout,
              {"'never'", store.address().c_str(), "30 ms"});
}

TEST(Store, ThreadsShareOne) {
  const StorePtr store = Store::in_process();
  as_threads(4, [&](int rank) { exchange(*store, rank, 4); });
}

// Ends a rank's use of the store. Rank 0, which runs the server of a TCP store, waits until all
// other ranks have called leave().
void leave(Store& store, int rank, int size) {
  ASSERT_TRUE(store.set("left/" + std::to_string(rank), "1").ok());
  for (int r = 0; rank == 0 && r < size; ++r)
    ASSERT_TRUE(store.get("left/" + std::to_string(r), 5000ms).ok());
}

void exchange_at(const std::string& address, int size) {
  as_threads(size, [&](int rank) {
    auto store = Store::open(address, rank, size, 5000ms);
    ASSERT_TRUE(store.ok()) << store.status().to_string();
    EXPECT_EQ((*store)->address(), address);
    exchange(**store, rank, size);
    leave(**store, rank, size);
  });
}

TEST(Store, FolderWorksForAllRanks) {
  const test::TempFolder folder;
  exchange_at("file:" + folder.path() + "/job", 4);
}

TEST(Store, PortWorksForAllRanks) { exchange_at(free_address(), 4); }

TEST(Store, OneRankNeedsNoOther) {
  const test::TempFolder folder;
  exchange_at("file:" + folder.path() + "/job", 1);
  exchange_at(free_address(), 1);
}

TEST(Store, ProcessesMeetAtAPort) {
  const std::string address = free_address();
  const auto rank = [&](int r) {
    auto store = Store::open(address, r, 3, 5000ms);
    if (!store.ok() || !(*store)->set("k" + std::to_string(r), "v").ok()) return 1;
    for (int other = 0; other < 3; ++other)
      if (!(*store)->get("k" + std::to_string(other), 5000ms).ok()) return 2;
    leave(**store, r, 3);
    return 0;
  };
  const pid_t one = in_child([&] { return rank(1); }), two = in_child([&] { return rank(2); });
  EXPECT_EQ(rank(0), 0);
  EXPECT_EQ(exit_code(one), 0);
  EXPECT_EQ(exit_code(two), 0);
}

// One thread sets a value while another thread waits for that value on the same store object.
TEST(Store, ThreadsOfOneRankDoNotBlockEachOther) {
  auto store = Store::open(free_address(), 0, 1, 1000ms);
  ASSERT_TRUE(store.ok());
  std::thread waiting([&] { EXPECT_TRUE((*store)->get("late", 5000ms).ok()); });
  std::this_thread::sleep_for(10ms);
  EXPECT_TRUE((*store)->set("late", "v").ok());
  waiting.join();
}

TEST(Store, OneIsOpenedOnceInAProcessAndThenAnew) {
  const test::TempFolder folder;
  for (const std::string& address : {"file:" + folder.path() + "/job", free_address()}) {
    auto first = Store::open(address, 0, 1, 1000ms);
    ASSERT_TRUE(first.ok()) << first.status().to_string();
    auto again = Store::open(address, 0, 1, 1000ms);
    ASSERT_TRUE(again.ok());
    EXPECT_EQ(first->get(), again->get());
    ASSERT_TRUE((*first)->set("world", "1").ok());
    first->reset();
    again->reset();
    auto next = Store::open(address, 0, 1, 1000ms);
    ASSERT_TRUE(next.ok()) << next.status().to_string();
    EXPECT_TRUE((*next)->set("world", "2").ok());  // a key of the previous store is not visible
  }
}

TEST(Store, RankThatIsAheadWaitsForTheNextStore) {
  const std::string address = free_address();
  auto zero = Store::open(address, 0, 2, 1000ms);
  auto one = Store::open(address, 1, 2, 1000ms);
  ASSERT_TRUE(zero.ok() && one.ok());
  ASSERT_TRUE((*zero)->set("world", "1").ok());
  one->reset();
  std::thread ahead([&] {
    auto next = Store::open(address, 1, 2, 5000ms);
    ASSERT_TRUE(next.ok()) << next.status().to_string();
    auto seen = (*next)->get("world", 5000ms);
    ASSERT_TRUE(seen.ok());
    EXPECT_EQ(*seen, "2");
    (void)(*next)->set("seen", "1");
  });
  std::this_thread::sleep_for(30ms);
  zero->reset();
  auto next = Store::open(address, 0, 2, 5000ms);
  ASSERT_TRUE(next.ok()) << next.status().to_string();
  EXPECT_TRUE((*next)->set("world", "2").ok());
  EXPECT_TRUE((*next)->get("seen", 5000ms).ok());
  ahead.join();
}

TEST(Store, MalformedAddressesSayWhatIsWrong) {
  for (const auto& [address, why] : std::initializer_list<std::pair<const char*, const char*>>{
           {"", "no known kind"},
           {"/tmp/x", "no known kind"},
           {"file:", "names no folder"},
           {"tcp://host", "has no port"},
           {"tcp://:1", "has no host"},
           {"tcp://host:0", "port '0'"},
           {"tcp://host:65536", "port '65536'"},
           {"tcp://host:12x", "port '12x'"}}) {
    expect_text(Store::open(address, 0, 2, 10ms).status(), StatusCode::kInvalidArgument,
                {address, why, "file:PATH", "tcp://HOST:PORT"});
  }
  expect_text(Store::open("file:x", 2, 2, 10ms).status(), StatusCode::kInvalidArgument,
              {"rank 2 of 2"});
}

TEST(Store, FolderOfAnEarlierRunIsRefusedByEveryRank) {
  const test::TempFolder folder;
  const std::string address = "file:" + folder.path() + "/job";
  const auto run = [&](int r) { return Store::open(address, r, 2, 5000ms).status(); };
  // Each rank is a process, since a process that took part in the run may open the store again.
  const auto job = [&](StatusCode expected) {
    std::vector<pid_t> ranks;
    for (int r : {1, 0})
      ranks.push_back(in_child([&, r] { return run(r).code() == expected ? 0 : 1; }));
    for (const pid_t rank : ranks) EXPECT_EQ(exit_code(rank), 0);
  };
  job(StatusCode::kOk);
  job(StatusCode::kAlreadyExists);
  expect_text(run(0), StatusCode::kAlreadyExists, {address.c_str(), "remove the folder"});
}

// The run ended before rank 1 came, so the folder alone does not show that the run is over.
TEST(Store, FolderOfARunThatBrokeOffIsRefusedWhenRankZeroComes) {
  const test::TempFolder folder;
  const std::string address = "file:" + folder.path();
  const pid_t broken = in_child([&] {
    (void)Store::open(address, 0, 2, 5000ms);
    return 0;
  });
  while (!std::filesystem::exists(folder.path() + "/te_fl_run")) std::this_thread::sleep_for(1ms);
  ::kill(broken, SIGKILL);
  EXPECT_EQ(exit_code(broken), 128 + SIGKILL);
  as_threads(2, [&](int rank) {
    if (rank == 0) std::this_thread::sleep_for(30ms);
    const auto start = Clock::now();
    expect_text(Store::open(address, rank, 2, 20000ms).status(), StatusCode::kAlreadyExists,
                {"an earlier run"});
    EXPECT_LT(ms_since(start), 2000);
  });
}

TEST(Store, FolderThatIsNoStoreIsLeftAlone) {
  const test::TempFolder folder;
  std::ofstream(folder.path() + "/thesis.txt") << "text";
  expect_text(Store::open("file:" + folder.path(), 0, 2, 10ms).status(), StatusCode::kAlreadyExists,
              {"thesis.txt"});
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(Store, FolderWhereARankDoesNotCome) {
  const test::TempFolder folder;
  const std::string address = "file:" + folder.path();
  std::thread one([&] { (void)Store::open(address, 1, 4, 200ms); });
  expect_text(Store::open(address, 0, 4, 100ms).status(), StatusCode::kTimeout,
              {"of 4 ranks", "2, 3 did not arrive within 100 ms"});
  one.join();
  const test::TempFolder empty;
  expect_text(Store::open("file:" + empty.path(), 1, 2, 20ms).status(), StatusCode::kTimeout,
              {"rank 0 did not start", "20 ms"});
}

TEST(Store, PortThatIsTakenIsNamed) {
  const int port = free_port();
  const auto taken = comm::listen_on("127.0.0.1", port);
  ASSERT_TRUE(taken.ok());
  const std::string address = "tcp://127.0.0.1:" + std::to_string(port);
  expect_text(Store::open(address, 0, 2, 1000ms).status(), StatusCode::kFailedPrecondition,
              {address.c_str(), "in use", "name a free port"});
}

TEST(Store, NoServerAnswers) {
  const std::string address = free_address();
  const auto start = Clock::now();
  expect_text(Store::open(address, 1, 2, 60ms).status(), StatusCode::kTimeout,
              {"rank 1", address.c_str(), "refused", "60 ms"});
  EXPECT_LT(ms_since(start), 1000);
  expect_text(Store::open("tcp://no.such.host.invalid:1", 1, 2, 10ms).status(),
              StatusCode::kTimeout, {"no.such.host.invalid", "its name has no address"});
}

// Another program listens at the store's port: one that sends nothing, and one that speaks another
// protocol.
TEST(Store, ForeignProgramAtThePort) {
  const int port = free_port();
  const auto foreign = comm::listen_on("127.0.0.1", port);
  ASSERT_TRUE(foreign.ok());
  const std::string address = "tcp://127.0.0.1:" + std::to_string(port);
  expect_text(Store::open(address, 1, 2, 50ms).status(), StatusCode::kTimeout, {"does not answer"});
  std::atomic<bool> stop = false;
  std::thread http([&] {
    while (!stop) {
      const comm::Socket peer(::accept(foreign->fd(), nullptr, nullptr));
      if (peer) (void)::send(peer.fd(), "HTTP/1.1 400 Bad Request\r\n\r\n", 28, MSG_NOSIGNAL);
      if (!peer) std::this_thread::sleep_for(1ms);
    }
  });
  expect_text(Store::open(address, 1, 2, 1000ms).status(), StatusCode::kFailedPrecondition,
              {"another program answers"});
  stop = true;
  http.join();
}

TEST(Store, OtherJobsAreRefused) {
  const std::string address = free_address();
  auto zero = Store::open(address, 0, 2, 1000ms);
  ASSERT_TRUE(zero.ok());
  expect_text(Store::open(address, 1, 3, 1000ms).status(), StatusCode::kFailedPrecondition,
              {"a job of 2 ranks", "of one of 3"});
  auto one = Store::open(address, 1, 2, 1000ms);
  ASSERT_TRUE(one.ok());
  const pid_t second = in_child([&] {
    const Status status = Store::open(address, 1, 2, 1000ms).status();
    return status.code() == StatusCode::kAlreadyExists ? 0 : 1;
  });
  EXPECT_EQ(exit_code(second), 0);
}

// Invalid bytes close their own connection and no other.
TEST(Store, GarbageDisturbsNoRank) {
  const int port = free_port();
  const std::string address = "tcp://127.0.0.1:" + std::to_string(port);
  auto zero = Store::open(address, 0, 1, 1000ms);
  ASSERT_TRUE(zero.ok());
  std::string why;
  const auto deadline = comm::deadline_after(1000ms);
  const comm::Socket peer = comm::connect_once("127.0.0.1", port, deadline, why);
  ASSERT_TRUE(peer) << why;
  const std::string garbage(100, 'x');
  EXPECT_EQ(comm::send_all(peer, garbage.data(), garbage.size(), deadline), comm::Transfer::kDone);
  char byte;
  EXPECT_EQ(comm::receive_all(peer, &byte, 1, deadline), comm::Transfer::kClosed);
  EXPECT_TRUE((*zero)->set("k", "v").ok());
}

TEST(Store, KilledRankDisturbsNoOther) {
  const std::string address = free_address();
  const pid_t one = in_child([&] {
    auto store = Store::open(address, 1, 3, 5000ms);
    (void)(*store)->set("waiting", "1");
    (void)(*store)->get("never", 60000ms);
    return 0;
  });
  auto zero = Store::open(address, 0, 3, 5000ms);
  auto two = Store::open(address, 2, 3, 5000ms);
  ASSERT_TRUE(zero.ok() && two.ok());
  ASSERT_TRUE((*zero)->get("waiting", 5000ms).ok());
  ::kill(one, SIGKILL);
  EXPECT_EQ(exit_code(one), 128 + SIGKILL);
  EXPECT_TRUE((*zero)->set("never", "now").ok());
  EXPECT_TRUE((*two)->get("never", 1000ms).ok());
}

TEST(Store, RankZeroThatEndsSaysSo) {
  const std::string address = free_address();
  auto zero = Store::open(address, 0, 2, 1000ms);
  auto one = Store::open(address, 1, 2, 1000ms);
  ASSERT_TRUE(zero.ok() && one.ok());
  std::thread waiting([&] {
    const auto start = Clock::now();
    expect_text((*one)->get("never", 60000ms).status(), StatusCode::kCommFailed,
                {"rank 0 has ended", address.c_str()});
    EXPECT_LT(ms_since(start), 2000);
  });
  std::this_thread::sleep_for(20ms);
  zero->reset();
  waiting.join();
  expect_text((*one)->set("k", "v"), StatusCode::kCommFailed, {"rank 0", "has ended"});
}

TEST(Store, AKilledRankZeroIsDetected) {
  const std::string address = free_address();
  const pid_t zero = in_child([&] {
    auto store = Store::open(address, 0, 2, 5000ms);
    std::this_thread::sleep_for(60s);
    return 0;
  });
  auto one = Store::open(address, 1, 2, 5000ms);
  ASSERT_TRUE(one.ok()) << one.status().to_string();
  std::thread waiting([&] {
    expect_text((*one)->get("never", 60000ms).status(), StatusCode::kCommFailed, {"is gone"});
  });
  std::this_thread::sleep_for(20ms);
  ::kill(zero, SIGKILL);
  waiting.join();
  EXPECT_EQ(exit_code(zero), 128 + SIGKILL);
}

TEST(Store, ChildOfAForkOpensItsOwn) {
  const std::string address = free_address();
  auto zero = Store::open(address, 0, 1, 1000ms);
  ASSERT_TRUE(zero.ok());
  const pid_t child = in_child([&] {
    const Status status = (*zero)->set("k", "of the child");
    zero->reset();  // the parent's server keeps running
    return status.code() == StatusCode::kFailedPrecondition ? 0 : 1;
  });
  EXPECT_EQ(exit_code(child), 0);
  EXPECT_TRUE((*zero)->set("k", "v").ok());
}

// A forked child that opens its parent's store gets an error that names the store's owner, and the
// parent's other ranks can still open the store.
TEST(Store, ChildOfAForkIsNotAdvisedToRemoveItsParents) {
  const test::TempFolder folder;
  for (const std::string& address : {"file:" + folder.path() + "/job", free_address()}) {
    auto zero = Store::open(address, 0, 1, 1000ms);
    ASSERT_TRUE(zero.ok());
    const pid_t child = in_child([&] {
      const Status status = Store::open(address, 0, 1, 1000ms).status();
      const auto has = [&](const char* part) {
        return status.message().find(part) != std::string::npos;
      };
      if (status.ok() || !has(address.c_str()) || !has("forked off")) return 1;
      return has("remove") || has("earlier run") || has("free port") ? 2 : 0;
    });
    EXPECT_EQ(exit_code(child), 0) << address;
    EXPECT_FALSE(std::filesystem::exists(folder.path() + "/job/te_fl_refused"));
    EXPECT_TRUE((*zero)->set("k", "v").ok());
  }
}

TEST(Store, ForgetsWhatBeginsWithAPrefix) {
  const test::TempFolder folder;
  std::vector<StorePtr> stores{Store::in_process()};
  for (const std::string& address : {"file:" + folder.path() + "/job", free_address()}) {
    auto opened = Store::open(address, 0, 1, 1000ms);
    ASSERT_TRUE(opened.ok());
    stores.push_back(*opened);
  }
  for (const StorePtr& store : stores) {
    for (const char* key : {"part/a", "part/b/0", "part", "pars", "paru", "q"})
      ASSERT_TRUE(store->set(key, "1").ok());
    ASSERT_TRUE(store->forget("part/").ok());
    ASSERT_TRUE(store->forget("none").ok());
    for (const char* key : {"part", "pars", "paru", "q"})
      EXPECT_TRUE(store->look(key)->has_value()) << key << " of " << store->address();
    for (const char* key : {"part/a", "part/b/0"})
      EXPECT_FALSE(store->look(key)->has_value()) << key << " of " << store->address();
    EXPECT_TRUE(store->set("part/a", "2").ok());
  }
}

}  // namespace
}  // namespace te_fl
