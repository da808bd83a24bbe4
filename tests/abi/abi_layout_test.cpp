#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "abi/describe.hpp"
#include "te_fl/plugin.h"

// The layout of every struct that crosses the plugin boundary, and the value of every enumerator,
// must match golden_*.txt. To accept an intended change, run this test with UPDATE_GOLDEN=1 in the
// environment and review the difference. From 2.0 on, the files of each release are kept, and
// nothing in them may change.
namespace te_fl::test {
namespace {

constexpr const char* kUpdate = "UPDATE_GOLDEN";
const std::string kFolder = std::string(TE_FL_SOURCE_DIR) + "/tests/abi/";

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file) << path;
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

void expect_golden(const std::string& name, const std::string& now) {
  const std::string path = kFolder + name;
  if (std::getenv(kUpdate) != nullptr) std::ofstream(path) << now;
  std::istringstream a(read_text(path)), b(now);
  std::string want, got, section;
  for (int line = 1; std::getline(a, want); ++line) {
    ASSERT_TRUE(std::getline(b, got))
        << "rule R3: the ABI ends before line " << line << " of " << name << ": " << want;
    if (got[0] != ' ') section = got;
    ASSERT_EQ(got, want) << "rule R3: line " << line << " of " << name << ", in " << section;
  }
  EXPECT_FALSE(std::getline(b, got)) << "rule R2: an addition, not in " << name << ": " << got;
}

TEST(Abi, LayoutMatchesTheGoldenFile) { expect_golden("golden_offsets.txt", describe_layout()); }

TEST(Abi, ValuesMatchTheGoldenFile) { expect_golden("golden_values.txt", describe_values()); }

// Parses a text of describe_layout() into a map: "te_fl_quant.scale" -> offset "@48", "te_fl_quant"
// -> size "56"; likewise for an op's arguments; "op NAME" -> the smallest accepted size.
std::map<std::string, std::string> places(const std::string& layout) {
  std::map<std::string, std::string> out;
  std::istringstream lines(layout);
  std::string section;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string first, second, rest, last;
    words >> first >> second;
    std::getline(words, rest);
    if (line[0] == ' ') {
      out[section + "." + first] = second + rest;
      continue;
    }
    section = first == "op" ? "op " + second : first;
    last = line.substr(line.rfind(' ') + 1);
    out[section] = last;
  }
  return out;
}

// describe_values() must list every enumerator, because the other tests check only listed ones.
TEST(Abi, EveryEnumeratorIsListed) {
  std::set<std::string> listed;
  std::istringstream lines(describe_values());
  for (std::string name, value; lines >> name >> value;) listed.insert(name);
  int found = 0;
  for (const char* file : {"include/te_fl/plugin.h", "include/te_fl/ops/enums.h"}) {
    std::string text = read_text(std::string(TE_FL_SOURCE_DIR) + "/" + file);
    text = std::regex_replace(text, std::regex(R"(/\*[^*]*\*+([^/*][^*]*\*+)*/)"), "");
    const std::regex enumerator(R"((TE_FL_\w+)\s*=[^=])");
    for (std::sregex_iterator m(text.begin(), text.end(), enumerator), end; m != end; ++m) {
      EXPECT_TRUE(listed.count((*m)[1])) << (*m)[1] << " of " << file << " is not in describe.cpp";
      ++found;
    }
  }
  EXPECT_GT(found, 100);
}

// describe_layout() must list every struct and every member.
TEST(Abi, EveryMemberIsListed) {
  const auto listed = places(describe_layout());
  std::string text = read_text(std::string(TE_FL_SOURCE_DIR) + "/include/te_fl/plugin.h");
  text = std::regex_replace(text, std::regex(R"(/\*[^*]*\*+([^/*][^*]*\*+)*/)"), "");
  const std::regex structs(R"(typedef struct (te_fl_\w+) \{([^}]*)\} te_fl_)");
  int found = 0;
  for (std::sregex_iterator s(text.begin(), text.end(), structs), end; s != end; ++s, ++found) {
    const std::string body =
        std::regex_replace((*s)[2].str(), std::regex(R"(TE_FL_INIT\([^;]*\))"), "");
    // matches member declarations: "type name;", "type name[4];", "type (*name)(...);"
    const std::regex member(R"((?:\(\*(\w+)\)\([^;]*\)|(\w+)(?:\[\d+\])?)\s*;)");
    for (std::sregex_iterator m(body.begin(), body.end(), member); m != end; ++m) {
      const std::string name = (*m)[1].matched ? (*m)[1] : (*m)[2];
      EXPECT_TRUE(listed.count((*s)[1].str() + "." + name))
          << (*s)[1] << "." << name << " is not in describe.cpp";
    }
  }
  EXPECT_GT(found, 20);
}

TEST(Abi, DlpackLayouts) {
  // DLDevice, DLDataType and DLTensor of DLPack 1.1 have these sizes on a 64-bit machine.
  EXPECT_EQ(sizeof(te_fl_device), 8u);
  EXPECT_EQ(sizeof(te_fl_dtype), 4u);
  EXPECT_EQ(sizeof(te_fl_dltensor), 48u);
  EXPECT_EQ(offsetof(te_fl_dltensor, device), 8u);
  EXPECT_EQ(offsetof(te_fl_dltensor, ndim), 16u);
  EXPECT_EQ(offsetof(te_fl_dltensor, dtype), 20u);
  EXPECT_EQ(offsetof(te_fl_dltensor, shape), 24u);
  EXPECT_EQ(offsetof(te_fl_dltensor, strides), 32u);
  EXPECT_EQ(offsetof(te_fl_dltensor, byte_offset), 40u);
}

// Every struct except those that R3 names begins with struct_size. The plugin query's header starts
// with a magic number instead, so that a reader can detect garbage before it trusts a size.
TEST(Abi, EveryStructBeginsWithItsSize) {
  const std::set<std::string> fixed = {"te_fl_dtype", "te_fl_device", "te_fl_dltensor"};
  auto layout = places(describe_layout());
  for (const auto& [what, where] : layout) {
    const bool is_struct = what.find('.') == std::string::npos && what.rfind("op ", 0) != 0;
    if (!is_struct) continue;
    const bool sized = layout.count(what + ".struct_size") != 0;
    EXPECT_NE(sized, fixed.count(what) != 0) << "rule R3: " << what;
    if (!sized) continue;
    EXPECT_EQ(layout[what + ".struct_size"], what == "te_fl_plugin_header" ? "@4" : "@0")
        << "rule R3: " << what;
  }
}

// The members that identify a version keep their offsets in every major version (R2).
TEST(Abi, TheHeadersBeginningNeverChanges) {
  EXPECT_EQ(offsetof(te_fl_plugin_header, magic), 0u);
  EXPECT_EQ(offsetof(te_fl_plugin_header, struct_size), 4u);
  EXPECT_EQ(offsetof(te_fl_plugin_header, abi_major), 8u);
  EXPECT_EQ(offsetof(te_fl_plugin_header, abi_minor), 12u);
  EXPECT_EQ(TE_FL_PLUGIN_MAGIC, 0x4c464554u);
}

}  // namespace
}  // namespace te_fl::test
