// A plugin's own settings, passed from the environment to the plugin (rule R21).
#include "fault_fixture.hpp"
#include "probe_run.hpp"
#include "support/expect.hpp"

namespace te_fl::test {
namespace {

constexpr const char* kDeclared = R"(, "settings": [
  {"name": "TE_FL_SETTINGS_DEBUG", "type": "bool", "default": "0", "doc": "A setting."},
  {"name": "TE_FL_SETTINGS_LEVEL", "type": "int", "default": "3", "choices": "1 9",
   "doc": "A setting."},
  {"name": "TE_FL_SETTINGS_MODE", "type": "enum", "choices": "fast exact", "doc": "A setting."},
  {"name": "TE_FL_SETTINGS_TABLE", "type": "file", "doc": "A setting."}])";

class SettingsTest : public FaultTest {
 protected:
  std::string manifest(const std::string& name, const std::string& more) {
    return folder_.write("path/" + name + ".json",
                         R"({"file_format_version": "1.0", "vendor": "fault", "abi": "0.9",
                             "name": ")" +
                             name + R"(", "library_path": ")" + fault_path(name) +
                             R"(", "arch": ")" + kArch + "\"" + more + "}");
  }
  ProbeRun probe(std::map<std::string, std::string> environment) {
    environment.try_emplace("TE_FL_PLUGIN_PATH", folder_ / "path");
    environment.try_emplace("XDG_DATA_HOME", folder_ / "xdg");
    environment["FAULT_EVENTS"] = "";  // unset for the child: the variable holds an address in this
                                       // process
    return run_probe(environment);
  }
#if defined(__x86_64__)
  static constexpr const char* kArch = "x86_64";
#else
  static constexpr const char* kArch = "aarch64";
#endif
  TempFolder folder_;
};

TEST_F(SettingsTest, ReachThePluginCheckedAndWithDefaults) {
  // The settings are declared in the plugin's header only, or in its manifest as well.
  for (const char* declared : {"", kDeclared}) {
    manifest("settings", declared);
    const ProbeRun run = probe({{"TE_FL_SETTINGS_DEBUG", "Yes"}, {"TE_FL_SETTINGS_MODE", "EXACT"}});
    EXPECT_HAS(run.line("settings"), "|active|") << run.output << run.log;
    for (const char* setting : {"DEBUG=1", "LEVEL=3", "MODE=exact", "TABLE=(null)"}) {
      EXPECT_HAS(run.log, std::string("settings: TE_FL_SETTINGS_") + setting);
    }
    EXPECT_LACKS(run.log, "unknown");
    EXPECT_HAS(run.output, "|0 2") << "calls work: " << run.output;
  }
}

TEST_F(SettingsTest, AWrongOneIsAnErrorThatNamesTheRule) {
  manifest("settings", kDeclared);
  ProbeRun run = probe({{"TE_FL_SETTINGS_LEVEL", "10"}});
  EXPECT_HAS(run.output, "relu|error|");
  EXPECT_HAS(run.output,
             "TE_FL_SETTINGS_LEVEL=10 is not accepted: it must be a whole "
             "number from 1 to 9");
  run = probe({{"TE_FL_SETTINGS_LEVLE", "5"}});
  EXPECT_HAS(run.output, "did you mean TE_FL_SETTINGS_LEVEL?");
}

TEST_F(SettingsTest, OfAPluginThatIsAbsentOrLeftOutTheyAreAWarning) {
  const std::map<std::string, std::string> wrong = {{"TE_FL_SETTINGS_LEVEL", "10"},
                                                    {"TE_FL_SETTINGS_NONSENSE", "1"}};
  for (const bool left_out : {false, true}) {
    if (left_out)
      manifest("settings", kDeclared + std::string(R"(, "probe": {"device_node": "/dev/fault0"})"));
    const ProbeRun run = probe(wrong);
    EXPECT_HAS(run.output, "|0 2") << run.output << run.log;
    EXPECT_HAS(run.log, "warning: ");
    EXPECT_HAS(run.log, "TE_FL_SETTINGS_LEVEL");
    EXPECT_HAS(run.log, "TE_FL_SETTINGS_NONSENSE");
  }
}

TEST_F(SettingsTest, ManifestAndHeaderMustAgree) {
  manifest("settings", R"(, "settings": [{"name": "TE_FL_SETTINGS_LEVEL", "type": "int",
                            "default": "4", "choices": "1 9", "doc": "A setting."}])");
  const ProbeRun run = probe({});
  EXPECT_HAS(run.line("settings"), "|failed|") << run.output;
  EXPECT_HAS(run.line("settings"), "declare its settings differently") << run.output;
  EXPECT_HAS(run.line("settings"), "TE_FL_SETTINGS_LEVEL, TE_FL_SETTINGS_DEBUG") << run.output;
  EXPECT_HAS(run.output, "|0 2");
}

TEST_F(SettingsTest, SetByCodeBeforeThePluginIsLoaded) {
  ASSERT_OK(environment::set("TE_FL_SETTINGS_LEVEL", "7"));
  load("settings");
  EXPECT_EQ(Events::count("TE_FL_SETTINGS_LEVEL=7"), 1);
  EXPECT_EQ(environment::get_int("TE_FL_SETTINGS_LEVEL").value(), 7);
  EXPECT_FALSE(environment::set("TE_FL_SETTINGS_LEVEL", "70").ok());
  ASSERT_OK(plugins::deactivate("settings", true));
  load("settings");
  EXPECT_EQ(Events::count("TE_FL_SETTINGS_LEVEL=7"), 2);
  ASSERT_OK(environment::unset("TE_FL_SETTINGS_LEVEL"));
}

}  // namespace
}  // namespace te_fl::test
