#include "plugins/manifest.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <random>

#include "plugins/file_trust.hpp"
#include "plugins/nearest.hpp"
#include "support/expect.hpp"
#include "support/temp_folder.hpp"

namespace te_fl::plugins {
namespace {

using nlohmann::json;

json good() {
  return {{"file_format_version", "1.0"},          {"name", "acme"},   {"vendor", "acme"},
          {"library_path", "../libte_fl_acme.so"}, {"arch", "x86_64"}, {"abi", "0.9"}};
}

json with(const std::string& key, const json& value) {
  json out = good();
  out[key] = value;
  return out;
}

std::string parse_error(const json& manifest) {
  return parse_manifest(manifest.dump(), "/p/acme.json").error;
}

json setting(const std::string& name, const std::string& type, const std::string& value = "",
             const std::string& choices = "") {
  return {{"name", name}, {"type", type}, {"default", value}, {"choices", choices}, {"doc", "A."}};
}

TEST(ManifestTest, ReadsEveryKey) {
  json text = with("probe", {{"pci_vendor", "0x10DE"}, {"device_node", "/dev/nvidia0"}});
  text["load_for"] = {"opencl", "ext:acme", "communicators"};
  text["settings"] = {{{"name", "TE_FL_ACME_DEBUG"}, {"type", "bool"}, {"doc", "Says more."}},
                      {{"name", "TE_FL_ACME_TILES"},
                       {"type", "int"},
                       {"default", "4"},
                       {"choices", "1 64"},
                       {"doc", "Tiles."}}};
  text["vendor_aliases"] = {"acme-inc", "ac"};
  text["packages"] = {{{"soname", "libacmert.so.2"}, {"apt", "acme-rt"}, {"note", "Acme's"}},
                      {{"soname", "libacmeblas.so"}, {"pypi", "acme-blas"}}};
  const ManifestResult result = parse_manifest(text.dump(2), "/opt/te_fl/plugins.d/acme.json");
  ASSERT_OK(result);
  const Manifest& m = result.manifest;
  EXPECT_EQ(m.path, "/opt/te_fl/plugins.d/acme.json");
  EXPECT_EQ(m.name, "acme");
  EXPECT_EQ(m.vendor, "acme");
  EXPECT_EQ(m.library_path, "/opt/te_fl/plugins.d/../libte_fl_acme.so");
  EXPECT_EQ(m.arch, "x86_64");
  EXPECT_EQ(m.abi_major, 0);
  EXPECT_EQ(m.abi_minor, 9);
  EXPECT_EQ(m.probe.pci_vendor, 0x10de);
  EXPECT_EQ(m.probe.device_node, "/dev/nvidia0");
  ASSERT_EQ(m.load_for.size(), 3u);
  EXPECT_TRUE(m.load_for[2].is_host());
  EXPECT_EQ(to_string(m.load_for[0]), "opencl:0");
  EXPECT_EQ(to_string(m.load_for[1]), "ext:acme:0");
  using enum core::VariableType;
  EXPECT_EQ(m.settings,
            (std::vector<core::PluginSetting>{{"TE_FL_ACME_DEBUG", kBool, "", "", "Says more."},
                                              {"TE_FL_ACME_TILES", kInt, "4", "1 64", "Tiles."}}));
  EXPECT_EQ(m.vendor_aliases, (std::vector<std::string>{"acme-inc", "ac"}));
  ASSERT_EQ(m.packages.size(), 2u);
  EXPECT_EQ(m.packages[0].soname + m.packages[0].apt + m.packages[0].note + m.packages[0].pypi,
            "libacmert.so.2acme-rtAcme's");
  EXPECT_EQ(m.packages[1].soname + m.packages[1].pypi, "libacmeblas.soacme-blas");
  EXPECT_EQ(
      parse_manifest(with("library_path", "/x/y.so").dump(), "/p/a.json").manifest.library_path,
      "/x/y.so");
}

TEST(ManifestTest, ChecksAliasesAndPackages) {
  EXPECT_HAS(parse_error(with("vendor_aliases", "acme-inc")),
             "a list of other names of the vendor");
  EXPECT_HAS(parse_error(with("vendor_aliases", {"Acme"})), "\"vendor_aliases\" is \"Acme\"");
  EXPECT_HAS(parse_error(with("vendor_aliases", {7})), "\"vendor_aliases\" is the number 7");
  const json package = {{"soname", "libx.so"}, {"apt", "x"}};
  EXPECT_HAS(parse_error(with("packages", package)), "must be a list");
  EXPECT_HAS(parse_error(with("packages", {"libx.so"})), "must be an object");
  EXPECT_HAS(parse_error(with("packages", json::array({package, package}))), "appears twice");
  EXPECT_HAS(parse_error(with("packages", json::array({{{"apt", "x"}}}))), "\"soname\" is missing");
  EXPECT_HAS(parse_error(with("packages", json::array({{{"soname", "libx.so"}}}))),
             "has none of apt");
  EXPECT_HAS(parse_error(with("packages", json::array({{{"soname", "libx.so"}, {"atp", "x"}}}))),
             "did you mean \"apt\"?");
}

TEST(ManifestTest, NamesTheNearestKey) {
  EXPECT_HAS(parse_error(with("libary_path", "x")),
             "unknown key \"libary_path\"; did you mean \"library_path\"?");
  EXPECT_HAS(parse_error(with("colour", 1)), "the keys are file_format_version, name");
  EXPECT_HAS(parse_error(with("probe", {{"pci_vender", "0x10de"}})),
             "unknown key \"pci_vender\" in \"probe\"; did you mean \"pci_vendor\"?");
  const json complete = good();
  for (const auto& item : complete.items()) {
    json lacking = good();
    lacking.erase(item.key());
    EXPECT_EQ(parse_error(lacking), "/p/acme.json: key \"" + item.key() + "\" is missing");
  }
}

TEST(ManifestTest, WrongTypesAndValuesNameKeyValueAndRule) {
  struct Case {
    const char* key;
    json value;
    const char* expected;
  };
  const Case cases[] = {
      {"name", 3, "\"name\" is the number 3 and must be a string"},
      {"name", nullptr, "\"name\" is the null null and must be"},
      {"name", "", "\"name\" is empty and must be"},
      {"name", "Acme Inc", "\"name\" is \"Acme Inc\" and must be"},
      {"name", std::string(65, 'a'), "at most 64 letters"},
      {"vendor", json::array({1}), "\"vendor\" is the array [1] and must be"},
      {"library_path", "a\nb", "holds control characters"},
      {"library_path", "folder/", "not of a folder"},
      {"library_path", json::object(), "\"library_path\" is the object {} and must be"},
      {"arch", "amd64", "did you mean \"x86_64\"?"},
      {"arch", "arm64", "did you mean \"aarch64\"?"},
      {"arch", "x86-64", "did you mean \"x86_64\"?"},
      {"arch", "vax", "one of x86_64 aarch64"},
      {"abi", "1", "MAJOR.MINOR"},
      {"abi", "1.", "MAJOR.MINOR"},
      {"abi", "0.1.2", "MAJOR.MINOR"},
      {"abi", "-1.0", "MAJOR.MINOR"},
      {"abi", "99999999999.0", "MAJOR.MINOR"},
      {"abi", 0.1, "\"abi\" is the number 0.1 and must be a string"},
      {"file_format_version", "2.0", "must be the string \"1.0\""},
      {"file_format_version", 1.0, "must be the string \"1.0\""},
      {"probe", json::object(), "an empty object"},
      {"probe", "0x10de", "must be an object"},
      {"probe", {{"pci_vendor", 4318}}, "\"pci_vendor\" is the number 4318"},
      {"probe", {{"pci_vendor", "10de"}}, "0x and four hex digits"},
      {"probe", {{"pci_vendor", "0x10dg"}}, "0x and four hex digits"},
      {"probe", {{"pci_vendor", "0x-1de"}}, "0x and four hex digits"},
      {"probe", {{"device_node", "nvidia0"}}, "absolute path of a node below /dev"},
      {"probe", {{"device_node", "/dev/../etc"}}, "without \"..\""},
      {"probe", {{"always", false}}, "\"always\" is false and must be true"},
      {"load_for", "opencl", "must be a list of types of devices"},
      {"load_for", json::array(), "must be a list of types of devices"},
      {"load_for", json::array({"opencl:0"}), "types of devices without their numbers"},
      {"load_for", json::array({"ext:acme:0"}), "types of devices without their numbers"},
      {"load_for", json::array({"opncl"}), "did you mean 'opencl'"},
      {"load_for", json::array({"cpu"}), "types of devices without their numbers"},
      {"sha256", std::string(64, 'a'), "\"sha256\" is not part of the format any more"},
      {"settings", "x", "\"settings\" is \"x\" and must be a list"},
      {"settings", json::array({1}), "a setting is 1 and must be an object"},
      {"settings", json::array({{{"name", "TE_FL_ACME_A"}}}),
       "key \"type\" is missing in \"settings\""},
      {"settings", json::array({{{"nam", "x"}}}),
       "unknown key \"nam\" in \"settings\"; did you mean \"name\"?"},
      {"settings", json::array({setting("TE_FL_ACME_A", "boolean")}),
       "one of string bool int enum list file"},
      {"settings", json::array({setting("TE_FL_OTHER_A", "bool")}), "must begin with TE_FL_ACME_"},
      {"settings", json::array({setting("TE_FL_ACME_", "bool")}), "must begin with TE_FL_ACME_"},
      {"settings", json::array({setting("TE_FL_ACME_a", "bool")}), "capital letters"},
      {"settings", json::array({setting("TE_FL_ACME_A", "bool", "maybe")}), "wrong default"},
      {"settings", json::array({setting("TE_FL_ACME_A", "bool", "yes")}), "is written '1'"},
      {"settings", json::array({setting("TE_FL_ACME_A", "enum")}), "an enum without choices"},
      {"settings", json::array({setting("TE_FL_ACME_A", "int", "", "9 1")}), "\"MIN MAX\""},
      {"settings", json::array({setting("TE_FL_ACME_A", "bool"), setting("TE_FL_ACME_A", "bool")}),
       "twice"},
  };
  for (const Case& c : cases) {
    const std::string error = parse_error(with(c.key, c.value));
    EXPECT_HAS(error, c.expected) << c.key << " = " << c.value << ": " << error;
    EXPECT_TRUE(error.starts_with("/p/acme.json: ")) << error;
  }
}

TEST(ManifestTest, BrokenJsonNamesThePosition) {
  const auto error = [](const std::string& text) {
    return parse_manifest(text, "/p/a.json").error;
  };
  EXPECT_EQ(error(""), "/p/a.json: it is empty");
  EXPECT_EQ(error(" \n"), "/p/a.json: it is empty");
  EXPECT_TRUE(error("{\n  \"name\" \"x\"\n}").starts_with("/p/a.json:2:12: not valid JSON"))
      << error("{\n  \"name\" \"x\"\n}");
  EXPECT_HAS(error("{\"name\": \"a\","), "may be truncated");
  EXPECT_HAS(error("[1]"), "must be an object");
  EXPECT_HAS(error("{\"name\":\"a\",\"name\":\"b\"}"), "\"name\" appears twice");
  EXPECT_HAS(error("{\"name\":\"\xff\"}"), "not valid JSON");
  EXPECT_HAS(error("{\"name\":1e999}"), "not usable as JSON");
  EXPECT_HAS(error(std::string(60000, '[')), "nested deeper than 8");
  std::string deep;
  for (int i = 0; i < 9; ++i) deep += "{\"probe\":";
  EXPECT_HAS(error(deep), "nested deeper than 8");
  EXPECT_HAS(error(std::string(kMaxManifestBytes + 1, ' ')), "at most 65536");
}

TEST(ManifestTest, EveryTruncationIsAnError) {
  const std::string whole = with("probe", {{"always", true}}).dump(2);
  ASSERT_OK(parse_manifest(whole, "/p/a.json"));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const std::string error = parse_manifest(whole.substr(0, size), "/p/a.json").error;
    EXPECT_TRUE(error.starts_with("/p/a.json:")) << size << ": " << error;
  }
}

TEST(ManifestTest, FlippedBytesNeverCrash) {
  const std::string whole = with("probe", {{"pci_vendor", "0x10de"}}).dump(1);
  std::mt19937 random(7);
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string damaged = whole;
    for (unsigned flips = 1 + random() % 4; flips > 0; --flips) {
      damaged[random() % damaged.size()] = static_cast<char>(random());
    }
    const ManifestResult result = parse_manifest(damaged, "/p/a.json");
    refused += result.ok() ? 0 : 1;
    // Error messages are printable whatever the file contains.
    EXPECT_TRUE(std::all_of(result.error.begin(), result.error.end(), [](char c) {
      return static_cast<unsigned char>(c) >= 0x20;
    })) << result.error;
  }
  EXPECT_GT(refused, 10000);
}

TEST(ProbeTest, LooksAtSysfsAndDevices) {
  const test::TempFolder root;
  root.write("sys/bus/pci/devices/0000:00:00.0/vendor", "0x8086\n");
  root.write("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n");
  root.write("sys/bus/pci/devices/0000:02:00.0/class", "0x030000\n");
  root.write("dev/acme0", "");
  Probe nvidia;
  nvidia.pci_vendor = 0x10de;
  Probe amd;
  amd.pci_vendor = 0x1002;
  EXPECT_TRUE(probe_matches(nvidia, root.path()));
  EXPECT_FALSE(probe_matches(amd, root.path()));
  EXPECT_FALSE(probe_matches(nvidia, root / "nothing"));
  Probe node;
  node.device_node = "/dev/acme0";
  EXPECT_TRUE(probe_matches(node, root.path()));
  node.device_node = "/dev/acme1";
  EXPECT_FALSE(probe_matches(node, root.path()));
  node.pci_vendor = 0x8086;  // one matching condition suffices
  EXPECT_TRUE(probe_matches(node, root.path()));
  EXPECT_EQ(describe(node), "PCI vendor 0x8086 or device node /dev/acme1");
  amd.always = true;
  EXPECT_TRUE(probe_matches(amd, root.path()));
  EXPECT_TRUE(probe_matches(Probe(), root / "nothing"));
  Probe null_device;
  null_device.device_node = "/dev/null";
  EXPECT_TRUE(probe_matches(null_device));
}

class DiscoveryTest : public ::testing::Test {
 protected:
  std::string add(const std::string& file, const std::string& name) {
    return folder_.write(file, with("name", name).dump());
  }
  test::TempFolder folder_;
};

TEST_F(DiscoveryTest, FoldersInOrderFilesSortedFirstNameWins) {
  add("one/b.json", "beta");
  add("one/a.json", "zeta");
  add("one/C.json", "gamma");
  folder_.write("one/notes.txt", "x");
  folder_.write("one/.hidden.json", "x");
  folder_.write("one/broken.json", "{");
  add("two/a.json", "alpha");
  const std::string later = add("two/b.json", "beta");
  const ManifestScan scan =
      discover_manifests({folder_ / "one", folder_ / "none", folder_ / "two", folder_ / "one",
                          "relative/folder", folder_ / "one/notes.txt"});
  std::vector<std::string> names;
  for (const Manifest& m : scan.manifests) names.push_back(m.name);
  EXPECT_EQ(names, (std::vector<std::string>{"gamma", "zeta", "beta", "alpha"}));
  ASSERT_EQ(scan.shadowed.size(), 1u);
  EXPECT_EQ(scan.shadowed[0].path, later);
  EXPECT_EQ(scan.shadowed[0].name, "beta");
  EXPECT_EQ(scan.shadowed[0].winner, folder_ / "one/b.json");
  EXPECT_EQ(scan.absent, std::vector<std::string>{folder_ / "none"});
  const auto errors = [&](const std::string& part) {
    return std::count_if(scan.errors.begin(), scan.errors.end(),
                         [&](const std::string& e) { return testing::contains(e, part); });
  };
  // The folder is listed twice.
  EXPECT_EQ(errors("one/broken.json:1:2: the JSON text ends too early"), 2);
  EXPECT_EQ(errors("relative/folder: a plugin folder must be an absolute path"), 1);
  EXPECT_EQ(errors("notes.txt: not a folder"), 1);
  EXPECT_EQ(scan.errors.size(), 4u);
}

TEST_F(DiscoveryTest, ARefusedManifestDoesNotTakeItsName) {
  const std::string bad = add("one/a.json", "beta");
  ASSERT_EQ(chmod(bad.c_str(), 0666), 0);
  add("two/a.json", "beta");
  const ManifestScan scan = discover_manifests({folder_ / "one", folder_ / "two"});
  ASSERT_EQ(scan.manifests.size(), 1u);
  EXPECT_EQ(scan.manifests[0].path, folder_ / "two/a.json");
  EXPECT_TRUE(scan.shadowed.empty());
}

TEST_F(DiscoveryTest, WritableByEverybodyIsRefusedWithTheWayOut) {
  const std::string file = add("plugins/a.json", "a");
  EXPECT_OK(read_manifest(file));
  ASSERT_EQ(chmod(file.c_str(), 0646), 0);
  EXPECT_HAS(read_manifest(file).error, "run: chmod o-w " + file);
  ASSERT_EQ(chmod(file.c_str(), 0644), 0);
  const std::string folder = folder_ / "plugins";
  ASSERT_EQ(chmod(folder.c_str(), 0777), 0);
  EXPECT_HAS(read_manifest(file).error, "run: chmod o-w " + folder);
  ASSERT_EQ(chmod(folder.c_str(), 01777), 0);  // sticky: no other user can replace the file
  EXPECT_OK(read_manifest(file));
  ASSERT_EQ(chmod(folder.c_str(), 0755), 0);
  ASSERT_EQ(chmod(folder_.path().c_str(), 0777), 0);  // parent folders further up are checked as
                                                      // well
  EXPECT_HAS(read_manifest(file).error, "run: chmod o-w " + folder_.path());
}

TEST_F(DiscoveryTest, ASymbolicLinkDoesNotHideAWritableFolder) {
  const std::string file = add("open/a.json", "a");
  ASSERT_EQ(chmod((folder_ / "open").c_str(), 0777), 0);
  std::filesystem::create_directory(folder_ / "closed");
  std::filesystem::create_symlink(file, folder_ / "closed/a.json");
  EXPECT_HAS(read_manifest(folder_ / "closed/a.json").error, folder_ / "open");
}

TEST_F(DiscoveryTest, AnotherOwnerIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  const std::string file = add("plugins/a.json", "a");
  ASSERT_EQ(chown(file.c_str(), 12345, 12345), 0);
  EXPECT_HAS(read_manifest(file).error, "belongs to 12345");
  EXPECT_HAS(read_manifest(file).error, "run: chown root " + file);
  ASSERT_EQ(chown(file.c_str(), 0, 0), 0);
  ASSERT_EQ(chown((folder_ / "plugins").c_str(), 12345, 12345), 0);
  EXPECT_HAS(file_trust_problem(file), "the folder " + folder_ / "plugins");
}

TEST_F(DiscoveryTest, FilesThatAreNoManifests) {
  ASSERT_EQ(mkfifo((folder_ / "fifo.json").c_str(), 0600), 0);
  EXPECT_HAS(read_manifest(folder_ / "fifo.json").error, "pipe");  // read_manifest() does not block
                                                                   // on the pipe
  EXPECT_HAS(read_manifest(folder_ / "absent.json").error, "No such file");
  folder_.write("large.json", std::string(kMaxManifestBytes + 1, ' '));
  EXPECT_HAS(read_manifest(folder_ / "large.json").error, "65537 bytes");
}

TEST(SearchPathTest, RelativeEntriesAreRefused) {
  const SearchPath path = split_plugin_path("/a::b/c:/d", "TE_FL_PLUGIN_PATH");
  EXPECT_EQ(path.folders, (std::vector<std::string>{"/a", "/d"}));
  ASSERT_EQ(path.problems.size(), 2u);
  EXPECT_HAS(path.problems[0], "TE_FL_PLUGIN_PATH: entry \"\" is empty");
  EXPECT_HAS(path.problems[1], "entry \"b/c\" is relative");
  EXPECT_TRUE(split_plugin_path("", "X").folders.empty());
  EXPECT_TRUE(split_plugin_path("", "X").problems.empty());
  EXPECT_EQ(split_plugin_path(".", "X").problems.size(), 1u);
}

class EnvironmentTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"HOME", "XDG_DATA_HOME"}) {
      if (const char* value = std::getenv(name)) saved_.emplace_back(name, value);
    }
  }
  void TearDown() override {
    unsetenv("HOME");
    unsetenv("XDG_DATA_HOME");
    for (const auto& [name, value] : saved_) setenv(name.c_str(), value.c_str(), 1);
  }
  std::vector<std::pair<std::string, std::string>> saved_;
};

TEST_F(EnvironmentTest, DefaultFolders) {
  using Folders = std::vector<std::string>;
  ASSERT_FALSE(privileges_elevated());
  setenv("HOME", "/home/u", 1);
  unsetenv("XDG_DATA_HOME");
  EXPECT_EQ(default_manifest_folders("/opt/te"),
            (Folders{"/home/u/.local/share/te_fl/plugins.d", "/etc/te_fl/plugins.d",
                     "/opt/te/lib/te_fl/plugins.d"}));
  setenv("XDG_DATA_HOME", "/data", 1);
  EXPECT_EQ(default_manifest_folders(""),
            (Folders{"/data/te_fl/plugins.d", "/etc/te_fl/plugins.d"}));
  setenv("XDG_DATA_HOME", "data", 1);
  const SearchPath path = default_search_path("usr");
  EXPECT_EQ(path.folders,
            (Folders{"/home/u/.local/share/te_fl/plugins.d", "/etc/te_fl/plugins.d"}));
  ASSERT_EQ(path.problems.size(), 2u);
  EXPECT_HAS(path.problems[0], "XDG_DATA_HOME is \"data\"");
  EXPECT_HAS(path.problems[1], "\"usr\" is not an absolute path");
  unsetenv("HOME");
  unsetenv("XDG_DATA_HOME");
  EXPECT_EQ(default_manifest_folders(""), Folders{"/etc/te_fl/plugins.d"});
}

TEST(NearestTest, DistanceCountsEditsAndSwaps) {
  EXPECT_EQ(edit_distance("abc", "abc"), 0u);
  EXPECT_EQ(edit_distance("abc", "ABC"), 0u);
  EXPECT_EQ(edit_distance("abc", "acb"), 1u);
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  const std::vector<std::string_view> names{"vendor", "name"};
  EXPECT_EQ(nearest_name("vender", names), "vendor");
  EXPECT_EQ(nearest_name("qqqqqqqq", names), "");
  EXPECT_EQ(nearest_name("x", std::vector<std::string_view>{}), "");
}

}  // namespace
}  // namespace te_fl::plugins
