// Settings that plugins declare; they become part of the environment once they are declared.
#include "core/base/plugin_settings.hpp"

#include <gtest/gtest.h>

#include <cstdlib>

#include "support/expect.hpp"
#include "te_fl/environment.hpp"

namespace te_fl::core {
namespace {

using environment::get;
using environment::get_if_set;
using environment::reload;
using environment::remarks;
using environment::set;
using environment::status;
using environment::unset;
using enum VariableType;

const PluginSetting kDebug{"TE_FL_ACME_DEBUG", kBool, "0", "", "Says more."};
const PluginSetting kMode{"TE_FL_ACME_MODE", kEnum, "", "fast exact", "How."};

class PluginSettings : public ::testing::Test {
 protected:
  void SetUp() override { TearDown(); }
  void TearDown() override {
    for (const char* name : names) unsetenv(name);
    for (const char* name : names) (void)unset(name);
    for (const char* plugin : {"acme", "acme_x"}) ASSERT_OK(declare_settings(plugin, {}, false));
    ASSERT_OK(reload());
  }
  static void declare(bool active) {
    const Status s = declare_settings("acme", {kDebug, kMode}, active);
    ASSERT_OK(s);
  }
  static constexpr const char* names[] = {"TE_FL_ACME_DEBUG", "TE_FL_ACME_MODE", "TE_FL_ACME_DEBGU",
                                          "TE_FL_ACME_X_MODE", "TE_FL_ACME_WEATHER"};
};

TEST_F(PluginSettings, AreReadWhenTheyAreDeclared) {
  setenv("TE_FL_ACME_DEBUG", "Yes", 1);
  ASSERT_OK(reload()) << "no policy becomes invalid by it";
  EXPECT_EQ(get("TE_FL_ACME_DEBUG").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(setting_for_plugin("TE_FL_ACME_DEBUG", "acme"), std::nullopt);
  const uint64_t before = environment::generation();
  declare(true);
  EXPECT_NE(environment::generation(), before);
  EXPECT_TRUE(status().ok() && remarks().empty());
  EXPECT_EQ(setting_for_plugin("TE_FL_ACME_DEBUG", "acme"), "1");
  EXPECT_EQ(setting_for_plugin("TE_FL_ACME_MODE", "acme"), std::nullopt);
  unsetenv("TE_FL_ACME_DEBUG");
  ASSERT_OK(reload());
  EXPECT_EQ(setting_for_plugin("TE_FL_ACME_DEBUG", "acme"), "0") << "its default";
  take_undeclared_setting();
  EXPECT_EQ(setting_for_plugin("TE_FL_ACME_DEBUG", "acme"), "0");
  EXPECT_EQ(take_undeclared_setting(), "") << "its own";
  EXPECT_EQ(setting_for_plugin("TE_FL_ACME_DEBUG", "other"), "0");
  EXPECT_EQ(take_undeclared_setting(), "TE_FL_ACME_DEBUG") << "another plugin's";
  EXPECT_EQ(setting_for_plugin("TE_FL_ACME_NONE", "acme"), std::nullopt);
  EXPECT_EQ(take_undeclared_setting(), "TE_FL_ACME_NONE");
  EXPECT_EQ(take_undeclared_setting(), "");
  EXPECT_EQ(get_if_set("TE_FL_ACME_DEBUG"), std::nullopt);
  for (const environment::Variable& v : environment::table()) {
    if (v.name != "TE_FL_ACME_MODE") continue;
    EXPECT_EQ(v.plugin, "acme");
    EXPECT_EQ(v.type, "enum");
    EXPECT_EQ(v.doc, "How.");
  }
}

TEST_F(PluginSettings, CodeMaySetThemBeforeTheyAreDeclared) {
  ASSERT_OK(set("TE_FL_ACME_MODE", "EXACT"));
  EXPECT_HAS(remarks().at(0), "TE_FL_ACME_MODE was set by the program, and no plugin");
  declare(true);
  EXPECT_EQ(setting_for_plugin("TE_FL_ACME_MODE", "acme"), "exact");
  EXPECT_TRUE(remarks().empty());
  declare(true);  // the plugin is loaded again
  EXPECT_EQ(setting_for_plugin("TE_FL_ACME_MODE", "acme"), "exact");
  ASSERT_OK(unset("TE_FL_ACME_MODE"));
  EXPECT_EQ(setting_for_plugin("TE_FL_ACME_MODE", "acme"), std::nullopt);
  EXPECT_FALSE(set("TE_FL_ACME_MODE", "slow").ok());
  // A name close to one of te-fl's own is reported as a mistake immediately.
  EXPECT_EQ(set("TE_FL_STRICKT", "1").code(), StatusCode::kNotFound);
  EXPECT_EQ(set("TE_FL_VERIFI_DIR", "x").code(), StatusCode::kNotFound);
}

TEST_F(PluginSettings, MistakesAreErrorsWhileThePluginIsActiveAndRemarksOtherwise) {
  setenv("TE_FL_ACME_MODE", "slow", 1);
  setenv("TE_FL_ACME_DEBGU", "1", 1);
  ASSERT_OK(reload());
  EXPECT_EQ(remarks().size(), 2u) << "nobody knows them";
  declare(false);
  EXPECT_OK(status());
  ASSERT_EQ(remarks().size(), 2u);
  declare(true);
  EXPECT_HAS(status().message(), "TE_FL_ACME_MODE=slow is not accepted: it must be fast");
  EXPECT_HAS(status().message(), "TE_FL_ACME_DEBGU is unknown; did you mean TE_FL_ACME_DEBUG?");
  EXPECT_TRUE(remarks().empty());
  leave_out_settings("acme");
  EXPECT_OK(status());
  EXPECT_EQ(remarks().size(), 2u);
}

TEST_F(PluginSettings, AnUnknownOneThatIsNearToNoneIsARemark) {
  setenv("TE_FL_ACME_WEATHER", "1", 1);
  ASSERT_OK(reload());
  declare(true);
  EXPECT_OK(status());
  EXPECT_HAS(remarks().at(0), "plugin acme has no such setting");
}

TEST_F(PluginSettings, ANameHasOneOwner) {
  declare(true);
  EXPECT_OK(declare_settings("acme_x", {{"TE_FL_ACME_X_MODE", kString, "", "", "A."}}, true));
  const Status taken =
      declare_settings("acme", {{"TE_FL_ACME_X_MODE", kString, "", "", "A."}}, true);
  EXPECT_FAILS(taken, kAlreadyExists, "is plugin acme_x's");
  EXPECT_EQ(setting_for_plugin("TE_FL_ACME_DEBUG", "acme"), "0") << "nothing was changed";
  EXPECT_HAS(
      declare_settings("verify", {{"TE_FL_VERIFY_DIR", kString, "", "", "A."}}, true).message(),
      "te-fl's own");
}

TEST_F(PluginSettings, AnIntWithoutADefaultIsUnset) {
  ASSERT_OK(declare_settings("acme", {{"TE_FL_ACME_DEBUG", kInt, "", "", "A."}}, true));
  EXPECT_EQ(environment::get_int("TE_FL_ACME_DEBUG").status().code(),
            StatusCode::kFailedPrecondition);
  ASSERT_OK(set("TE_FL_ACME_DEBUG", "-7"));
  EXPECT_EQ(environment::get_int("TE_FL_ACME_DEBUG").value(), -7);
}

}  // namespace
}  // namespace te_fl::core
