// te-fl merge-traces: merges the traces of a job's ranks into one file.
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "conformance/check/output.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool {
namespace {

using nlohmann::json;

// The trace of one process, as dispatch/watch/trace.cpp writes it.
struct Trace {
  std::string path;
  json content;
  std::string who;       // label: "rank 3", "process 4711"
  int64_t order = 0;     // sort key: rank number; processes without a rank come last
  int64_t began_us = 0;  // system clock at the trace's ts 0
};

te_fl::Status not_a_trace(const std::string& path, const std::string& why) {
  return te_fl::Status(te_fl::StatusCode::kInvalidArgument,
                       path + " is no trace of TE_FL_TRACE: " + why);
}

// Returns a JSON library's error text "[its name] why" without the name.
std::string words_without_name(const json::exception& error) {
  const std::string text = error.what();
  const size_t name = text.find("] ");
  return name == std::string::npos ? text : text.substr(name + 2);
}

te_fl::Status cannot_read(const std::string& path, const std::string& why) {
  return te_fl::Status(te_fl::StatusCode::kNotFound, "cannot read " + path + ": " + why);
}

te_fl::Result<Trace> read_trace(const std::string& path) try {
  std::error_code unknown;
  if (std::filesystem::exists(path, unknown) && !std::filesystem::is_regular_file(path, unknown))
    return cannot_read(path, "it is no regular file");
  std::ifstream in(path, std::ios::binary);
  if (!in.good()) return cannot_read(path, std::strerror(errno));
  Trace trace{path, json::parse(in), {}, 0, 0};
  const json& other = trace.content.at("otherData");
  if (other.contains("merged"))
    return not_a_trace(path, "merge-traces made it of several; name those instead");
  if (!other.contains("began_us"))
    return not_a_trace(path, "it does not say when it began; an earlier te-fl wrote it");
  trace.began_us = other.at("began_us").get<int64_t>();
  const int64_t process = other.at("process").get<int64_t>();
  const int64_t rank = other.value("rank", int64_t{-1});
  trace.who = rank >= 0 ? "rank " + std::to_string(rank) : "process " + std::to_string(process);
  trace.order = rank >= 0 ? rank : process + (int64_t{1} << 32);
  static_cast<void>(trace.content.at("te_fl_calls").get_ref<const json::array_t&>());
  static_cast<void>(trace.content.at("traceEvents").get_ref<const json::array_t&>());
  return trace;
} catch (const json::exception& e) {
  return not_a_trace(path, words_without_name(e));
}

// Adapts an event to the merged file: shifts its time to the earliest trace's origin, moves it to
// the tracks of process number `place`, and offsets its call numbers.
void move_event(json& event, const Trace& trace, size_t place, int64_t first_us, size_t calls) {
  const int group = event.at("pid").get<int>();  // 1: by thread, 2: by stream
  event["pid"] = 2 * static_cast<int64_t>(place) + group;
  if (event.contains("ts"))
    event["ts"] = event["ts"].get<double>() + static_cast<double>(trace.began_us - first_us);
  json& args = event["args"];
  if (event.at("name") == "process_name")
    args["name"] = trace.who + ": " + args.at("name").get<std::string>();
  if (event.at("name") == "process_sort_index") args["sort_index"] = 2 * place;
  if (args.contains("call")) args["call"] = args["call"].get<size_t>() + calls;
}

// Appends a trace to the merged events.
te_fl::Status add(Trace& trace, size_t place, int64_t first_us, json& all) try {
  const size_t calls = all["te_fl_calls"].size();
  for (json& event : trace.content["traceEvents"]) {
    move_event(event, trace, place, first_us, calls);
    all["traceEvents"].push_back(std::move(event));
  }
  for (json& call : trace.content["te_fl_calls"]) all["te_fl_calls"].push_back(std::move(call));
  json part = std::move(trace.content["otherData"]);
  part["who"] = trace.who;
  all["otherData"]["merged"].push_back(std::move(part));
  return {};
} catch (const json::exception& e) {
  return not_a_trace(trace.path, words_without_name(e));
}

te_fl::Result<json> merged(std::vector<Trace>& traces) {
  int64_t first_us = INT64_MAX;
  for (const Trace& t : traces) first_us = std::min(first_us, t.began_us);
  json all = {
      {"traceEvents", json::array()},
      {"otherData", {{"te_fl", TE_FL_VERSION}, {"began_us", first_us}, {"merged", json::array()}}},
      {"te_fl_calls", json::array()}};
  for (size_t place = 0; place < traces.size(); ++place) {
    if (te_fl::Status s = add(traces[place], place, first_us, all); !s.ok()) return s;
  }
  return all;
}

// Checks that no two files belong to one rank; two such files come from different runs, or one was
// named twice.
bool all_differ(const std::vector<Trace>& traces) {
  std::map<int64_t, const Trace*> known;
  for (const Trace& t : traces) {
    const auto [at, added] = known.emplace(t.order, &t);
    if (added) continue;
    complain(at->second->path + " and " + t.path + " are both of " + t.who +
             "; name the files of one run, each once");
    return false;
  }
  return true;
}

bool write(const std::string& path, const json& content) {
  std::error_code error;
  if (std::filesystem::exists(path, error) && !std::filesystem::is_regular_file(path, error)) {
    complain("cannot write " + path + " (--out): it is no regular file");
    return false;
  }
  const std::string temporary = path + ".part";
  std::ofstream file(temporary, std::ios::trunc);
  file << json_text(content, -1) << "\n";
  file.close();
  if (file.good() && std::rename(temporary.c_str(), path.c_str()) == 0) return true;
  complain("cannot write " + path + " (--out): " + std::strerror(errno));
  std::filesystem::remove(temporary, error);
  return false;
}

}  // namespace

int merge_traces(const MergeTracesOptions& options) {
  std::vector<Trace> traces;
  for (const std::string& path : options.files) {
    te_fl::Result<Trace> trace = read_trace(path);
    if (!trace.ok()) {
      complain(trace.status().message());
      return kUsage;
    }
    traces.push_back(std::move(trace).value());
  }
  if (!all_differ(traces)) return kUsage;
  std::sort(traces.begin(), traces.end(),
            [](const Trace& a, const Trace& b) { return a.order < b.order; });
  const te_fl::Result<json> content = merged(traces);
  if (!content.ok()) {
    complain(content.status().message());
    return kUsage;
  }
  if (!write(options.out, *content)) return kProblem;
  size_t events = 0;
  for (const json& event : (*content)["traceEvents"]) events += event.at("ph") == "X" ? 1 : 0;
  std::printf("%s: %zu events of %zu %s, from %s to %s; https://ui.perfetto.dev opens it.\n",
              options.out.c_str(), events, traces.size(),
              traces.size() == 1 ? "process" : "processes", traces.front().who.c_str(),
              traces.back().who.c_str());
  return kSuccess;
}

}  // namespace te_fl_tool
