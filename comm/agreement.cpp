#include "comm/agreement.hpp"

#include <algorithm>
#include <vector>

#include "core/base/file.hpp"
#include "te_fl/watch.hpp"

namespace te_fl::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr size_t kMostDifferences = 12;  // reported per rank

class TimeLeft {
 public:
  explicit TimeLeft(milliseconds timeout) : end_(steady_clock::now() + timeout) {}
  milliseconds left() const {
    const auto left = std::chrono::duration_cast<milliseconds>(end_ - steady_clock::now());
    return std::max(left, milliseconds(1));
  }

 private:
  steady_clock::time_point end_;
};

void replace_last(std::string& text, const std::string& what, const std::string& by) {
  const size_t at = text.rfind(what);
  if (at != std::string::npos) text.replace(at, what.size(), by);
}

std::string difference(const std::string& first, const std::string& mine, int rank) {
  const std::string here = "on rank " + std::to_string(rank);
  std::vector<std::string> all = fingerprint_difference(first, mine);
  std::string text;
  for (size_t i = 0; i < std::min(all.size(), kMostDifferences); ++i) {
    replace_last(all[i], "in the second", here);
    replace_last(all[i], "in the first", "on rank 0");
    text += "\n  " + all[i];
  }
  if (all.size() > kMostDifferences)
    text += "\n  and " + std::to_string(all.size() - kMostDifferences) + " more " + here;
  return text;
}

// Lists the ranks that have not written the key `word` to the store.
std::string absent(NamespacedStore& store, int size, const std::string& word) {
  std::string ranks;
  for (int r = 0; r < size; ++r) {
    const auto there = store.store().look(store.key(word + std::to_string(r)));
    if (there.ok() && there->has_value()) continue;
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
  }
  return ranks;
}

Status late(NamespacedStore& store, int size, const Status& why) {
  if (why.code() != StatusCode::kTimeout) return why;
  const std::string ranks = absent(store, size, "facts/");
  if (ranks.empty()) return why;
  return why.wrap("of " + std::to_string(size) + " ranks, these did not arrive: " + ranks);
}

// The first character of a rank's answer: kValidates if the rank requests that collectives be
// compared, otherwise kPlain.
constexpr char kValidates = 'v', kPlain = '-';

// Runs on rank 0: collects the texts that all ranks have written, and writes the result for all.
Status decide(NamespacedStore& store, int size, const Facts& facts, const TimeLeft& deadline) {
  bool validates = facts.validates;
  std::string all;
  for (int r = 1; r < size; ++r) {
    Result<std::string> answer =
        store.store().get(store.key("differs/" + std::to_string(r)), deadline.left());
    if (!answer.ok()) return late(store, size, answer.status());
    validates = validates || answer->starts_with(kValidates);
    if (answer->size() > 1) all += difference(facts.table, answer->substr(1), r);
  }
  return store.store().set(store.key("agreed"), (validates ? kValidates : kPlain) + all);
}

}  // namespace

// A rank's table of facts has a few thousand bytes and is nearly always equal on all ranks, and a
// store keeps every value it receives. Therefore rank 0 writes only its table's hash, and another
// rank writes its table only if its hash differs.
Result<bool> agree(NamespacedStore& store, int rank, int size, const Facts& facts,
                   milliseconds timeout) {
  if (size == 1) return facts.validates;
  const TimeLeft deadline(timeout);
  Store& s = store.store();
  const std::string hash = core::contents_hash(facts.table);
  TE_FL_RETURN_IF_ERROR(s.set(store.key("facts/" + std::to_string(rank)), "here"));
  if (rank == 0) {
    TE_FL_RETURN_IF_ERROR(s.set(store.key("facts"), hash));
    TE_FL_RETURN_IF_ERROR(decide(store, size, facts, deadline));
  } else {
    Result<std::string> first = s.get(store.key("facts"), deadline.left());
    if (!first.ok()) return late(store, size, first.status());
    TE_FL_RETURN_IF_ERROR(s.set(
        store.key("differs/" + std::to_string(rank)),
        (facts.validates ? kValidates : kPlain) + (*first == hash ? std::string() : facts.table)));
  }
  Result<std::string> agreed = s.get(store.key("agreed"), deadline.left());
  if (!agreed.ok()) return late(store, size, agreed.status());
  if (agreed->size() <= 1) return agreed->starts_with(kValidates);
  return failed_precondition(
      "the ranks would not do the same, which is refused before the first collective; give all of "
      "them the same plugins, libraries and settings:" +
      agreed->substr(1));
}

}  // namespace te_fl::comm
