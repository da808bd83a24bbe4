#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "te_fl/policy.hpp"

// libFuzzer target: policy strings never crash the parser. Parsing the text of a parsed policy
// gives the same policy, and interning equal settings gives one id.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<std::string> ops = {"gelu", "generic_gemm", "layernorm_fwd"};
  const std::string text(reinterpret_cast<const char*>(data), size);
  te_fl::PolicySettings settings;
  if (auto kind = te_fl::parse_kind(text); kind.ok()) settings.prefer = *kind;
  if (auto vendors = te_fl::parse_vendor_list(text); vendors.ok()) settings.deny_vendors = *vendors;
  if (auto per_op = te_fl::parse_per_op(text, ops); per_op.ok()) {
    auto again = te_fl::parse_per_op(text, ops);
    if (!again.ok() || *again != *per_op) std::abort();
    settings.per_op = *per_op;
  } else if (per_op.status().message().empty()) {
    std::abort();
  }
  // Interned policies live as long as the process; the limit bounds the fuzzer's memory.
  static int interned = 0;
  if (interned < 2000) {
    const auto a = te_fl::SelectionPolicy::intern(settings);
    const auto b = te_fl::SelectionPolicy::intern(settings);
    // Interning may reorder lists into a canonical form; interning that form again must give the
    // same id.
    const auto c = te_fl::SelectionPolicy::intern(a.settings());
    if (a.id() != b.id() || c.id() != a.id() || !(c.settings() == a.settings())) std::abort();
    ++interned;
  }
  return 0;
}
