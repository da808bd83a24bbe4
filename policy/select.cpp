#include "policy/select.hpp"

#include <algorithm>

#include "policy/tex_names.hpp"
#include "policy/text.hpp"
#include "policy/vendors.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::policy {
namespace {

constexpr uint32_t kUnlisted = UINT32_MAX;
using Tokens = std::vector<PolicyToken>;

bool contains_vendor(const std::vector<std::string>& list, std::string_view vendor) {
  return std::any_of(list.begin(), list.end(),
                     [&](const std::string& name) { return same_vendor(name, vendor); });
}

bool matches(const PolicyToken& token, const Implementation& impl) {
  switch (token.type) {
    case PolicyToken::Type::kKind:
      return impl.kind == token.kind;
    case PolicyToken::Type::kVendorName:
      return impl.kind == Kind::kVendor && same_vendor(token.name, impl.vendor);
    case PolicyToken::Type::kImpl:
      return impl.impl_id == token.name;
  }
  return false;
}

uint32_t find_group(const PolicySettings& settings, const Tokens* tokens,
                    const Implementation& impl) {
  if (tokens != nullptr) {
    for (uint32_t i = 0; i < tokens->size(); ++i) {
      if (matches((*tokens)[i], impl)) return i;
    }
    return kUnlisted;
  }
  return settings.prefer && impl.kind != *settings.prefer ? 1 : 0;
}

// Vendor filters apply to kVendor implementations only. deny_vendors takes precedence.
Refusal vendor_refusal(const PolicySettings& settings, const Implementation& impl) {
  if (impl.kind != Kind::kVendor) return Refusal::kNone;
  if (contains_vendor(settings.deny_vendors, impl.vendor)) return Refusal::kDenied;
  if (!settings.allow_vendors.empty() && !contains_vendor(settings.allow_vendors, impl.vendor)) {
    return Refusal::kNotAllowed;
  }
  return Refusal::kNone;
}

bool serves(const Implementation& impl, int32_t type) {
  return type >= 0 && type < 64 && (impl.device_types >> type & 1) != 0;
}

bool on_device(const Implementation& impl, const Device& device) {
  // An extension device's memory is readable only by kernels of the same provider (R18).
  if (device.type == TE_FL_DEVICE_EXT && impl.provider != 0 && impl.provider != device.provider) {
    return false;
  }
  // Pinned memory counts as host memory.
  return serves(impl, device.type) || (device.is_host() && serves(impl, TE_FL_DEVICE_CPU));
}

// True if the implementation cannot run on the call's device but could run on copies in host
// memory.
bool on_copies(const Implementation& impl, const CallTraits& call) {
  return call.present && !call.device.is_host() && !on_device(impl, call.device) &&
         serves(impl, TE_FL_DEVICE_CPU);
}

const std::string* barred_reason(const CallTraits& call, const Implementation& impl) {
  for (const Barred& b : call.barred) {
    if (b.impl_id == impl.impl_id) return &b.reason;
  }
  return nullptr;
}

Refusal staging_refusal(const PolicySettings& settings, const CallTraits& call, const Standing& v) {
  if (call.collective) return Refusal::kStagingCollective;
  if (settings.strict && !v.named) return Refusal::kStagingStrict;
  if (settings.max_staged_bytes == 0u) return Refusal::kStagingForbidden;
  return call.capturing ? Refusal::kStagingCaptured : Refusal::kNone;
}

Refusal capability_refusal(const PolicySettings& settings, const CallTraits& call,
                           const Implementation& impl, bool staged) {
  if (call.maker != 0 && impl.owner != call.maker) return Refusal::kMaker;
  if (!staged && !on_device(impl, call.device)) return Refusal::kDevice;
  const uint32_t arch = staged ? 0 : call.arch;
  if (impl.min_arch > arch || (impl.max_arch != 0 && impl.max_arch < arch)) return Refusal::kArch;
  if ((call.dtypes & ~impl.dtypes) != 0) return Refusal::kDtype;
  if ((call.scalings & ~impl.scalings) != 0) return Refusal::kScaling;
  if ((call.later & ~impl.later) != 0) return Refusal::kLaterArgument;
  if (settings.deterministic && (impl.flags & TE_FL_OP_DETERMINISTIC) == 0) {
    return Refusal::kNondeterministic;
  }
  if (call.capturing && (impl.flags & TE_FL_OP_GRAPH_SAFE) == 0) return Refusal::kNotGraphSafe;
  return Refusal::kNone;
}

// True for te-fl's own function of the form tex::NAME.
bool calls_typed_op(const CallTraits& call, const Implementation& impl) {
  return impl.impl_id == kTexOwn && call.op.starts_with(kTexPrefix);
}

Standing rank_candidate(const PolicySettings& settings, const Tokens* tokens,
                        const CallTraits& call, std::span<const Implementation> impls,
                        uint32_t index) {
  const Implementation& impl = impls[index];
  Standing v;
  v.impl = index;
  v.group = find_group(settings, tokens, impl);
  if (v.group == kUnlisted && calls_typed_op(call, impl)) v.group = kUnlisted - 1;
  v.staged = on_copies(impl, call);
  const bool prefers_reference = tokens == nullptr && settings.prefer == Kind::kReference;
  v.named =
      tokens != nullptr ? v.group != kUnlisted : prefers_reference && impl.kind == Kind::kReference;
  if (v.staged && !v.named && v.group != kUnlisted) v.group += 2;
  if (v.group == kUnlisted) v.refusal = Refusal::kNotListed;
  if (v.refusal == Refusal::kNone) v.refusal = vendor_refusal(settings, impl);
  if (v.refusal == Refusal::kNone && barred_reason(call, impl) != nullptr) {
    v.refusal = Refusal::kQuarantined;
  }
  if (v.refusal == Refusal::kNone && v.staged) v.refusal = staging_refusal(settings, call, v);
  if (v.refusal == Refusal::kNone) {
    v.refusal = capability_refusal(settings, call, impl, v.staged);
  }
  return v;
}

template <class Name>
std::string mask_text(uint64_t mask, int count, Name&& name) {
  std::string out;
  for (int i = 0; i < count; ++i) {
    if ((mask >> i & 1) != 0) out += (out.empty() ? "" : "|") + std::string(name(i));
  }
  return out.empty() ? "nothing" : out;
}

std::string joined(const std::vector<std::string>& items) {
  std::string out;
  for (const std::string& item : items) out += (out.empty() ? "" : ",") + item;
  return out;
}

std::string device_type_text(uint64_t mask) {
  std::string out;
  for (int32_t type = 0; type < 64; ++type) {
    if ((mask >> type & 1) == 0) continue;
    std::string name = type == TE_FL_DEVICE_EXT ? "ext" : to_string(Device{type, 0, 0});
    if (const size_t colon = name.find(':'); colon != std::string::npos) name.resize(colon);
    out += (out.empty() ? "" : "|") + name;
  }
  return out.empty() ? "no device" : out;
}

// The supported architectures as text: "architecture 80 or newer", "an architecture from 80 to 90".
std::string arch_text(const Implementation& impl) {
  const std::string low = std::to_string(impl.min_arch), high = std::to_string(impl.max_arch);
  if (impl.max_arch == 0) return "architecture " + low + " or newer";
  if (impl.min_arch == 0) return "architecture " + high + " or older";
  return impl.min_arch == impl.max_arch ? "architecture " + low
                                        : "an architecture from " + low + " to " + high;
}

// The supported device types as text: "cpu|cuda", "ext of acme".
std::string support_text(const Implementation& impl) {
  const std::string types = device_type_text(impl.device_types);
  return impl.provider == 0 || !serves(impl, TE_FL_DEVICE_EXT)
             ? types
             : types + " of " + devices::provider_name(impl.provider);
}

}  // namespace

const SignatureList* signature_list_for(const PolicySettings& settings, const CallTraits& call) {
  for (const SignatureList& list : settings.per_signature) {
    if (list.op != call.op || list.dtypes != call.dtypes || list.scalings != call.scalings)
      continue;
    const bool fits = list.for_all_sizes() || (call.bytes && list.min_bytes <= *call.bytes &&
                                               *call.bytes <= list.max_bytes);
    if (fits && list.device == device_type_name(call.device)) return &list;
  }
  return nullptr;
}

const Tokens* list_for(const PolicySettings& settings, const CallTraits& call) {
  if (const SignatureList* list = signature_list_for(settings, call)) return &list->use;
  if (settings.per_op.empty()) return nullptr;
  auto at = settings.per_op.find(call.op);
  if (at == settings.per_op.end()) at = settings.per_op.find(governing_name(call.op));
  return at == settings.per_op.end() ? nullptr : &at->second;
}

std::string device_type_name(const Device& device) {
  std::string name = to_string(device.is_host() ? Device{} : device);
  if (const size_t colon = name.rfind(':'); colon != std::string::npos) name.resize(colon);
  return name;
}

Ranking decide(const PolicySettings& settings, const CallTraits& call,
               std::span<const Implementation> impls) {
  const Tokens* tokens = list_for(settings, call);
  Ranking decision;
  decision.order.reserve(impls.size());
  for (uint32_t i = 0; i < impls.size(); ++i) {
    decision.order.push_back(rank_candidate(settings, tokens, call, impls, i));
  }
  std::sort(decision.order.begin(), decision.order.end(),
            [&](const Standing& a, const Standing& b) {
              if (a.group != b.group) return a.group < b.group;
              if (a.staged != b.staged) return b.staged;
              const Implementation& x = impls[a.impl];
              const Implementation& y = impls[b.impl];
              if (x.priority != y.priority) return x.priority > y.priority;
              if (x.kind != y.kind) return x.kind < y.kind;  // default, vendor, reference
              return x.impl_id < y.impl_id;
            });
  for (size_t i = 0; i < decision.order.size(); ++i) {
    const Standing& v = decision.order[i];
    if (v.group != 0) break;
    if (v.refusal == Refusal::kDenied || v.refusal == Refusal::kNotAllowed ||
        v.refusal == Refusal::kDevice || v.refusal == Refusal::kMaker) {
      continue;
    }
    decision.first = static_cast<int32_t>(i);
    break;
  }
  // The typed op that te-fl's own function calls applies the policy.
  for (size_t i = 0; i < decision.order.size() && decision.first < 0; ++i) {
    if (calls_typed_op(call, impls[decision.order[i].impl]))
      decision.first = static_cast<int32_t>(i);
  }
  return decision;
}

std::string dtype_mask_text(uint64_t mask) {
  return mask_text(mask, TE_FL_DTYPE_COUNT, [](int i) { return name(static_cast<DType>(i)); });
}

std::string scaling_mask_text(uint32_t mask) {
  return mask_text(mask, TE_FL_SCALING_COUNT, [](int i) { return name(static_cast<Scaling>(i)); });
}

namespace {

// The dtypes of `supported` that are floating-point or integer as `refused` is; all of `supported`
// if there are none. Many implementations support every integer dtype, for indices, which would
// hide the few dtypes that matter.
uint64_t of_same_class(uint64_t supported, uint64_t refused) {
  constexpr uint64_t kFloats = TE_FL_BIT(TE_FL_I8) - 1;
  uint64_t same = 0;
  if ((refused & kFloats) != 0) same |= supported & kFloats;
  if ((refused & ~kFloats) != 0) same |= supported & ~kFloats;
  return same == 0 ? supported : same;
}

}  // namespace

std::string refusal_text(Refusal refusal, const Implementation& impl, const CallTraits& call,
                         const PolicySettings& settings, const ArgumentNames* names) {
  const auto of = [](const std::string& argument) {
    return argument.empty() ? "" : " of " + argument;
  };
  switch (refusal) {
    case Refusal::kNone:
      return "";
    case Refusal::kNotListed:
      return "the policy's list for this op does not name it";
    case Refusal::kDenied:
      return "vendor " + std::string(impl.vendor) + " is denied (TE_FL_DENY_VENDORS " +
             joined(settings.deny_vendors) + ")";
    case Refusal::kNotAllowed:
      return "vendor " + std::string(impl.vendor) +
             " is not among the allowed (TE_FL_ALLOW_VENDORS " + joined(settings.allow_vendors) +
             ")";
    case Refusal::kQuarantined: {
      const std::string* reason = barred_reason(call, impl);
      return reason == nullptr ? "quarantined" : *reason;
    }
    case Refusal::kDevice:
      return "the tensors are on " + to_string(call.device) + ", it supports " + support_text(impl);
    case Refusal::kArch:
      if (!on_device(impl, call.device)) {
        return "it needs " + arch_text(impl) + ", and would be run on the host, which has none";
      }
      if (!call.present && call.arch == 0) {
        return "it needs " + arch_text(impl) + ", and there is no " + to_string(call.device) +
               " here to ask for its own";
      }
      return "it needs " + arch_text(impl) + ", " + to_string(call.device) + " is " +
             std::to_string(call.arch);
    case Refusal::kDtype:
      return "dtype " + dtype_mask_text(call.dtypes & ~impl.dtypes) +
             of(names == nullptr ? "" : names->dtype_outside(impl.dtypes)) +
             " is not supported (it supports " +
             dtype_mask_text(of_same_class(impl.dtypes, call.dtypes & ~impl.dtypes)) + ")";
    case Refusal::kScaling:
      return "scaling " + scaling_mask_text(call.scalings & ~impl.scalings) +
             of(names == nullptr ? "" : names->scaling_outside(impl.scalings)) +
             " is not supported (it supports " + scaling_mask_text(impl.scalings) + ")";
    case Refusal::kLaterArgument: {
      const std::string set = names == nullptr ? "" : names->later_names(call.later & ~impl.later);
      return "the call sets " + (set.empty() ? "an argument" : set) +
             ", which the op gained later and it does not know (rule R23)";
    }
    case Refusal::kNondeterministic:
      return "it is not deterministic and the policy requires that (TE_FL_DETERMINISTIC)";
    case Refusal::kNotGraphSafe:
      return "the stream is being captured into a graph, which it does not allow";
    case Refusal::kStagingStrict:
      return "the tensors are on " + to_string(call.device) +
             ", it would run on copies in host memory, and strict (TE_FL_STRICT) allows that only "
             "if "
             "the policy names it (TE_FL_PER_OP, or TE_FL_PREFER=reference)";
    case Refusal::kStagingForbidden:
      return "the tensors are on " + to_string(call.device) +
             ", and copying them to the host is forbidden (TE_FL_MAX_STAGED_BYTES is 0)";
    case Refusal::kStagingCollective:
      return "the tensors are on " + to_string(call.device) +
             ", and a collective cannot run on copies, which the other ranks would not make; "
             "load a plugin that supports it on that device";
    case Refusal::kMaker:
      return "the communicator was made by plugin " + devices::provider_name(call.maker) +
             ", whose implementations alone can use it (rule R29)";
    case Refusal::kStagingCaptured:
      return "the stream is being captured into a graph, into which copies to the host cannot go; "
             "leave the op out of the graph, or load a plugin that supports it on " +
             to_string(call.device);
  }
  return "?";
}

std::string missing_first_text(const CallTraits& call, const PolicySettings& settings) {
  std::string what = "no implementation";
  if (const Tokens* tokens = list_for(settings, call); tokens != nullptr && !tokens->empty()) {
    const PolicyToken& token = tokens->front();
    switch (token.type) {
      case PolicyToken::Type::kKind:
        what = "no " + std::string(to_string(token.kind)) + " implementation";
        break;
      case PolicyToken::Type::kVendorName:
        what = "no implementation of vendor " + token.name;
        break;
      case PolicyToken::Type::kImpl:
        what = "no implementation " + token.name;
        break;
    }
  } else if (settings.prefer) {
    what = "no " + std::string(to_string(*settings.prefer)) + " implementation";
  }
  return what + " that the vendor filters let pass is registered for op " + quoted(call.op) +
         " on " + to_string(call.device);
}

std::vector<std::string> unknown_vendors(const PolicySettings& settings,
                                         std::span<const std::string> known) {
  std::vector<std::string> unknown;
  const auto look = [&](const std::string& vendor) {
    for (const std::string& k : known) {
      if (same_vendor(k, vendor)) return;
    }
    if (std::find(unknown.begin(), unknown.end(), vendor) == unknown.end())
      unknown.push_back(vendor);
  };
  for (const std::string& v : settings.allow_vendors) look(v);
  for (const std::string& v : settings.deny_vendors) look(v);
  const auto look_in = [&](const Tokens& tokens) {
    for (const PolicyToken& token : tokens) {
      if (token.type == PolicyToken::Type::kVendorName) look(token.name);
    }
  };
  for (const auto& [op, tokens] : settings.per_op) look_in(tokens);
  for (const SignatureList& list : settings.per_signature) look_in(list.use);
  return unknown;
}

}  // namespace te_fl::policy
