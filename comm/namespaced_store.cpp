#include "comm/namespaced_store.hpp"

#include <cstring>
#include <exception>
#include <new>
#include <type_traits>
#include <utility>

namespace te_fl::comm {
namespace {

// Runs f and reports its status and text to the plugin.
template <class F>
te_fl_status report_errors(const te_fl_error_sink* errors, F&& f) noexcept {
  try {
    const Status status = f();
    if (!status.ok() && errors != nullptr && errors->write != nullptr)
      errors->write(errors->host, status.message().c_str());
    return TE_FL_STATUS_CODE(status.to_c());
  } catch (...) {
    return TE_FL_OUT_OF_MEMORY;
  }
}

// Wraps a store of the program, which may throw, and converts exceptions other than std::bad_alloc
// into statuses. An exception in the middle of an abort would leave other ranks waiting.
class StatusStore final : public Store {
 public:
  explicit StatusStore(std::shared_ptr<Store> store) : store_(std::move(store)) {}
  Status set(std::string_view key, std::string_view value) override {
    return catch_status("set", [&] { return store_->set(key, value); });
  }
  Result<std::string> get(std::string_view key, std::chrono::milliseconds timeout) override {
    return catch_status("get", [&] { return store_->get(key, timeout); });
  }
  Result<std::optional<std::string>> look(std::string_view key) override {
    return catch_status("look", [&] { return store_->look(key); });
  }
  Status forget(std::string_view prefix) override {
    return catch_status("forget", [&] { return store_->forget(prefix); });
  }
  std::string address() const override {
    const auto address =
        catch_status("address", [&] { return Result<std::string>(store_->address()); });
    return address.ok() ? *address : "of the program";
  }

 private:
  template <class F>
  static std::invoke_result_t<F> catch_status(const char* function, F&& f) {
    const auto thrown = [&](const std::string& what) {
      return Status(StatusCode::kCommFailed,
                    std::string("the store's ") + function + "() threw " + what);
    };
    try {
      return f();
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& e) {
      return thrown(std::string("an exception: ") + e.what());
    } catch (...) {
      return thrown("something that is no std::exception");
    }
  }

  std::shared_ptr<Store> store_;
};

}  // namespace

NamespacedStore::NamespacedStore(std::shared_ptr<Store> store, const std::string& name)
    : store_(std::make_unique<StatusStore>(std::move(store))), prefix_(name + "/") {
  c_store_.struct_size = sizeof c_store_;
  c_store_.host = this;
  c_store_.set = &set;
  c_store_.get = &get;
}

te_fl_status NamespacedStore::set(void* host, const char* key, const void* value, size_t bytes,
                                  const te_fl_error_sink* errors) noexcept {
  return report_errors(errors, [&] {
    auto* self = static_cast<NamespacedStore*>(host);
    if (key == nullptr || (value == nullptr && bytes != 0))
      return invalid_argument("te_fl_comm_store.set: key or value is NULL");
    return self->store_->set(self->prefix_ + "provider/" + key,
                             std::string_view(static_cast<const char*>(value), bytes));
  });
}

te_fl_status NamespacedStore::get(void* host, const char* key, uint32_t timeout_ms, void* value,
                                  size_t capacity, size_t* bytes,
                                  const te_fl_error_sink* errors) noexcept {
  return report_errors(errors, [&]() -> Status {
    auto* self = static_cast<NamespacedStore*>(host);
    if (key == nullptr || bytes == nullptr)
      return invalid_argument("te_fl_comm_store.get: key or bytes is NULL");
    TE_FL_ASSIGN_OR_RETURN(const std::string found,
                           self->store_->get(self->prefix_ + "provider/" + key,
                                             std::chrono::milliseconds(timeout_ms)));
    *bytes = found.size();
    if (found.size() > capacity) {
      return invalid_argument("te_fl_comm_store.get: '" + std::string(key) + "' has " +
                              std::to_string(found.size()) + " bytes, the caller has room for " +
                              std::to_string(capacity));
    }
    if (!found.empty()) std::memcpy(value, found.data(), found.size());
    return {};
  });
}

}  // namespace te_fl::comm
