// Every way in which loading a plugin can fail: tests the message and that the failed load leaves
// nothing behind.
#include <sys/stat.h>

#include <chrono>
#include <thread>

#include "elf_patch.hpp"
#include "fault_fixture.hpp"
#include "support/expect.hpp"

namespace te_fl::test {
namespace {

using plugins::State;

// A fault plugin and the error with which its load must fail.
struct Case {
  const char* name;
  StatusCode code;
  std::vector<std::string> texts;   // the message contains all of them
  std::vector<std::string> events;  // the functions that were called
};

const std::vector<std::string> kCreated = {"create", "devices", "quiesce", "destroy"};
const std::vector<std::string> kWithOps = {"create", "devices", "ops", "quiesce", "destroy"};

const Case kCases[] = {
    {"no_entry", StatusCode::kIncompatible, {"te_fl_plugin_query", "exports nothing"}, {}},
    {"undefined_symbol", StatusCode::kIncompatible, {"fault_nobody_has_this"}, {}},
    {"missing_dependency", StatusCode::kIncompatible, {"libfault_gone.so.7", "way out"}, {}},
    {"throw_query", StatusCode::kIncompatible, {"te_fl_plugin_query", "R5"}, {}},
    {"null_header", StatusCode::kIncompatible, {"NULL"}, {}},
    {"settings_foreign", StatusCode::kIncompatible, {"TE_FL_SETTINGS_FOREIGN_", "R21"}, {}},
    {"settings_default", StatusCode::kIncompatible, {"=10 is not accepted", "1 to 9", "R21"}, {}},
    {"settings_type", StatusCode::kIncompatible, {"TE_FL_SETTINGS_TYPE_A", "77", "R21"}, {}},
    {"settings_null", StatusCode::kIncompatible, {"setting 0 is NULL", "R21"}, {}},
    {"verify", StatusCode::kIncompatible, {"TE_FL_VERIFY_DIR is te-fl's own", "R21"}, {}},
    {"bad_magic", StatusCode::kIncompatible, {"MAGIC"}, {}},
    {"garbage_header_size", StatusCode::kIncompatible, {"struct_size 3", "R3"}, {}},
    {"garbage_api_size", StatusCode::kIncompatible, {"3735928559", "R3"}, {}},
    {"half_header_member", StatusCode::kIncompatible, {"multiple of 8", "R3"}, {}},
    {"half_api_member", StatusCode::kIncompatible, {"table of functions", "multiple of 8"}, {}},
    {"null_api", StatusCode::kIncompatible, {"R4"}, {}},
    {"null_create", StatusCode::kIncompatible, {"create", "R4"}, {}},
    {"null_destroy", StatusCode::kIncompatible, {"destroy", "R4"}, {}},
    {"bad_name", StatusCode::kIncompatible, {"name", "a-z"}, {}},
    {"null_name", StatusCode::kIncompatible, {"name", "a-z"}, {}},
    {"null_vendor", StatusCode::kIncompatible, {"vendor"}, {}},
    {"newer_major", StatusCode::kIncompatible, {"3.9", "0.9", "R2", "newer te-fl"}, {}},
    {"older_major", StatusCode::kIncompatible, {"0.1", "0.9", "R2", "rebuild"}, {}},
    {"newer_minor", StatusCode::kIncompatible, {"0.10", "0.9", "before 2.0", "R2"}, {}},
    {"withdrawn",
     StatusCode::kIncompatible,
     {"1.0 was withdrawn", "R2", "rebuild the plugin with this te-fl's header"},
     {}},
    {"needs_newer_host", StatusCode::kIncompatible, {"0.12", "0.9", "R2", "newer te-fl"}, {}},
    {"unknown_feature", StatusCode::kIncompatible, {"features 4", "0.9", "R2"}, {}},
    {"throw_create", StatusCode::kInternal, {"create", "thrown by throw_create", "R5"}, {"create"}},
    {"create_fails", StatusCode::kFailedPrecondition, {"the fault device is on fire"}, {"create"}},
    {"create_garbage_status", StatusCode::kInternal, {"create"}, {"create"}},
    {"throw_devices", StatusCode::kInternal, {"thrown by throw_devices", "R5"}, kCreated},
    {"devices_fail", StatusCode::kInternal, {"no bus"}, kCreated},
    {"second_device_bad", StatusCode::kIncompatible, {"device 1", "R18"}, kCreated},
    {"garbage_device_count", StatusCode::kIncompatible, {"4294967280"}, kCreated},
    {"null_device_list", StatusCode::kIncompatible, {"no list"}, kCreated},
    {"null_device", StatusCode::kIncompatible, {"device 0", "null"}, kCreated},
    {"garbage_device_size", StatusCode::kIncompatible, {"4294967294", "R3"}, kCreated},
    {"null_device_slot", StatusCode::kIncompatible, {"free", "R4"}, kCreated},
    {"throw_ops", StatusCode::kInternal, {"thrown by throw_ops", "R5"}, kWithOps},
    {"ops_fail", StatusCode::kOutOfMemory, {"no kernels"}, kWithOps},
    {"ops_fail_after_devices", StatusCode::kOutOfMemory, {"no kernels"}, kWithOps},
    {"garbage_op_count", StatusCode::kIncompatible, {"4294967295"}, kWithOps},
    {"null_op_list", StatusCode::kIncompatible, {"no list"}, kWithOps},
    {"null_op", StatusCode::kIncompatible, {"null"}, kWithOps},
    {"null_op_name", StatusCode::kIncompatible, {"op_name"}, kWithOps},
    {"null_impl_id", StatusCode::kIncompatible, {"impl_id", "R16"}, kWithOps},
    {"null_run", StatusCode::kIncompatible, {"run", "R4"}, kWithOps},
    {"misspelt_op", StatusCode::kIncompatible, {"reluu", "relu'"}, kWithOps},
    {"bad_impl_id", StatusCode::kIncompatible, {"Vendor Fault", "R16"}, kWithOps},
    {"garbage_op_size", StatusCode::kIncompatible, {"4294967295", "R3"}, kWithOps},
    {"half_op_member", StatusCode::kIncompatible, {"struct_size 84", "R3"}, kWithOps},
    {"zero_op_size", StatusCode::kIncompatible, {"struct_size 0", "R3"}, kWithOps},
    {"no_destroy_plan", StatusCode::kIncompatible, {"destroy_plan", "R4"}, kWithOps},
    {"second_op_bad", StatusCode::kIncompatible, {"gelu", "run", "R4"}, kWithOps},
    {"two_providers", StatusCode::kIncompatible, {"names no provider", "R18"}, kWithOps},
    {"duplicate", StatusCode::kIncompatible, {"vendor.fault", "relu", "R16"}, kWithOps},
    {"newer_misspelt", StatusCode::kIncompatible, {"later::relu", "R17"}, kWithOps},
    {"no_schema", StatusCode::kIncompatible, {"fault::unknown", "R17"}, kWithOps},
};

class LoadFailure : public FaultTest {
 protected:
  // Loads `path`, which must fail, and checks the conditions that hold after every failure.
  static Status fail(const std::string& path) {
    const auto devices = devices::list();
    const uint64_t epoch = OpRegistry::instance().epoch();
    const auto loaded = plugins::load(path);
    EXPECT_FALSE(loaded.ok()) << path;
    EXPECT_FALSE(in_maps(path)) << path
                                << " is still mapped after: " << loaded.status().to_string();
    EXPECT_EQ(devices::list(), devices);
    for (const OpImplInfo& i : OpRegistry::instance().snapshot()) {
      EXPECT_NE(i.vendor, "fault") << i.op << ": " << i.impl_id << ", epoch " << epoch;
    }
    EXPECT_HAS(loaded.status().message(), path);
    expect_host_works();
    return loaded.status();
  }
};

class BrokenPlugin : public LoadFailure, public ::testing::WithParamInterface<Case> {};

TEST_P(BrokenPlugin, IsRefusedAndLeavesNothing) {
  const Case& c = GetParam();
  const std::string path = fault_path(c.name);
  const Status status = fail(path);
  EXPECT_EQ(status.code(), c.code) << status.to_string();
  for (const std::string& text : c.texts) {
    EXPECT_HAS(status.message(), text);
  }
  EXPECT_EQ(Events::take(), c.events);
  const auto list = plugins::list();
  const auto met =
      std::find_if(list.begin(), list.end(), [&](const auto& p) { return p.path == path; });
  ASSERT_NE(met, list.end());
  EXPECT_EQ(met->state, State::kFailed);
  EXPECT_HAS(status.message(), met->reason);
  EXPECT_EQ(met->origin, "load()");
  // A second attempt fails with the same message, and the plugin is listed once.
  EXPECT_EQ(fail(path).message(), status.message());
  const auto again = plugins::list();
  EXPECT_EQ(
      std::count_if(again.begin(), again.end(), [&](const auto& p) { return p.path == path; }), 1);
}

INSTANTIATE_TEST_SUITE_P(Faults, BrokenPlugin, ::testing::ValuesIn(kCases),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST_F(LoadFailure, AMissingFile) {
  const Status status = fail(std::string(FAULT_FOLDER) + "/nowhere.so");
  EXPECT_EQ(status.code(), StatusCode::kNotFound) << status.to_string();
}

TEST_F(LoadFailure, AFileThatIsNoLibrary) {
  const TempFolder folder;
  const Status text = fail(folder.write("text.so", "INPUT(libm.so)\n"));
  EXPECT_EQ(text.code(), StatusCode::kIncompatible);
  EXPECT_TRUE(testing::contains(text.message(), "script") ||
              testing::contains(text.message(), "text"))
      << text.to_string();
  EXPECT_EQ(fail(folder.write("empty.so", "")).code(), StatusCode::kIncompatible);
  EXPECT_EQ(fail(folder.write("archive.so", "!<arch>\n")).code(), StatusCode::kIncompatible);
  EXPECT_EQ(fail(folder.path() + "/").code(), StatusCode::kIncompatible);
}

TEST_F(LoadFailure, ATruncatedLibrary) {
  const TempFolder folder;
  std::string whole = read_file(fault_path("good"));
  // A file cut behind the mapped segments still loads: debug information and section headers follow
  // these segments, and the dynamic loader does not need them.
  const size_t needed = end_of_segments(whole);
  for (const size_t size :
       {size_t{4}, size_t{40}, size_t{64}, size_t{500}, needed / 4, needed / 2, needed - 1}) {
    const Status status = fail(folder.write("cut.so", whole.substr(0, size)));
    EXPECT_EQ(status.code(), StatusCode::kIncompatible) << size << ": " << status.to_string();
  }
}

TEST_F(LoadFailure, ALibraryForAnotherProcessor) {
  const TempFolder folder;
  std::string bytes = read_file(fault_path("good"));
  const bool on_arm = reinterpret_cast<Elf64_Ehdr*>(bytes.data())->e_machine == EM_AARCH64;
  reinterpret_cast<Elf64_Ehdr*>(bytes.data())->e_machine = on_arm ? EM_X86_64 : EM_AARCH64;
  const Status status = fail(folder.write("foreign.so", bytes));
  EXPECT_HAS(status.message(), "aarch64");
  EXPECT_HAS(status.message(), "x86_64");
}

TEST_F(LoadFailure, ALibraryForANewerGlibc) {
  const TempFolder folder;
  std::string bytes = read_file(fault_path("good"));
  ASSERT_TRUE(require_newer_glibc(bytes));
  const Status status = fail(folder.write("newer.so", bytes));
  EXPECT_HAS(status.message(), "GLIBC_2.99");
  EXPECT_HAS(status.message(), "only up to");
}

TEST_F(LoadFailure, AFileThatEverybodyCanWrite) {
  const TempFolder folder;
  const std::string path = folder.write("open.so", read_file(fault_path("good")));
  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  const Status status = fail(path);
  EXPECT_FAILS(status, kFailedPrecondition, "chmod o-w");
  EXPECT_TRUE(Events::take().empty());
  ASSERT_EQ(chmod(path.c_str(), 0644), 0);
  EXPECT_OK(plugins::load(path));
}

// Copies the plugin and the library that it needs; the plugin's RUNPATH is $ORIGIN/v1.
std::string copy_with_dependency(const TempFolder& folder) {
  std::filesystem::create_directories(folder / "v1");
  std::filesystem::copy(fault_path("versioned1"), folder / "versioned1.so");
  std::filesystem::copy(std::string(FAULT_FOLDER) + "/v1/libfault_shared.so.1",
                        folder / "v1/libfault_shared.so.1");
  return folder / "versioned1.so";
}

TEST_F(LoadFailure, ANeededLibraryThatOthersCouldExchange) {
  const TempFolder folder;
  const std::string path = copy_with_dependency(folder);
  ASSERT_EQ(chmod((folder / "v1").c_str(), 0777), 0);
  const Status status = fail(path);
  EXPECT_FAILS(status, kFailedPrecondition, "it needs libfault_shared.so.1");
  EXPECT_HAS(status.message(), "run: chmod o-w " + folder / "v1");
  EXPECT_FALSE(in_maps("libfault_shared.so.1")) << "nothing of it ran";
  ASSERT_EQ(chmod((folder / "v1").c_str(), 0755), 0);
  const auto loaded = plugins::load(path);
  EXPECT_OK(loaded);
}

#if defined(__x86_64__)
// A needed library in the subfolder glibc-hwcaps is found, because the dynamic loader searches
// there too.
TEST_F(LoadFailure, ALibraryInGlibcHwcapsLoads) {
  if (!__builtin_cpu_supports("sse4.2")) GTEST_SKIP() << "the processor is below x86-64-v2";
  const TempFolder folder;
  const std::string path = copy_with_dependency(folder);
  std::filesystem::create_directories(folder / "v1/glibc-hwcaps/x86-64-v2");
  std::filesystem::rename(folder / "v1/libfault_shared.so.1",
                          folder / "v1/glibc-hwcaps/x86-64-v2/libfault_shared.so.1");
  const auto loaded = plugins::load(path);
  EXPECT_OK(loaded);
}
#endif

TEST_F(LoadFailure, AnImplementationThatIsTakenIsNotTakenOver) {
  load("good");
  // Registers vendor.fault for relu a second time.
  const auto second = plugins::load(fault_path("clean_failure"));
  EXPECT_FAILS(second, kIncompatible, "by good");
  EXPECT_FALSE(in_maps(fault_path("clean_failure")));
  EXPECT_EQ(owned_by("good"), (std::vector<std::string>{"relu: vendor.fault"}));
}

TEST_F(LoadFailure, ANameThatIsTaken) {
  load("good");
  const TempFolder folder;
  const std::string copy = folder.write("copy.so", read_file(fault_path("good")));
  const auto second = plugins::load(copy);
  EXPECT_FAILS(second, kAlreadyExists, fault_path("good"));
  EXPECT_FALSE(in_maps(copy));
}

// ".." after a link means the parent of the link's target, not the folder that contains the link.
TEST_F(LoadFailure, APathThroughALinkIsTheFileSystemsPath) {
  const TempFolder folder;
  std::filesystem::create_directories(folder / "real/inner");
  std::filesystem::create_directories(folder / "other");
  const std::string right = folder.write("real/p.so", read_file(fault_path("good")));
  folder.write("other/p.so", "no library");
  std::filesystem::create_directory_symlink(folder / "real/inner", folder / "other/link");
  const auto loaded = plugins::load(folder / "other/link/../p.so");
  ASSERT_OK(loaded);
  EXPECT_EQ(std::filesystem::canonical(loaded->path), std::filesystem::canonical(right));
  ASSERT_OK(plugins::deactivate("good"));
}

TEST_F(LoadFailure, ABuiltInsNameIsTakenForEver) {
  const auto named = plugins::load(fault_path("reference"));
  EXPECT_FAILS(named, kAlreadyExists, "'reference' is the name of a backend that is part of te-fl");
  EXPECT_HAS(named.status().message(), "give the plugin another name");
}

TEST_F(LoadFailure, AHangingCreateIsAbandoned) {
  ASSERT_OK(environment::set("TE_FL_PLUGIN_TIMEOUT_MS", "100"));
  const std::string path = fault_path("hanging_create");
  const auto began = std::chrono::steady_clock::now();
  const auto loaded = plugins::load(path);
  const auto took = std::chrono::steady_clock::now() - began;
  EXPECT_LT(took, std::chrono::milliseconds(1500));
  EXPECT_EQ(loaded.status().code(), StatusCode::kTimeout) << loaded.status().to_string();
  for (const char* text : {"100 ms", "TE_FL_PLUGIN_TIMEOUT_MS", "R14", "abandoned"}) {
    EXPECT_HAS(loaded.status().message(), text);
  }
  EXPECT_EQ(info("hanging_create").state, State::kAbandoned);
  EXPECT_TRUE(in_maps(path)) << "its code is still running";
  expect_host_works();
  // The plugin is refused now, and again after its create() has finally returned.
  for (int round = 0; round < 2; ++round) {
    const auto again = plugins::load(path);
    EXPECT_FAILS(again, kFailedPrecondition, "R14");
    for (int i = 0; i < 500 && Events::count("create ends") == 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  EXPECT_EQ(Events::take(), (std::vector<std::string>{"create", "create ends"}));
  EXPECT_EQ(plugins::deactivate("hanging_create").code(), StatusCode::kNotFound);
}

TEST_F(LoadFailure, ASlowCreateWithinTheLimitIsNot) {
  load("slow_create");
  EXPECT_EQ(info("slow_create").state, State::kActive);
  EXPECT_GE(info("slow_create").load_ms, 20);
}

TEST_F(LoadFailure, LoadingFromInsideAnOpIsRefused) {
  te_fl_op_desc desc;
  desc.op_name = "relu";
  desc.impl_id = "vendor.loads_another";
  desc.kind = TE_FL_KIND_VENDOR;
  desc.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_STATIC_SUPPORT;
  desc.device_types = uint64_t{1} << TE_FL_DEVICE_CPU;
  static Status inside;
  desc.run = [](void*, const te_fl_context*, const void*) -> te_fl_status {
    inside = plugins::load(fault_path("good")).status();
    return TE_FL_OK;
  };
  ASSERT_OK(OpRegistry::instance().register_op(desc, "test", "test"));
  {
    const PolicyScope scope(only("relu", "vendor.loads_another"));
    EXPECT_OK(call_relu(floats({1}), floats({0})));
  }
  EXPECT_EQ(inside.code(), StatusCode::kBusy) << inside.to_string();
  EXPECT_OK(OpRegistry::instance().unregister_owner("test"));
}

TEST_F(LoadFailure, ANameWithoutAManifestNamesTheFolders) {
  Status status = plugins::load("nobody").status();
  EXPECT_FAILS(status, kNotFound, "looked in no folder, since TE_FL_PLUGIN_PATH");
  EXPECT_OK(environment::set("TE_FL_PLUGIN_PATH", "/nothing"));
  status = plugins::load("nobody").status();
  EXPECT_HAS(status.message(), "/nothing, ");
  EXPECT_HAS(status.message(), "/etc/te_fl/plugins.d");
  EXPECT_OK(environment::unset("TE_FL_PLUGIN_PATH"));
  EXPECT_HAS(plugins::load("good.so").status().message(), "./good.so");
}

}  // namespace
}  // namespace te_fl::test
