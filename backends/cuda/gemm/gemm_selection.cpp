#include "gemm/gemm_selection.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace te_fl::cuda {
namespace {

constexpr double kGlanceUs = 300;    // time per candidate in the first look, or one run if longer
constexpr double kWorthALook = 1.3;  // candidates slower than the best by this factor get no second
                                     // look
constexpr double kLookUs = 2000;     // time of the second look

// One stage of the selection. Under load a GPU lowers its clock to keep its power limit, so in a
// training run the candidate that needs the least energy tends to be the fastest. A short
// measurement, or one on an idle GPU, would select another candidate. Each sequence of runs is
// therefore long enough for the clock to adapt. Every round has a new random order, because a
// candidate's time depends on what ran before it.
struct Stage {
  size_t field;     // number of the fastest candidates that take part
  int rounds;       // in each round every candidate runs one sequence
  double sequence;  // duration of a sequence in microseconds
};
constexpr std::array<Stage, 3> kStages{{{16, 3, 20000}, {8, 3, 30000}, {4, 5, 60000}}};

// A deterministic random number generator.
class Draws {
 public:
  void shuffle(std::vector<size_t>& list) {
    for (size_t i = list.size(); i > 1; --i) std::swap(list[i - 1], list[next() % i]);
  }

 private:
  uint32_t next() {
    state_ = state_ * 1664525u + 1013904223u;
    return state_ >> 8;
  }
  uint32_t state_ = 12345;
};

class Selection {
 public:
  Selection(size_t candidates, const Contest& contest) : contest_(contest), us_(candidates, -1) {}

  void look() {
    std::vector<size_t> order(us_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    draws_.shuffle(order);
    double best = -1;
    for (const size_t i : order) {
      // The first run of a kernel loads it.
      if (contest_.time(i, 1) < 0 || (us_[i] = contest_.time(i, 1)) < 0) continue;
      // The time of one short run is mostly launch latency, so short candidates are run more often.
      if (us_[i] < kGlanceUs) us_[i] = contest_.time(i, runs(i, kGlanceUs, 2));
      if (us_[i] < 0) continue;
      if (best < 0 || us_[i] <= best * kWorthALook) us_[i] = contest_.time(i, runs(i, kLookUs, 2));
      if (us_[i] < 0) continue;
      if (best < 0 || us_[i] < best) best = us_[i];
      field_.push_back(i);
    }
  }

  Winner winner() {
    Winner result;
    result.timed = static_cast<int>(field_.size());
    if (field_.empty()) return result;
    for (const Stage& stage : kStages) {
      rank();
      const bool last = &stage == &kStages.back();
      result.different += keep(stage.field, last);
      rounds(stage);
    }
    rank();
    if (field_.empty()) return {};
    result.index = field_.front();
    result.us = us_[result.index];
    result.first_us = us_[0];
    return result;
  }

 private:
  int runs(size_t i, double us, int least) const {
    return std::clamp(static_cast<int>(us / std::max(us_[i], 1.0)), least, 50000);
  }
  // Sorts the candidates by time and removes those that no longer run.
  void rank() {
    std::erase_if(field_, [this](size_t i) { return us_[i] < 0; });
    std::sort(field_.begin(), field_.end(), [this](size_t a, size_t b) {
      return us_[a] < us_[b] || (us_[a] == us_[b] && a < b);
    });
  }
  // Keeps the `most` fastest candidates. In the last stage, keeps only those that agree, and always
  // candidate 0. Returns the number that did not agree.
  int keep(size_t most, bool last) {
    std::vector<size_t> kept;
    int different = 0;
    for (const size_t i : field_) {
      if (kept.size() == most) break;
      if (last && i != 0 && !contest_.agrees(i)) {
        ++different;
        continue;
      }
      kept.push_back(i);
    }
    if (last && us_[0] >= 0 && std::find(kept.begin(), kept.end(), size_t{0}) == kept.end()) {
      kept.push_back(0);
    }
    field_ = std::move(kept);
    return different;
  }
  void rounds(const Stage& stage) {
    std::vector<std::vector<double>> times(us_.size());
    std::vector<size_t> order = field_;
    for (int round = 0; round < stage.rounds; ++round) {
      draws_.shuffle(order);
      for (const size_t i : order) {
        times[i].push_back(contest_.time(i, runs(i, stage.sequence, 3)));
      }
    }
    for (const size_t i : field_) {
      std::vector<double>& all = times[i];
      std::sort(all.begin(), all.end());
      us_[i] = all.front() < 0 ? -1 : all[static_cast<size_t>(stage.rounds) / 2];
    }
  }

  const Contest& contest_;
  Draws draws_;
  std::vector<double> us_;     // latest time of each candidate
  std::vector<size_t> field_;  // candidates that remain
};

}  // namespace

Winner select_fastest(size_t candidates, const Contest& contest) {
  Selection selection(candidates, contest);
  selection.look();
  return selection.winner();
}

}  // namespace te_fl::cuda
