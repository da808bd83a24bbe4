#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "te_fl/export.hpp"
#include "te_fl/plugin.h"

namespace te_fl {

// The ABI's te_fl_code as a C++ enum.
enum class StatusCode : int32_t {
  kOk = TE_FL_OK,
  kInvalidArgument = TE_FL_INVALID_ARGUMENT,
  kUnsupported = TE_FL_UNSUPPORTED,
  kNotFound = TE_FL_NOT_FOUND,
  kAlreadyExists = TE_FL_ALREADY_EXISTS,
  kOutOfMemory = TE_FL_OUT_OF_MEMORY,
  kFailedPrecondition = TE_FL_FAILED_PRECONDITION,
  kIncompatible = TE_FL_INCOMPATIBLE,
  kBusy = TE_FL_BUSY,
  kTimeout = TE_FL_TIMEOUT,
  kDeviceLost = TE_FL_DEVICE_LOST,
  kDataLoss = TE_FL_DATA_LOSS,
  kInternal = TE_FL_INTERNAL,
  kCommFailed = TE_FL_COMM_FAILED,
};

// The code's name: "OK", "INVALID_ARGUMENT", ...
TE_FL_API std::string_view to_string(StatusCode code);

// Outcome of an operation: a code, a message, and optionally the status that caused it. An OK
// status is one null pointer and allocates nothing. Copies share the text. Different threads may
// use different objects; sharing one object needs a lock if a thread changes it.
class [[nodiscard]] TE_FL_API Status {
 public:
  Status() noexcept = default;  // OK
  Status(StatusCode code, std::string message);
  Status(StatusCode code, std::string message, Status cause);

  bool ok() const noexcept { return rep_ == nullptr; }
  explicit operator bool() const noexcept { return ok(); }
  StatusCode code() const noexcept;
  // The message of this status, without its causes. Empty for OK.
  const std::string& message() const noexcept;
  // The status that caused this one, or OK.
  Status cause() const;
  // True if nothing was written and nothing was enqueued (TE_FL_CLEAN).
  bool clean() const noexcept;
  Status& set_clean();
  // Returns a status with the same code and cleanness, with `message` as its message and *this as
  // its cause.
  Status wrap(std::string message) const;
  // "INVALID_ARGUMENT: message", followed by one line "  caused by: ..." for each cause.
  std::string to_string() const;
  // The ABI's form of the status, including TE_FL_CLEAN.
  te_fl_status to_c() const noexcept;
  static Status from_c(te_fl_status status, std::string message);

 private:
  struct Rep;
  std::shared_ptr<const Rep> rep_;
};

// Make a status with this code. The first two are clean (see Status::clean()).
TE_FL_API Status invalid_argument(std::string message);
TE_FL_API Status not_found(std::string message);
TE_FL_API Status failed_precondition(std::string message);
TE_FL_API Status internal_error(std::string message);

// Writes the status to stderr and aborts. Result::value() calls it on an error.
[[noreturn]] TE_FL_API void die(const Status& status);

// A value, or a Status that is not OK.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT: implicit on purpose
  Result(Status status) : status_(std::move(status)) {  // NOLINT: implicit on purpose
    if (status_.ok())
      status_ = internal_error("a Result was made from an OK status without a value");
  }
  bool ok() const noexcept { return value_.has_value(); }
  explicit operator bool() const noexcept { return ok(); }
  const Status& status() const noexcept { return status_; }
  // value() aborts with the status if there is no value. Test ok() first.
  T& value() & {
    if (!ok()) die(status_);
    return *value_;
  }
  const T& value() const& {
    if (!ok()) die(status_);
    return *value_;
  }
  T&& value() && {
    if (!ok()) die(status_);
    return std::move(*value_);
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace te_fl

#define TE_FL_CONCAT_INNER(a, b) a##b
#define TE_FL_CONCAT(a, b) TE_FL_CONCAT_INNER(a, b)
// Returns the status from the enclosing function if it is not OK.
#define TE_FL_RETURN_IF_ERROR(expr)                                                   \
  do {                                                                                \
    if (::te_fl::Status te_fl_status_ = (expr); !te_fl_status_) return te_fl_status_; \
  } while (false)
// Declares or assigns a variable from a Result; returns the status from the enclosing function on
// an error: TE_FL_ASSIGN_OR_RETURN(auto x, make_x());
#define TE_FL_ASSIGN_OR_RETURN(decl, expr) \
  TE_FL_ASSIGN_OR_RETURN_IMPL(TE_FL_CONCAT(te_fl_result_, __LINE__), decl, expr)
#define TE_FL_ASSIGN_OR_RETURN_IMPL(tmp, decl, expr) \
  auto tmp = (expr);                                 \
  if (!tmp.ok()) return tmp.status();                \
  decl = std::move(tmp).value()
