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
  // Every status that a plugin's function answers comes through here: what follows relies on its
  // being a known code, marked clean or not (R6). One that is none becomes INTERNAL, and the text
  // says what it was.
  [[gnu::always_inline]] te_fl_status answered(te_fl_status raw) noexcept {
    if (raw == TE_FL_OK) [[likely]]
      return TE_FL_OK;
    return not_ok(raw);
  }
  // Runs an entry of a plugin. R5 forbids exceptions; one that comes all the same becomes INTERNAL
  // with its text.
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
  // "what: text" with the status's code; OK stays OK.
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
        } catch (...) {  // out of memory: the status alone has to do
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
    } catch (...) {  // out of memory: the status alone has to do
    }
  }

  std::string text_;
  te_fl_error_sink sink_{sizeof(te_fl_error_sink), 0, this, &write};
};

}  // namespace te_fl::core
