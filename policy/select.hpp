#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/device.hpp"
#include "te_fl/policy.hpp"

// The deciding function: policy, call and implementations in, ordered candidates with reasons out.
// It reads nothing else but the aliases of vendors, so dispatch and `te-fl explain` cannot differ.
// Reasons are kept as codes and put into words on demand, since dispatch seldom needs the words.
namespace te_fl::policy {

// An implementation as deciding sees it.
struct Implementation {
  std::string_view impl_id;
  std::string_view vendor;  // lower case
  Kind kind = Kind::kDefault;
  int32_t priority = 0;
  uint32_t later = 0;  // mask of the op's later arguments that it knows (R23)
  uint32_t flags = 0;  // TE_FL_OP_*
  uint32_t min_arch = 0;
  uint32_t max_arch = 0;  // 0: no bound
  uint64_t dtypes = 0;
  uint32_t scalings = 0;
  uint64_t device_types = 0;
  uint32_t provider = 0;  // of the kDLExtDev devices it serves; 0: any
  uint32_t owner = 0;     // number of the plugin that has it (core::maker_number)
};

// An implementation that is kept from serving a call, and why.
struct Barred {
  std::string_view impl_id;
  std::string reason;
};

// The part of a call that static constraints read.
struct CallTraits {
  std::string_view op;
  Device device;
  bool present = true;  // the device is there: a copy to and from it is possible
  uint32_t arch = 0;    // of the device
  uint64_t dtypes = 0;
  uint32_t scalings = 0;
  uint32_t later = 0;  // mask of the later arguments that it sets
  bool capturing = false;
  bool collective = false;              // other ranks run the op, too
  uint32_t maker = 0;                   // number of the communicator's plugin; 0: there is none
  std::span<const Barred> barred = {};  // quarantined implementations
  std::optional<uint64_t> bytes =
      {};  // of all tensors' elements; absent: of a call without tensors
};

enum class Refusal : uint8_t {
  kNone,
  kNotListed,    // an exclusive per-op list leaves it out
  kDenied,       // deny_vendors
  kNotAllowed,   // allow_vendors
  kQuarantined,  // it was caught with wrong results for such calls
  kDevice,
  kArch,
  kDtype,
  kScaling,
  kLaterArgument,  // the call sets one that it does not know
  kNondeterministic,
  kNotGraphSafe,
  kStagingStrict,      // strict, and staging was not named
  kStagingForbidden,   // max_staged_bytes is 0
  kStagingCollective,  // other ranks run the op on their devices
  kMaker,              // the call's communicator is another plugin's
  kStagingCaptured,    // a copy to the host cannot go into a graph
};

// True if the refusal comes from the policy rather than from what the implementation can do.
constexpr bool is_policy_refusal(Refusal r) {
  return r == Refusal::kNotListed || r == Refusal::kDenied || r == Refusal::kNotAllowed ||
         r == Refusal::kNondeterministic || r == Refusal::kStagingStrict ||
         r == Refusal::kStagingForbidden;
}

// An implementation with its standing for a call.
struct Standing {
  uint32_t impl = 0;  // index into the implementations given
  // Token of the per-op list (UINT32_MAX: not listed). Without a list 0 preferred / 1 other; staged
  // ones that the policy does not name 2 / 3.
  uint32_t group = 0;
  Refusal refusal = Refusal::kNone;
  // A host implementation for tensors of another device: they are copied to the host for it, and
  // its outputs back.
  bool staged = false;
  // The policy asked for it on the host: an exclusive list has it, or reference is preferred.
  bool named = false;
};

// The standing of all implementations for a call.
struct Ranking {
  std::vector<Standing> order;  // as they would be tried; refused ones where they stand
  // For STRICT: index into `order` of the top-ranked implementation on the call's device, or staged
  // and named, after vendor filters within the first token (the preferred kind), whether or not it
  // can serve the call; -1: there is none.
  int32_t first = -1;
};

// The list of per_signature that such a call is under; null: none. One for some sizes only is for
// no call whose size is not known.
const SignatureList* signature_list_for(const PolicySettings& settings, const CallTraits& call);
// The exclusive list that such a call is under; null: none.
const std::vector<PolicyToken>* list_for(const PolicySettings& settings, const CallTraits& call);

Ranking decide(const PolicySettings& settings, const CallTraits& call,
               std::span<const Implementation> impls);

// Names of the arguments that a refusal is about, where the call's arguments are at hand.
class ArgumentNames {
 public:
  virtual ~ArgumentNames() = default;
  virtual std::string dtype_outside(uint64_t mask) const = 0;
  virtual std::string scaling_outside(uint32_t mask) const = 0;
  virtual std::string later_names(uint32_t mask) const = 0;
};

// The reason for which `impl` was refused, such as "dtype f64 of input is not served (it serves
// f32|f16)"; empty for kNone.
std::string refusal_text(Refusal refusal, const Implementation& impl, const CallTraits& call,
                         const PolicySettings& settings, const ArgumentNames* names);
// SelectionPolicy::describe without the lists of other ops, which are only counted: a tuned policy
// has hundreds.
std::string describe_for(const PolicySettings& settings, std::string_view op);
// The implementation that STRICT missed if Ranking::first is -1: "no vendor implementation is
// registered for cpu".
std::string missing_first_text(const CallTraits& call, const PolicySettings& settings);
// "cpu", "cuda", "ext:acme": a device without its number.
std::string device_type_name(const Device& device);
// Vendor names that the settings mention and `known` lacks.
std::vector<std::string> unknown_vendors(const PolicySettings& settings,
                                         std::span<const std::string> known);
// "f32|bf16", "none|tensor"
std::string dtype_mask_text(uint64_t mask);
std::string scaling_mask_text(uint32_t mask);

}  // namespace te_fl::policy
