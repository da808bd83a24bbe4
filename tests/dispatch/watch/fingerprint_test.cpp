// The fingerprint of settings, which ranks compare before the first step.
#include <gtest/gtest.h>

#include "core/base/plugin_settings.hpp"
#include "dispatch/watch/barred.hpp"
#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/temp_folder.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl {
namespace {

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
  ASSERT_OK(registry.set_priority("gelu", "reference.host", 51));
  auto d = fingerprint_difference(table, fingerprint_table());
  ASSERT_EQ(d.size(), 1u);
  EXPECT_HAS(d[0], "op gelu reference.host: priority 50");
  ASSERT_OK(registry.set_priority("gelu", "reference.host", 50));

  testing::Fake fake("vendor.fake");
  ASSERT_OK(registry.register_op(fake.desc, "acme", "acme"));
  d = fingerprint_difference(table, fingerprint_table());
  ASSERT_EQ(d.size(), 2u);
  EXPECT_HAS(d[0] + d[1], "only in the second: op test::five vendor.fake");
  ASSERT_OK(registry.unregister_owner("acme"));
  EXPECT_EQ(fingerprint(), before);
}

TEST(Fingerprint, KnowsQuarantines) {
  test::TempFolder folder;
  const std::string table = fingerprint_table();
  folder.write("q.json",
               R"({"te_fl_quarantine": 1, "entries": [{"op": "gelu", "impl": "default.cpu",
                   "owner": "cpu", "build": "b", "chip": "c", "driver": "", "dtypes": ["f32"],
                   "scalings": ["none"]}]})");
  ASSERT_OK(environment::set("TE_FL_QUARANTINE_FILE", folder / "q.json"));
  dispatch::forget_quarantine_file();
  auto d = fingerprint_difference(table, fingerprint_table());
  ASSERT_EQ(d.size(), 1u);
  EXPECT_EQ(d[0], "only in the second: quarantine gelu default.cpu f32 none b = c");
  ASSERT_OK(environment::unset("TE_FL_QUARANTINE_FILE"));
  dispatch::forget_quarantine_file();
}

TEST(Fingerprint, KnowsSettingsOfActivePlugins) {
  test::TempFolder folder;
  using enum core::VariableType;
  ASSERT_OK(core::declare_settings("acme",
                                   {{"TE_FL_ACME_TABLE", kFile, "", "", "A file."},
                                    {"TE_FL_ACME_TILES", kInt, "4", "", "A number."}},
                                   true));
  const std::string table = fingerprint_table();
  ASSERT_OK(environment::set("TE_FL_ACME_TILES", "8"));
  auto d = fingerprint_difference(table, fingerprint_table());
  ASSERT_EQ(d.size(), 1u);
  EXPECT_EQ(d[0], "only in the second: setting TE_FL_ACME_TILES = 8");
  ASSERT_OK(environment::unset("TE_FL_ACME_TILES"));
  // The fingerprint contains a file's contents and not its path.
  ASSERT_OK(environment::set("TE_FL_ACME_TABLE", folder.write("a", "1")));
  const std::string one = fingerprint();
  ASSERT_OK(environment::set("TE_FL_ACME_TABLE", folder.write("b", "1")));
  EXPECT_EQ(fingerprint(), one);
  folder.write("b", "2");
  EXPECT_NE(fingerprint(), one);
  ASSERT_OK(environment::set("TE_FL_ACME_TABLE", folder.path()));
  EXPECT_HAS(fingerprint_table(), "setting TE_FL_ACME_TABLE = unreadable");
  core::leave_out_settings("acme");
  EXPECT_EQ(fingerprint_table(), table);
  ASSERT_OK(environment::unset("TE_FL_ACME_TABLE"));
  ASSERT_OK(core::declare_settings("acme", {}, false));
}

}  // namespace
}  // namespace te_fl
