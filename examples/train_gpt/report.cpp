#include "report.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "te_fl/te_fl.hpp"

namespace train_gpt {

double peak_memory_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024.0;
}

namespace {

// Prints what TE_FL_VERIFY found, and the implementations that are quarantined for it, by this run
// or an earlier one.
void print_checks() {
  const te_fl::VerifyCounts v = te_fl::verify_counts();
  if (v.agreed + v.differed + v.skipped + v.captured != 0) {
    std::printf("  checked by TE_FL_VERIFY: %llu calls agreed, %llu differed (%llu saved)\n",
                static_cast<unsigned long long>(v.agreed),
                static_cast<unsigned long long>(v.differed),
                static_cast<unsigned long long>(v.saved));
  }
  const auto held = te_fl::quarantines();
  if (!held.ok()) return;  // the calls have already reported this error
  for (const te_fl::Quarantine& q : *held) {
    std::printf("  in quarantine: %s for %s on %s\n", q.impl_id.c_str(), q.op.c_str(),
                q.chip.c_str());
  }
}

}  // namespace

void print_usage_table() {
  auto usage = te_fl::OpManager::instance().usage();
  std::sort(usage.begin(), usage.end(), [](const auto& a, const auto& b) {
    return a.op != b.op ? a.op < b.op : a.impl_id < b.impl_id;
  });
  const bool any_staged =
      std::any_of(usage.begin(), usage.end(), [](const auto& u) { return u.staged_calls != 0; });
  std::printf("\nImplementations that ran\n  %-46s %-22s %12s", "op", "implementation", "calls");
  if (any_staged)
    std::printf(" %10s %12s %12s %12s", "staged", "MiB copied", "copying ms", "waiting ms");
  std::printf("\n");
  uint64_t calls = 0, bytes = 0, copying = 0, waiting = 0;
  for (const auto& u : usage) {
    std::printf("  %-46s %-22s %12llu", u.op.c_str(), u.impl_id.c_str(),
                static_cast<unsigned long long>(u.calls));
    if (u.staged_calls != 0) {
      std::printf(" %10llu %12.1f %12.1f %12.1f", static_cast<unsigned long long>(u.staged_calls),
                  static_cast<double>(u.staged_bytes) / (1 << 20),
                  static_cast<double>(u.staged_microseconds) / 1000,
                  static_cast<double>(u.staged_wait_microseconds) / 1000);
    }
    std::printf("\n");
    calls += u.staged_calls;
    bytes += u.staged_bytes;
    copying += u.staged_microseconds;
    waiting += u.staged_wait_microseconds;
  }
  if (any_staged) {
    std::printf(
        "  staged to the host: %llu calls, %.1f MiB copied in %.1f ms, after %.1f ms of waiting "
        "for the "
        "device's earlier work\n",
        static_cast<unsigned long long>(calls), static_cast<double>(bytes) / (1 << 20),
        static_cast<double>(copying) / 1000, static_cast<double>(waiting) / 1000);
  } else {
    std::printf("  staged to the host: none\n");
  }
  print_checks();
}

namespace {

// Returns the length of the UTF-8 character at `at`, or 0 if the bytes are not valid UTF-8.
size_t utf8_length(const std::string& text, size_t at) {
  const auto lead = static_cast<unsigned char>(text[at]);
  const size_t n = lead < 0x80                   ? 1
                   : lead >= 0xc2 && lead < 0xe0 ? 2
                   : lead >= 0xe0 && lead < 0xf0 ? 3
                   : lead >= 0xf0 && lead < 0xf5 ? 4
                                                 : 0;
  if (at + n > text.size()) return 0;
  for (size_t i = 1; i < n; ++i) {
    if ((static_cast<unsigned char>(text[at + i]) & 0xc0) != 0x80) return 0;
  }
  return n;
}

}  // namespace

std::string printable(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const size_t n = utf8_length(text, i);
    const bool control = (byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7f;
    if (n > 0 && !control) {
      out += text.substr(i, n);
      i += n;
    } else {
      char code[8];
      std::snprintf(code, sizeof code, "\\x%02x", byte);
      out += code;
      ++i;
    }
  }
  return out;
}

std::string json_text(const Options& o, const std::string& device, const Results& r) {
  nlohmann::json usage = nlohmann::json::array();
  for (const auto& u : te_fl::OpManager::instance().usage()) {
    usage.push_back({{"op", u.op},
                     {"impl", u.impl_id},
                     {"calls", u.calls},
                     {"staged_calls", u.staged_calls},
                     {"staged_bytes", u.staged_bytes},
                     {"staged_us", u.staged_microseconds},
                     {"staged_wait_us", u.staged_wait_microseconds}});
  }
  const nlohmann::json out = {{"recipe", o.recipe},
                              {"fp8_attention", o.fp8_attention},
                              {"style", o.style},
                              {"dtype", o.dtype},
                              {"device", device},
                              {"graph", o.graph},
                              {"fp8_weights", o.fp8_weights},
                              {"steps", o.steps},
                              {"seed", o.seed},
                              {"batch", o.batch},
                              {"microbatches", o.microbatches},
                              {"seq_len", o.seq_len},
                              {"hidden", o.hidden},
                              {"layers", o.layers},
                              {"heads", o.heads},
                              {"ranks", o.tp * o.dp},
                              {"tp", o.tp},
                              {"dp", o.dp},
                              {"sp", o.sp},
                              {"parameters", r.parameters},
                              {"training_loss", r.training_loss},
                              {"validation_loss", r.validation_loss},
                              {"seconds", r.seconds},
                              {"tokens_per_s", r.tokens_per_s},
                              {"peak_mib", r.peak_mib},
                              {"device_peak_mib", r.device_peak_mib},
                              {"version", TE_FL_VERSION},
                              {"usage", usage}};
  return out.dump(1, ' ', true, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace train_gpt
