#include "conformance/run.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <utility>

#include "conformance/call.hpp"
#include "conformance/compare.hpp"

namespace te_fl::conformance {
namespace {

// Moves the data of an unquantised compact input into rows with gaps, unless it shares memory with
// another tensor.
bool spread(Tensor& t, const std::vector<std::unique_ptr<Tensor>>& all) {
  const bool plain = t.role == Role::kIn && !t.spec.quantised() && t.strides.empty() &&
                     t.offset == 0 && t.shape.size() >= 2 && storage_bits(t.spec.dtype) >= 8;
  if (!plain || t.numel() == 0 || t.rows() < 2) return false;
  for (const auto& other : all)
    if (other.get() != &t && other->data == t.data) return false;
  const std::vector<double> values = t.values();
  const int64_t pitch = t.cols() + 3;
  t.strides.assign(t.shape.size(), 1);
  for (size_t d = t.shape.size() - 1; d-- > 0;)
    t.strides[d] = d + 2 == t.shape.size() ? pitch : t.strides[d + 1] * t.shape[d + 1];
  t.data = std::make_shared<Buffer>(bytes_for(t.spec.dtype, t.rows() * pitch), 0xff);
  for (int64_t i = 0; i < t.numel(); ++i) t.put(i, values[i]);
  t.data->freeze();
  t.bind();
  return true;
}

// Returns the result with the first failure, in the order of ranks. Failures that result from
// another rank's failure come last.
Result worst_result(std::vector<Result> results) {
  const auto name = [&](size_t r) {
    results[r].message = "rank " + std::to_string(r) + ": " + results[r].message;
    return std::move(results[r]);
  };
  for (const bool consequences : {false, true}) {
    for (size_t r = 0; r < results.size(); ++r) {
      const bool consequence = results[r].message.find("COMM_FAILED") != std::string::npos;
      if (results[r].outcome != Outcome::kPass && consequence == consequences) return name(r);
    }
  }
  return std::move(results.front());
}

// A hash of the output's bits for all_reduce, which guarantees equal bits on all ranks; 0 for other
// ops.
uint32_t output_bits(const Problem& rank) {
  if (rank.op_name != "all_reduce" || rank.want_code != 0) return 0;
  const Buffer& own = *rank.singles.at("output")->data;
  uint32_t hash = 2166136261u;  // offset basis of FNV-1a
  for (size_t i = 0; i < own.size(); ++i) hash = (hash ^ own.data()[i]) * 16777619u;
  return hash;
}

// Names the first rank whose bits differ from rank 0's; empty if there is none.
std::string other_bits(const std::vector<std::unique_ptr<Problem>>& ranks) {
  for (size_t r = 1; r < ranks.size(); ++r) {
    if (output_bits(*ranks[r]) != output_bits(*ranks[0]))
      return "rank " + std::to_string(r) + " has other bits than rank 0";
  }
  return {};
}

// Adds a failure of the communicator to the result: a call that began before the failure may return
// OK although its output is unwritten.
void note_failure(const Comm& comm, Result& result) {
  const Status status = comm.status();
  if (!status.ok()) result = {Outcome::kFail, status.to_string(), result.milliseconds};
}

// The outcome if a communicator cannot be made: a missing provider or too few devices is not a
// failure of the implementation.
Outcome refusal(const Status& status) {
  const bool cannot =
      status.code() == StatusCode::kUnsupported || status.code() == StatusCode::kNotFound;
  return cannot ? Outcome::kUnsupported : Outcome::kFail;
}

}  // namespace

Prepared::Prepared(const Case& c, Device device, bool strided, Processes* processes)
    : device_(device), ranks_(c.ranks), processes_(processes) {
  for (int r = 0; r < std::max(1, ranks_); ++r) build(c, r, strided);
}

void Prepared::build(const Case& c, int rank, bool strided) {
  problems_.push_back(std::make_unique<Problem>(c.op, c.seed));
  Problem& p = *problems_.back();
  p.rank = rank, p.ranks = c.ranks;
  c.build(p);
  for (const auto& t : p.tensors)
    if (strided && spread(*t, p.tensors)) has_strided_inputs_ = true;
  p.evaluate();
  std::set<const Tensor*> expected;
  for (const Expectation& e : p.expectations) expected.insert(e.tensor);
  for (const auto& t : p.tensors)
    if (t->role != Role::kIn && expected.count(t.get()) == 0 && p.want_code == 0) {
      // An input in the memory of an in-place output needs no expectation of its own.
      bool shared = false;
      for (const Tensor* e : expected) shared = shared || e->data == t->data;
      if (!shared) throw std::logic_error(c.name + ": nothing is expected of " + t->name);
    }
}

void Prepared::restore() {
  for (const auto& p : problems_)
    for (const auto& t : p->tensors)
      for (Buffer* b : t->buffers()) b->restore();
}

std::vector<uint8_t> Prepared::bytes() const {
  std::vector<uint8_t> all;
  for (const auto& p : problems_)
    for (const auto& t : p->tensors)
      for (const Buffer* b : t->buffers()) all.insert(all.end(), b->data(), b->data() + b->size());
  return all;
}

Result Prepared::run(const std::string& impl_id, const How& how) {
  restore();
  if (ranks_ == 0) return run_one(problem(), device_, impl_id, how);
  return processes_ == nullptr ? run_ranks(impl_id, how) : run_processes(impl_id, how);
}

Result Prepared::run_ranks(const std::string& impl_id, const How& how) {
  auto made = communicators_.find(impl_id);
  if (made != communicators_.end() && !made->second.status().ok()) {
    communicators_.erase(made), made = communicators_.end();
  }
  if (made == communicators_.end()) {
    te_fl::Result<Ranks> ranks = Ranks::create(problem().op_name, impl_id, device_, ranks_);
    if (!ranks.ok()) {
      const bool lacks = ranks.status().code() == StatusCode::kUnsupported;
      return {lacks ? Outcome::kUnsupported : Outcome::kFail, ranks.status().to_string(), 0};
    }
    made = communicators_.emplace(impl_id, std::move(*ranks)).first;
  }
  std::vector<Result> results(problems_.size());
  made->second.run([&](int r) {
    Problem& p = *problems_[static_cast<size_t>(r)];
    Result& result = results[static_cast<size_t>(r)];
    p.comm = made->second[r].c();
    if (p.op_name.empty())
      result.outcome = Outcome::kPass;
    else
      result = run_one(p, rank_device(device_, r), impl_id, how);
    note_failure(made->second[r], result);
    // Other ranks may be waiting for the call that was refused.
    if (result.outcome != Outcome::kPass) made->second[r].abort("its case did not pass");
  });
  Result result = worst_result(std::move(results));
  if (result.outcome != Outcome::kPass || how.describe) return result;
  result.message = other_bits(problems_);
  if (!result.message.empty()) result.outcome = Outcome::kFail;
  return result;
}

// Makes the call of this process's rank with its communicator.
Result Prepared::run_own_rank(const std::string& impl_id, const How& how) {
  const int rank = processes_->rank();
  std::map<std::string, Comm>& kept = processes_->communicators();
  const std::string key = impl_id + "/" + std::to_string(ranks_);
  auto made = kept.find(key);
  if (made == kept.end()) {
    te_fl::Result<CommOptions> options =
        comm_options(problem().op_name, impl_id, device_, rank, ranks_);
    if (!options.ok()) return {refusal(options.status()), options.status().to_string(), 0};
    options->store = processes_->store();
    options->name += "-" + std::to_string(processes_->count());
    te_fl::Result<Comm> comm = Comm::create(*options);
    if (!comm.ok()) return {refusal(comm.status()), comm.status().to_string(), 0};
    made = kept.emplace(key, std::move(*comm)).first;
  }
  Problem& p = *problems_[static_cast<size_t>(rank)];
  p.comm = made->second.c();
  if (p.op_name.empty()) return {Outcome::kPass, {}, 0};
  Result result = run_one(p, rank_device(device_, rank), impl_id, how);
  note_failure(made->second, result);
  if (result.outcome != Outcome::kPass) made->second.abort("its case did not pass");
  return result;
}

Result Prepared::run_processes(const std::string& impl_id, const How& how) {
  if (ranks_ > processes_->size()) {
    return {Outcome::kUnsupported,
            "a case of " + std::to_string(ranks_) + " ranks, and the job has " +
                std::to_string(processes_->size()) + " processes",
            0};
  }
  const auto rank = static_cast<size_t>(processes_->rank());
  const bool takes_part = processes_->rank() < ranks_;
  nlohmann::json own;
  if (takes_part) {
    const Result result = run_own_rank(impl_id, how);
    own = {{"outcome", result.outcome},
           {"message", result.message},
           {"milliseconds", result.milliseconds},
           {"outside", result.wrote_outside}};
    if (result.outcome == Outcome::kPass) own["bits"] = output_bits(*problems_[rank]);
  }
  const auto gathered =
      processes_->exchange(own.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  if (!gathered.ok()) {
    throw std::runtime_error("the processes lost each other: " + gathered.status().to_string());
  }
  std::vector<Result> results;
  std::string message;
  nlohmann::json first;
  for (int r = 0; r < ranks_; ++r) {
    const nlohmann::json its = nlohmann::json::parse((*gathered)[static_cast<size_t>(r)]);
    if (r == 0) first = its;
    results.push_back({its.at("outcome").get<Outcome>(), its.at("message"), its.at("milliseconds"),
                       its.at("outside")});
    if (message.empty() && its.value("bits", 0u) != first.value("bits", 0u))
      message = "rank " + std::to_string(r) + " has other bits than rank 0";
  }
  Result result = worst_result(std::move(results));
  if (result.outcome == Outcome::kPass && !message.empty()) {
    result = {Outcome::kFail, message, 0};
  }
  // Some ranks' communicators have failed, so all ranks make new ones for the next case.
  if (result.outcome != Outcome::kPass)
    processes_->communicators().erase(impl_id + "/" + std::to_string(ranks_));
  return result;
}

std::string Prepared::self_check(const std::string& impl_id) {
  for (size_t i = 0; i < problem().expectations.size(); ++i) {
    if (run(impl_id).outcome != Outcome::kPass) return "a second run differs from the first";
    Expectation changed = problem().expectations[i];
    if (mutate(changed) && compare(changed).empty())
      return changed.tensor->name + ": a wrong expectation was not detected";
    const Expectation& e = problem().expectations[i];
    // For a fused result near a rounding boundary two adjacent codes are correct, so some
    // corruptions pass; most must be detected.
    double noticed = 0;
    const double wanted = e.kind == Expectation::Kind::kExactQuantised ? 1 : 0.5;
    if (e.kind != Expectation::Kind::kUnchanged && corrupt_codes(e, noticed) && noticed < wanted)
      return e.tensor->name + ": " + std::to_string(noticed) + " of the wrong codes were detected";
    const bool skipped = !e.skip.empty() && std::all_of(e.skip.begin(), e.skip.end(),
                                                        [](uint8_t s) { return s != 0; });
    const bool writes = e.kind != Expectation::Kind::kUnchanged && e.tensor->role == Role::kOut &&
                        e.tensor->numel() > 0 && !skipped;
    restore();
    // A single byte of mask bits may equal the poison by chance.
    if (e.kind == Expectation::Kind::kCustom && e.tensor->numel() == 1) continue;
    if (writes && compare(e).empty())
      return e.tensor->name + ": an output that was never written was not detected";
  }
  for (const auto& t : problem().tensors) {
    restore();
    if (t->buffers().empty()) continue;
    t->buffers()[0]->data()[t->buffers()[0]->size()] ^= 1;
    if (check_memory(problem(), false).empty())
      return t->name + ": a write past its memory was not detected";
    restore();
    const Buffer* b = t->buffers()[0];
    if (t->role != Role::kIn || b->size() == 0) continue;
    t->buffers()[0]->data()[0] ^= 1;
    bool shared = false;  // an adjacent or in-place tensor may be written
    for (const auto& other : problem().tensors)
      shared = shared || (other->role != Role::kIn && other->data == t->data);
    if (!shared && check_memory(problem(), false).empty())
      return t->name + ": a write to an input was not detected";
  }
  restore();
  return {};
}

}  // namespace te_fl::conformance
