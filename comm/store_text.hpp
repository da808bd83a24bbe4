#pragma once

#include <algorithm>
#include <chrono>
#include <string>
#include <string_view>

#include "te_fl/status.hpp"

// Limits and error texts that all stores share.
namespace te_fl::comm {

using Deadline = std::chrono::steady_clock::time_point;
constexpr uint64_t kMostValueBytes = uint64_t{64} << 20;

// The time point after `timeout`, limited to ten years so that the sum cannot overflow.
inline Deadline deadline_after(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 3650);
  return std::chrono::steady_clock::now() +
         std::clamp(timeout, std::chrono::milliseconds(0), kLongest);
}

inline Status set_before(std::string_view key, const std::string& address) {
  return Status(StatusCode::kAlreadyExists,
                "key '" + std::string(key) + "' of the store " + address +
                    " was set before to another value; a key is set once: give each communicator a "
                    "name of its own, and each run a store of its own");
}

inline Status key_timeout(std::string_view key, const std::string& address,
                          std::chrono::milliseconds timeout) {
  return Status(StatusCode::kTimeout, "key '" + std::string(key) + "' of the store " + address +
                                          " was set by no rank in " +
                                          std::to_string(timeout.count()) + " ms");
}

inline Status check_value_size(std::string_view key, size_t bytes) {
  if (bytes <= kMostValueBytes) return {};
  return invalid_argument("the value of key '" + std::string(key) + "' has " +
                          std::to_string(bytes) + " bytes; a store takes at most " +
                          std::to_string(kMostValueBytes));
}

}  // namespace te_fl::comm
