// The plugins that a new process finds through TE_FL_PLUGIN_MODULES, manifests and the installation
// prefix, and the plugins that it refuses.
#include <sys/stat.h>
#include <unistd.h>

#include "fault_fixture.hpp"
#include "probe_run.hpp"
#include "support/expect.hpp"
#include "support/sanitizers.hpp"

namespace te_fl::test {
namespace {

namespace fs = std::filesystem;

std::string host_arch() {
#if defined(__x86_64__)
  return "x86_64";
#else
  return "aarch64";
#endif
}

class DiscoveryTest : public ::testing::Test {
 protected:
  // Writes a manifest for a fault plugin into the folder `into`; `more` is inserted into the JSON
  // object.
  std::string manifest(const std::string& into, const std::string& name, const std::string& library,
                       const std::string& more = "", const std::string& abi = "0.9",
                       const std::string& arch = host_arch()) {
    return folder_.write(into + "/" + name + ".json",
                         "{\"file_format_version\": \"1.0\", \"name\": \"" + name +
                             "\", \"vendor\": \"fault\"," + " \"library_path\": \"" + library +
                             "\", \"arch\": \"" + arch + "\", \"abi\": \"" + abi + "\"" + more +
                             "}");
  }
  ProbeRun probe(std::map<std::string, std::string> environment = {}) {
    environment.try_emplace("TE_FL_PLUGIN_PATH", folder_ / "path");
    environment.try_emplace("XDG_DATA_HOME", folder_ / "xdg");
    environment.try_emplace("XDG_CACHE_HOME", folder_ / "cache");
    const ProbeRun run = run_probe(environment, FAULT_PROBE, "--path");
    // The host must work whatever plugins were found.
    EXPECT_EQ(run.exit_code, 0) << run.output << run.log;
    EXPECT_HAS(run.output, "|0 2") << run.output << run.log;
    return run;
  }

  TempFolder folder_;
};

TEST_F(DiscoveryTest, LoadsWhatManifestsOffer) {
  const std::string json = manifest("path", "good", fault_path("good"));
  const ProbeRun run = probe();
  EXPECT_EQ(run.line("good"), "good|active|" + json + "|") << run.log;
  EXPECT_TRUE(run.output.find("reference|active|built-in|") < run.output.find("good|active"))
      << run.output;
  EXPECT_HAS(run.output, "path|" + (folder_ / "path") + ": 1 manifest\n");
  EXPECT_HAS(run.output, "path|/etc/te_fl/plugins.d");
  EXPECT_EQ(run.log, "");
}

TEST_F(DiscoveryTest, FoldersCountInOrderAndALaterNameIsShadowed) {
  manifest("path", "good", fault_path("good"));
  const std::string later = manifest("xdg/te_fl/plugins.d", "good", fault_path("no_entry"));
  const ProbeRun run = probe();
  EXPECT_HAS(run.line("good"), "good|active|" + (folder_ / "path")) << run.output;
  EXPECT_HAS(run.output, "good|skipped|" + later + "|" + (folder_ / "path"));
}

TEST_F(DiscoveryTest, ALibraryPathIsRelativeToItsManifest) {
  fs::create_directories(folder_ / "path");
  fs::copy_file(fault_path("good"), folder_ / "path/mine.so");
  manifest("path", "good", "mine.so");
  EXPECT_HAS(probe().line("good"), "|active|");
}

TEST_F(DiscoveryTest, ArchAbiAndNamesAreChecked) {
  manifest("path", "good", fault_path("good"), "", "1.0",
           host_arch() == "x86_64" ? "aarch64" : "x86_64");
  ProbeRun run = probe();
  EXPECT_HAS(run.line("good"), "|failed|") << run.output;
  EXPECT_HAS(run.line("good"), "aarch64") << run.output;
  manifest("path", "good", fault_path("good"), "", "0.7");
  run = probe();
  EXPECT_HAS(run.line("good"), "ABI 0.7") << run.output;
  EXPECT_HAS(run.line("good"), "R2") << run.output;
  manifest("path", "good", fault_path("good"), ", \"sha256\": \"" + std::string(64, 'a') + "\"");
  run = probe();
  EXPECT_HAS(run.line("good"), "|failed|") << run.output;
  EXPECT_HAS(run.line("good"), "not part of the format any more") << run.output;
  manifest("path", "another", fault_path("good"));
  fs::remove(folder_ / "path/good.json");
  run = probe();
  EXPECT_HAS(run.output, "its manifest calls it 'another', and the library says 'good'");
}

TEST_F(DiscoveryTest, AProbeSkipsAPluginUnlessItIsRequested) {
  manifest("path", "good", fault_path("good"), ", \"probe\": {\"device_node\": \"/dev/fault0\"}");
  ProbeRun run = probe();
  EXPECT_HAS(run.line("good"), "|skipped|") << run.output;
  EXPECT_HAS(run.line("good"), "/dev/fault0") << run.output;
  EXPECT_EQ(run.log, "") << "absent hardware is no news";
  run = probe({{"TE_FL_PLUGIN_MODULES", "good"}});
  EXPECT_EQ(run.line("good"), "good|active|TE_FL_PLUGIN_MODULES|") << run.output;
}

TEST_F(DiscoveryTest, ModulesAreLoadedBeforeManifests) {
  manifest("path", "a_custom_op", fault_path("custom_op"));
  const ProbeRun run =
      probe({{"TE_FL_PLUGIN_MODULES", " " + fault_path("good") + " ,," + fault_path("no_entry")}});
  EXPECT_HAS(run.line("good"), "|active|TE_FL_PLUGIN_MODULES|") << run.output;
  EXPECT_HAS(run.line("no_entry"), "|failed|TE_FL_PLUGIN_MODULES|") << run.output;
  EXPECT_HAS(run.log, "no_entry.so");
  EXPECT_HAS(run.log, "te_fl_plugin_query");
  EXPECT_LT(run.output.find("good|active"), run.output.find("custom_op|failed")) << run.output;
}

// create() runs on its own thread, which must not wait for the thread that loads the plugins.
TEST_F(DiscoveryTest, ACreateThatNeedsADeviceOfALaterPluginFailsAtOnce) {
  const ProbeRun run =
      probe({{"TE_FL_PLUGIN_MODULES", fault_path("early_create") + "," + fault_path("good")}});
  EXPECT_HAS(run.line("early_create"), "|failed|TE_FL_PLUGIN_MODULES|") << run.output;
  EXPECT_HAS(run.line("early_create"), "there is no device cuda:3") << run.output;
  EXPECT_HAS(run.line("early_create"), "plugins that were loaded before it") << run.output;
  EXPECT_HAS(run.line("good"), "|active|") << run.output;
}

TEST_F(DiscoveryTest, ModulesThatDoNotResolveAreWarnings) {
  manifest("path", "good", fault_path("good"));
  const ProbeRun run =
      probe({{"TE_FL_PLUGIN_MODULES", "transformer_engine_fl.vendor, godo,./good.so,xyzzy"}});
  EXPECT_HAS(run.log, "\"transformer_engine_fl.vendor\" looks like a Python module");
  EXPECT_HAS(run.log, "\"godo\" is the name of no manifest; did you mean good?");
  EXPECT_HAS(run.log, "\"./good.so\" is a relative path");
  EXPECT_HAS(run.log, "\"xyzzy\" is the name of no manifest (known: good");
  // An entry of TE_FL_PLUGIN_MODULES that is a path or a misspelt plugin name fails; an entry
  // unlike any plugin name may name a Python module and is skipped.
  EXPECT_HAS(run.line("godo"), "|failed|TE_FL_PLUGIN_MODULES|") << run.output;
  EXPECT_HAS(run.line("xyzzy"), "|skipped|TE_FL_PLUGIN_MODULES|") << run.output;
  EXPECT_HAS(run.line("good"), "|active|") << run.output;
}

TEST_F(DiscoveryTest, SkipCudaLeavesOutThePluginOfThatName) {
  manifest("path", "cuda", fault_path("cuda"));
  EXPECT_HAS(probe().line("cuda"), "|active|");
  ProbeRun run = probe({{"TE_FL_SKIP_CUDA", "1"}});
  EXPECT_HAS(run.line("cuda"), "|skipped|") << run.output;
  EXPECT_HAS(run.line("cuda"), "TE_FL_SKIP_CUDA") << run.output;
  run = probe({{"TE_FL_SKIP_CUDA", "1"},
               {"TE_FL_PLUGIN_MODULES", fault_path("cuda")},
               {"TE_FL_PLUGIN_PATH", ""}});
  EXPECT_HAS(run.line("cuda"), "|skipped|TE_FL_PLUGIN_MODULES|") << run.output;
  run = probe({{"TE_FL_SKIP_CUDA", "1"}, {"TE_FL_PLUGIN_MODULES", "cuda"}});
  EXPECT_HAS(run.line("cuda"), "|skipped|") << run.output;
}

// A plugin without a manifest is denied by an alias that a manifest of te-fl's own plugins defines.
TEST_F(DiscoveryTest, AVendorIsDeniedByItsAliasWhenThePluginIsLoadedByPath) {
  std::map<std::string, std::string> variables = {{"TE_FL_PLUGIN_MODULES", fault_path("of_nvidia")},
                                                  {"TE_FL_PLUGIN_PATH", kSetAndEmpty},
                                                  {"TE_FL_PREFER", "vendor"}};
  EXPECT_HAS(probe(variables).output, "relu|vendor.fault|0 2");
  for (const char* name : {"cuda", "CUDA", "nvidia"}) {
    variables["TE_FL_DENY_VENDORS"] = name;
    const ProbeRun run = probe(variables);
    EXPECT_HAS(run.line("of_nvidia"), "|active|") << run.output;
    EXPECT_LACKS(run.output, "vendor.fault|0 2") << name;
    EXPECT_EQ(run.log, "") << "the vendor is here, so nothing is warned about";
  }
}

TEST_F(DiscoveryTest, AVendorIsDeniedByAnAliasInAManifest) {
  const std::string aliases = ", \"vendor_aliases\": [\"faulty\", \"fault-inc\"]";
  manifest("path", "good", fault_path("good"), aliases);
  std::map<std::string, std::string> variables = {{"TE_FL_PREFER", "vendor"}};
  EXPECT_HAS(probe(variables).output, "relu|vendor.fault|0 2");
  variables["TE_FL_DENY_VENDORS"] = "Fault-Inc";
  EXPECT_LACKS(probe(variables).output, "vendor.fault|0 2");
  // The manifest's plugin is not loaded here; another plugin of the same vendor is loaded by its
  // path.
  manifest("path", "custom_op", fault_path("custom_op"),
           aliases + ", \"probe\": {\"device_node\": \"/dev/fault0\"}");
  fs::remove(folder_ / "path/good.json");
  variables["TE_FL_PLUGIN_MODULES"] = fault_path("good");
  const ProbeRun run = probe(variables);
  EXPECT_HAS(run.line("custom_op"), "|skipped|") << run.output;
  EXPECT_HAS(run.line("good"), "|active|") << run.output;
  EXPECT_LACKS(run.output, "vendor.fault|0 2");
  EXPECT_EQ(run.log, "");
  variables["TE_FL_DENY_VENDORS"] = "faultless";
  EXPECT_HAS(probe(variables).output, "relu|vendor.fault|0 2");
}

// Returns the exit status of a process that calls an op before it looks for plugins.
int deny_by_alias_before_and_after_discovery() {
  te_fl_op_desc desc;
  desc.op_name = "relu";
  desc.impl_id = "vendor.own";
  desc.kind = TE_FL_KIND_VENDOR;
  desc.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_STATIC_SUPPORT;
  desc.device_types = uint64_t{1} << TE_FL_DEVICE_CPU;
  desc.run = [](void*, const te_fl_context*, const void*) { return te_fl_status{TE_FL_OK}; };
  OpRegistry registry;
  OpManager manager(registry);
  PolicySettings settings;
  settings.deny_vendors = {"faulty"};
  const PolicyScope scope(settings);
  te_fl_relu_args args;
  const Tensor in = floats({-1, 2}), out = floats({9, 9});
  args.input = in;
  args.output = out;
  if (!registry.register_op(desc, "test", "fault").ok()) return 1;
  if (!manager.call(op::relu, &args).ok()) return 2;
  (void)plugins::list();
  const Status denied = manager.call(op::relu, &args);
  return denied.ok() ? 3 : testing::contains(denied.message(), "is denied") ? 0 : 4;
}

TEST_F(DiscoveryTest, AnAliasCountsFromTheNextCallOn) {
  manifest("path", "good", fault_path("good"), ", \"vendor_aliases\": [\"faulty\"]");
  const pid_t child = fork();
  if (child == 0) {
    setenv("TE_FL_PLUGIN_PATH", (folder_ / "path").c_str(), 1);
    _exit(deny_by_alias_before_and_after_discovery());
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(DiscoveryTest, AManifestsPackagesSayWhatToInstall) {
  manifest("path", "missing_dependency", fault_path("missing_dependency"),
           ", \"packages\": [{\"soname\": \"libfault_gone.so\", \"apt\": \"fault-gone\","
           " \"note\": \"Fault's repository\"}]");
  const ProbeRun run = probe();
  EXPECT_HAS(run.line("missing_dependency"), "|failed|") << run.output;
  EXPECT_HAS(run.output, "libfault_gone.so.7") << run.output;
  EXPECT_HAS(run.output, "install the apt package fault-gone (Fault's repository)") << run.output;
  EXPECT_LACKS(run.output, "apt-file search");
}

TEST_F(DiscoveryTest, BadManifestsAreListedWithTheirMistake) {
  folder_.write("path/broken.json", "{\"name\": \"broken\",");
  const std::string open = manifest("path", "open", fault_path("good"));
  ASSERT_EQ(chmod(open.c_str(), 0666), 0);
  const ProbeRun run = probe();
  EXPECT_HAS(run.line("broken"), "|failed|" + (folder_ / "path/broken.json")) << run.output;
  EXPECT_HAS(run.line("open"), "chmod o-w") << run.output;
}

TEST_F(DiscoveryTest, TheWorkingDirectoryNeverCounts) {
  manifest("here/lib/te_fl/plugins.d", "good", fault_path("good"));
  const fs::path before = fs::current_path();
  fs::current_path(folder_ / "here/lib/te_fl/plugins.d");
  const ProbeRun run = probe({{"TE_FL_PLUGIN_PATH", ".:here:"}});
  fs::current_path(before);
  EXPECT_EQ(run.line("good"), "") << run.output;
  EXPECT_HAS(run.log, "relative");
}

TEST_F(DiscoveryTest, AnEmptyPathLooksNowhere) {
  manifest("xdg/te_fl/plugins.d", "good", fault_path("good"));
  ProbeRun run = probe({{"XDG_DATA_HOME", folder_ / "xdg"}});
  EXPECT_HAS(run.line("good"), "|active|") << run.output;
  run = probe({{"XDG_DATA_HOME", folder_ / "xdg"}, {"TE_FL_PLUGIN_PATH", kSetAndEmpty}});
  EXPECT_EQ(run.line("good"), "") << run.output;
}

// An installation prefix is relocatable: te-fl derives it from the location of libte_fl.so.
TEST_F(DiscoveryTest, ThePrefixIsWhereTheLibraryIs) {
  for (const char* lib : {"lib", "lib/x86_64-linux-gnu"}) {
    const TempFolder prefix;
    fs::create_directories(prefix / "bin");
    fs::create_directories(prefix / lib);
    fs::create_directories(prefix / "lib/te_fl/plugins.d");
    fs::copy(FAULT_PROBE, prefix / "bin/probe");
    for (const auto& file : fs::directory_iterator(FAULT_LIBRARY_FOLDER)) {
      if (file.path().filename().string().starts_with("libte_fl.so")) {
        fs::copy(file, prefix / lib / file.path().filename(), fs::copy_options::copy_symlinks);
      }
    }
    fs::copy(fault_path("good"), prefix / "lib/te_fl/good.so");
    const std::string json = manifest("away", "good", "../good.so");
    fs::copy(json, prefix / "lib/te_fl/plugins.d/good.json");
    const ProbeRun run = run_probe({{"LD_LIBRARY_PATH", prefix / lib},
                                    {"TE_FL_PLUGIN_PATH", folder_ / "nothing"},
                                    {"XDG_DATA_HOME", folder_ / "xdg"}},
                                   prefix / "bin/probe");
    EXPECT_EQ(run.line("good"), "good|active|" + (prefix / "lib/te_fl/plugins.d/good.json") + "|")
        << run.output << run.log;
  }
}

// A set-user-ID program must not follow paths that the calling user sets.
TEST_F(DiscoveryTest, PathVariablesAreIgnoredUnderElevatedPrivileges) {
  if (TE_FL_ASAN) GTEST_SKIP() << "the leak check cannot trace such a program";
  if (geteuid() != 0) GTEST_SKIP() << "only root can make a set-user-ID program of another user";
  const TempFolder shared;
  ASSERT_EQ(chmod(shared.path().c_str(), 0755), 0);
  const std::string program = shared / "probe";
  fs::copy(FAULT_PROBE, program);
  const uid_t other_user = 65534;
  ASSERT_EQ(chown(program.c_str(), other_user, other_user), 0);
  ASSERT_EQ(chmod(program.c_str(), 04755), 0);
  manifest("path", "good", fault_path("good"));
  manifest("xdg/te_fl/plugins.d", "custom_op", fault_path("custom_op"));
  const ProbeRun run = run_probe({{"TE_FL_PLUGIN_PATH", folder_ / "path"},
                                  {"XDG_DATA_HOME", folder_ / "xdg"},
                                  {"TE_FL_PLUGIN_MODULES", fault_path("smaller_structs")}},
                                 program);
  if (run.exit_code == 127) GTEST_SKIP() << "the libraries are out of the other user's reach";
  EXPECT_EQ(run.exit_code, 0) << run.log;
  EXPECT_EQ(run.line("good") + run.line("custom_op") + run.line("smaller_structs"), "")
      << run.output;
  EXPECT_HAS(run.output, "|0 2") << run.output << run.log;
}

}  // namespace
}  // namespace te_fl::test
