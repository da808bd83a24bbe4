#include "policy/select.hpp"

#include <gtest/gtest.h>

namespace te_fl::policy {
namespace {

constexpr uint64_t kCpu = uint64_t{1} << TE_FL_DEVICE_CPU;
constexpr uint64_t kCuda = uint64_t{1} << TE_FL_DEVICE_CUDA;

Option option(std::string_view id, Kind kind, std::string_view vendor = "te-fl",
              uint64_t devices = kCpu) {
  Option o;
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

Call call() {
  Call c;
  c.op = "gelu";
  c.dtypes = TE_FL_BIT(TE_FL_F32);
  c.scalings = TE_FL_BIT(TE_FL_SCALING_NONE);
  return c;
}

const std::vector<Option> kThree = {option("reference.any", Kind::kReference),
                                    option("vendor.acme", Kind::kVendor, "acme"),
                                    option("default.cpu", Kind::kDefault)};

// "default.cpu vendor.acme! ...", ! for a refused one.
std::string order(const PolicySettings& s, const Call& c, const std::vector<Option>& options) {
  std::string text;
  for (const Verdict& v : decide(s, c, options).order) {
    text += (text.empty() ? "" : " ") + std::string(options[v.option].impl_id) +
            (v.refusal == Refusal::kNone ? "" : "!");
  }
  return text;
}

std::string first(const PolicySettings& s, const Call& c, const std::vector<Option>& options) {
  const Decision d = decide(s, c, options);
  return d.first < 0 ? "none" : std::string(options[d.order[d.first].option].impl_id);
}

Refusal refusal_of(const PolicySettings& s, const Call& c, const Option& o) {
  return decide(s, c, std::vector<Option>{o}).order[0].refusal;
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
  std::vector<Option> same = {option("default.b", Kind::kDefault),
                              option("default.a", Kind::kDefault),
                              option("default.c", Kind::kDefault)};
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
  s.prefer = Kind::kDefault;  // the list wins
  s.per_op["gelu"] = {kind_token(Kind::kReference), vendor_token("acme")};
  EXPECT_EQ(order(s, call(), kThree), "reference.any vendor.acme default.cpu!");
  s.per_op["gelu"] = {impl_token("vendor.acme")};
  EXPECT_EQ(order(s, call(), kThree), "vendor.acme default.cpu! reference.any!");
  Call other = call();
  other.op = "dgelu";
  EXPECT_EQ(order(s, other, kThree), "default.cpu vendor.acme reference.any");
}

TEST(Decide, FiltersVendorKindOnlyAndDenyWins) {
  PolicySettings s;
  s.allow_vendors = {"acme"};
  s.deny_vendors = {"ACME"};
  EXPECT_EQ(order(s, call(), kThree), "default.cpu vendor.acme! reference.any");
  EXPECT_EQ(refusal_of(s, call(), kThree[1]), Refusal::kDenied);
  s.deny_vendors.clear();
  EXPECT_EQ(order(s, call(), kThree), "default.cpu vendor.acme reference.any");
  s.allow_vendors = {"other"};
  EXPECT_EQ(refusal_of(s, call(), kThree[1]), Refusal::kNotAllowed);
  EXPECT_EQ(refusal_of(s, call(), option("default.acme", Kind::kDefault, "acme")), Refusal::kNone);
}

TEST(Decide, NvidiaAnswersToCuda) {
  const Option nvidia = option("vendor.cuda", Kind::kVendor, "nvidia");
  PolicySettings s;
  s.deny_vendors = {"cuda"};
  EXPECT_EQ(refusal_of(s, call(), nvidia), Refusal::kDenied);
  s.deny_vendors.clear();
  s.per_op["gelu"] = {vendor_token("cuda")};
  EXPECT_EQ(refusal_of(s, call(), nvidia), Refusal::kNone);
  EXPECT_TRUE(same_vendor("CUDA", "Nvidia"));
  EXPECT_FALSE(same_vendor("cuda", "amd"));
}

TEST(Decide, ChecksEveryConstraint) {
  Call c = call();
  Option o = option("default.x", Kind::kDefault);
  EXPECT_EQ(refusal_of({}, c, option("default.x", Kind::kDefault, "te-fl", kCuda)),
            Refusal::kDevice);
  o.min_arch = 1;
  EXPECT_EQ(refusal_of({}, c, o), Refusal::kArch);
  c.arch = 1;
  EXPECT_EQ(refusal_of({}, c, o), Refusal::kNone);
  o.dtypes = TE_FL_BIT(TE_FL_F16);
  EXPECT_EQ(refusal_of({}, c, o), Refusal::kDtype);
  o.dtypes = TE_FL_MASK_ANY_DTYPE;
  o.scalings = TE_FL_BIT(TE_FL_SCALING_TENSOR);
  EXPECT_EQ(refusal_of({}, c, o), Refusal::kScaling);
  o.scalings = 0x3f;
  c.version = 2;
  EXPECT_EQ(refusal_of({}, c, o), Refusal::kVersion);
  o.param_version = 2;
  EXPECT_EQ(refusal_of({}, c, o), Refusal::kNone);
  o.flags = 0;
  PolicySettings deterministic;
  deterministic.deterministic = true;
  EXPECT_EQ(refusal_of(deterministic, c, o), Refusal::kNondeterministic);
  c.capturing = true;
  EXPECT_EQ(refusal_of({}, c, o), Refusal::kNotGraphSafe);
}

TEST(Decide, PinnedMemoryIsHostMemory) {
  Call c = call();
  c.device.type = TE_FL_DEVICE_CUDA_HOST;
  EXPECT_EQ(refusal_of({}, c, kThree[0]), Refusal::kNone);
}

TEST(First, IsTheTopRankedWhateverItCanDo) {
  std::vector<Option> options = kThree;
  options[2].dtypes =
      TE_FL_BIT(TE_FL_F16);  // default.cpu cannot serve the call, but stays the first choice
  EXPECT_EQ(first({}, call(), options), "default.cpu");
  options[2].device_types = kCuda;  // now it is not registered for the call's device
  EXPECT_EQ(first({}, call(), options), "vendor.acme");
}

TEST(First, StaysWithinTheFirstToken) {
  PolicySettings s;
  s.prefer = Kind::kVendor;
  EXPECT_EQ(first(s, call(), kThree), "vendor.acme");
  s.deny_vendors = {"acme"};
  EXPECT_EQ(first(s, call(), kThree), "none");
  EXPECT_NE(missing_first_text(call(), s).find("no vendor implementation"), std::string::npos);
  PolicySettings list;
  list.per_op["gelu"] = {vendor_token("absent"), kind_token(Kind::kDefault)};
  EXPECT_EQ(first(list, call(), kThree), "none");
  EXPECT_NE(missing_first_text(call(), list).find("vendor absent"), std::string::npos);
}

class Names final : public ArgumentNames {
 public:
  std::string dtype_outside(uint32_t) const override { return "input"; }
  std::string scaling_outside(uint32_t) const override { return "output"; }
  std::string newer_than(uint32_t) const override { return "gain"; }
};

TEST(Text, SaysWhatWasAndWhatIsServed) {
  const Names names;
  Call c = call();
  c.dtypes = TE_FL_BIT(TE_FL_F64) | TE_FL_BIT(TE_FL_F32);
  c.version = 3;
  Option o = option("default.x", Kind::kDefault);
  o.dtypes = TE_FL_MASK_HIGH;
  EXPECT_EQ(refusal_text(Refusal::kDtype, o, c, {}, &names),
            "dtype f64 of input is not served (it serves f32|f16|bf16)");
  EXPECT_EQ(refusal_text(Refusal::kVersion, o, c, {}, &names),
            "it implements version 1 of the op, the call uses gain of version 3");
  EXPECT_EQ(refusal_text(Refusal::kDevice, option("v", Kind::kVendor, "a", kCuda), c, {}, nullptr),
            "the tensors are on cpu, it serves cuda");
  for (int r = 1; r <= static_cast<int>(Refusal::kNotGraphSafe); ++r) {
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
