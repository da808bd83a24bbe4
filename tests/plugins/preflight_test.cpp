#include "plugins/preflight.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "plugins/byte_source.hpp"
#include "plugins/soname_hints.hpp"
#include "support/expect.hpp"
#include "support/library_fixture.hpp"

namespace te_fl::plugins {
namespace {

constexpr char kEntry[] = "te_fl_plugin_query";
constexpr char kQuery[] = "extern \"C\" int te_fl_plugin_query(const void*) { return 1; }\n";

class PreflightTest : public test::LibraryFixture {
 protected:
  // Returns the dynamic loader's own error, which is the oracle for preflight().
  static std::string loader_says(const std::string& path) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return dlerror();
    dlclose(handle);
    return {};
  }
};

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

TEST_F(PreflightTest, ASoundPluginPasses) {
  const std::string path = build("good.so", kQuery, "-Wl,--no-as-needed -lm");
  const PreflightReport report = preflight(path, kEntry);
  EXPECT_OK(report);
  EXPECT_TRUE(report.symbols_checked);
  EXPECT_HAS(report.to_string(), "can be loaded");
  EXPECT_FALSE(report.libraries.empty());
  EXPECT_EQ(loader_says(path), "");
}

TEST_F(PreflightTest, AMissingEntryNamesTheMangledOne) {
  const std::string mangled =
      build("mangled.so", "int te_fl_plugin_query(const void*) { return 1; }");
  const PreflightReport report = preflight(mangled, kEntry);
  EXPECT_TRUE(report.lacks_required_symbol);
  EXPECT_EQ(report.similar_symbol, "_Z18te_fl_plugin_queryPKv");
  EXPECT_HAS(report.to_string(), "extern \"C\"");
  const std::string misspelt =
      build("misspelt.so", "extern \"C\" int te_fl_plugin_qeury() { return 1; }");
  EXPECT_EQ(preflight(misspelt, kEntry).similar_symbol, "te_fl_plugin_qeury");
}

TEST_F(PreflightTest, AMissingLibraryIsNamedWithWhoNeedsIt) {
  // plugin.so needs libmid.so.1, which needs libgone.so.7 and libcudnn.so.99.
  build("libgone.so.7", "int gone() { return 1; }", "-Wl,-soname,libgone.so.7");
  build("libcudnn.so.99", "int dnn() { return 1; }", "-Wl,-soname,libcudnn.so.99");
  build("libmid.so.1", "int gone(); int dnn(); int mid() { return gone() + dnn(); }",
        "-Wl,-soname,libmid.so.1 -L. -l:libgone.so.7 -l:libcudnn.so.99");
  const std::string path =
      build("plugin.so",
            std::string(kQuery) + "int mid(); int gone(); int use() { return mid() + gone(); }",
            "-L. -l:libmid.so.1 -l:libgone.so.7 -Wl,-rpath-link,. -Wl,--enable-new-dtags "
            "'-Wl,-rpath,${ORIGIN}'");
  std::remove((folder_ / "libgone.so.7").c_str());
  std::remove((folder_ / "libcudnn.so.99").c_str());
  const PreflightReport report = preflight(path, kEntry);
  const std::string text = report.to_string();
  ASSERT_EQ(report.missing_libraries.size(), 2u) << text;
  EXPECT_EQ(report.missing_libraries[0].soname, "libgone.so.7");
  EXPECT_EQ(report.missing_libraries[0].needed_by,
            (std::vector<std::string>{path, folder_ / "libmid.so.1"}));
  EXPECT_EQ(report.missing_libraries[1].chain,
            "libcudnn.so.99, needed by libmid.so.1, needed by plugin.so");
  EXPECT_HAS(first_line(text), "libgone.so.7") << text;
  EXPECT_HAS(text, "apt-file search libgone.so.7");
  EXPECT_HAS(text, "libcudnn");
  EXPECT_FALSE(report.symbols_checked);
  EXPECT_HAS(loader_says(path), "libgone.so.7");
}

TEST_F(PreflightTest, SearchFollowsTheLoadersOrder) {
  for (const char* sub : {"rpath", "library_path", "cached", "default"}) {
    std::filesystem::create_directories(folder_ / sub);
  }
  build("libdep.so.1", "int dep() { return 1; }", "-Wl,-soname,libdep.so.1");
  for (const char* sub : {"rpath", "library_path", "cached", "default"}) {
    std::filesystem::copy_file(folder_ / "libdep.so.1",
                               folder_ / (std::string(sub) + "/libdep.so.1"));
  }
  const std::string source = std::string(kQuery) + "int dep(); int use() { return dep(); }";
  const std::string old_style = build(
      "old.so", source, "-L. -l:libdep.so.1 -Wl,--disable-new-dtags '-Wl,-rpath,$ORIGIN/rpath'");
  const std::string new_style = build(
      "new.so", source, "-L. -l:libdep.so.1 -Wl,--enable-new-dtags '-Wl,-rpath,$ORIGIN/rpath'");
  SearchRules rules = SearchRules::of_process();
  rules.library_path = {folder_ / "library_path"};
  rules.cache.emplace("libdep.so.1", folder_ / "cached/libdep.so.1");
  rules.default_folders.push_back(folder_ / "default");
  const auto found = [&](const std::string& plugin) {
    for (const ClosureLibrary& l : preflight(plugin, kEntry, rules).libraries) {
      if (l.soname == "libdep.so.1")
        return std::filesystem::path(l.path).parent_path().filename().string();
    }
    return std::string("nowhere");
  };
  EXPECT_EQ(found(old_style), "rpath");         // RPATH is searched before LD_LIBRARY_PATH
  EXPECT_EQ(found(new_style), "library_path");  // RUNPATH is searched after LD_LIBRARY_PATH
  rules.library_path.clear();
  EXPECT_EQ(found(new_style), "rpath");
  std::filesystem::remove_all(folder_ / "rpath");
  EXPECT_EQ(found(new_style), "cached");
  rules.cache.erase("libdep.so.1");
  EXPECT_EQ(found(old_style), "default");
  rules.default_folders.pop_back();
  EXPECT_EQ(found(old_style), "nowhere");
  rules.loaded.push_back({"/somewhere/else.so", "libdep.so.1"});
  EXPECT_EQ(found(old_style), "somewhere");  // a library that is already loaded takes precedence
}

TEST_F(PreflightTest, ALibraryPathSetTooLateIsExplained) {
  build("libdep.so.1", "int dep() { return 1; }", "-Wl,-soname,libdep.so.1");
  const std::string path =
      build("plugin.so", std::string(kQuery) + "int dep(); int u() { return dep(); }",
            "-L. -l:libdep.so.1");
  const char* before = std::getenv("LD_LIBRARY_PATH");
  const std::string saved = before ? before : "";
  setenv("LD_LIBRARY_PATH", folder_.path().c_str(), 1);
  const PreflightReport report = preflight(path, kEntry);
  const std::string loader = loader_says(path);
  before ? setenv("LD_LIBRARY_PATH", saved.c_str(), 1) : unsetenv("LD_LIBRARY_PATH");
  EXPECT_HAS(loader, "libdep.so.1");
  ASSERT_EQ(report.missing_libraries.size(), 1u) << report.to_string();
  EXPECT_HAS(report.missing_libraries[0].hint, "after the program had started");
}

TEST_F(PreflightTest, AFileForAnotherMachineIsPassedOver) {
  std::string bytes =
      test::read_file(build("libdep.so.1", "int dep() { return 1; }", "-Wl,-soname,libdep.so.1"));
  const std::string path =
      build("plugin.so", std::string(kQuery) + "int dep(); int u() { return dep(); }",
            "-L. -l:libdep.so.1 -Wl,-rpath,'$ORIGIN'");
  EXPECT_OK(preflight(path, kEntry));
  bytes[18] = bytes[18] == 8 ? 62 : 8;  // sets another machine type: 8 is EM_MIPS, 62 is EM_X86_64
  folder_.write("libdep.so.1", bytes);
  const PreflightReport report = preflight(path, kEntry);
  ASSERT_EQ(report.missing_libraries.size(), 1u);
  EXPECT_HAS(report.missing_libraries[0].rejected, "libdep.so.1 is a mips64 library")
      << report.to_string();
}

TEST_F(PreflightTest, AVersionThatTheLibraryLacks) {
  folder_.write("two.map", "DEP_1.9 { global: first; }; DEP_1.10 { global: second; } DEP_1.9;");
  folder_.write("one.map", "DEP_1.9 { global: first; second; };");
  const std::string dep =
      "extern \"C\" int first() { return 1; } extern \"C\" int second() { return 2; }";
  build("libdep.so.1", dep, "-Wl,-soname,libdep.so.1 -Wl,--version-script=two.map");
  const std::string path = build("plugin.so",
                                 std::string(kQuery) +
                                     "extern \"C\" int first(); extern \"C\" int second();"
                                     "int use() { return first() + second(); }",
                                 "-L. -l:libdep.so.1 -Wl,-rpath,'$ORIGIN'");
  EXPECT_OK(preflight(path, kEntry));
  build("libdep.so.1", dep, "-Wl,-soname,libdep.so.1 -Wl,--version-script=one.map");
  const PreflightReport report = preflight(path, kEntry);
  ASSERT_EQ(report.missing_versions.size(), 1u) << report.to_string();
  const MissingVersion& v = report.missing_versions[0];
  EXPECT_EQ(v.version, "DEP_1.10");
  EXPECT_EQ(v.present, "DEP_1.9");
  EXPECT_EQ(v.needed_by, path);
  EXPECT_EQ(v.library_path, folder_ / "libdep.so.1");
  EXPECT_EQ(v.symbols, std::vector<std::string>{"second"});
  EXPECT_EQ(report.missing_symbol_count, 0u);  // one cause gives one report
  EXPECT_HAS(loader_says(path), "DEP_1.10");
}

TEST_F(PreflightTest, ANewerGlibc) {
  std::string bytes = test::read_file(
      build("plugin.so",
            std::string("#include <pthread.h>\n") + kQuery +
                "void* f(void*) { return nullptr; }\n"
                "int use(pthread_t* t) { return pthread_create(t, nullptr, f, nullptr); }",
            "-pthread"));
  const std::size_t at = bytes.find("GLIBC_2.34");
  ASSERT_NE(at, std::string::npos);
  bytes.replace(at, 10, "GLIBC_2.99");
  const PreflightReport report = preflight(folder_.write("newer.so", bytes), kEntry);
  ASSERT_EQ(report.missing_versions.size(), 1u) << report.to_string();
  EXPECT_EQ(report.missing_versions[0].version, "GLIBC_2.99");
  EXPECT_TRUE(report.missing_versions[0].present.starts_with("GLIBC_2."));
  EXPECT_EQ(report.missing_versions[0].symbols, std::vector<std::string>{"pthread_create"});
  EXPECT_HAS(first_line(report.to_string()), "GLIBC_2.99") << report.to_string();
  EXPECT_HAS(report.to_string(), "rebuild it");
}

TEST_F(PreflightTest, UndefinedSymbolsAreNamedDemangledAndCounted) {
  std::string source = kQuery;
  std::string body = "int use() { return 0";
  for (int i = 0; i < 12; ++i) {
    const std::string name = "absent_" + std::to_string(i);
    source += "namespace acme { int " + name + "(int, const char*); }\n";
    body += " + acme::" + name + "(1, \"\")";
  }
  source += "extern \"C\" int maybe() __attribute__((weak)); int w() { return maybe ? 1 : 0; }\n";
  const std::string path = build("plugin.so", source + body + "; }\n");
  const PreflightReport report = preflight(path, kEntry);
  EXPECT_EQ(report.missing_symbol_count, 12u) << report.to_string();
  ASSERT_EQ(report.missing_symbols.size(), PreflightReport::kMaxSymbolsNamed);
  for (const MissingSymbol& s : report.missing_symbols) {
    EXPECT_TRUE(s.demangled.starts_with("acme::absent_")) << s.demangled;
    EXPECT_TRUE(s.demangled.ends_with("(int, char const*)")) << s.demangled;
  }
  EXPECT_HAS(report.to_string(), "and 2 more undefined symbols");
  EXPECT_HAS(loader_says(path), "undefined symbol");
}

TEST_F(PreflightTest, TheProcessGlobalScopeProvides) {
  // The library has no DT_NEEDED, so puts() must come from the process.
  const std::string path = build(
      "bare.so",
      std::string(kQuery) + "extern \"C\" int puts(const char*); int u() { return puts(\"\"); }",
      "-nostdlib");
  EXPECT_TRUE(inspect_elf(path).needed.empty());
  EXPECT_OK(preflight(path, kEntry));
  EXPECT_EQ(loader_says(path), "");
  SearchRules rules = SearchRules::of_process();
  rules.use_global_scope = false;
  const PreflightReport report = preflight(path, kEntry, rules);
  ASSERT_EQ(report.missing_symbols.size(), 1u);
  EXPECT_EQ(report.missing_symbols[0].name, "puts");
}

// Encodes a cache as ldconfig writes it: header, entries, strings; offsets count from the header.
std::string encode_cache(const std::vector<std::pair<std::string, std::string>>& entries) {
  std::string out = "glibc-ld.so.cache1.1";
  std::string strings;
  const auto put = [](std::string& to, std::uint32_t v) {
    to.append(reinterpret_cast<const char*>(&v), 4);
  };
  put(out, static_cast<std::uint32_t>(entries.size()));
  out.append(48 - out.size(), '\0');
  const std::uint32_t strings_at = static_cast<std::uint32_t>(48 + 24 * entries.size());
  for (const auto& [soname, file] : entries) {
    put(out, 0x0303);
    put(out, strings_at + static_cast<std::uint32_t>(strings.size()));
    strings += soname + '\0';
    put(out, strings_at + static_cast<std::uint32_t>(strings.size()));
    strings += file + '\0';
    out.append(12, '\0');
  }
  return out + strings;
}

LibraryCache parse_text(const std::string& bytes) {
  return parse_library_cache({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()});
}

TEST(LibraryCacheTest, ReadsBothLayouts) {
  const std::string modern =
      encode_cache({{"liba.so.1", "/x/liba.so.1"}, {"libb.so", "/y/libb.so"}});
  EXPECT_EQ(parse_text(modern),
            (LibraryCache{{"liba.so.1", "/x/liba.so.1"}, {"libb.so", "/y/libb.so"}}));
  // The old format precedes the new one: a header of 16 bytes, 12 bytes for each of its 3 entries,
  // and padding to a multiple of 8.
  std::string old("ld.so-1.7.0\0\x03\0\0\0", 16);
  old.append(3 * 12 + 4, '\0');
  EXPECT_EQ(parse_text(old + modern).size(), 2u);
  EXPECT_TRUE(parse_text("something else").empty());
}

TEST(LibraryCacheTest, DamageIsSkipped) {
  const std::string whole =
      encode_cache({{"liba.so.1", "/x/liba.so.1"}, {"libb.so", "/y/libb.so"}});
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_LE(parse_text(whole.substr(0, size)).size(), 1u) << size;
  }
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(0xff);
    EXPECT_LE(parse_text(damaged).size(), 2u) << at;
  }
}

TEST(LibraryCacheTest, AgreesWithLdconfig) {
  FILE* pipe = popen("/sbin/ldconfig -p 2>/dev/null", "r");
  ASSERT_NE(pipe, nullptr);
  char line[4096];
  std::size_t files = 0;
  while (std::fgets(line, sizeof(line), pipe)) files += std::strstr(line, "=> ") ? 1 : 0;
  if (pclose(pipe) != 0 || files == 0) GTEST_SKIP() << "no ldconfig here";
  EXPECT_EQ(parse_library_cache(ByteSource("/etc/ld.so.cache").read_some(0, 32 << 20)).size(),
            files);
}

TEST(LoadedLibraries, HoldTheCLibrary) {
  const auto loaded = loaded_libraries();
  EXPECT_TRUE(std::any_of(loaded.begin(), loaded.end(),
                          [](const LoadedLibrary& l) { return l.soname == "libc.so.6"; }));
}

TEST(Tokens, Expand) {
  EXPECT_EQ(expand_tokens("$ORIGIN/../x", "/a/b/c.so"), "/a/b/../x");
  EXPECT_EQ(expand_tokens("${ORIGIN}:$OTHER$", "/a/b/c.so"), "/a/b:$OTHER$");
}

TEST(Hints, KnowTheUsualLibraries) {
  EXPECT_HAS(soname_hint("libcudart.so.12"), "nvidia-cuda-runtime-cu12");
  EXPECT_HAS(soname_hint("libcublasLt.so.13"), "libcublas-13-0");
  EXPECT_HAS(soname_hint("libcublasLt.so.11"), "same major version");
  EXPECT_HAS(soname_hint("libOpenCL.so.1"), "ocl-icd-libopencl1");
  EXPECT_HAS(soname_hint("libamdhip64.so.6"), "ROCm");
  EXPECT_HAS(soname_hint("libascendcl.so"), "CANN");
  EXPECT_HAS(soname_hint("libcuda.so.1"), "driver");
  EXPECT_HAS(soname_hint("libunheard.so.4"), "apt-file search libunheard.so.4");
  EXPECT_HAS(soname_hint("libcudartx.so.12"), "apt-file search");
  EXPECT_HAS(symbol_hint("__asan_init"), "libasan");
}

TEST(Hints, AManifestsPackagesComeFirst) {
  const std::vector<LibraryPackage> packages = {{"libchiprt.so", "chip-rt", "Chip's", ""},
                                                {"libchiprt.so.4", "", "Chip's", "chip-rt4"},
                                                {"libchipblas.so.1", "cb", "", "chip-blas"},
                                                {"libz.so.1", "", "it is Chip's own", ""}};
  const auto hint = [&](std::string_view soname) { return soname_hint(soname, packages); };
  const std::string folder =
      ", whose lib folder must be in LD_LIBRARY_PATH before the program starts";
  EXPECT_HAS(soname_hint("libchiprt.so.3"), "apt-file search");
  EXPECT_EQ(hint("libchiprt.so.3"), "install the apt package chip-rt (Chip's)");
  EXPECT_EQ(hint("libchiprt.so.4"), "install the PyPI package chip-rt4 (Chip's)" + folder);
  EXPECT_EQ(hint("libchipblas.so.1"),
            "install the apt package cb, or the PyPI package chip-blas" + folder);
  EXPECT_HAS(hint("libchipblas.so.2"), "apt-file search");
  EXPECT_EQ(hint("libz.so.1"), "it is Chip's own");
  EXPECT_HAS(hint("libcuda.so.1"), "driver");
}

}  // namespace
}  // namespace te_fl::plugins
