// Runs functions concurrently on several threads, so that the thread sanitizer finds accesses that
// no lock orders.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace te_fl::testing {

// Runs each function on a thread of its own, `rounds` times in a row. The threads begin together
// and yield after each call, so that they alternate even on few cores. Beginning and yielding order
// no memory, so they hide no race between the functions. A race of a function is found most
// reliably if its thread calls no other function that takes the same lock.
inline void together(int rounds, const std::vector<std::function<void(int round)>>& functions) {
  std::atomic<size_t> ready{0};
  std::vector<std::thread> threads;
  for (const auto& function : functions) {
    threads.emplace_back([&] {
      ready.fetch_add(1, std::memory_order_relaxed);
      while (ready.load(std::memory_order_relaxed) < functions.size()) std::this_thread::yield();
      for (int round = 0; round < rounds; ++round) {
        function(round);
        std::this_thread::yield();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace te_fl::testing
