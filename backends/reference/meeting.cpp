#include "meeting.hpp"

#include <algorithm>
#include <cstring>

#include "te_fl/backend.hpp"

namespace te_fl::reference {
namespace {

std::string join_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

// True if two ranks make the same call. Ranks of all_to_all_v may have different numbers of rows,
// which Collective::misfit checks.
bool same_call(const Brought& a, const Brought& b) {
  return a.op == b.op && a.dtype == b.dtype && a.reduction == b.reduction && a.root == b.root &&
         (a.elements == b.elements || a.op->misfit != nullptr);
}

// Returns a text such as "rank 0 has all_reduce of 8 f32 (sum), rank 1 has ...".
std::string brought_by_each(Ranks ranks) {
  constexpr size_t kMaxListed = 16;
  std::string text;
  for (size_t r = 0; r < std::min(ranks.size(), kMaxListed); ++r) {
    text += (r == 0 ? "rank " : ", rank ") + std::to_string(r) + " has " + describe(*ranks[r]);
  }
  if (ranks.size() > kMaxListed) text += ", and so on";
  return text;
}

}  // namespace

Meeting::Meeting(std::string name, int size, uint32_t timeout_ms)
    : name_(std::move(name)), size_(size), timeout_ms_(timeout_ms) {
  const auto ranks = static_cast<size_t>(size);
  presence_.assign(ranks, Presence::kAbsent);
  calls_.resize(ranks);
  sends_.resize(ranks * ranks);
  recvs_.resize(ranks * ranks);
}

// ---- joining and leaving

void Meeting::join(int rank, int size) {
  Lock lock(mutex_);
  throw_if_failed();
  if (size != size_) {
    backend::invalid("communicator '" + name_ + "' is of " + std::to_string(size_) +
                     " ranks for rank 0 and of " + std::to_string(size) + " for rank " +
                     std::to_string(rank));
  }
  Presence& mine = presence_[static_cast<size_t>(rank)];
  if (mine != Presence::kAbsent) {
    backend::invalid("rank " + std::to_string(rank) + " of communicator '" + name_ +
                     "' is there already; each rank makes it once");
  }
  mine = Presence::kHere;
  changed_.notify_all();
  const auto all_here = [&] {
    return std::none_of(presence_.begin(), presence_.end(),
                        [](Presence p) { return p == Presence::kAbsent; });
  };
  if (!wait_until(lock, [&] { return failed_ || all_here(); })) {
    std::vector<int> absent;
    for (int r = 0; r < size_; ++r) {
      if (presence_[static_cast<size_t>(r)] == Presence::kAbsent) absent.push_back(r);
    }
    fail(join_ranks(absent) + " of " + std::to_string(size_) + " did not make communicator '" +
             name_ + "' within " + std::to_string(timeout_ms_) + " ms",
         TE_FL_TIMEOUT);
  }
  if (!all_here()) throw_if_failed();
}

void Meeting::leave(int rank) {
  const Lock lock(mutex_);
  presence_[static_cast<size_t>(rank)] = Presence::kGone;
  look_for_leavers();
  changed_.notify_all();
}

void Meeting::abort(const std::string& why) {
  const Lock lock(mutex_);
  fail(why);
}

void Meeting::fail(std::string text, te_fl_status status) {
  if (!failed_) {
    status_ = status;
    failure_ = std::move(text);
    failed_ = true;
    for (std::vector<Queue>* queues : {&calls_, &sends_, &recvs_}) {
      for (Queue& queue : *queues) queue.clear();
    }
  }
  changed_.notify_all();
}

std::string Meeting::failure() const {
  if (!failed_) return "";
  const Lock lock(mutex_);
  return failure_;
}

void Meeting::throw_if_failed() const {
  if (failed_) throw backend::Error(status_, failure_);
}

// Fails a call that waits for a rank that has destroyed its communicator, because it can never
// complete.
void Meeting::look_for_leavers() {
  for (int gone = 0; gone < size_ && !failed_; ++gone) {
    const auto index = static_cast<size_t>(gone);
    if (presence_[index] != Presence::kGone) continue;
    const auto mismatch_text = [&](const Posted& call) {
      fail("rank " + std::to_string(gone) + " has destroyed communicator '" + name_ +
           "', and rank " + std::to_string(call.rank) + " waits for it in " +
           describe(call.brought));
    };
    for (const Queue& queue : calls_) {
      if (!queue.empty() && calls_[index].empty()) return mismatch_text(*queue.front());
    }
    for (int r = 0; r < size_; ++r) {
      if (!sends_[pair(r, gone)].empty()) return mismatch_text(*sends_[pair(r, gone)].front());
      if (!recvs_[pair(gone, r)].empty()) return mismatch_text(*recvs_[pair(gone, r)].front());
    }
  }
}

// ---- calls

void Meeting::post(Posted& call) {
  const Lock lock(mutex_);
  throw_if_failed();
  const int32_t peer = call.brought.peer;
  if (call.brought.op->way == Collective::Way::kAll) {
    calls_[static_cast<size_t>(call.rank)].push_back(&call);
    progress();
  } else if (call.brought.op->way == Collective::Way::kSend) {
    sends_[pair(call.rank, peer)].push_back(&call);
    transfer(pair(call.rank, peer));
  } else {
    recvs_[pair(peer, call.rank)].push_back(&call);
    transfer(pair(peer, call.rank));
  }
  look_for_leavers();
}

void Meeting::progress() {
  const auto complete = [&] {
    return std::none_of(calls_.begin(), calls_.end(), [](const Queue& q) { return q.empty(); });
  };
  while (!failed_ && complete()) meet();
}

void Meeting::meet() {
  std::vector<const Brought*> ranks;
  for (const Queue& queue : calls_) ranks.push_back(&queue.front()->brought);
  const bool agree = std::all_of(ranks.begin(), ranks.end(),
                                 [&](const Brought* b) { return same_call(*b, *ranks[0]); });
  std::string why;
  if (!agree)
    why = brought_by_each(ranks);
  else if (ranks[0]->op->misfit != nullptr)
    why = ranks[0]->op->misfit(ranks);
  if (!why.empty()) {
    return fail("the ranks of communicator '" + name_ + "' differ in call " +
                std::to_string(met_ + 1) + ": " + why);
  }
  if (ranks[0]->op->compute != nullptr) ranks[0]->op->compute(ranks);
  ++met_;
  for (Queue& queue : calls_) {
    queue.front()->done = true;
    queue.pop_front();
  }
  changed_.notify_all();
}

void Meeting::transfer(size_t pair) {
  Queue& sends = sends_[pair];
  Queue& recvs = recvs_[pair];
  while (!failed_ && !sends.empty() && !recvs.empty()) {
    Posted& from = *sends.front();
    Posted& to = *recvs.front();
    const Brought& a = from.brought;
    if (a.elements != to.brought.elements || a.dtype != to.brought.dtype) {
      return fail("rank " + std::to_string(from.rank) + " of communicator '" + name_ + "' calls " +
                  describe(a) + ", and rank " + std::to_string(to.rank) + " calls " +
                  describe(to.brought));
    }
    if (a.bytes != 0) std::memcpy(to.brought.out, a.in, static_cast<size_t>(a.bytes));
    from.done = to.done = true;
    sends.pop_front();
    recvs.pop_front();
    changed_.notify_all();
  }
}

// ---- waiting

// Waits until ready() is true. Returns false if the time-out expires first.
bool Meeting::wait_until(Lock& lock, const auto& ready) {
  if (timeout_ms_ != 0)
    return changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms_), ready);
  changed_.wait(lock, ready);
  return true;
}

void Meeting::wait(const Posted& call) {
  Lock lock(mutex_);
  if (!wait_until(lock, [&] { return call.done || failed_; })) fail(missing(call));
  if (!call.done) throw_if_failed();
}

std::string Meeting::missing(const Posted& call) const {
  const bool all = call.brought.op->way == Collective::Way::kAll;
  std::vector<int> came, absent;
  for (int r = 0; r < size_; ++r) {
    const bool needed = all || r == call.rank || r == call.brought.peer;
    const bool there = r == call.rank || (all && !calls_[static_cast<size_t>(r)].empty());
    if (needed) (there ? came : absent).push_back(r);
  }
  std::string text = join_ranks(absent) + " of communicator '" + name_ + "' did not reach " +
                     describe(call.brought);
  if (all) text += ", call " + std::to_string(met_ + 1) + ",";
  text += " within " + std::to_string(timeout_ms_) + " ms; " + join_ranks(came) + " did";
  for (const int r : absent) text += whereabouts(r);
  return text;
}

// Returns a text about the call in which a rank waits, such as "; rank 2 waits in recv of 4 f32
// from rank 0"; empty if it does not wait.
std::string Meeting::whereabouts(int rank) const {
  const auto waits = [&](const Queue& queue) {
    return queue.empty() || queue.front()->rank != rank
               ? std::string()
               : "; rank " + std::to_string(rank) + " waits in " + describe(queue.front()->brought);
  };
  std::string text = waits(calls_[static_cast<size_t>(rank)]);
  for (int r = 0; r < size_ && text.empty(); ++r) {
    text = waits(sends_[pair(rank, r)]) + waits(recvs_[pair(r, rank)]);
  }
  return text;
}

}  // namespace te_fl::reference
