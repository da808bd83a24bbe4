// Parser for the policy variables of the environment.

#include <algorithm>
#include <array>
#include <cctype>
#include <functional>

#include "core/op/op_table.hpp"
#include "policy/tex_names.hpp"
#include "policy/text.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/policy.hpp"

namespace te_fl {
namespace {

using policy::did_you_mean;
using policy::lower;
using policy::quoted;
using policy::split;
using policy::trim;

std::vector<std::string> kind_names() { return {"flagos", "default", "vendor", "reference"}; }

std::optional<Kind> find_kind(std::string_view word) {
  if (word == "flagos" || word == "default") return Kind::kDefault;
  if (word == "vendor") return Kind::kVendor;
  if (word == "reference") return Kind::kReference;
  return std::nullopt;
}

bool is_vendor_name(std::string_view s) {
  return !s.empty() && std::all_of(s.begin(), s.end(), [](unsigned char c) {
    return std::isalnum(c) || c == '_' || c == '-' || c == '.';
  });
}

Result<PolicyToken> parse_token(std::string_view text, std::string_view op) {
  const std::string where = " in the list of op " + quoted(op);
  const std::string rule =
      " (tokens are flagos, default, vendor, reference, vendor:NAME and impl:ID)";
  if (text.empty()) return invalid_argument("an empty token" + where + rule);
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) {
    const std::string word = lower(text);
    if (auto kind = find_kind(word)) return PolicyToken{PolicyToken::Type::kKind, *kind, {}};
    return invalid_argument(quoted(text) + where + " is not a token" +
                            did_you_mean(word, kind_names()) + rule);
  }
  const std::string head = lower(trim(text.substr(0, colon)));
  const std::string_view name = trim(text.substr(colon + 1));
  if (head != "vendor" && head != "impl") {
    return invalid_argument(quoted(text) + where + " is not a token" +
                            did_you_mean(head + ":", {"vendor:", "impl:"}) + rule);
  }
  if (name.empty()) {
    return invalid_argument(quoted(text) + where + " names nothing after the colon" + rule);
  }
  if (head == "impl")
    return PolicyToken{PolicyToken::Type::kImpl, Kind::kDefault, std::string(name)};
  if (!is_vendor_name(name)) {
    return invalid_argument(quoted(name) + where +
                            " is not a vendor name (letters, digits, _ - .)");
  }
  return PolicyToken{PolicyToken::Type::kVendorName, Kind::kVendor, lower(name)};
}

Result<std::vector<PolicyToken>> parse_tokens(std::string_view text, std::string_view op) {
  std::vector<PolicyToken> tokens;
  for (std::string_view part : split(text, '|')) {
    TE_FL_ASSIGN_OR_RETURN(PolicyToken token, parse_token(part, op));
    if (std::find(tokens.begin(), tokens.end(), token) != tokens.end()) {
      return invalid_argument(quoted(part) + " appears twice in the list of op " + quoted(op));
    }
    tokens.push_back(std::move(token));
  }
  return tokens;
}

// Reads a boolean variable. Needed for values that code has set: the environment checks only those
// that it reads from the process environment.
Result<std::optional<bool>> bool_variable(const char* name) {
  const std::optional<std::string> value = environment::get_if_set(name);
  if (!value) return std::optional<bool>();
  const std::string word = lower(trim(*value));
  if (word == "1" || word == "true" || word == "yes" || word == "on")
    return std::optional<bool>(true);
  if (word.empty() || word == "0" || word == "false" || word == "no" || word == "off") {
    return std::optional<bool>(false);
  }
  return invalid_argument(std::string(name) + "=" + *value + " must be 0 or 1");
}

template <class F>
auto parse_variable(const char* name, F&& parse) -> decltype(parse(std::string_view())) {
  const std::optional<std::string> value = environment::get_if_set(name);
  auto parsed = parse(value ? std::string_view(*value) : std::string_view());
  if (!parsed.ok())
    return policy::in_setting(std::string(name) + "=" + value.value_or(""), parsed.status());
  return parsed;
}

Result<std::optional<Kind>> preferred_kind() {
  const std::optional<std::string> prefer = environment::get_if_set("TE_FL_PREFER");
  if (prefer && !trim(*prefer).empty()) {
    const Result<Kind> kind = parse_kind(*prefer);
    if (!kind.ok()) return policy::in_setting("TE_FL_PREFER=" + *prefer, kind.status());
    return std::optional<Kind>(*kind);
  }
  TE_FL_ASSIGN_OR_RETURN(const std::optional<bool> older, bool_variable("TE_FL_PREFER_VENDOR"));
  if (!older) return std::optional<Kind>();
  return std::optional<Kind>(*older ? Kind::kVendor : Kind::kDefault);
}

}  // namespace

std::string_view to_string(Kind kind) {
  switch (kind) {
    case Kind::kDefault:
      return "default";
    case Kind::kVendor:
      return "vendor";
    case Kind::kReference:
      return "reference";
  }
  return "?";
}

Result<Kind> parse_kind(std::string_view text) {
  const std::string word = lower(trim(text));
  if (auto kind = find_kind(word)) return *kind;
  return invalid_argument(quoted(text) + " is not a kind of implementation" +
                          did_you_mean(word, kind_names()) +
                          " (flagos, its alias default, vendor, reference)");
}

Result<std::map<std::string, std::vector<PolicyToken>, std::less<>>> parse_per_op(
    std::string_view text, const std::vector<std::string>& known_ops) {
  std::map<std::string, std::vector<PolicyToken>, std::less<>> lists;
  for (std::string_view entry : split(text, ';')) {
    if (entry.empty()) continue;
    const size_t equals = entry.find('=');
    const std::string op(trim(entry.substr(0, equals)));
    if (equals == std::string_view::npos || op.empty()) {
      return invalid_argument(quoted(entry) + " is not of the form op=token|token");
    }
    const bool custom = op.find("::") != std::string::npos;
    if (!custom && !policy::is_tex_name(op) &&
        std::find(known_ops.begin(), known_ops.end(), op) == known_ops.end()) {
      return invalid_argument("there is no op " + quoted(op) + did_you_mean(op, known_ops) +
                              " (`te-fl ops` lists them)");
    }
    TE_FL_ASSIGN_OR_RETURN(std::vector<PolicyToken> tokens,
                           parse_tokens(trim(entry.substr(equals + 1)), op));
    if (!lists.emplace(op, std::move(tokens)).second) {
      return invalid_argument("op " + quoted(op) + " appears twice; join its tokens with |");
    }
  }
  return lists;
}

Result<std::vector<std::string>> parse_vendor_list(std::string_view text) {
  std::vector<std::string> vendors;
  for (std::string_view part : split(text, ',')) {
    if (part.empty()) continue;
    if (!is_vendor_name(part)) {
      return invalid_argument(quoted(part) +
                              " is not a vendor name (letters, digits, _ - .; comma separated)");
    }
    std::string name = lower(part);
    if (std::find(vendors.begin(), vendors.end(), name) == vendors.end()) {
      vendors.push_back(std::move(name));
    }
  }
  return vendors;
}

Result<SelectionPolicy> SelectionPolicy::from_environment(
    const std::vector<std::string>& known_ops) {
  TE_FL_RETURN_IF_ERROR(environment::status());
  PolicySettings settings;
  if (const auto file = environment::get_if_set("TE_FL_POLICY_FILE"); file && !file->empty()) {
    TE_FL_ASSIGN_OR_RETURN(settings, load_policy_file(*file));
  }
  TE_FL_ASSIGN_OR_RETURN(const std::optional<Kind> prefer, preferred_kind());
  if (prefer) settings.prefer = prefer;
  TE_FL_ASSIGN_OR_RETURN(const std::optional<bool> strict, bool_variable("TE_FL_STRICT"));
  settings.strict = strict.value_or(settings.strict);
  TE_FL_ASSIGN_OR_RETURN(const std::optional<bool> deterministic,
                         bool_variable("TE_FL_DETERMINISTIC"));
  settings.deterministic = deterministic.value_or(settings.deterministic);
  const std::optional<std::string> cap = environment::get_if_set("TE_FL_MAX_STAGED_BYTES");
  if (cap && !trim(*cap).empty()) {
    TE_FL_ASSIGN_OR_RETURN(const int64_t bytes, environment::get_int("TE_FL_MAX_STAGED_BYTES"));
    settings.max_staged_bytes = static_cast<uint64_t>(bytes);
  }
  if (environment::get_if_set("TE_FL_ALLOW_VENDORS")) {
    TE_FL_ASSIGN_OR_RETURN(settings.allow_vendors,
                           parse_variable("TE_FL_ALLOW_VENDORS", parse_vendor_list));
  }
  if (environment::get_if_set("TE_FL_DENY_VENDORS")) {
    TE_FL_ASSIGN_OR_RETURN(settings.deny_vendors,
                           parse_variable("TE_FL_DENY_VENDORS", parse_vendor_list));
  }
  TE_FL_ASSIGN_OR_RETURN(auto lists, parse_variable("TE_FL_PER_OP", [&](std::string_view text) {
                           return parse_per_op(text, known_ops);
                         }));
  for (auto& [op, tokens] : lists) {
    std::erase_if(settings.per_signature, [&op = op](const auto& list) { return list.op == op; });
    settings.per_op[op] = std::move(tokens);
  }
  return intern(std::move(settings));
}

}  // namespace te_fl
