// Asks an implementation for the names of the kernels that run() would launch for a call (rule
// R31).

#include "dispatch/call.hpp"
#include "dispatch/staging/staged_call.hpp"

namespace te_fl::dispatch {
namespace {

// The sink for describe(). It keeps one line of at most kMost bytes.
class Words {
 public:
  const te_fl_error_sink* sink() const noexcept { return &sink_; }
  std::string take() {
    if (more_) text_ += "...";
    return std::move(text_);
  }

 private:
  static constexpr size_t kMost = 400;

  static bool continues(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }
  void add(const char* text) {
    if (!text_.empty() && *text != '\0') text_ += ' ';
    while (*text != '\0' && text_.size() < kMost) {
      const char c = *text++;
      text_ += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
    }
    if (*text == '\0') return;
    more_ = true;
    if (!continues(*text)) return;  // do not end within a multi-byte character
    while (!text_.empty() && continues(text_.back())) text_.pop_back();
    if (!text_.empty()) text_.pop_back();
  }
  static void write(void* host, const char* text) noexcept {
    try {
      auto* self = static_cast<Words*>(host);
      if (text != nullptr && !self->more_) self->add(text);
    } catch (...) {  // out of memory: keeps the text so far
    }
  }

  std::string text_;
  bool more_ = false;
  te_fl_error_sink sink_{sizeof(te_fl_error_sink), 0, this, &write};
};

te_fl_status ask(const Implementation& impl, const te_fl_context& context, const void* args,
                 Words& words, core::ErrorText& errors) {
  return entered("describe() threw an exception (rule R5)", errors, [&] {
    const InsideFunction inside(impl, args, "describe()");
    return impl.desc.describe(impl.desc.self, &context, args, words.sink());
  });
}

}  // namespace

Described described(const Call& call, const Step& step, bool deterministic) {
  constexpr size_t kMostReason = 300;
  const Implementation& impl = *step.impl;
  if (impl.desc.describe == nullptr) return {"", "it has no describe()"};
  core::ErrorText errors;
  Words words;
  te_fl_status code = TE_FL_OK;
  if (step.staged) {
    StagedCall staged(call, errors);
    code = staged.plan();
    if (code == TE_FL_OK) {
      staged.bind_nowhere();
      code = ask(impl, staged.context(deterministic), staged.args(), words, errors);
    }
  } else {
    const te_fl_context context = context_of(call, deterministic, errors.sink());
    code = ask(impl, context, call.args, words, errors);
  }
  std::string text = words.take();
  if (code != TE_FL_OK)
    return {"", failure_text({&impl, code, errors.text()}).substr(0, kMostReason)};
  if (text.empty()) return {"", "its describe() wrote nothing"};
  return {std::move(text), ""};
}

}  // namespace te_fl::dispatch
