#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/device.hpp"
#include "te_fl/policy.hpp"

// Decides which implementations may run a call. Input: policy, call and implementations. Output:
// ordered candidates with reasons for refusals. The result depends on nothing else except vendor
// aliases, so dispatch and `te-fl explain` always agree. Reasons are codes, converted to text on
// demand, since dispatch rarely needs the text.
namespace te_fl::policy {

// The properties of an implementation that the decision depends on.
struct Implementation {
  std::string_view impl_id;
  std::string_view vendor;  // in lower case
  Kind kind = Kind::kDefault;
  int32_t priority = 0;
  uint32_t later = 0;  // mask of the later-added arguments that it supports (R23)
  uint32_t flags = 0;  // bits TE_FL_OP_*
  uint32_t min_arch = 0;
  uint32_t max_arch = 0;  // 0: no upper bound
  uint64_t dtypes = 0;
  uint32_t scalings = 0;
  uint64_t device_types = 0;
  uint32_t provider = 0;  // the provider of its kDLExtDev devices; 0: any
  uint32_t owner = 0;     // number of its plugin (core::maker_number)
};

// An implementation that is excluded from a call, with the reason.
struct Barred {
  std::string_view impl_id;
  std::string reason;
};

// The properties of a call that the decision depends on.
struct CallTraits {
  std::string_view op;
  Device device;
  bool present = true;  // the device exists, so copies to and from it are possible
  uint32_t arch = 0;    // architecture of the device
  uint64_t dtypes = 0;
  uint32_t scalings = 0;
  uint32_t later = 0;  // mask of the later-added arguments (R23) that the call sets
  bool capturing = false;
  bool collective = false;              // a collective, which other ranks run too
  uint32_t maker = 0;                   // number of the communicator's plugin; 0: no communicator
  std::span<const Barred> barred = {};  // quarantined implementations
  std::optional<uint64_t> bytes =
      {};  // size of all tensors' elements; absent: a call without tensors
};

enum class Refusal : uint8_t {
  kNone,
  kNotListed,    // an exclusive per-op list does not contain it
  kDenied,       // listed in deny_vendors
  kNotAllowed,   // missing in allow_vendors
  kQuarantined,  // the implementation gave wrong results for such calls
  kDevice,
  kArch,
  kDtype,
  kScaling,
  kLaterArgument,  // the call sets a later-added argument (R23) that the implementation does not
                   // support
  kNondeterministic,
  kNotGraphSafe,
  kStagingStrict,      // the policy is strict and does not name the implementation
  kStagingForbidden,   // max_staged_bytes is 0
  kStagingCollective,  // other ranks run the op on devices
  kMaker,              // the call's communicator belongs to another plugin
  kStagingCaptured,    // a copy to the host cannot be captured in a graph
};

// The rank and state of one implementation for a call.
struct Standing {
  uint32_t impl = 0;  // index into `impls` of decide()
  // With a per-op list: index of the matching token, UINT32_MAX if none matches. Without a list: 0
  // for the preferred kind, 1 for others; 2 and 3 for staged ones that the policy does not name.
  uint32_t group = 0;
  Refusal refusal = Refusal::kNone;
  // Staged: an implementation for the host, chosen for tensors on another device. The inputs are
  // copied to the host and the outputs back.
  bool staged = false;
  // The policy explicitly permits this implementation to run staged: an exclusive list contains it,
  // or the policy prefers reference implementations.
  bool named = false;
};

// The ranking of all implementations for a call.
struct Ranking {
  std::vector<Standing> order;  // in the order of trial, refused ones included
  // For STRICT: index into `order` of the first-ranked implementation; -1 if there is none. This
  // implementation runs on the call's device, or is staged and named, passes the vendor filters,
  // and matches the first token (or the preferred kind). It may still be refused for the call, for
  // example for a dtype.
  int32_t first = -1;
};

// The per_signature list that applies to the call; null: none. A list for some sizes only does not
// apply to a call of unknown size.
const SignatureList* signature_list_for(const PolicySettings& settings, const CallTraits& call);
// The exclusive list that applies to the call; null: none.
const std::vector<PolicyToken>* list_for(const PolicySettings& settings, const CallTraits& call);

Ranking decide(const PolicySettings& settings, const CallTraits& call,
               std::span<const Implementation> impls);

// Finds the names of the arguments that cause a refusal. Available if the call's arguments are.
class ArgumentNames {
 public:
  virtual ~ArgumentNames() = default;
  virtual std::string dtype_outside(uint64_t mask) const = 0;
  virtual std::string scaling_outside(uint32_t mask) const = 0;
  virtual std::string later_names(uint32_t mask) const = 0;
};

// The reason for which `impl` was refused, such as "dtype f64 of input is not supported (it
// supports f32|f16)". Empty for kNone.
std::string refusal_text(Refusal refusal, const Implementation& impl, const CallTraits& call,
                         const PolicySettings& settings, const ArgumentNames* names);
// As SelectionPolicy::describe, but only counts the lists of other ops, since a tuned policy has
// hundreds.
std::string describe_for(const PolicySettings& settings, std::string_view op);
// The missing implementation, for STRICT with Ranking::first == -1: "no vendor implementation is
// registered for cpu".
std::string missing_first_text(const CallTraits& call, const PolicySettings& settings);
// A device type without the device's number: "cpu", "cuda", "ext:acme".
std::string device_type_name(const Device& device);
// Vendor names in the settings that are not in `known`.
std::vector<std::string> unknown_vendors(const PolicySettings& settings,
                                         std::span<const std::string> known);
// Masks as text: "f32|bf16", "none|tensor".
std::string dtype_mask_text(uint64_t mask);
std::string scaling_mask_text(uint32_t mask);

}  // namespace te_fl::policy
