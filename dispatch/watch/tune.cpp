// Measures the implementations that could run the calls of a recorded run.
#include "dispatch/watch/tune.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/base/file.hpp"
#include "dispatch/watch/call_file.hpp"
#include "dispatch/watch/quarantine.hpp"
#include "policy/select.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/tensor.hpp"
#include "te_fl/watch.hpp"

namespace te_fl {
namespace dispatch {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

// A call of a recorded run, and the number of times that the run made it.
struct Recorded {
  std::unique_ptr<FiledCall> call;
  uint64_t count = 1;
};

Result<std::vector<Recorded>> read_calls(const std::string& path) try {
  TE_FL_RETURN_IF_ERROR(core::check_regular(path));
  std::vector<Recorded> out;
  std::ifstream in(path, std::ios::binary);
  if (in.peek() != '{') {
    TE_FL_ASSIGN_OR_RETURN(std::unique_ptr<FiledCall> call, FiledCall::read(path));
    out.push_back({std::move(call), 1});
    return out;
  }
  const json trace = json::parse(in, nullptr, false);
  if (!trace.is_object() || !trace.contains("te_fl_calls") || !trace["te_fl_calls"].is_array() ||
      !trace.contains("traceEvents") || !trace["traceEvents"].is_array()) {
    return invalid_argument(path + " is neither a trace of TE_FL_TRACE nor a saved call");
  }
  std::map<size_t, uint64_t> counts;
  for (const json& event : trace["traceEvents"]) {
    // Skips the tracks of streams, which have even pids: they repeat the events of the threads'
    // tracks.
    if (!event.is_object() || event.value("ph", "") != "X" || event.value("pid", 0) % 2 != 1)
      continue;
    const json& args = event.value("args", json::object());
    if (args.contains("call") && args["call"].is_number_unsigned())
      ++counts[args["call"].get<size_t>()];
  }
  for (const auto& [number, count] : counts) {
    if (number >= trace["te_fl_calls"].size()) continue;
    const json& description = trace["te_fl_calls"][number];
    if (!description.contains("args")) continue;  // a query or a collective
    TE_FL_ASSIGN_OR_RETURN(std::unique_ptr<FiledCall> call,
                           FiledCall::make(description, path + ", call " + std::to_string(number)));
    out.push_back({std::move(call), count});
  }
  return out;
} catch (const json::exception& e) {  // JSON with another structure
  return invalid_argument(path + " is no trace of TE_FL_TRACE: " + e.what());
}

// The time of one call in seconds: the median over samples between two synchronisations.
Result<double> time_call(OpManager& manager, OpId op, const void* args, const CallOptions& options,
                         const Device& device, double seconds) {
  const auto run = [&](int calls) -> Result<double> {
    const auto start = Clock::now();
    for (int i = 0; i < calls; ++i) TE_FL_RETURN_IF_ERROR(manager.call(op, args, options));
    TE_FL_RETURN_IF_ERROR(devices::synchronize(device));
    return std::chrono::duration<double>(Clock::now() - start).count() / calls;
  };
  TE_FL_RETURN_IF_ERROR(run(1).status());  // makes plans and scratch
  TE_FL_ASSIGN_OR_RETURN(const double once, run(1));
  constexpr int kSamples = 7;
  const double wanted = seconds / kSamples / std::max(once, 1e-9);
  const int calls = static_cast<int>(std::clamp(wanted, 1.0, 1e6));
  std::vector<double> samples;
  const auto start = Clock::now();
  for (int i = 0; i < kSamples; ++i) {
    TE_FL_ASSIGN_OR_RETURN(const double each, run(calls));
    samples.push_back(each);
    const double spent = std::chrono::duration<double>(Clock::now() - start).count();
    if (samples.size() >= 3 && spent > 2 * seconds) break;
  }
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

PolicySettings only(const std::string& op, const std::string& impl_id, bool deterministic) {
  PolicySettings settings;
  settings.deterministic = deterministic;
  settings.per_op[op] = {PolicyToken{PolicyToken::Type::kImpl, Kind::kDefault, impl_id}};
  return settings;
}

// Measures every implementation that accepts the call. Adds the times to the row of its signature
// and size.
Status time_recorded(Recorded& recorded, double seconds, std::vector<TunedSignature>& rows) {
  FiledCall& call = *recorded.call;
  OpManager& manager = OpManager::instance();
  TE_FL_ASSIGN_OR_RETURN(const OpId op, manager.registry().find(call.op()));
  const Device device = call.device();
  TE_FL_RETURN_IF_ERROR(devices::find(device).status().wrap(
      "op '" + call.op() + "' was recorded on " + to_string(device)));
  CopyBuffer host = call.made_up();
  if (host.data() == nullptr)
    return Status(StatusCode::kOutOfMemory, "no memory for a call of op '" + call.op() + "'");
  Tensor memory;
  char* base = host.data();
  if (!device.is_host()) {
    TE_FL_ASSIGN_OR_RETURN(memory,
                           Tensor::empty({static_cast<int64_t>(call.bytes())}, DType::kU8, device));
    base = memory.data<char>();
    TE_FL_RETURN_IF_ERROR(
        devices::copy(device, base, Device{}, host.data(), call.bytes(), nullptr));
    TE_FL_RETURN_IF_ERROR(devices::synchronize(device));
  }
  const void* args = call.bind(base, device, host.data());
  CallOptions options;
  options.rng = call.rng();
  TE_FL_ASSIGN_OR_RETURN(const auto compiled,
                         core::CompiledOp::compile(*manager.registry().schema(op)));
  core::Signature signature;
  if (!compiled->check(args, signature)) return compiled->check_status(args);
  TunedSignature key;
  key.list.op = call.op();
  key.list.device = policy::device_type_name(device);
  key.list.dtypes = signature.dtypes;
  key.list.scalings = signature.scalings;
  set_size_class(key.list, compiled->element_bytes(args));
  auto row = std::find_if(rows.begin(), rows.end(), [&](const TunedSignature& r) {
    return r.list.same_signature(key.list) && r.list.min_bytes == key.list.min_bytes;
  });
  if (row == rows.end()) row = rows.insert(rows.end(), std::move(key));
  ++row->calls;
  row->count += recorded.count;
  // The policy in force decides what dispatch takes and may take.
  TE_FL_ASSIGN_OR_RETURN(const SelectionPolicy policy, current_policy());
  PolicySettings any = policy.settings();
  any.deterministic = any.deterministic || call.deterministic();
  std::vector<Candidate> candidates;
  {
    const PolicyScope scope(any);
    TE_FL_ASSIGN_OR_RETURN(const te_fl::Decision r, manager.resolve(op, args, options));
    candidates = r.candidates;
  }
  std::optional<double> usual;  // time of the implementation that dispatch chooses
  for (const Candidate& c : candidates) {
    if (!c.accepted || c.staged) continue;
    const PolicyScope scope(only(call.op(), c.impl_id, call.deterministic()));
    const Result<double> each = time_call(manager, op, args, options, device, seconds);
    if (!each.ok()) continue;  // its run() refuses: unsuitable for this signature
    auto timed = std::find_if(row->times.begin(), row->times.end(),
                              [&](const auto& t) { return t.impl_id == c.impl_id; });
    if (timed == row->times.end()) timed = row->times.insert(timed, TunedTime{c.impl_id, 0, 0});
    const double all = *each * static_cast<double>(recorded.count);
    timed->seconds += all;
    ++timed->calls;
    if (c.chosen) usual = all;
  }
  // The row has a usual time only if the usual time of each of its calls is known.
  const bool first = row->calls == 1, known = usual && (first || row->usual_seconds > 0);
  row->usual_seconds = known ? row->usual_seconds + *usual : 0;
  return {};
}

constexpr double kNoise = 0.05, kLeast = 100e-9;  // a fraction; seconds per call

}  // namespace

bool worth_pinning(const TunedSignature& row) {
  if (row.times.empty()) return false;
  if (row.usual_seconds <= 0) return true;
  const double gained = row.usual_seconds - row.times[0].seconds;
  return row.times[0].calls == row.calls && gained > kNoise * row.usual_seconds &&
         gained > kLeast * static_cast<double>(row.count);
}

void set_size_class(SignatureList& list, uint64_t bytes) {
  const int size_class = std::bit_width(bytes) / 3, first = 3 * size_class;
  list.min_bytes = first == 0 ? 0 : uint64_t{1} << (first - 1);
  list.max_bytes = first + 2 > 63 ? UINT64_MAX : (uint64_t{1} << (first + 2)) - 1;
}

}  // namespace dispatch

Result<std::vector<TunedSignature>> tune(const std::vector<std::string>& files, double seconds,
                                         std::vector<std::string>* left_out) {
  using namespace dispatch;
  OpManager::instance();  // loads the built-in backends and the plugins
  std::vector<TunedSignature> rows;
  for (const std::string& file : files) {
    TE_FL_ASSIGN_OR_RETURN(std::vector<Recorded> calls, read_calls(file));
    for (Recorded& recorded : calls) {
      const Status status = time_recorded(recorded, seconds, rows);
      if (!status.ok() && left_out != nullptr) left_out->push_back(status.to_string());
    }
  }
  for (TunedSignature& row : rows) {
    // Implementations that can run all of the signature's calls precede those that cannot.
    std::sort(row.times.begin(), row.times.end(), [](const TunedTime& a, const TunedTime& b) {
      if (a.calls != b.calls) return a.calls > b.calls;
      if (a.seconds != b.seconds) return a.seconds < b.seconds;
      return a.impl_id < b.impl_id;
    });
    if (!worth_pinning(row)) continue;
    for (const TunedTime& t : row.times)
      row.list.use.push_back({PolicyToken::Type::kImpl, Kind::kDefault, t.impl_id});
    for (const Kind kind : {Kind::kDefault, Kind::kVendor, Kind::kReference})
      row.list.use.push_back({PolicyToken::Type::kKind, kind, {}});
  }
  return rows;
}

}  // namespace te_fl
