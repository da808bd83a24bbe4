#include "te_fl/status.hpp"

#include <cstdio>
#include <cstdlib>
#include <string>

#include "core/base/answer.hpp"
#include "core/base/fork.hpp"

namespace te_fl {

std::string_view to_string(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "OK";
    case StatusCode::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case StatusCode::kUnsupported:
      return "UNSUPPORTED";
    case StatusCode::kNotFound:
      return "NOT_FOUND";
    case StatusCode::kAlreadyExists:
      return "ALREADY_EXISTS";
    case StatusCode::kOutOfMemory:
      return "OUT_OF_MEMORY";
    case StatusCode::kFailedPrecondition:
      return "FAILED_PRECONDITION";
    case StatusCode::kIncompatible:
      return "INCOMPATIBLE";
    case StatusCode::kBusy:
      return "BUSY";
    case StatusCode::kTimeout:
      return "TIMEOUT";
    case StatusCode::kDeviceLost:
      return "DEVICE_LOST";
    case StatusCode::kDataLoss:
      return "DATA_LOSS";
    case StatusCode::kInternal:
      return "INTERNAL";
    case StatusCode::kCommFailed:
      return "COMM_FAILED";
  }
  return "UNKNOWN";
}

struct Status::Rep {
  StatusCode code;
  bool clean;
  std::string message;
  Status cause;
};

Status::Status(StatusCode code, std::string message) : Status(code, std::move(message), Status()) {}

Status::Status(StatusCode code, std::string message, Status cause) {
  if (code == StatusCode::kOk) return;
  // UNSUPPORTED is clean by definition (rule R6).
  const bool clean = code == StatusCode::kUnsupported;
  rep_ = std::make_shared<const Rep>(Rep{code, clean, std::move(message), std::move(cause)});
}

StatusCode Status::code() const noexcept { return rep_ ? rep_->code : StatusCode::kOk; }

const std::string& Status::message() const noexcept {
  static constinit std::atomic<const std::string*> empty{nullptr};
  return rep_ ? rep_->message : core::made_once(empty, [] { return new std::string; });
}

Status Status::cause() const { return rep_ ? rep_->cause : Status(); }

bool Status::clean() const noexcept { return rep_ != nullptr && rep_->clean; }

Status& Status::set_clean() {
  // Copies of a Status share its record, so a changed Status gets a new record.
  if (rep_ && !rep_->clean) {
    rep_ = std::make_shared<const Rep>(Rep{rep_->code, true, rep_->message, rep_->cause});
  }
  return *this;
}

Status Status::wrap(std::string message) const {
  if (ok()) return *this;
  Status wrapped(code(), std::move(message), *this);
  if (clean()) wrapped.set_clean();
  return wrapped;
}

std::string Status::to_string() const {
  std::string text(te_fl::to_string(code()));
  if (!rep_) return text;
  text += ": " + rep_->message;
  for (const Rep* r = rep_->cause.rep_.get(); r != nullptr; r = r->cause.rep_.get()) {
    text += "\n  caused by: ";
    // Shows the code of a cause only if it differs from the outer status's code.
    if (r->code != rep_->code) text.append(te_fl::to_string(r->code)).append(": ");
    text += r->message;
  }
  return text;
}

te_fl_status Status::to_c() const noexcept {
  if (!rep_) return TE_FL_OK;
  return static_cast<te_fl_status>(rep_->code) | (rep_->clean ? TE_FL_CLEAN : 0);
}

Status Status::from_c(te_fl_status status, std::string message) {
  const te_fl_status known = core::known_status(status);
  if (known == TE_FL_OK) return {};
  if (!core::is_status(status)) {
    const std::string note = core::odd_status_text(status);
    message = message.empty() ? note : message + " (" + note + ")";
  }
  Status result(static_cast<StatusCode>(TE_FL_STATUS_CODE(known)), std::move(message));
  if (TE_FL_STATUS_IS_CLEAN(known)) result.set_clean();
  return result;
}

std::atomic<te_fl_status> core::g_odd_status{TE_FL_OK};

std::string core::odd_status_text(te_fl_status raw) {
  char text[64];
  std::snprintf(text, sizeof text, "it answered status %d (0x%x)", static_cast<int>(raw),
                static_cast<unsigned>(raw));
  return text +
         std::string(raw == TE_FL_CLEAN
                         ? ", TE_FL_OK marked with TE_FL_CLEAN, which only a failure carries"
                         : ", which is no te_fl_code, with or without TE_FL_CLEAN") +
         " (rules R6, R20)";
}

Status invalid_argument(std::string message) {
  return std::move(Status(StatusCode::kInvalidArgument, std::move(message)).set_clean());
}
Status not_found(std::string message) {
  return std::move(Status(StatusCode::kNotFound, std::move(message)).set_clean());
}
Status failed_precondition(std::string message) {
  return {StatusCode::kFailedPrecondition, std::move(message)};
}
Status internal_error(std::string message) { return {StatusCode::kInternal, std::move(message)}; }

void die(const Status& status) {
  std::fprintf(stderr, "te-fl: %s\n", status.to_string().c_str());
  std::abort();
}

}  // namespace te_fl
