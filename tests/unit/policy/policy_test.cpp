#include "te_fl/policy.hpp"

#include <gtest/gtest.h>

#include <thread>

#include "policy/select.hpp"
#include "te_fl/environment.hpp"

namespace te_fl {
namespace {

const std::vector<std::string> kOps = {"gelu", "rmsnorm_fwd", "generic_gemm"};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

#define EXPECT_ERROR(result, part)                                                   \
  do {                                                                               \
    const auto& r_ = (result);                                                       \
    ASSERT_FALSE(r_.ok());                                                           \
    EXPECT_TRUE(contains(r_.status().to_string(), part)) << r_.status().to_string(); \
  } while (false)

// Variables set by code during a test.
class Variables {
 public:
  ~Variables() {
    for (const std::string& name : names_) EXPECT_TRUE(environment::unset(name).ok());
  }
  void set(const std::string& name, const std::string& value) {
    names_.push_back(name);
    const Status s = environment::set(name, value);
    ASSERT_TRUE(s.ok()) << s.to_string();
  }

 private:
  std::vector<std::string> names_;
};

TEST(ParseKind, TakesEveryWordInAnyCase) {
  EXPECT_EQ(*parse_kind("flagos"), Kind::kDefault);
  EXPECT_EQ(*parse_kind(" Default "), Kind::kDefault);
  EXPECT_EQ(*parse_kind("VENDOR"), Kind::kVendor);
  EXPECT_EQ(*parse_kind("reference"), Kind::kReference);
}

TEST(ParseKind, NamesTheNearestWord) {
  EXPECT_ERROR(parse_kind("vendr"), "'vendor'");
  EXPECT_ERROR(parse_kind("referense"), "'reference'");
  EXPECT_ERROR(parse_kind(""), "flagos");
}

TEST(ParsePerOp, ReadsEveryToken) {
  const auto lists = parse_per_op(
      "gelu=vendor:NVIDIA|flagos; rmsnorm_fwd = impl:default.cpu ;acme::op=reference", kOps);
  ASSERT_TRUE(lists.ok()) << lists.status().to_string();
  using Type = PolicyToken::Type;
  EXPECT_EQ(lists->at("gelu"),
            (std::vector<PolicyToken>{{Type::kVendorName, Kind::kVendor, "nvidia"},
                                      {Type::kKind, Kind::kDefault, ""}}));
  EXPECT_EQ(lists->at("rmsnorm_fwd"),
            (std::vector<PolicyToken>{{Type::kImpl, Kind::kDefault, "default.cpu"}}));
  EXPECT_EQ(lists->at("acme::op"), (std::vector<PolicyToken>{{Type::kKind, Kind::kReference, ""}}));
  EXPECT_TRUE(parse_per_op("", kOps)->empty());
}

TEST(ParsePerOp, RefusesWhatItCannotMean) {
  EXPECT_ERROR(parse_per_op("geluu=vendor", kOps), "'gelu'");
  EXPECT_ERROR(parse_per_op("gelu=vender", kOps), "'vendor'");
  EXPECT_ERROR(parse_per_op("gelu=vendr:acme", kOps), "vendor:");
  EXPECT_ERROR(parse_per_op("gelu=", kOps), "empty token");
  EXPECT_ERROR(parse_per_op("gelu=vendor||flagos", kOps), "empty token");
  EXPECT_ERROR(parse_per_op("gelu=vendor:", kOps), "names nothing");
  EXPECT_ERROR(parse_per_op("gelu=vendor:a b", kOps), "vendor name");
  EXPECT_ERROR(parse_per_op("gelu", kOps), "op=token");
  EXPECT_ERROR(parse_per_op("=vendor", kOps), "op=token");
  EXPECT_ERROR(parse_per_op("gelu=vendor;gelu=flagos", kOps), "twice");
  EXPECT_ERROR(parse_per_op("gelu=vendor|vendor", kOps), "twice");
}

TEST(ParseVendors, SplitsLowersAndDeduplicates) {
  EXPECT_EQ(*parse_vendor_list("NVIDIA, acme,,nvidia"),
            (std::vector<std::string>{"nvidia", "acme"}));
  EXPECT_ERROR(parse_vendor_list("a;b"), "'a;b'");
}

TEST(Policy, EqualSettingsAreOnePolicy) {
  PolicySettings a;
  a.deny_vendors = {"b", "A"};
  PolicySettings b;
  b.deny_vendors = {"a", "b", "a"};
  EXPECT_EQ(SelectionPolicy::intern(a), SelectionPolicy::intern(b));
  EXPECT_EQ(&SelectionPolicy::intern(a).settings(), &SelectionPolicy::intern(b).settings());
  b.strict = true;
  EXPECT_NE(SelectionPolicy::intern(a).id(), SelectionPolicy::intern(b).id());
  EXPECT_EQ(SelectionPolicy::intern({}).id(), SelectionPolicy().id());
}

TEST(Policy, DescribesItself) {
  PolicySettings s;
  s.prefer = Kind::kDefault;
  s.strict = true;
  s.allow_vendors = {"acme"};
  s.per_op["gelu"] = {{PolicyToken::Type::kVendorName, Kind::kVendor, "acme"},
                      {PolicyToken::Type::kKind, Kind::kReference, ""}};
  EXPECT_EQ(SelectionPolicy::intern(s).describe(),
            "prefer=flagos strict=1 allow_vendors=acme per_op=gelu=vendor:acme|reference");
  EXPECT_EQ(SelectionPolicy().describe(), "pure priority");
  // To one op's reader the others' lists are a number.
  s.per_op["relu"] = s.per_op["silu"] = s.per_op["gelu"];
  EXPECT_EQ(policy::describe_for(s, "gelu"),
            "prefer=flagos strict=1 allow_vendors=acme per_op=gelu=vendor:acme|reference (and 2 "
            "lists of other ops)");
  PolicySettings others;
  others.per_op["relu"] = s.per_op["gelu"];
  EXPECT_EQ(policy::describe_for(others, "gelu"),
            "pure priority for this op (and 1 list of other ops)");
}

TEST(FromEnvironment, ReadsEveryVariable) {
  Variables v;
  v.set("TE_FL_PREFER", "vendor");
  v.set("TE_FL_STRICT", "1");
  v.set("TE_FL_DETERMINISTIC", "1");
  v.set("TE_FL_ALLOW_VENDORS", "Acme");
  v.set("TE_FL_DENY_VENDORS", "evil");
  v.set("TE_FL_PER_OP", "gelu=reference");
  const auto policy = SelectionPolicy::from_environment(kOps);
  ASSERT_TRUE(policy.ok()) << policy.status().to_string();
  const PolicySettings& s = policy->settings();
  EXPECT_EQ(s.prefer, Kind::kVendor);
  EXPECT_TRUE(s.strict);
  EXPECT_TRUE(s.deterministic);
  EXPECT_EQ(s.allow_vendors, std::vector<std::string>{"acme"});
  EXPECT_EQ(s.deny_vendors, std::vector<std::string>{"evil"});
  EXPECT_EQ(s.per_op.size(), 1u);
}

TEST(FromEnvironment, PreferWinsOverItsOlderForm) {
  Variables v;
  v.set("TE_FL_PREFER_VENDOR", "1");
  EXPECT_EQ(SelectionPolicy::from_environment(kOps)->settings().prefer, Kind::kVendor);
  v.set("TE_FL_PREFER_VENDOR", "0");
  EXPECT_EQ(SelectionPolicy::from_environment(kOps)->settings().prefer, Kind::kDefault);
  v.set("TE_FL_PREFER", "reference");
  EXPECT_EQ(SelectionPolicy::from_environment(kOps)->settings().prefer, Kind::kReference);
}

TEST(FromEnvironment, MistakesNameVariableAndNearest) {
  Variables v;
  v.set("TE_FL_PER_OP", "generic_gem=vendor");
  const auto policy = SelectionPolicy::from_environment(kOps);
  EXPECT_ERROR(policy, "TE_FL_PER_OP=generic_gem=vendor");
  EXPECT_ERROR(policy, "'generic_gemm'");
}

TEST(FromEnvironment, AMisspeltVariableIsAnError) {
  ASSERT_EQ(setenv("TE_FL_PERFER", "vendor", 1), 0);
  EXPECT_FALSE(environment::reload().ok());
  EXPECT_ERROR(SelectionPolicy::from_environment(kOps), "TE_FL_PREFER");
  EXPECT_ERROR(current_policy(), "TE_FL_PREFER");
  ASSERT_EQ(unsetenv("TE_FL_PERFER"), 0);
  EXPECT_TRUE(environment::reload().ok());
  EXPECT_TRUE(current_policy().ok());
}

TEST(CurrentPolicy, ScopeWinsOverGlobalWinsOverEnvironment) {
  Variables v;
  v.set("TE_FL_PREFER", "vendor");
  EXPECT_EQ(current_policy()->settings().prefer, Kind::kVendor);
  PolicySettings reference;
  reference.prefer = Kind::kReference;
  set_global_policy(SelectionPolicy::intern(reference));
  EXPECT_EQ(current_policy()->settings().prefer, Kind::kReference);
  {
    const PolicyScope outer((PolicySettings()));
    EXPECT_EQ(current_policy()->id(), 0u);
    {
      PolicySettings strict;
      strict.strict = true;
      const PolicyScope inner(strict);
      EXPECT_TRUE(current_policy()->settings().strict);
    }
    EXPECT_EQ(current_policy()->id(), 0u);
  }
  EXPECT_EQ(current_policy()->settings().prefer, Kind::kReference);
  clear_global_policy();
  EXPECT_EQ(current_policy()->settings().prefer, Kind::kVendor);
}

TEST(CurrentPolicy, AnInvalidEnvironmentIsAnErrorUnlessCodeDecides) {
  Variables v;
  v.set("TE_FL_PER_OP", "nonsense");
  EXPECT_ERROR(current_policy(), "nonsense");
  {
    const PolicyScope scope((PolicySettings()));
    EXPECT_TRUE(current_policy().ok());
  }
  EXPECT_FALSE(current_policy().ok());
  v.set("TE_FL_PER_OP", "");
  EXPECT_TRUE(current_policy().ok());
}

TEST(CapturedPolicy, CarriesTheScopeToAnotherThread) {
  PolicySettings s;
  s.prefer = Kind::kReference;
  CapturedPolicy captured;
  {
    const PolicyScope scope(s);
    captured = CapturedPolicy::capture();
  }
  const CapturedPolicy none = CapturedPolicy::capture();
  std::thread([&] {
    EXPECT_EQ(none.enter(), nullptr);
    EXPECT_EQ(current_policy()->id(), 0u);
    {
      const auto scope = captured.enter();
      ASSERT_NE(scope, nullptr);
      EXPECT_EQ(current_policy()->settings(), s);
    }
    EXPECT_EQ(current_policy()->id(), 0u);
  }).join();
}

}  // namespace
}  // namespace te_fl
