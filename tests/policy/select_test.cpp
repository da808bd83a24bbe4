#include "policy/select.hpp"
#include "support/expect.hpp"

#include <gtest/gtest.h>

namespace te_fl::policy {
namespace {

constexpr uint64_t kCpu = uint64_t{1} << TE_FL_DEVICE_CPU;
constexpr uint64_t kCuda = uint64_t{1} << TE_FL_DEVICE_CUDA;

Implementation impl(std::string_view id, Kind kind, std::string_view vendor = "te-fl",
                    uint64_t devices = kCpu) {
  Implementation o;
  o.impl_id = id;
  o.vendor = vendor;
  o.kind = kind;
  o.priority = kind == Kind::kDefault ? 150 : kind == Kind::kVendor ? 100 : 50;
  o.flags = TE_FL_OP_DETERMINISTIC | TE_FL_OP_GRAPH_SAFE;
  o.dtypes = TE_FL_MASK_ANY_DTYPE;
  o.scalings = 0x3f;
  o.device_types = devices;
  return o;
}

CallTraits call() {
  CallTraits c;
  c.op = "gelu";
  c.dtypes = TE_FL_BIT(TE_FL_F32);
  c.scalings = TE_FL_BIT(TE_FL_SCALING_NONE);
  return c;
}

const std::vector<Implementation> kThree = {impl("reference.any", Kind::kReference),
                                            impl("vendor.acme", Kind::kVendor, "acme"),
                                            impl("default.cpu", Kind::kDefault)};

// Returns the order of candidates, "default.cpu vendor.acme! ..."; ! marks a refused one.
std::string order(const PolicySettings& s, const CallTraits& c,
                  const std::vector<Implementation>& impls) {
  std::string text;
  for (const Standing& v : decide(s, c, impls).order) {
    text += (text.empty() ? "" : " ") + std::string(impls[v.impl].impl_id) +
            (v.refusal == Refusal::kNone ? "" : "!");
  }
  return text;
}

std::string first(const PolicySettings& s, const CallTraits& c,
                  const std::vector<Implementation>& impls) {
  const Ranking d = decide(s, c, impls);
  return d.first < 0 ? "none" : std::string(impls[d.order[d.first].impl].impl_id);
}

Refusal find_refusal(const PolicySettings& s, const CallTraits& c, const Implementation& o) {
  return decide(s, c, std::vector<Implementation>{o}).order[0].refusal;
}

PolicyToken kind_token(Kind k) { return {PolicyToken::Type::kKind, k, ""}; }
PolicyToken vendor_token(std::string v) {
  return {PolicyToken::Type::kVendorName, Kind::kVendor, std::move(v)};
}
PolicyToken impl_token(std::string id) {
  return {PolicyToken::Type::kImpl, Kind::kDefault, std::move(id)};
}

TEST(Decide, OrdersByPriorityThenId) {
  EXPECT_EQ(order({}, call(), kThree), "default.cpu vendor.acme reference.any");
  std::vector<Implementation> same = {impl("default.b", Kind::kDefault),
                                      impl("default.a", Kind::kDefault),
                                      impl("default.c", Kind::kDefault)};
  same[2].priority = 200;
  EXPECT_EQ(order({}, call(), same), "default.c default.a default.b");
  EXPECT_EQ(order({}, call(), {}), "");
}

TEST(Decide, PutsThePreferredKindFirst) {
  PolicySettings s;
  s.prefer = Kind::kReference;
  EXPECT_EQ(order(s, call(), kThree), "reference.any default.cpu vendor.acme");
  s.prefer = Kind::kVendor;
  EXPECT_EQ(order(s, call(), kThree), "vendor.acme default.cpu reference.any");
}

TEST(Decide, FollowsAnExclusiveList) {
  PolicySettings s;
  s.prefer = Kind::kDefault;  // the per_op list takes precedence
  s.per_op["gelu"] = {kind_token(Kind::kReference), vendor_token("acme")};
  EXPECT_EQ(order(s, call(), kThree), "reference.any vendor.acme default.cpu!");
  s.per_op["gelu"] = {impl_token("vendor.acme")};
  EXPECT_EQ(order(s, call(), kThree), "vendor.acme default.cpu! reference.any!");
  CallTraits other = call();
  other.op = "dgelu";
  EXPECT_EQ(order(s, other, kThree), "default.cpu vendor.acme reference.any");
}

TEST(Decide, FiltersVendorKindOnlyAndDenyWins) {
  PolicySettings s;
  s.allow_vendors = {"acme"};
  s.deny_vendors = {"ACME"};
  EXPECT_EQ(order(s, call(), kThree), "default.cpu vendor.acme! reference.any");
  EXPECT_EQ(find_refusal(s, call(), kThree[1]), Refusal::kDenied);
  s.deny_vendors.clear();
  EXPECT_EQ(order(s, call(), kThree), "default.cpu vendor.acme reference.any");
  s.allow_vendors = {"other"};
  EXPECT_EQ(find_refusal(s, call(), kThree[1]), Refusal::kNotAllowed);
  EXPECT_EQ(find_refusal(s, call(), impl("default.acme", Kind::kDefault, "acme")), Refusal::kNone);
}

TEST(Decide, NvidiaAnswersToCuda) {
  const Implementation nvidia = impl("vendor.cuda", Kind::kVendor, "nvidia");
  PolicySettings s;
  s.deny_vendors = {"cuda"};
  EXPECT_EQ(find_refusal(s, call(), nvidia), Refusal::kDenied);
  s.deny_vendors.clear();
  s.per_op["gelu"] = {vendor_token("cuda")};
  EXPECT_EQ(find_refusal(s, call(), nvidia), Refusal::kNone);
}

TEST(Decide, ChecksEveryConstraint) {
  CallTraits c = call();
  Implementation o = impl("default.x", Kind::kDefault);
  EXPECT_EQ(find_refusal({}, c, impl("default.x", Kind::kDefault, "te-fl", kCuda)),
            Refusal::kDevice);
  o.min_arch = 1;
  EXPECT_EQ(find_refusal({}, c, o), Refusal::kArch);
  c.arch = 1;
  EXPECT_EQ(find_refusal({}, c, o), Refusal::kNone);
  o.dtypes = TE_FL_BIT(TE_FL_F16);
  EXPECT_EQ(find_refusal({}, c, o), Refusal::kDtype);
  o.dtypes = TE_FL_MASK_ANY_DTYPE;
  o.scalings = TE_FL_BIT(TE_FL_SCALING_TENSOR);
  EXPECT_EQ(find_refusal({}, c, o), Refusal::kScaling);
  o.scalings = 0x3f;
  o.max_arch = 1;
  c.arch = 2;
  EXPECT_EQ(find_refusal({}, c, o), Refusal::kArch);
  o.max_arch = 2;
  EXPECT_EQ(find_refusal({}, c, o), Refusal::kNone);
  // An implementation declares the set of later arguments that it knows: knowing a newer one does
  // not imply knowing an older one.
  c.later = 0b01;
  o.later = 0b10;
  EXPECT_EQ(find_refusal({}, c, o), Refusal::kLaterArgument);
  o.later = 0b11;
  EXPECT_EQ(find_refusal({}, c, o), Refusal::kNone);
  o.flags = 0;
  PolicySettings deterministic;
  deterministic.deterministic = true;
  EXPECT_EQ(find_refusal(deterministic, c, o), Refusal::kNondeterministic);
  c.capturing = true;
  EXPECT_EQ(find_refusal({}, c, o), Refusal::kNotGraphSafe);
}

TEST(Decide, PinnedMemoryIsHostMemory) {
  CallTraits c = call();
  c.device.type = TE_FL_DEVICE_CUDA_HOST;
  EXPECT_EQ(find_refusal({}, c, kThree[0]), Refusal::kNone);
}

// Candidates for tensors on cuda:0: one implementation runs on that device, the others on the host.
const std::vector<Implementation> kMixed = {impl("reference.any", Kind::kReference),
                                            impl("vendor.acme", Kind::kVendor, "acme", kCuda),
                                            impl("default.cpu", Kind::kDefault)};

CallTraits on_cuda() {
  CallTraits c = call();
  c.device.type = TE_FL_DEVICE_CUDA;
  return c;
}

TEST(Staged, HostImplementationsFollowAllNativeOnes) {
  EXPECT_EQ(order({}, on_cuda(), kMixed), "vendor.acme default.cpu reference.any");
  const Ranking d = decide({}, on_cuda(), kMixed);
  EXPECT_FALSE(d.order[0].staged);
  EXPECT_TRUE(d.order[1].staged && d.order[2].staged);
  PolicySettings s;
  s.prefer = Kind::kDefault;  // does not apply to staged host implementations
  EXPECT_EQ(order(s, on_cuda(), kMixed), "vendor.acme default.cpu reference.any");
  s.deny_vendors = {"acme"};
  EXPECT_EQ(order(s, on_cuda(), kMixed), "vendor.acme! default.cpu reference.any");
  for (const Standing& v : decide({}, call(), kThree).order) EXPECT_FALSE(v.staged);
}

TEST(Staged, AmongThemThePreferredKindComesFirst) {
  PolicySettings s;
  s.prefer = Kind::kVendor;
  std::vector<Implementation> impls = {impl("default.cpu", Kind::kDefault),
                                       impl("vendor.host", Kind::kVendor, "acme")};
  EXPECT_EQ(order(s, on_cuda(), impls), "vendor.host default.cpu");
}

TEST(Staged, ReferenceAndListsNameThem) {
  PolicySettings s;
  s.prefer = Kind::kReference;
  EXPECT_EQ(order(s, on_cuda(), kMixed), "reference.any vendor.acme default.cpu");
  s.strict = true;
  EXPECT_EQ(order(s, on_cuda(), kMixed), "reference.any vendor.acme default.cpu!");
  EXPECT_EQ(first(s, on_cuda(), kMixed), "reference.any");
  s = {};
  s.per_op["gelu"] = {impl_token("default.cpu"), vendor_token("acme")};
  EXPECT_EQ(order(s, on_cuda(), kMixed), "default.cpu vendor.acme reference.any!");
  // Two implementations match the same token of a policy list: the native one comes first.
  std::vector<Implementation> both = kMixed;
  both.push_back(impl("default.chip", Kind::kDefault, "te-fl", kCuda));
  s.per_op["gelu"] = {kind_token(Kind::kDefault)};
  EXPECT_EQ(order(s, on_cuda(), both), "default.chip default.cpu vendor.acme! reference.any!");
  EXPECT_EQ(find_refusal(s, on_cuda(), kMixed[0]), Refusal::kNotListed);
}

TEST(Staged, StrictRefusesWhatIsNotNamed) {
  PolicySettings s;
  s.strict = true;
  EXPECT_EQ(order(s, on_cuda(), kMixed), "vendor.acme default.cpu! reference.any!");
  EXPECT_EQ(find_refusal(s, on_cuda(), kMixed[2]), Refusal::kStagingStrict);
  EXPECT_EQ(first(s, on_cuda(), {kMixed[2]}), "none");
  s.per_op["gelu"] = {kind_token(Kind::kDefault)};
  EXPECT_EQ(first(s, on_cuda(), {kMixed[2]}), "default.cpu");
  EXPECT_EQ(find_refusal(s, on_cuda(), kMixed[2]), Refusal::kNone);
}

TEST(Staged, GraphsCapsAndAbsentDevicesRefuseThem) {
  CallTraits c = on_cuda();
  c.capturing = true;
  EXPECT_EQ(find_refusal({}, c, kMixed[2]), Refusal::kStagingCaptured);
  PolicySettings s;
  s.max_staged_bytes = 0;
  EXPECT_EQ(find_refusal(s, c, kMixed[2]), Refusal::kStagingForbidden);
  EXPECT_EQ(find_refusal(s, call(), kMixed[2]), Refusal::kNone);
  s.max_staged_bytes = 1;  // max_staged_bytes is checked during the call, not by the selection
  EXPECT_EQ(find_refusal(s, on_cuda(), kMixed[2]), Refusal::kNone);
  c = on_cuda();
  c.collective = true;
  EXPECT_EQ(find_refusal({}, c, kMixed[2]), Refusal::kStagingCollective);
  c = on_cuda();
  c.present = false;
  EXPECT_EQ(find_refusal({}, c, kMixed[2]), Refusal::kDevice);
  Implementation needs_arch = kMixed[2];
  needs_arch.min_arch = 80;
  c = on_cuda();
  c.arch = 90;
  EXPECT_EQ(find_refusal({}, c, needs_arch), Refusal::kArch);
  EXPECT_EQ(refusal_text(Refusal::kArch, needs_arch, c, {}, nullptr),
            "it needs architecture 80 or newer, and would be run on the host, which has none");
  Implementation native = kMixed[2];
  native.min_arch = 80;
  native.device_types = uint64_t{1} << TE_FL_DEVICE_CUDA;
  EXPECT_EQ(refusal_text(Refusal::kArch, native, c, {}, nullptr),
            "it needs architecture 80 or newer, cuda:0 is 90");
  native.max_arch = 86;
  EXPECT_EQ(refusal_text(Refusal::kArch, native, c, {}, nullptr),
            "it needs an architecture from 80 to 86, cuda:0 is 90");
  native.min_arch = 0;
  EXPECT_EQ(refusal_text(Refusal::kArch, native, c, {}, nullptr),
            "it needs architecture 86 or older, cuda:0 is 90");
  native.min_arch = 80, native.max_arch = 0;
  c.present = false;
  c.arch = 0;
  EXPECT_EQ(refusal_text(Refusal::kArch, native, c, {}, nullptr),
            "it needs architecture 80 or newer, and there is no cuda:0 here to ask for its own");
}

TEST(First, IsTheTopRankedWhateverItCanDo) {
  std::vector<Implementation> impls = kThree;
  impls[2].dtypes =
      TE_FL_BIT(TE_FL_F16);  // default.cpu lacks the call's dtype, but stays first choice
  EXPECT_EQ(first({}, call(), impls), "default.cpu");
  impls[2].device_types = kCuda;  // the implementation no longer supports the call's device
  EXPECT_EQ(first({}, call(), impls), "vendor.acme");
}

TEST(First, StaysWithinTheFirstToken) {
  PolicySettings s;
  s.prefer = Kind::kVendor;
  EXPECT_EQ(first(s, call(), kThree), "vendor.acme");
  s.deny_vendors = {"acme"};
  EXPECT_EQ(first(s, call(), kThree), "none");
  EXPECT_HAS(missing_first_text(call(), s), "no vendor implementation");
  PolicySettings list;
  list.per_op["gelu"] = {vendor_token("absent"), kind_token(Kind::kDefault)};
  EXPECT_EQ(first(list, call(), kThree), "none");
  EXPECT_HAS(missing_first_text(call(), list), "vendor absent");
}

class Names final : public ArgumentNames {
 public:
  std::string dtype_outside(uint64_t) const override { return "input"; }
  std::string scaling_outside(uint32_t) const override { return "output"; }
  std::string later_names(uint32_t) const override { return "gain"; }
};

TEST(Text, ListsTheCallAndWhatIsSupported) {
  const Names names;
  CallTraits c = call();
  c.dtypes = TE_FL_BIT(TE_FL_F64) | TE_FL_BIT(TE_FL_F32);
  c.later = 1;
  Implementation o = impl("default.x", Kind::kDefault);
  o.dtypes = TE_FL_MASK_HIGH;
  EXPECT_EQ(refusal_text(Refusal::kDtype, o, c, {}, &names),
            "dtype f64 of input is not supported (it supports f32|f16|bf16)");
  // The integers, which it supports for indices, do not matter to this refusal.
  o.dtypes = TE_FL_BIT(TE_FL_BF16) | TE_FL_BIT(TE_FL_I32) | TE_FL_BIT(TE_FL_I64);
  EXPECT_EQ(refusal_text(Refusal::kDtype, o, c, {}, &names),
            "dtype f64|f32 of input is not supported (it supports bf16)");
  EXPECT_EQ(refusal_text(Refusal::kLaterArgument, o, c, {}, &names),
            "the call sets gain, which the op gained later and it does not know (rule R23)");
  EXPECT_EQ(refusal_text(Refusal::kDevice, impl("v", Kind::kVendor, "a", kCuda), c, {}, nullptr),
            "the tensors are on cpu, it supports cuda");
  for (int r = 1; r <= static_cast<int>(Refusal::kStagingCaptured); ++r) {
    EXPECT_FALSE(refusal_text(static_cast<Refusal>(r), o, c, {}, &names).empty()) << r;
    EXPECT_FALSE(refusal_text(static_cast<Refusal>(r), o, c, {}, nullptr).empty()) << r;
  }
}

TEST(UnknownVendors, ListsThoseThatNothingAnswersTo) {
  PolicySettings s;
  s.allow_vendors = {"cuda", "acme"};
  s.deny_vendors = {"gone"};
  s.per_op["gelu"] = {vendor_token("lost"), vendor_token("gone")};
  const std::vector<std::string> known = {"nvidia", "acme"};
  EXPECT_EQ(unknown_vendors(s, known), (std::vector<std::string>{"gone", "lost"}));
}

}  // namespace
}  // namespace te_fl::policy
