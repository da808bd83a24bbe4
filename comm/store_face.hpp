#pragma once

#include <memory>
#include <string>

#include "te_fl/comm.hpp"

// A store as providers see it (te_fl_comm_store), and as a communicator sees it: with its name
// before every key, so that two of one store do not meet.
namespace te_fl::comm {

class StoreFace {
 public:
  StoreFace(std::shared_ptr<Store> store, const std::string& name);
  const te_fl_comm_store* c() const noexcept { return &face_; }
  Store& store() noexcept { return *store_; }
  std::string key(const std::string& word) const { return prefix_ + word; }

 private:
  static te_fl_status set(void* host, const char* key, const void* value, size_t bytes,
                          const te_fl_error_sink* errors) noexcept;
  static te_fl_status get(void* host, const char* key, uint32_t timeout_ms, void* value,
                          size_t capacity, size_t* bytes, const te_fl_error_sink* errors) noexcept;
  std::unique_ptr<Store> store_;  // It throws nothing but std::bad_alloc.
  std::string prefix_;
  te_fl_comm_store face_{};
};

}  // namespace te_fl::comm
