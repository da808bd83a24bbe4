// Corrupts expectations and outputs, to prove that the comparison can fail.
#include <algorithm>
#include <cmath>

#include "conformance/compare.hpp"

namespace te_fl::conformance {

bool mutate(Expectation& e) {
  switch (e.kind) {
    case Expectation::Kind::kValues:
    case Expectation::Kind::kQuantised:
    case Expectation::Kind::kDequantised:
    case Expectation::Kind::kExactQuantised: {
      size_t at = e.want.size();  // the largest value: its code always changes
      for (size_t i = 0; i < e.want.size(); ++i) {
        if ((!e.skip.empty() && e.skip[i]) || !std::isfinite(e.want[i])) continue;
        if (at == e.want.size() || std::fabs(e.want[i]) > std::fabs(e.want[at])) at = i;
      }
      if (at == e.want.size()) return false;
      if (e.tensor->spec.dtype == TE_FL_BOOL) {
        e.want[at] = e.want[at] == 0 ? 1 : 0;
        return true;
      }
      if (e.tensor->spec.dtype == TE_FL_F8E8M0) {  // only powers of two, no sign
        e.want[at] *= e.want[at] > 1 ? 0.25 : 4;
        return true;
      }
      // A change that exceeds all tolerances and gives a different code.
      const double step =
          4 * tolerance(e, e.tensor->spec.dtype, at) + 0.3 * std::fabs(e.want[at]) + 0.5;
      e.want[at] = is_float(e.tensor->spec.dtype) ? -e.want[at] - std::copysign(step, e.want[at])
                                                  : e.want[at] + 1;
      return true;
    }
    case Expectation::Kind::kBytes:
      if (e.bytes.empty()) return false;
      e.bytes.back() ^= 1;
      return true;
    case Expectation::Kind::kUnchanged: {
      if (e.tensor->buffers().empty() || e.tensor->buffers()[0]->size() == 0) return false;
      e.tensor->buffers()[0]->data()[0] ^= 1;  // simulates a write by the op
      return true;
    }
    case Expectation::Kind::kCustom:
      return false;
  }
  return false;
}

bool corrupt_codes(const Expectation& e, double& noticed) {
  const Tensor& t = *e.tensor;
  const bool quantised =
      e.kind == Expectation::Kind::kQuantised || e.kind == Expectation::Kind::kExactQuantised;
  const auto& data = t.spec.row ? t.data : t.col_data;
  if (!quantised || data == nullptr || data->size() == 0) return false;
  // Skips codes near zero: their values are below the tolerance, so several codes are correct.
  std::vector<size_t> codes;
  for (size_t i = 0; i < data->size(); ++i)
    if ((data->data()[i] & 0x7f) >= 0x10) codes.push_back(i);
  const size_t tries = std::min<size_t>(codes.size(), 16);
  if (tries == 0) return false;
  int seen = 0;
  for (size_t i = 0; i < tries; ++i) {
    uint8_t& code = data->data()[codes[i * codes.size() / tries]];
    code ^= 1;
    seen += compare(e).empty() ? 0 : 1;
    code ^= 1;
  }
  noticed = static_cast<double>(seen) / static_cast<double>(tries);
  return true;
}

}  // namespace te_fl::conformance
