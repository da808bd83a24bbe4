#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <thread>

#include "nn_test_util.hpp"
#include "te_fl/comm.hpp"

namespace te_fl::nn::testing {

inline std::shared_ptr<const Comm> shared(Result<Comm> comm) {
  return std::make_shared<const Comm>(take(std::move(comm)));
}

// Runs f on one thread per rank of a job, each with its rank's communicator.
inline void on_ranks(int size, const std::function<void(const std::shared_ptr<const Comm>&)>& f,
                     const std::string& provider = "threads") {
  const std::shared_ptr<Store> store = Store::in_process();
  const auto run = [&](int rank) {
    try {
      CommOptions options;
      options.rank = rank;
      options.size = size;
      options.store = store;
      options.provider = provider;
      options.timeout = std::chrono::milliseconds(20000);
      f(shared(Comm::create(options)));
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << rank << ": " << error.what();
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
}

// Returns the shard of the unsharded values `whole` that parameter p holds on this rank.
inline Values take_part(const Values& whole, const NamedParameter& p) {
  const Shard& shard = p.parameter->shard;
  if (shard.whole.empty()) return whole;
  const std::span<const int64_t> shape = p.value().shape();
  std::vector<int64_t> rows;
  for (const Shard::Rows& range : shard.rows) {
    for (int64_t i = 0; i < range.count; ++i) rows.push_back(range.begin + i);
  }
  for (int64_t i = 0; shard.rows.empty() && i < shape[0]; ++i) rows.push_back(shard.begin[0] + i);
  const int64_t columns = shape.size() == 2 ? shape[1] : 1;
  const int64_t width = shape.size() == 2 ? shard.whole[1] : 1;
  const int64_t first = shape.size() == 2 ? shard.begin[1] : 0;
  Values part;
  for (int64_t row : rows) {
    for (int64_t c = 0; c < columns; ++c) {
      part.push_back(whole[static_cast<size_t>(row * width + first + c)]);
    }
  }
  return part;
}

}  // namespace te_fl::nn::testing
