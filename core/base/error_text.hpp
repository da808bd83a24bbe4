#pragma once

#include <exception>
#include <string>

#include "core/base/answer.hpp"
#include "te_fl/plugin.h"
#include "te_fl/status.hpp"

namespace te_fl::core {

// An error sink on the stack that turns a plugin's status and text into a Status.
//   ErrorText errors;
//   return errors.status(api.copy(..., errors.sink()), "copy to cuda:0");
class ErrorText {
 public:
  ErrorText() = default;
  ErrorText(const ErrorText&) = delete;
  ErrorText& operator=(const ErrorText&) = delete;

  const te_fl_error_sink* sink() const noexcept { return &sink_; }
  const std::string& text() const noexcept { return text_; }
  // Every status that a plugin function returns passes through here, so that the code after it sees
  // only known codes, with or without TE_FL_CLEAN (R6). An invalid status becomes INTERNAL, and its
  // value is added to the text.
  [[gnu::always_inline]] te_fl_status answered(te_fl_status raw) noexcept {
    if (raw == TE_FL_OK) [[likely]]
      return TE_FL_OK;
    return not_ok(raw);
  }
  // Calls a plugin function. R5 forbids exceptions; if one is thrown, the status is INTERNAL and
  // the text is that of the exception.
  template <class F>
  te_fl_status call(F&& enter) noexcept {
    try {
      return answered(enter());
    } catch (const std::exception& e) {
      write(this, "an exception escaped (rule R5):");
      write(this, e.what());
    } catch (...) {
      write(this, "an exception of unknown type escaped (rule R5)");
    }
    return TE_FL_INTERNAL;
  }
  // Makes a Status with the text "what: text" from the code. OK stays OK.
  Status status(te_fl_status code, const std::string& what) const {
    if (code == TE_FL_OK) return {};
    return Status::from_c(code, text_.empty() ? what + " failed" : what + ": " + text_);
  }

 private:
  [[gnu::cold, gnu::noinline]] te_fl_status not_ok(te_fl_status raw) noexcept {
    if (!is_status(raw)) {
      note_odd_status(raw);
      if (known_status(raw) != TE_FL_OK) {
        try {
          write(this, odd_status_text(raw).c_str());
        } catch (...) {  // out of memory: only the status is reported
        }
      }
    }
    return known_status(raw);
  }
  static void write(void* host, const char* text) noexcept {
    try {
      auto* self = static_cast<ErrorText*>(host);
      if (text == nullptr) return;
      if (!self->text_.empty()) self->text_ += "\n  caused by: ";
      self->text_ += text;
    } catch (...) {  // out of memory: only the status is reported
    }
  }

  std::string text_;
  te_fl_error_sink sink_{sizeof(te_fl_error_sink), 0, this, &write};
};

}  // namespace te_fl::core
