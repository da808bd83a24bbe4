#include "conformance/check/steps.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cfenv>
#include <cstdio>
#include <cstring>

#include "conformance/format.hpp"

namespace te_fl_tool::check {
namespace {

namespace conformance = te_fl::conformance;

Outcome from(conformance::Outcome outcome) {
  return outcome == conformance::Outcome::kPass   ? Outcome::kPass
         : outcome == conformance::Outcome::kFail ? Outcome::kFail
                                                  : Outcome::kUnsupported;
}

Finding finding(const char* check, const Subject& subject, const conformance::Case& c,
                conformance::Prepared& prepared, const conformance::Result& result) {
  Finding f;
  f.check = check, f.name = c.name, f.dtype = dtype_of(prepared.problem());
  f.outcome = from(result.outcome), f.message = result.message;
  if (f.outcome == Outcome::kUnsupported) f.message = strip_prefix(result.message, subject.impl);
  f.milliseconds = result.milliseconds;
  return f;
}

bool denormals_count() {
  volatile float smallest = 1e-39f;
  volatile float same = smallest * 1.0f;
  return same != 0;
}

}  // namespace

std::string strip_prefix(const std::string& message, const std::string& impl) {
  const size_t line = message.find("\n  " + impl + " (");
  if (line == std::string::npos) return message.substr(0, message.find('\n'));
  const size_t end = message.find('\n', line + 1), begin = message.find("): ", line);
  return begin < end ? message.substr(begin + 3, end - begin - 3) : message;
}

ProcessState ProcessState::now() {
  ProcessState state;
  state.rounding_ = std::fegetround();
  state.denormals_ = denormals_count();
  size_t i = 0;
  for (const int signal : kSignals) sigaction(signal, nullptr, &state.actions_[i++]);
  return state;
}

std::string ProcessState::changed() const {
  if (std::fegetround() != rounding_) return "it left another rounding mode behind";
  if (denormals_count() != denormals_)
    return "it left the flushing of denormals to zero switched on or off";
  size_t i = 0;
  for (const int signal : kSignals) {
    struct sigaction action {};
    sigaction(signal, nullptr, &action);
    const auto& before = actions_[i++];
    if (std::memcmp(&action.sa_handler, &before.sa_handler, sizeof action.sa_handler) != 0)
      return std::string("it left a handler of SIG") + sigabbrev_np(signal) + " behind";
  }
  return {};
}

void ProcessState::restore() const {
  std::fenv_t plain;
  std::fegetenv(&plain);
  std::fesetenv(FE_DFL_ENV);
  std::fesetround(rounding_);
  size_t i = 0;
  for (const int signal : kSignals) sigaction(signal, &actions_[i++], nullptr);
}

std::string PrintedText::take() {
  std::fflush(nullptr);
  struct stat file {};
  if (fstat(STDERR_FILENO, &file) != 0 || !S_ISREG(file.st_mode) || file.st_size <= seen_)
    return {};
  std::string text(static_cast<size_t>(std::min<int64_t>(file.st_size - seen_, 4096)), '\0');
  const ssize_t n = pread(STDERR_FILENO, text.data(), text.size(), seen_);
  seen_ = file.st_size;
  text.resize(n > 0 ? static_cast<size_t>(n) : 0);
  // Skips a line of te-fl's log, "2026-11-24 00:30:12.345 te-fl ERROR: ...", and its continuation.
  if (const size_t log = text.find(" te-fl "); log != std::string::npos && log < 32) return {};
  text = text.substr(text.find_first_not_of(" \n") == std::string::npos
                         ? text.size()
                         : text.find_first_not_of(" \n"));
  return text.substr(0, std::min<size_t>(text.find('\n'), 200));
}

std::string undeclared_text(const std::string& setting) {
  return "it asked the host for " + setting +
         ", which is no setting of te-fl's nor one that the plugin declares: neither `te-fl env` "
         "nor "
         "the fingerprint of a job knows it (rule R21)";
}

std::string dtype_of(const conformance::Problem& problem) {
  const conformance::Tensor* chosen = nullptr;
  for (const auto& t : problem.tensors) {
    if (t->spec.quantised()) {
      const std::string name =
          t->spec.name();  // "f8e4m3.tensor.row": only the first two parts are used
      const size_t dot = name.find('.'), end = name.find('.', dot + 1);
      return name.substr(0, dot) + " " + name.substr(dot + 1, end - dot - 1);
    }
    if (chosen == nullptr ||
        (!conformance::is_float(chosen->spec.dtype) && conformance::is_float(t->spec.dtype)))
      chosen = t.get();
  }
  return chosen == nullptr ? "-" : conformance::name_of(chosen->spec.dtype);
}

Finding check_result(const Subject& subject, const conformance::Case& c,
                     conformance::Prepared& prepared) {
  return finding("result", subject, c, prepared, prepared.run(subject.impl));
}

Finding check_guard(const Subject& subject, const conformance::Case& c,
                    conformance::Prepared& prepared) {
  conformance::Result result = prepared.run(subject.impl, {.guard_alignment = 1});
  if (result.outcome == conformance::Outcome::kUnsupported)
    result = prepared.run(subject.impl, {.guard_alignment = 256});
  if (result.outcome == conformance::Outcome::kFail)
    result.message = "with tensors that are aligned to their elements only: " + result.message;
  return finding("guard", subject, c, prepared, result);
}

Finding check_start_guard(const Subject& subject, const conformance::Case& c,
                          conformance::Prepared& prepared) {
  return finding("guard", subject, c, prepared,
                 prepared.run(subject.impl, {.guard_alignment = 256, .guard_start = true}));
}

Finding check_margins(const Subject& subject, const conformance::Case& c,
                      conformance::Prepared& prepared, size_t bytes) {
  const bool deterministic = (subject.flags & TE_FL_OP_DETERMINISTIC) != 0;
  return finding("guard", subject, c, prepared,
                 conformance::run_between_margins(prepared, subject.impl, deterministic, bytes));
}

Finding check_determinism(const Subject& subject, const conformance::Case& c,
                          conformance::Prepared& prepared) {
  const conformance::How how{.deterministic = true};
  conformance::Result result = prepared.run(subject.impl, how);
  if (result.outcome != conformance::Outcome::kPass) {
    result.message = "it says TE_FL_OP_DETERMINISTIC, and a call with TE_FL_CALL_DETERMINISTIC: " +
                     result.message;
    result.outcome = conformance::Outcome::kFail;
    return finding("determinism", subject, c, prepared, result);
  }
  const std::vector<uint8_t> first = prepared.bytes();
  result = prepared.run(subject.impl, how);
  const std::vector<uint8_t> second = prepared.bytes();
  const auto differ = std::mismatch(first.begin(), first.end(), second.begin()).first;
  if (result.outcome == conformance::Outcome::kPass && differ != first.end()) {
    result.outcome = conformance::Outcome::kFail;
    result.message = "two calls with the same inputs differ, first in byte " +
                     std::to_string(differ - first.begin()) +
                     " of its tensors' memory; it says TE_FL_OP_DETERMINISTIC";
  }
  return finding("determinism", subject, c, prepared, result);
}

Finding check_describe(const Subject& subject, const conformance::Case& c,
                       conformance::Prepared& prepared) {
  conformance::Result result = prepared.run(subject.impl, {.describe = true});
  if (result.outcome == conformance::Outcome::kPass) result.message.clear();
  return finding("describe", subject, c, prepared, result);
}

std::optional<Finding> check_stream(const Subject& subject, const conformance::Case& c,
                                    conformance::Prepared& prepared) {
  auto stream = te_fl::Stream::create(subject.device);
  if (!stream.ok()) {
    if (stream.status().code() == te_fl::StatusCode::kUnsupported) return std::nullopt;
    return finding("stream", subject, c, prepared,
                   {conformance::Outcome::kFail, stream.status().to_string(), 0});
  }
  conformance::Result result = prepared.run(subject.impl, {.own_stream = true});
  if (result.outcome != conformance::Outcome::kPass) {
    result.message = "on a stream of its own: " + result.message +
                     " (rule R11: all of the work goes to ctx->stream)";
    result.outcome = conformance::Outcome::kFail;
  }
  return finding("stream", subject, c, prepared, result);
}

}  // namespace te_fl_tool::check
