// te-fl bench: times an op and compares its time with the limits of the device.
#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "cases.hpp"
#include "commands.hpp"
#include "conformance/check/output.hpp"
#include "measure.hpp"

namespace te_fl_tool {
namespace {

using nlohmann::json;
using te_fl::Device;
using te_fl::Result;
using te_fl::Status;
using te_fl::bench::CaseSpec;
using te_fl::bench::Shape;

std::string fixed(double value, int digits) {
  char text[40];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

// Returns the requested implementations: their ids, or one empty string for the dispatcher's
// choice. "all" gives those that support the device.
Result<std::vector<std::string>> list_implementations(const BenchOptions& options,
                                                      const Device& device) {
  if (options.impls.empty()) return std::vector<std::string>{""};
  std::vector<std::string> known, there;
  for (const auto& impl : te_fl::OpManager::instance().registry().snapshot()) {
    if (impl.op != options.op) continue;
    known.push_back(impl.impl_id);
    const int32_t type = device.is_host() ? int32_t{TE_FL_DEVICE_CPU} : device.type;
    const bool ours = type != TE_FL_DEVICE_EXT || impl.desc.provider == nullptr ||
                      te_fl::devices::intern_provider(impl.desc.provider) == device.provider;
    if (ours && (impl.desc.device_types >> type & 1) != 0) there.push_back(impl.impl_id);
  }
  if (options.impls.size() == 1 && options.impls[0] == "all" && !there.empty()) return there;
  for (const std::string& id : options.impls) {
    if (std::find(known.begin(), known.end(), id) != known.end()) continue;
    std::string all;
    for (const std::string& k : known) all += (all.empty() ? "" : ", ") + k;
    return te_fl::not_found("--impl " + id + ": " + options.op + " has " +
                            (all.empty() ? "no implementation" : all) + ", or all");
  }
  return options.impls;
}

te_fl::PolicySettings pinned(const std::string& op, const std::string& impl) {
  using te_fl::PolicyToken;
  te_fl::PolicySettings settings;
  settings.strict = true;
  settings.per_op[op] = {PolicyToken{PolicyToken::Type::kImpl, te_fl::Kind::kDefault, impl}};
  return settings;
}

// Peak operations per second for one kind of matrix product, measured once on the device or given
// by the user.
struct Peak {
  double flops = 0;
  std::string from;
};

struct Row {
  const CaseSpec* spec = nullptr;
  Shape extents;
  std::string impl;
  Status status;
  Timing timing;
  int64_t bytes = 0;
  double flops = 0;
  size_t sets = 0;
  bool cold = false;
  Peak peak;
  bool verified = false;  // true if the results were compared with the reference's and agree

  // Lower bounds on the time: the time to move the bytes and the time of the arithmetic.
  double bytes_floor() const { return static_cast<double>(bytes) / timing.copy_bandwidth; }
  double flops_floor() const { return peak.flops > 0 ? flops / peak.flops : 0; }
  double floor() const { return std::max(bytes_floor(), flops_floor()); }
  bool enqueue_bound(const Device& device) const {
    const bool plain = !device.is_host() && timing.in_graph == 0;
    return plain && timing.host_seconds > 0.9 * timing.seconds;
  }
};

class Bench {
 public:
  Bench(const BenchOptions& options, Device device) : options_(options), device_(device) {}
  Status start() {
    TE_FL_ASSIGN_OR_RETURN(copy_, CopyMeter::make(device_));
    TE_FL_ASSIGN_OR_RETURN(const te_fl_device_props props, te_fl::devices::properties(device_));
    name_ = props.name;
    return {};
  }
  Row run(const CaseSpec& spec, const Shape& extents, const std::string& impl);
  const Device& device() const { return device_; }
  const std::string& name() const { return name_; }

 private:
  Status measure(Row& row);
  Result<bool> verify(const CaseSpec& spec, Shape extents) const;
  Result<Peak> find_peak(const CaseSpec& spec);

  const BenchOptions& options_;
  Device device_;
  std::string name_;
  std::unique_ptr<CopyMeter> copy_;
  std::map<std::string, Peak> peaks_;
};

// Measures a large square product of the same dtypes with the dispatcher's choice of
// implementation.
Result<Peak> Bench::find_peak(const CaseSpec& spec) {
  if (options_.peak > 0) return Peak{options_.peak * 1e12, "stated with --peak"};
  const std::string dtype = split_words(spec.variant).front();
  if (const auto known = peaks_.find(dtype); known != peaks_.end()) return known->second;
  for (const CaseSpec& product : te_fl::bench::all_cases()) {
    if (product.op != "generic_gemm" || split_words(product.variant).front() != dtype) continue;
    const int64_t n = device_.is_host() ? 2048 : 8192;
    std::vector<std::unique_ptr<PlacedCase>> one(1);
    TE_FL_ASSIGN_OR_RETURN(one[0], PlacedCase::make(product, {n, n, n}, device_));
    TE_FL_ASSIGN_OR_RETURN(const Timing timing, time_calls(device_, one, 0.3, nullptr));
    return peaks_[dtype] = {
               one[0]->work().flops / timing.seconds,
               "generic_gemm " + product.variant + " " + shape_text({n, n, n}) + ", measured here"};
  }
  return Peak{};
}

// Verifies one call as TE_FL_VERIFY does. False: the call could not be compared. DATA_LOSS: the
// results differ.
Result<bool> Bench::verify(const CaseSpec& spec, Shape extents) const {
  constexpr double kMost = 4e9;  // number of operations for which the reference needs a few seconds
  for (size_t i = 0; i < extents.size(); ++i) extents[i] = std::min(extents[i], spec.extents[i]);
  TE_FL_ASSIGN_OR_RETURN(auto one, PlacedCase::make(spec, extents, device_));
  while (one->work().flops > kMost && !spec.axes.empty() && extents[0] >= 64) {
    extents[0] /= 2;
    TE_FL_ASSIGN_OR_RETURN(one, PlacedCase::make(spec, extents, device_));
  }
  if (one->work().flops > kMost) return false;
  TE_FL_RETURN_IF_ERROR(one->poison());
  const std::pair<const char*, std::string> settings[] = {{"TE_FL_VERIFY", "1:" + spec.op},
                                                          {"TE_FL_VERIFY_ACTION", "quarantine"},
                                                          {"TE_FL_VERIFY_DIR", ""},
                                                          {"TE_FL_QUARANTINE_FILE", ""}};
  for (const auto& [name, value] : settings)
    TE_FL_RETURN_IF_ERROR(te_fl::environment::set(name, value));
  const auto before = te_fl::verify_counts();
  const Status called = one->call();
  const auto after = te_fl::verify_counts();
  TE_FL_RETURN_IF_ERROR(te_fl::environment::unset("TE_FL_VERIFY"));
  TE_FL_RETURN_IF_ERROR(called);
  if (after.differed == before.differed) return after.agreed > before.agreed;
  TE_FL_RETURN_IF_ERROR(te_fl::step_boundary());
  std::string reason = "its results differ from the reference's";
  if (const auto held = te_fl::quarantines(); held.ok() && !held->empty())
    reason = held->back().reason;
  return Status(te_fl::StatusCode::kDataLoss, "extents " + shape_text(extents) + ": " + reason);
}

Status Bench::measure(Row& row) {
  const CaseSpec& spec = *row.spec;
  if (options_.verify) {
    TE_FL_ASSIGN_OR_RETURN(row.verified, verify(spec, row.extents));
  }
  std::vector<std::unique_ptr<PlacedCase>> sets;
  TE_FL_ASSIGN_OR_RETURN(auto first, PlacedCase::make(spec, row.extents, device_));
  row.bytes = first->work().bytes;
  row.flops = first->work().flops;
  const int64_t each = std::max<int64_t>(first->work().memory, 1), cold = cold_bytes(device_);
  sets.push_back(std::move(first));
  const size_t wanted = static_cast<size_t>(std::clamp<int64_t>((cold + each - 1) / each, 1, 256));
  // Makes one call first, so that an unsupported case fails before the other sets of tensors are
  // allocated.
  TE_FL_RETURN_IF_ERROR(sets[0]->call());
  for (const auto& u : te_fl::OpManager::instance().usage()) {
    if (u.op == spec.op) row.impl = u.impl_id;
  }
  while (sets.size() < wanted) {
    TE_FL_ASSIGN_OR_RETURN(auto next, PlacedCase::make(spec, row.extents, device_));
    sets.push_back(std::move(next));
  }
  row.sets = sets.size();
  row.cold = static_cast<int64_t>(sets.size()) * each >= cold;
  TE_FL_ASSIGN_OR_RETURN(row.timing, time_calls(device_, sets, options_.seconds, copy_.get()));
  return {};
}

Row Bench::run(const CaseSpec& spec, const Shape& extents, const std::string& impl) {
  Row row;
  row.spec = &spec;
  row.extents = extents;
  row.impl = impl;
  te_fl::OpManager::instance().reset_usage();
  std::optional<te_fl::PolicyScope> scope;
  if (!impl.empty()) scope.emplace(pinned(spec.op, impl));
  row.status = measure(row);
  scope.reset();
  if (!row.status.ok() || row.flops == 0) return row;
  if (auto peak = find_peak(spec); peak.ok()) {
    row.peak = *peak;
  } else {
    row.peak.from = "not known: " + peak.status().message();
  }
  return row;
}

json to_json(const Row& r, const Bench& bench) {
  json out = {{"op", r.spec->op},
              {"case", r.spec->variant},
              {"axes", r.spec->axes},
              {"extents", r.extents},
              {"device", te_fl::to_string(bench.device())},
              {"device_name", bench.name()},
              {"impl", r.impl}};
  if (!r.status.ok()) {
    const bool differs = r.status.code() == te_fl::StatusCode::kDataLoss;
    out[differs ? "differs" : "refused"] = differs ? r.status.message() : r.status.to_string();
    return out;
  }
  const Timing& t = r.timing;
  out.update({{"time_us", t.seconds * 1e6},
              {"spread", t.spread},
              {"host_us", t.host_seconds * 1e6},
              {"samples", t.samples},
              {"calls_per_sample", t.calls},
              {"timing", t.in_graph > 0 ? "launches of a graph of " + std::to_string(t.in_graph) +
                                              " calls between two synchronisations"
                                        : "calls between two synchronisations"},
              {"tensor_sets", r.sets},
              {"in_cache", !r.cold},
              {"bytes", r.bytes},
              {"operations", r.flops},
              {"GB_per_s", static_cast<double>(r.bytes) / t.seconds / 1e9},
              {"copy_GB_per_s", t.copy_bandwidth / 1e9},
              {"floor_us", r.floor() * 1e6},
              {"times_floor", t.seconds / r.floor()},
              {"floor_is", r.flops_floor() > r.bytes_floor() ? "operations" : "bytes"},
              {"enqueue_bound", r.enqueue_bound(bench.device())},
              {"verified", r.verified}});
  if (r.flops > 0) {
    out["TFLOP_per_s"] = r.flops / t.seconds / 1e12;
    out["peak_TFLOP_per_s"] = r.peak.flops / 1e12;
    out["peak_from"] = r.peak.from;
  }
  return out;
}

void print(const std::vector<Row>& rows, const Bench& bench) {
  const bool host = bench.device().is_host();
  std::printf("%s on %s (%s)\n\n", paint(Color::kBold, rows[0].spec->op).c_str(),
              te_fl::to_string(bench.device()).c_str(), bench.name().c_str());
  Table table({"case", "extents", "by", "us", "spread", "enqueue us", "MB", "GB/s", "copy GB/s",
               "TFLOP/s", "floor us", "x floor", "timed"});
  for (const Row& r : rows) {
    if (!r.status.ok()) continue;
    const Timing& t = r.timing;
    table.add({r.spec->variant, shape_text(r.extents), r.impl, fixed(t.seconds * 1e6, 1),
               fixed(100 * t.spread, 1) + "%", host ? "-" : fixed(t.host_seconds * 1e6, 1),
               fixed(static_cast<double>(r.bytes) / 1e6, 2),
               fixed(static_cast<double>(r.bytes) / t.seconds / 1e9, 1),
               fixed(t.copy_bandwidth / 1e9, 1),
               r.flops > 0 ? fixed(r.flops / t.seconds / 1e12, 2) : "-",
               fixed(r.floor() * 1e6, 1) + (r.flops_floor() > r.bytes_floor() ? " ops" : " bytes"),
               fixed(t.seconds / r.floor(), 2),
               t.in_graph > 0 ? "graphs of " + std::to_string(t.in_graph) : "calls"});
  }
  table.print();
  std::printf("\nA sample is many calls between two synchronisations%s.\n",
              host ? "" : ", enqueued one by one or as graphs");
  for (const Row& r : rows) {
    const std::string who = "\n" + r.spec->variant + (r.impl.empty() ? "" : " by " + r.impl) + ": ";
    if (!r.status.ok()) {
      std::printf("%snot measured: %s\n", who.c_str(), r.status.to_string().c_str());
      continue;
    }
    if (r.flops > 0) {
      std::printf("%speak %s TFLOP/s (%s)\n", who.c_str(), fixed(r.peak.flops / 1e12, 2).c_str(),
                  r.peak.from.c_str());
    }
    if (!r.cold) {
      std::printf(
          "%sthe calls' tensors may stay in caches (%zu sets of them); a larger --shape "
          "measures memory\n",
          who.c_str(), r.sets);
    }
    if (r.enqueue_bound(bench.device())) {
      std::printf("%sthe host's enqueueing takes the time; the device waits between calls\n",
                  who.c_str());
    }
  }
}

int list_cases(const std::vector<const CaseSpec*>& cases, bool as_json) {
  if (as_json) {
    json out = json::array();
    for (const CaseSpec* const one : cases) {
      const CaseSpec& spec = *one;
      json entry = {{"op", spec.op}, {"case", spec.variant}, {"axes", spec.axes}};
      if (!spec.axes.empty()) {
        entry["extents_on_host"] = spec.extents;
        entry["extents_on_accelerator"] = spec.large;
      }
      out.push_back(std::move(entry));
    }
    std::printf("%s\n", json_text(out).c_str());
    return kSuccess;
  }
  Table table({"op", "case", "extents", "on the host", "on an accelerator"});
  for (const CaseSpec* const one : cases) {
    const CaseSpec& spec = *one;
    const bool sized = !spec.axes.empty();
    table.add({spec.op, spec.variant, sized ? spec.axes : "fixed",
               sized ? shape_text(spec.extents) : "-", sized ? shape_text(spec.large) : "-"});
  }
  table.print();
  return kSuccess;
}

int usage_problem(const Status& status) {
  complain(status.message());
  return kUsage;
}

}  // namespace

int bench(const BenchOptions& options) {
  if (options.list && options.op.empty()) {
    std::vector<const CaseSpec*> all;
    for (const CaseSpec& spec : te_fl::bench::all_cases()) all.push_back(&spec);
    return list_cases(all, options.json);
  }
  if (options.op.empty()) {
    return usage_problem(
        te_fl::invalid_argument("bench needs the name of an op; --list shows all"));
  }
  te_fl::OpManager::instance();
  const auto cases = find_cases(options.op, options.dtype, options.variant);
  if (!cases.ok()) return usage_problem(cases.status());
  if (options.list) return list_cases(*cases, options.json);
  const auto device = te_fl::parse_device(options.device);
  if (!device.ok()) return usage_problem(device.status());
  // loads the device's plugin, whose implementations the next line lists
  (void)te_fl::devices::find(*device);
  const auto impls = list_implementations(options, *device);
  if (!impls.ok()) return usage_problem(impls.status());
  std::vector<std::pair<const CaseSpec*, Shape>> work;
  for (const CaseSpec* spec : *cases) {
    const auto extents = parse_extents(*spec, options.shape, *device);
    if (!extents.ok()) return usage_problem(extents.status());
    work.emplace_back(spec, *extents);
  }
  Bench bench(options, *device);
  if (const Status status = bench.start(); !status.ok()) {
    complain(status.to_string());
    return kProblem;
  }
  std::vector<Row> rows;
  bool measured = false, differs = false;
  for (const auto& [spec, extents] : work) {
    for (const std::string& impl : *impls) {
      rows.push_back(bench.run(*spec, extents, impl));
      measured = measured || rows.back().status.ok();
      differs = differs || rows.back().status.code() == te_fl::StatusCode::kDataLoss;
    }
  }
  if (options.json) {
    json out = json::array();
    for (const Row& row : rows) out.push_back(to_json(row, bench));
    std::printf("%s\n", json_text(out).c_str());
  } else {
    print(rows, bench);
  }
  if (differs) return kProblem;
  return measured ? kSuccess : kNoCandidate;
}

}  // namespace te_fl_tool
