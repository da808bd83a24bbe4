#include "te_fl/environment.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>

#include "core/base/plugin_settings.hpp"
#include "core/base/settings.hpp"
#include "support/expect.hpp"
#include "support/sanitizers.hpp"
#include "support/threads.hpp"
#include "te_fl/log.hpp"

extern char** environ;

namespace te_fl::environment {
namespace {

// Each test starts with an environment without te-fl's variables; TearDown() restores them.
class Environment : public ::testing::Test {
 protected:
  void SetUp() override { found_ = clear(); }
  void TearDown() override {
    clear();
    for (const auto& [name, value] : found_) setenv(name.c_str(), value.c_str(), 1);
    EXPECT_OK(reload());
  }
  static std::map<std::string, std::string> clear() {
    std::map<std::string, std::string> ours;
    for (char** e = environ; *e != nullptr; ++e) {
      const std::string entry = *e;
      const size_t equals = entry.find('=');
      if (entry.rfind("TE", 0) == 0) ours[entry.substr(0, equals)] = entry.substr(equals + 1);
    }
    for (const auto& [name, value] : ours) unsetenv(name.c_str());
    for (const Variable& v : table()) EXPECT_OK(unset(v.name));
    EXPECT_OK(reload());
    return ours;
  }
  static Status load(const char* name, const char* value) {
    setenv(name, value, 1);
    return reload();
  }
  static Variable row(const std::string& name) {
    for (const Variable& v : table()) {
      if (v.name == name) return v;
    }
    ADD_FAILURE() << name;
    return {};
  }

 private:
  std::map<std::string, std::string> found_;
};

TEST_F(Environment, DefaultsAreShown) {
  EXPECT_EQ(get("TE_FL_STRICT").value(), "0");
  EXPECT_EQ(get("TEFL_LOG_LEVEL").value(), "INFO");
  EXPECT_EQ(get_int("TE_FL_PLUGIN_TIMEOUT_MS").value(), 10000);
  EXPECT_EQ(get("TE_FL_PREFER").value(), "");
  EXPECT_FALSE(get_if_set("TE_FL_STRICT").has_value());
  EXPECT_EQ(row("TE_FL_STRICT").origin, "default");
  EXPECT_EQ(variable("TE_FL_STRICT").value().origin, "default");
}

TEST_F(Environment, ValuesAreReadOnReloadInCanonicalForm) {
  setenv("TE_FL_STRICT", " Yes ", 1);
  setenv("TE_FL_PREFER", "VENDOR", 1);
  EXPECT_EQ(get("TE_FL_STRICT").value(), "0") << "must not be read before reload()";
  const uint64_t before = generation();
  ASSERT_OK(reload());
  EXPECT_NE(generation(), before);
  EXPECT_EQ(get("TE_FL_STRICT").value(), "1");
  EXPECT_TRUE(get_bool("TE_FL_STRICT").value());
  EXPECT_EQ(get("TE_FL_PREFER").value(), "vendor");
  EXPECT_EQ(row("TE_FL_PREFER").origin, "environment (TE_FL_PREFER)");
}

TEST_F(Environment, EveryBoolSpelling) {
  for (const char* yes : {"1", "true", "TRUE", "on", "Yes"}) {
    ASSERT_OK(load("TE_FL_SYNC", yes)) << yes;
    EXPECT_TRUE(get_bool("TE_FL_SYNC").value()) << yes;
  }
  for (const char* no : {"0", "false", "Off", "no", ""}) {
    ASSERT_OK(load("TE_FL_SYNC", no)) << no;
    EXPECT_FALSE(get_bool("TE_FL_SYNC").value()) << no;
  }
}

TEST_F(Environment, AMisspeltVariableNamesTheNearest) {
  const Status s = load("TE_FL_PERFER", "vendor");
  EXPECT_FAILS(s, kInvalidArgument, "TE_FL_PERFER is unknown; did you mean TE_FL_PREFER?");
  EXPECT_EQ(status().message(), s.message()) << "the same until the next reload";
  unsetenv("TE_FL_PERFER");
  EXPECT_OK(reload());
  EXPECT_OK(status());
}

// The variable may belong to a plugin that is not loaded.
TEST_F(Environment, AnUnknownVariableFarFromAllIsARemarkThatPointsToTheList) {
  for (const char* name : {"TEFL_XYZZY", "TE_FL_ACME_DEBUG", "TE_FL_ACME_SYNC"}) {
    const Status s = load(name, "1");
    EXPECT_OK(s);
    ASSERT_EQ(remarks().size(), 1u) << name;
    EXPECT_HAS(remarks()[0], std::string(name) + " is unknown; it may be of a plugin");
    EXPECT_HAS(remarks()[0], "`te-fl env` lists");
    unsetenv(name);
  }
}

TEST_F(Environment, AWrongValueNamesVariableValueAndNearest) {
  const Status s = load("TE_FL_STRICT", "ture");
  EXPECT_EQ(s.message(),
            "TE_FL_STRICT=ture is not accepted: it must be 0, 1, true, false, on, off, yes or no "
            "(any case); "
            "did you mean 'true'?");
  EXPECT_EQ(get("TE_FL_STRICT").value(), "0");
  EXPECT_EQ(variable("TE_FL_STRICT").value().error, s.message());
  EXPECT_EQ(variable("TE_FL_SYNC").value().error, "");
  EXPECT_OK(set("TE_FL_STRICT", "1"));
  EXPECT_EQ(variable("TE_FL_STRICT").value().error, "");
}

TEST_F(Environment, WrongEnumsAndIntsAreRefused) {
  EXPECT_HAS(load("TE_FL_PREFER", "vender").message(), "did you mean 'vendor'?");
  unsetenv("TE_FL_PREFER");
  for (const char* bad : {"-1", "1025", "four", "8x", "99999999999999999999", "1.5"}) {
    const Status s = load("TE_FL_NUM_THREADS", bad);
    EXPECT_EQ(s.message(), std::string("TE_FL_NUM_THREADS=") + bad +
                               " is not accepted: it must be a whole number from 0 to 1024");
  }
  EXPECT_OK(load("TE_FL_NUM_THREADS", "0004"));
  EXPECT_EQ(get("TE_FL_NUM_THREADS").value(), "4");
}

TEST_F(Environment, GoodVariablesTakeEffectBesideBadOnes) {
  setenv("TE_FL_STRICT", "maybe", 1);
  setenv("TE_FL_DETERMINSTIC", "1", 1);
  setenv("TE_FL_SKIP_CUDA", "1", 1);
  const Status s = reload();
  EXPECT_HAS(s.message(), "TE_FL_STRICT=maybe");
  EXPECT_HAS(s.message(), "did you mean TE_FL_DETERMINISTIC?");
  EXPECT_EQ(get("TE_FL_SKIP_CUDA").value(), "1");
}

TEST_F(Environment, TheNameWinsOverTheAlias) {
  ASSERT_OK(load("TE_FL_LOG_LEVEL", "error"));
  EXPECT_EQ(get("TEFL_LOG_LEVEL").value(), "ERROR");
  EXPECT_EQ(get("TE_FL_LOG_LEVEL").value(), "ERROR");
  EXPECT_EQ(row("TEFL_LOG_LEVEL").origin, "environment (alias TE_FL_LOG_LEVEL)");
  ASSERT_OK(load("TEFL_LOG_LEVEL", "debug"));
  EXPECT_EQ(get("TEFL_LOG_LEVEL").value(), "DEBUG");
  // Unsets the variables, then sets both in the other order.
  unsetenv("TE_FL_LOG_LEVEL");
  ASSERT_OK(load("TE_FL_LOG_LEVEL", "trace"));
  EXPECT_EQ(get("TEFL_LOG_LEVEL").value(), "DEBUG");
  EXPECT_EQ(row("TEFL_LOG_LEVEL").origin, "environment (TEFL_LOG_LEVEL)");
}

TEST_F(Environment, CodeWinsOverTheEnvironmentUntilUnset) {
  ASSERT_OK(load("TE_FL_STRICT", "1"));
  ASSERT_OK(set("TE_FL_STRICT", "off"));
  EXPECT_EQ(get("TE_FL_STRICT").value(), "0");
  EXPECT_EQ(row("TE_FL_STRICT").origin, "code");
  ASSERT_OK(reload());
  EXPECT_EQ(get("TE_FL_STRICT").value(), "0") << "reload must not undo code";
  ASSERT_OK(unset("TE_FL_STRICT"));
  EXPECT_EQ(get("TE_FL_STRICT").value(), "1");
  EXPECT_FALSE(set("TE_FL_STRICT", "2").ok());
}

TEST_F(Environment, UnknownNamesInCallsNameTheNearest) {
  EXPECT_EQ(get("TE_FL_STRICKT").status().message(),
            "there is no variable 'TE_FL_STRICKT'; did you mean 'TE_FL_STRICT'?");
  EXPECT_EQ(set("NOPE", "1").code(), StatusCode::kNotFound);
  EXPECT_EQ(unset("NOPE").code(), StatusCode::kNotFound);
  EXPECT_EQ(get_bool("TE_FL_PLUGIN_PATH").status().message(),
            "TE_FL_PLUGIN_PATH is of type path list, not bool");
}

TEST_F(Environment, AnEmptyListIsSetAnEmptyEnumIsNot) {
  setenv("TE_FL_PLUGIN_PATH", "", 1);
  setenv("TE_FL_PREFER", "", 1);
  ASSERT_OK(reload());
  EXPECT_EQ(get_if_set("TE_FL_PLUGIN_PATH"), std::optional<std::string>(""));
  EXPECT_FALSE(get_if_set("TE_FL_PREFER").has_value());
}

TEST_F(Environment, ValuesMayContainAnEqualsSign) {
  ASSERT_OK(load("TE_FL_PER_OP", "gelu=vendor;rmsnorm_fwd=reference"));
  EXPECT_EQ(get("TE_FL_PER_OP").value(), "gelu=vendor;rmsnorm_fwd=reference");
}

TEST_F(Environment, VariablesOfOthersAreLeftAlone) {
  setenv("TEST_SOMETHING", "x", 1);
  setenv("TE_F", "x", 1);
  setenv("TERM", "dumb", 1);
  EXPECT_OK(reload());
}

TEST_F(Environment, SettingsFollow) {
  EXPECT_FALSE(core::g_validate.load());
  ASSERT_OK(set("TE_FL_VALIDATE", "1"));
  EXPECT_TRUE(core::g_validate.load());
  ASSERT_OK(unset("TE_FL_VALIDATE"));
  EXPECT_FALSE(core::g_validate.load());
  ASSERT_OK(set("TEFL_LOG_LEVEL", "ERROR"));
  EXPECT_EQ(log::level(), log::Level::kError);
}

TEST_F(Environment, Nearest) {
  const std::vector<std::string> words = {"vendor", "reference", "flagos"};
  EXPECT_EQ(nearest("vednor", words), "vendor");
  EXPECT_EQ(nearest("Referenze", words), "reference");
  EXPECT_EQ(nearest("banana", words), "");
  EXPECT_EQ(nearest("", words), "");
  EXPECT_EQ(nearest("x", {}), "");
  EXPECT_EQ(nearest(std::string(100000, 'a'), words), "");
}

TEST_F(Environment, MarkdownHasEveryVariableAndEscapesBars) {
  const std::string text = markdown();
  for (const Variable& v : table()) EXPECT_HAS(text, "| `" + v.name + "`");
  EXPECT_HAS(text, "op=token\\|token");
}

TEST_F(Environment, ReadersAndWritersMayMeet) {
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) {
      EXPECT_OK(get("TE_FL_PER_OP"));
      EXPECT_FALSE(table().empty());
    }
  });
  for (int i = 0; i < 200; ++i) EXPECT_OK(set("TE_FL_PER_OP", "gelu=vendor" + std::to_string(i)));
  stop = true;
  reader.join();
}

// Runs each function on a thread of its own; some read the settings that others change at the same
// time.
TEST_F(Environment, ThreadsAskAndChangeAll) {
  const core::PluginSetting setting{"TE_FL_RELAY_LEVEL", core::VariableType::kInt, "1", "0 9",
                                    "How much it says."};
  testing::together(
      200,
      {[](int) { EXPECT_FALSE(table().empty()); }, [](int) { EXPECT_OK(get("TE_FL_PER_OP")); },
       [](int) { (void)get_if_set("TE_FL_PER_OP"); },
       [](int) { EXPECT_OK(get_bool("TE_FL_STRICT")); },
       [](int) { EXPECT_OK(get_int("TE_FL_COMM_TIMEOUT_MS")); }, [](int) { (void)remarks(); },
       [](int) { EXPECT_OK(status()); },
       [](int round) {
         EXPECT_OK(set("TE_FL_PER_OP", "gelu=vendor" + std::to_string(round)));
         EXPECT_OK(set("TE_FL_STRICT", round % 2 == 0 ? "1" : "0"));
         EXPECT_OK(set("TE_FL_COMM_TIMEOUT_MS", std::to_string(1000 + round)));
       },
       [](int) { EXPECT_OK(unset("TE_FL_PER_OP")); }, [](int) { EXPECT_OK(reload()); },
       [&](int) { EXPECT_OK(core::declare_settings("relay", {setting}, true)); },
       [](int) { core::leave_out_settings("relay"); },
       [](int) { EXPECT_EQ(core::setting_for_plugin("TE_FL_RELAY_X", "relay"), std::nullopt); },
       [](int) { (void)core::take_undeclared_setting(); }});
  EXPECT_OK(core::declare_settings("relay", {}, true));
  (void)core::take_undeclared_setting();
}

// A child forked while another thread holds the lock must still be able to ask.
TEST_F(Environment, AForkedChildCanAsk) {
  TE_FL_SKIP_FORK_WHILE_ALLOCATING();
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    while (!stop) (void)set("TE_FL_STRICT", "1");
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(20);
      _exit(get("TE_FL_SYNC").ok() ? 0 : 1);
    }
    int result = 0;
    ASSERT_EQ(waitpid(child, &result, 0), child);
    EXPECT_EQ(result, 0);
  }
  stop = true;
  writer.join();
}

}  // namespace
}  // namespace te_fl::environment
