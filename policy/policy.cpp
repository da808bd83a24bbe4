// Interned policies, and the choice of the policy that applies.

#include "te_fl/policy.hpp"
#include "te_fl/environment.hpp"

#include <algorithm>
#include <cctype>
#include <deque>
#include <mutex>
#include <tuple>
#include <unordered_map>

#include "core/base/fork.hpp"
#include "core/op/op_table.hpp"
#include "policy/current.hpp"
#include "policy/select.hpp"
#include "policy/tex_names.hpp"
#include "policy/text.hpp"

namespace te_fl {
namespace policy {

constinit thread_local uint32_t t_scope = 0;
std::atomic<uint32_t> g_global{0};
// An initial value that no real generation has in its low bits, since generation() counts up from a
// small number.
constexpr uint64_t kNeverRead = uint64_t{UINT32_MAX} << 32 | kInvalidPolicy;
std::atomic<uint64_t> g_environment{kNeverRead};
std::atomic<bool> g_lists_by_size{false};

namespace {

void append_list(std::string& out, const char* name, const std::vector<std::string>& items) {
  if (items.empty()) return;
  out += out.empty() ? "" : " ";
  out += name;
  out += '=';
  for (size_t i = 0; i < items.size(); ++i) out += (i == 0 ? "" : ",") + items[i];
}

std::string token_text(const PolicyToken& token) {
  switch (token.type) {
    case PolicyToken::Type::kKind:
      return token.kind == Kind::kDefault ? "flagos" : std::string(to_string(token.kind));
    case PolicyToken::Type::kVendorName:
      return "vendor:" + token.name;
    case PolicyToken::Type::kImpl:
      return "impl:" + token.name;
  }
  return "?";
}

// The size range of a list as text, ":512..4095"; empty if the list applies to all sizes. The text
// of settings is complete, so it is also the key for interning: equal texts mean equal settings.
std::string sizes_text(const SignatureList& list) {
  if (list.for_all_sizes()) return {};
  return ":" + std::to_string(list.min_bytes) + ".." + std::to_string(list.max_bytes);
}

std::string to_text(const PolicySettings& s) {
  std::string out;
  const auto word = [&](const std::string& w) { out += (out.empty() ? "" : " ") + w; };
  if (s.prefer) {
    word("prefer=" + (*s.prefer == Kind::kDefault ? "flagos" : std::string(to_string(*s.prefer))));
  }
  if (s.strict) word("strict=1");
  if (s.deterministic) word("deterministic=1");
  if (s.max_staged_bytes) word("max_staged_bytes=" + std::to_string(*s.max_staged_bytes));
  append_list(out, "allow_vendors", s.allow_vendors);
  append_list(out, "deny_vendors", s.deny_vendors);
  std::string lists;
  for (const auto& [op, tokens] : s.per_op) {
    lists += (lists.empty() ? "" : ";") + op + "=";
    for (size_t i = 0; i < tokens.size(); ++i) lists += (i == 0 ? "" : "|") + token_text(tokens[i]);
  }
  if (!lists.empty()) word("per_op=" + lists);
  for (const SignatureList& list : s.per_signature) {
    std::string text = list.op + "@" + list.device + ":" + dtype_mask_text(list.dtypes) + ":" +
                       scaling_mask_text(list.scalings) + sizes_text(list) + "=";
    for (size_t i = 0; i < list.use.size(); ++i)
      text += (i == 0 ? "" : "|") + token_text(list.use[i]);
    word("per_signature=" + text);
  }
  return out;
}

// No other function is called while this mutex is held.
constinit core::ForkMutex mutex(core::LockLevel::kPolicies);
const core::ForkMutex::Registration registration(mutex);

struct Interned {
  std::deque<PolicySettings> by_id;  // addresses are stable
  std::unordered_map<std::string, uint32_t> ids;
  Status environment_error;           // the error of the policy in g_environment
  std::vector<std::string> declared;  // names of declared ops; only grows
};

// The process-wide table of interned policies. The caller holds the lock.
Interned& interned() {
  static Interned* const table = [] {
    auto* made = new Interned;  // never freed: used until the last thread ends
    made->by_id.emplace_back();
    made->ids.emplace(to_text({}), 0);
    return made;
  }();
  return *table;
}

void normalise(std::vector<std::string>& vendors) {
  for (std::string& v : vendors) {
    for (char& c : v) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  std::sort(vendors.begin(), vendors.end());
  vendors.erase(std::unique(vendors.begin(), vendors.end()), vendors.end());
}

}  // namespace

std::vector<std::string> known_ops() {
  std::vector<std::string> names;
  for (const te_fl_op_schema* schema : core::catalogue()) names.emplace_back(schema->name);
  std::lock_guard lock(mutex);
  names.insert(names.end(), interned().declared.begin(), interned().declared.end());
  return names;
}

void know_op(const std::string& name) {
  for (const te_fl_op_schema* schema : core::catalogue()) {
    if (name == schema->name) return;
  }
  std::lock_guard lock(mutex);
  std::vector<std::string>& declared = interned().declared;
  if (std::find(declared.begin(), declared.end(), name) != declared.end()) return;
  declared.push_back(name);
  g_environment.store(kNeverRead, std::memory_order_release);  // the next call reads it again
}

const PolicySettings& settings_of(uint32_t id) {
  std::lock_guard lock(mutex);
  return interned().by_id[id];
}

Status settings_error(const PolicySettings& settings) {
  std::vector<std::string> named;
  for (const auto& [op, tokens] : settings.per_op) named.push_back(op);
  for (const SignatureList& list : settings.per_signature) named.push_back(list.op);
  if (named.empty()) return {};
  const std::vector<std::string> known = known_ops();
  for (const std::string& op : named) {
    // These may be registered later.
    if (op.find("::") != std::string::npos || is_tex_name(op)) continue;
    if (std::find(known.begin(), known.end(), op) != known.end()) continue;
    return invalid_argument("the policy has a list for op " + quoted(op) +
                            ", which does not exist" + did_you_mean(op, known));
  }
  return {};
}

uint32_t refresh_environment() {
  // Reads the environment without holding our lock. If the generation changes meanwhile, the next
  // call reads it again. If an op is declared meanwhile, the policy was checked without it, so the
  // loop repeats.
  while (true) {
    const uint64_t generation = environment::generation();
    const std::vector<std::string> known = known_ops();
    // `known` needs no custom ops: a name of the form "vendor::op" is always accepted.
    const Result<SelectionPolicy> policy = SelectionPolicy::from_environment(known);
    const uint32_t id = policy.ok() ? policy->id() : kInvalidPolicy;
    std::lock_guard lock(mutex);
    if (core::catalogue().size() + interned().declared.size() != known.size()) continue;
    interned().environment_error = policy.status();
    g_environment.store(static_cast<uint64_t>(static_cast<uint32_t>(generation)) << 32 | id,
                        std::memory_order_release);
    return id;
  }
}

}  // namespace policy

SelectionPolicy::SelectionPolicy() noexcept : settings_(&policy::settings_of(0)) {}

SelectionPolicy SelectionPolicy::intern(PolicySettings settings) {
  policy::normalise(settings.allow_vendors);
  policy::normalise(settings.deny_vendors);
  std::sort(settings.per_signature.begin(), settings.per_signature.end(),
            [](const SignatureList& a, const SignatureList& b) {
              return std::tie(a.op, a.device, a.dtypes, a.scalings, a.min_bytes) <
                     std::tie(b.op, b.device, b.dtypes, b.scalings, b.min_bytes);
            });
  for (const SignatureList& list : settings.per_signature) {
    if (!list.for_all_sizes()) policy::g_lists_by_size = true;
  }
  std::string key = policy::to_text(settings);
  SelectionPolicy made;
  std::lock_guard lock(policy::mutex);
  policy::Interned& table = policy::interned();
  auto at = table.ids.find(key);
  if (at == table.ids.end()) {
    table.by_id.push_back(std::move(settings));
    try {
      at = table.ids.emplace(std::move(key), table.by_id.size() - 1).first;
    } catch (...) {  // no memory: the next policy gets this id
      table.by_id.pop_back();
      throw;
    }
  }
  made.id_ = at->second;
  made.settings_ = &table.by_id[made.id_];
  return made;
}

std::string SelectionPolicy::describe() const {
  const std::string text = policy::to_text(*settings_);
  return text.empty() ? "pure priority" : text;
}

std::string policy::describe_for(const PolicySettings& settings, std::string_view op) {
  PolicySettings s = settings;
  const size_t lists = s.per_op.size() + s.per_signature.size();
  const auto other = [&](std::string_view name) {
    return name != op && name != governing_name(op);
  };
  std::erase_if(s.per_op, [&](const auto& list) { return other(list.first); });
  std::erase_if(s.per_signature, [&](const SignatureList& list) { return other(list.op); });
  const size_t others = lists - s.per_op.size() - s.per_signature.size();
  const std::string text = to_text(s);
  if (others == 0) return text.empty() ? "pure priority" : text;
  return (text.empty() ? "pure priority for this op" : text) + " (and " + std::to_string(others) +
         (others == 1 ? " list" : " lists") + " of other ops)";
}

void set_global_policy(SelectionPolicy policy) {
  policy::g_global.store(policy.id() + 1, std::memory_order_release);
}

void clear_global_policy() { policy::g_global.store(0, std::memory_order_release); }

Result<SelectionPolicy> current_policy() {
  while (true) {
    const uint32_t id = policy::current_id();
    if (id != policy::kInvalidPolicy) return SelectionPolicy::intern(policy::settings_of(id));
    std::lock_guard lock(policy::mutex);
    const Status& error = policy::interned().environment_error;
    if (error.ok()) continue;  // corrected between the two reads
    return policy::cause_first(error, "the selection policy of the environment is invalid");
  }
}

PolicyScope::PolicyScope(SelectionPolicy policy) : previous_(policy::t_scope) {
  policy::t_scope = policy.id() + 1;
}

PolicyScope::~PolicyScope() { policy::t_scope = previous_; }

CapturedPolicy CapturedPolicy::capture() {
  CapturedPolicy captured;
  if (policy::t_scope != 0) {
    captured.policy_ = SelectionPolicy::intern(policy::settings_of(policy::t_scope - 1));
  }
  return captured;
}

std::unique_ptr<PolicyScope> CapturedPolicy::enter() const {
  return policy_ ? std::make_unique<PolicyScope>(*policy_) : nullptr;
}

}  // namespace te_fl
