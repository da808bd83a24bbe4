// What ranks compare before the first step.
#include <gtest/gtest.h>

#include "core/base/plugin_settings.hpp"
#include "dispatch/watch/watch.hpp"
#include "dispatch_fixture.hpp"
#include "te_fl/te_fl.hpp"
#include "unit/temp_folder.hpp"

namespace te_fl {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Fingerprint, IsTheSameUntilSomethingThatDecidesChanges) {
  const std::string before = fingerprint(), table = fingerprint_table();
  EXPECT_EQ(before.size(), 32u);
  EXPECT_EQ(before, fingerprint());
  EXPECT_TRUE(table.starts_with("fingerprint = " + before));
  EXPECT_TRUE(fingerprint_difference(table, fingerprint_table()).empty());

  PolicySettings strict;
  strict.strict = true;
  {
    const PolicyScope scope(strict);
    EXPECT_NE(fingerprint(), before);
    const auto d = fingerprint_difference(table, fingerprint_table());
    ASSERT_EQ(d.size(), 1u);
    EXPECT_EQ(d[0], "policy: pure priority in the first, strict=1 in the second");
  }
  OpRegistry& registry = OpRegistry::instance();
  ASSERT_TRUE(registry.set_priority("gelu", "reference.host", 51).ok());
  auto d = fingerprint_difference(table, fingerprint_table());
  ASSERT_EQ(d.size(), 1u);
  EXPECT_TRUE(contains(d[0], "op gelu reference.host: priority 50")) << d[0];
  ASSERT_TRUE(registry.set_priority("gelu", "reference.host", 50).ok());

  testing::Fake fake("vendor.fake");
  ASSERT_TRUE(registry.register_op(fake.desc, "acme", "acme").ok());
  d = fingerprint_difference(table, fingerprint_table());
  ASSERT_EQ(d.size(), 2u);
  EXPECT_TRUE(contains(d[0] + d[1], "only in the second: op test::five vendor.fake"));
  ASSERT_TRUE(registry.unregister_owner("acme").ok());
  EXPECT_EQ(fingerprint(), before);
}

TEST(Fingerprint, KnowsQuarantines) {
  test::TempFolder folder;
  const std::string table = fingerprint_table();
  folder.write("q.json",
               R"({"te_fl_quarantine": 1, "entries": [{"op": "gelu", "impl": "default.cpu",
                   "owner": "cpu", "build": "b", "chip": "c", "driver": "", "dtypes": ["f32"],
                   "scalings": ["none"]}]})");
  ASSERT_TRUE(environment::set("TE_FL_QUARANTINE_FILE", folder / "q.json").ok());
  dispatch::forget_quarantine_file();
  auto d = fingerprint_difference(table, fingerprint_table());
  ASSERT_EQ(d.size(), 1u);
  EXPECT_EQ(d[0], "only in the second: quarantine gelu default.cpu f32 none b = c");
  ASSERT_TRUE(environment::unset("TE_FL_QUARANTINE_FILE").ok());
  dispatch::forget_quarantine_file();
}

TEST(Fingerprint, KnowsSettingsOfActivePlugins) {
  test::TempFolder folder;
  using enum core::VariableType;
  ASSERT_TRUE(core::declare_settings("acme",
                                     {{"TE_FL_ACME_TABLE", kFile, "", "", "A file."},
                                      {"TE_FL_ACME_TILES", kInt, "4", "", "A number."}},
                                     true)
                  .ok());
  const std::string table = fingerprint_table();
  ASSERT_TRUE(environment::set("TE_FL_ACME_TILES", "8").ok());
  auto d = fingerprint_difference(table, fingerprint_table());
  ASSERT_EQ(d.size(), 1u);
  EXPECT_EQ(d[0], "only in the second: setting TE_FL_ACME_TILES = 8");
  ASSERT_TRUE(environment::unset("TE_FL_ACME_TILES").ok());
  // A file by its contents, wherever a rank has it.
  ASSERT_TRUE(environment::set("TE_FL_ACME_TABLE", folder.write("a", "1")).ok());
  const std::string one = fingerprint();
  ASSERT_TRUE(environment::set("TE_FL_ACME_TABLE", folder.write("b", "1")).ok());
  EXPECT_EQ(fingerprint(), one);
  folder.write("b", "2");
  EXPECT_NE(fingerprint(), one);
  ASSERT_TRUE(environment::set("TE_FL_ACME_TABLE", folder.path()).ok());
  EXPECT_TRUE(contains(fingerprint_table(), "setting TE_FL_ACME_TABLE = unreadable"));
  core::leave_out_settings("acme");
  EXPECT_EQ(fingerprint_table(), table);
  ASSERT_TRUE(environment::unset("TE_FL_ACME_TABLE").ok());
  ASSERT_TRUE(core::declare_settings("acme", {}, false).ok());
}

}  // namespace
}  // namespace te_fl
