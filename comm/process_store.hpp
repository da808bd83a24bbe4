#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "te_fl/comm.hpp"

namespace te_fl::comm {

// A store for ranks that are threads of one process. It is a map, shared by all of them.
class ProcessStore : public Store {
 public:
  Status set(std::string_view key, std::string_view value) override;
  Result<std::string> get(std::string_view key, std::chrono::milliseconds timeout) override;
  Result<std::optional<std::string>> look(std::string_view key) override;
  Status forget(std::string_view prefix) override;
  std::string address() const override { return "threads of this process"; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string, std::less<>> values_;
};

}  // namespace te_fl::comm
