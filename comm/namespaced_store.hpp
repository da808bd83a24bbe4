#pragma once

#include <memory>
#include <string>

#include "te_fl/comm.hpp"

// A store in the form that providers use (te_fl_comm_store), and as communicators use it. Each key
// gets the communicator's name as prefix, so that communicators can share a store.
namespace te_fl::comm {

class NamespacedStore {
 public:
  NamespacedStore(std::shared_ptr<Store> store, const std::string& name);
  const te_fl_comm_store* c() const noexcept { return &c_store_; }
  Store& store() noexcept { return *store_; }
  std::string key(const std::string& word) const { return prefix_ + word; }

 private:
  static te_fl_status set(void* host, const char* key, const void* value, size_t bytes,
                          const te_fl_error_sink* errors) noexcept;
  static te_fl_status get(void* host, const char* key, uint32_t timeout_ms, void* value,
                          size_t capacity, size_t* bytes, const te_fl_error_sink* errors) noexcept;
  std::unique_ptr<Store> store_;  // throws nothing but std::bad_alloc
  std::string prefix_;
  te_fl_comm_store c_store_{};
};

}  // namespace te_fl::comm
