#include "te_fl/policy.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "policy/current.hpp"
#include "policy/select.hpp"
#include "support/expect.hpp"
#include "te_fl/environment.hpp"

namespace te_fl {
namespace {

const std::vector<std::string> kOps = {"gelu", "rmsnorm_fwd", "generic_gemm"};

// Sets environment variables during a test and unsets them at its end.
class Variables {
 public:
  ~Variables() {
    for (const std::string& name : names_) EXPECT_OK(environment::unset(name));
  }
  void set(const std::string& name, const std::string& value) {
    names_.push_back(name);
    const Status s = environment::set(name, value);
    ASSERT_OK(s);
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
  EXPECT_FAILS(parse_kind("vendr"), kInvalidArgument, "'vendor'");
  EXPECT_FAILS(parse_kind("referense"), kInvalidArgument, "'reference'");
  EXPECT_FAILS(parse_kind(""), kInvalidArgument, "flagos");
}

TEST(ParsePerOp, ReadsEveryToken) {
  const auto lists = parse_per_op(
      "gelu=vendor:NVIDIA|flagos; rmsnorm_fwd = impl:default.cpu ;acme::op=reference", kOps);
  ASSERT_OK(lists);
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
  EXPECT_FAILS(parse_per_op("geluu=vendor", kOps), kInvalidArgument, "'gelu'");
  EXPECT_FAILS(parse_per_op("gelu=vender", kOps), kInvalidArgument, "'vendor'");
  EXPECT_FAILS(parse_per_op("gelu=vendr:acme", kOps), kInvalidArgument, "vendor:");
  EXPECT_FAILS(parse_per_op("gelu=", kOps), kInvalidArgument, "empty token");
  EXPECT_FAILS(parse_per_op("gelu=vendor||flagos", kOps), kInvalidArgument, "empty token");
  EXPECT_FAILS(parse_per_op("gelu=vendor:", kOps), kInvalidArgument, "names nothing");
  EXPECT_FAILS(parse_per_op("gelu=vendor:a b", kOps), kInvalidArgument, "vendor name");
  EXPECT_FAILS(parse_per_op("gelu", kOps), kInvalidArgument, "op=token");
  EXPECT_FAILS(parse_per_op("=vendor", kOps), kInvalidArgument, "op=token");
  EXPECT_FAILS(parse_per_op("gelu=vendor;gelu=flagos", kOps), kInvalidArgument, "twice");
  EXPECT_FAILS(parse_per_op("gelu=vendor|vendor", kOps), kInvalidArgument, "twice");
}

TEST(ParseVendors, SplitsLowersAndDeduplicates) {
  EXPECT_EQ(*parse_vendor_list("NVIDIA, acme,,nvidia"),
            (std::vector<std::string>{"nvidia", "acme"}));
  EXPECT_FAILS(parse_vendor_list("a;b"), kInvalidArgument, "'a;b'");
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

TEST(Policy, ThreadsMakeAndReadThem) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        PolicySettings settings;
        settings.deny_vendors = {"thread" + std::to_string(t % 2), "round" + std::to_string(i)};
        const SelectionPolicy made = SelectionPolicy::intern(settings);
        const PolicyScope scope(made);
        const auto in_force = current_policy();
        const bool right = in_force.ok() && in_force->id() == made.id() &&
                           policy::settings_of(made.id()).deny_vendors.size() == 2;
        const std::string op = "test::declared" + std::to_string(i);
        policy::know_op(op);
        const std::vector<std::string> known = policy::known_ops();
        wrong.fetch_add(right && std::count(known.begin(), known.end(), op) == 1 ? 0 : 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
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
  // The description of the policy for one op shows only the number of lists for other ops.
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
  ASSERT_OK(policy);
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
  EXPECT_FAILS(policy, kInvalidArgument, "TE_FL_PER_OP=generic_gem=vendor");
  EXPECT_FAILS(policy, kInvalidArgument, "'generic_gemm'");
}

TEST(FromEnvironment, AMisspeltVariableIsAnError) {
  ASSERT_EQ(setenv("TE_FL_PERFER", "vendor", 1), 0);
  EXPECT_FALSE(environment::reload().ok());
  EXPECT_FAILS(SelectionPolicy::from_environment(kOps), kInvalidArgument, "TE_FL_PREFER");
  EXPECT_FAILS(current_policy(), kInvalidArgument, "TE_FL_PREFER");
  ASSERT_EQ(unsetenv("TE_FL_PERFER"), 0);
  EXPECT_OK(environment::reload());
  EXPECT_OK(current_policy());
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
  EXPECT_FAILS(current_policy(), kInvalidArgument, "nonsense");
  {
    const PolicyScope scope((PolicySettings()));
    EXPECT_OK(current_policy());
  }
  EXPECT_FALSE(current_policy().ok());
  v.set("TE_FL_PER_OP", "");
  EXPECT_OK(current_policy());
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
