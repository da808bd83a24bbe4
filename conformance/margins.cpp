#include "conformance/margins.hpp"

#include <algorithm>
#include <mutex>
#include <utility>

#include "conformance/run.hpp"

namespace te_fl::conformance {
namespace {

class MarginSearch {
 public:
  MarginSearch(Prepared& prepared, const std::string& impl_id, bool deterministic, size_t bytes)
      : prepared_(prepared), impl_id_(impl_id), deterministic_(deterministic), bytes_(bytes) {}

  Result run() {
    Margins large = margins(Margins::kLarge), nan = margins(Margins::kNan);
    Result result = run_with(large);
    if (result.outcome == Outcome::kUnsupported) return result;
    if (result.outcome == Outcome::kFail) return blame(Margins::kPlain, Margins::kLarge, result);
    const std::vector<uint8_t> with_large = prepared_.bytes();
    result = run_with(nan);
    if (result.outcome == Outcome::kFail) return blame(Margins::kPlain, Margins::kNan, result);
    if (!deterministic_ || prepared_.bytes() == with_large) return result;
    return blame(Margins::kLarge, Margins::kNan, result);
  }

 private:
  Margins margins(uint8_t fill) const {
    Margins m;
    m.bytes = bytes_, m.fill = fill;
    return m;
  }
  Result run_with(Margins& m) {
    return prepared_.run(impl_id_, {.deterministic = deterministic_, .margins = &m});
  }
  // True if a run with these margins fails or, in deterministic mode, has other results than the
  // run with quiet margins.
  bool shows(Margins m) {
    if (run_with(m).outcome != Outcome::kPass) return true;
    return deterministic_ && prepared_.bytes() != quiet_;
  }

  // Called after a run with all margin bytes `loud` that failed or, in deterministic mode, had
  // other results than with all margin bytes `quiet`. `found` is the result of that run. Finds the
  // byte closest to a tensor whose change from `quiet` to `loud` changes the result.
  Result blame(uint8_t quiet, uint8_t loud, Result found) {
    if (found.wrote_outside) return found;
    Margins calm = margins(quiet);
    const Result plain = run_with(calm);
    if (plain.outcome != Outcome::kPass) return plain;  // fails independently of the margins
    quiet_ = prepared_.bytes();
    if (shows(calm)) return plain;  // two equal calls differ; another check finds that
    found.outcome = Outcome::kFail;
    for (const std::string& name : calm.take_placed()) {
      for (const bool before : {false, true}) {
        calm.odd_name = name, calm.odd_before = before, calm.odd_fill = loud;
        calm.odd_bytes = bytes_;
        if (!shows(calm)) continue;
        const size_t place = nearest(calm);
        found.message = "it reads outside of " + name + ", byte " +
                        (before ? std::to_string(place) + " before its start"
                                : std::to_string(place - 1) + " behind its end") +
                        ": the results change with what lies there, and an op reads its arguments "
                        "only (rule R11)";
        return found;
      }
    }
    found.message =
        "the results change with what lies before and behind the tensors, and an op reads its "
        "arguments only (rule R11): " +
        (found.message.empty() ? "other bits" : found.message);
    return found;
  }
  // Returns the smallest number of bytes next to the tensor such that changing them changes the
  // result.
  size_t nearest(Margins m) {
    size_t unseen = 0, seen = m.odd_bytes;
    while (seen - unseen > 1) {
      m.odd_bytes = unseen + (seen - unseen) / 2;
      (shows(m) ? seen : unseen) = m.odd_bytes;
    }
    return seen;
  }

  Prepared& prepared_;
  const std::string& impl_id_;
  bool deterministic_;
  size_t bytes_;
  std::vector<uint8_t> quiet_;
};

}  // namespace

namespace {

// A mutex for all Margins objects. They are copied, so they do not contain a mutex themselves.
std::mutex& placed_mutex() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

void Margins::add_placed(const std::string& name) {
  const std::scoped_lock lock(placed_mutex());
  placed_.push_back(name);
}

std::vector<std::string> Margins::take_placed() {
  const std::scoped_lock lock(placed_mutex());
  return std::exchange(placed_, {});
}

std::vector<uint8_t> Margins::around(const Buffer& buffer, const std::string& name) const {
  std::vector<uint8_t> all(bytes + buffer.size() + bytes, fill);
  uint8_t *const begin = all.data() + bytes, *const end = begin + buffer.size();
  std::copy(buffer.data(), buffer.data() + buffer.size(), begin);
  if (name != odd_name) return all;
  if (odd_before)
    std::fill(begin - odd_bytes, begin, odd_fill);
  else
    std::fill(end, end + odd_bytes, odd_fill);
  return all;
}

std::string Margins::written_outside(const Buffer& buffer, const std::vector<uint8_t>& made,
                                     const std::vector<uint8_t>& now) const {
  const auto of_bytes = " of its " + std::to_string(buffer.size()) + " bytes";
  const size_t end = bytes + buffer.size();
  for (size_t i = 0; i < bytes; ++i)
    if (made[end + i] != now[end + i])
      return "byte " + std::to_string(i) + " behind the end" + of_bytes;
  for (size_t i = 1; i <= bytes; ++i)
    if (made[bytes - i] != now[bytes - i])
      return "byte " + std::to_string(i) + " before the start" + of_bytes;
  return {};
}

Result run_between_margins(Prepared& prepared, const std::string& impl_id, bool deterministic,
                           size_t bytes) {
  return MarginSearch(prepared, impl_id, deterministic, bytes).run();
}

}  // namespace te_fl::conformance
