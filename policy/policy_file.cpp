// The parser of TE_FL_POLICY_FILE. The file can express all policy variables, and in addition lists
// for single signatures.

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "policy/current.hpp"
#include "policy/text.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/policy.hpp"

namespace te_fl {
namespace {

using nlohmann::json;
using policy::did_you_mean;

constexpr uint64_t kMaxBytes = uint64_t{64} << 20;

// An error if the object has a key that is not in `known`.
Status check_keys(const json& object, const std::vector<std::string>& known,
                  const std::string& where) {
  if (!object.is_object()) return invalid_argument(where + " must be an object {...}");
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    return invalid_argument(where + " has an unknown key " + policy::quoted(key) +
                            did_you_mean(key, known));
  }
  return {};
}

Result<std::vector<std::string>> strings(const json& value, const std::string& where) {
  std::vector<std::string> out;
  if (value.is_array()) {
    for (const json& item : value) {
      if (!item.is_string()) return invalid_argument(where + " must be a list of strings");
      out.push_back(item.get<std::string>());
    }
    return out;
  }
  return invalid_argument(where + " must be a list of strings");
}

Result<std::vector<PolicyToken>> tokens(const std::string& op, const json& value,
                                        const std::string& where) {
  TE_FL_ASSIGN_OR_RETURN(const std::vector<std::string> words, strings(value, where));
  std::string list;
  for (const std::string& word : words) {
    if (word.find_first_of("|;=") != std::string::npos) {
      return invalid_argument(where + ": " + policy::quoted(word) + " is not a token");
    }
    list += (list.empty() ? "" : "|") + word;
  }
  const Result<std::map<std::string, std::vector<PolicyToken>, std::less<>>> parsed =
      parse_per_op(op + "=" + list, policy::known_ops());
  if (!parsed.ok()) return policy::in_setting(where, parsed.status());
  if (parsed->size() != 1)
    return invalid_argument(where + ": " + policy::quoted(op) + " is not an op");
  return parsed->begin()->second;
}

Result<SignatureList> signature_list(const json& item, const std::string& where) {
  TE_FL_RETURN_IF_ERROR(
      check_keys(item, {"op", "device", "dtypes", "scalings", "bytes", "use", "note"}, where));
  SignatureList out;
  for (const char* key : {"op", "dtypes", "use"}) {
    if (!item.contains(key))
      return invalid_argument(where + " lacks the key " + policy::quoted(key));
  }
  if (!item.at("op").is_string()) return invalid_argument(where + ".op must be a string");
  out.op = item.at("op").get<std::string>();
  const json device = item.value("device", json("cpu"));
  if (!device.is_string()) return invalid_argument(where + ".device must be a string");
  const auto name = device.get<std::string>();
  // A device type, such as "cpu", "cuda" or "ext:acme".
  if (Result<Device> parsed = parse_device(name == "cpu" ? name : name + ":0"); !parsed.ok()) {
    return policy::in_setting(where + ".device (a type of device, without its number)",
                              parsed.status());
  }
  out.device = name;
  TE_FL_ASSIGN_OR_RETURN(const auto dtypes, strings(item.at("dtypes"), where + ".dtypes"));
  for (const std::string& word : dtypes) {
    const Result<DType> dtype = parse_dtype(word);
    if (!dtype.ok()) return policy::in_setting(where, dtype.status());
    out.dtypes |= TE_FL_BIT(static_cast<uint32_t>(*dtype));
  }
  TE_FL_ASSIGN_OR_RETURN(const auto scalings,
                         strings(item.value("scalings", json{"none"}), where + ".scalings"));
  for (const std::string& word : scalings) {
    const Result<Scaling> scaling = parse_scaling(word);
    if (!scaling.ok()) return policy::in_setting(where, scaling.status());
    out.scalings |= TE_FL_BIT(static_cast<uint32_t>(*scaling));
  }
  if (item.contains("bytes")) {
    const json& range = item.at("bytes");
    const bool two = range.is_array() && range.size() == 2 && range[0].is_number_unsigned() &&
                     range[1].is_number_unsigned();
    if (two) out.min_bytes = range[0].get<uint64_t>(), out.max_bytes = range[1].get<uint64_t>();
    if (!two || out.min_bytes > out.max_bytes) {
      return invalid_argument(where +
                              ".bytes must be [least, most]: two whole numbers, the bytes of all "
                              "tensors' elements of a call");
    }
  }
  TE_FL_ASSIGN_OR_RETURN(out.use, tokens(out.op, item.at("use"), where));
  return out;
}

Result<bool> boolean(const json& value, const std::string& where) {
  if (value.is_boolean()) return value.get<bool>();
  return invalid_argument(where + " must be true or false");
}

Result<PolicySettings> read_settings(const json& file) {
  TE_FL_RETURN_IF_ERROR(
      check_keys(file,
                 {"te_fl_policy", "prefer", "strict", "deterministic", "max_staged_bytes",
                  "allow_vendors", "deny_vendors", "per_op", "per_signature", "note"},
                 "the file"));
  if (!file.contains("te_fl_policy") || file.at("te_fl_policy") != 1) {
    return invalid_argument("the file must say \"te_fl_policy\": 1");
  }
  PolicySettings s;
  if (file.contains("prefer")) {
    if (!file["prefer"].is_string()) return invalid_argument("prefer must be a string");
    TE_FL_ASSIGN_OR_RETURN(s.prefer, parse_kind(file["prefer"].get<std::string>()));
  }
  if (file.contains("strict")) {
    TE_FL_ASSIGN_OR_RETURN(s.strict, boolean(file["strict"], "strict"));
  }
  if (file.contains("deterministic")) {
    TE_FL_ASSIGN_OR_RETURN(s.deterministic, boolean(file["deterministic"], "deterministic"));
  }
  if (file.contains("max_staged_bytes")) {
    if (!file["max_staged_bytes"].is_number_unsigned()) {
      return invalid_argument("max_staged_bytes must be a whole number of bytes from 0");
    }
    s.max_staged_bytes = file["max_staged_bytes"].get<uint64_t>();
  }
  for (const auto& [key, list] :
       {std::pair{"allow_vendors", &s.allow_vendors}, std::pair{"deny_vendors", &s.deny_vendors}}) {
    if (!file.contains(key)) continue;
    TE_FL_ASSIGN_OR_RETURN(const std::vector<std::string> names, strings(file[key], key));
    for (const std::string& name : names) {
      TE_FL_ASSIGN_OR_RETURN(const std::vector<std::string> parsed, parse_vendor_list(name));
      list->insert(list->end(), parsed.begin(), parsed.end());
    }
  }
  if (file.contains("per_op")) {
    if (!file["per_op"].is_object()) return invalid_argument("per_op must be an object {...}");
    for (const auto& [op, list] : file["per_op"].items()) {
      TE_FL_ASSIGN_OR_RETURN(s.per_op[op], tokens(op, list, "per_op." + op));
    }
  }
  if (file.contains("per_signature")) {
    if (!file["per_signature"].is_array())
      return invalid_argument("per_signature must be a list [...]");
    for (const json& item : file["per_signature"]) {
      TE_FL_ASSIGN_OR_RETURN(
          SignatureList list,
          signature_list(item, "per_signature[" + std::to_string(s.per_signature.size()) + "]"));
      for (const SignatureList& other : s.per_signature) {
        if (!other.same_signature(list)) continue;
        if (other.max_bytes < list.min_bytes || list.max_bytes < other.min_bytes) continue;
        return invalid_argument("op " + policy::quoted(list.op) +
                                " appears twice in per_signature with the "
                                "same device, dtypes and scalings, for calls of the same bytes");
      }
      s.per_signature.push_back(std::move(list));
    }
  }
  return s;
}

}  // namespace

Result<PolicySettings> load_policy_file(const std::string& path) {
  const std::string what = "the policy file " + path;
  const Result<std::string> text = core::read_file(path, kMaxBytes);
  if (!text.ok()) return Status(text.status().code(), what + " " + text.status().message());
  if (core::trim(*text).empty()) return invalid_argument(what + " is empty");
  json file;
  std::string twice;  // a duplicate key of an object, which JSON readers would drop
  std::vector<std::set<std::string>> keys;
  const auto note_key = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second)
      twice = parsed.get<std::string>();
    return true;
  };
  try {
    file = json::parse(*text, note_key);
  } catch (const json::exception& e) {   // invalid JSON, or a number beyond double
    const std::string words = e.what();  // text of the form "[name] reason"
    const size_t name = words.find("] ");
    return invalid_argument(what + " is not JSON that can be read: " +
                            (name == words.npos ? words : words.substr(name + 2)));
  }
  if (!twice.empty()) {
    return invalid_argument(what + " has the key " + policy::quoted(twice) +
                            " twice in one object; keep one of them");
  }
  Result<PolicySettings> settings = read_settings(file);
  if (!settings.ok()) return policy::in_setting(what, settings.status());
  return settings;
}

}  // namespace te_fl
