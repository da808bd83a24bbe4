#include "plugins/elf_inspect.hpp"

#include <elf.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "plugins/preflight.hpp"
#include "support/expect.hpp"
#include "support/library_fixture.hpp"

namespace te_fl::plugins {
namespace {

using ElfInspect = test::LibraryFixture;

constexpr char kPlugin[] = R"(
#include <cstdlib>
extern "C" int te_fl_plugin_query(const void*) { return std::getenv("HOME") != nullptr; }
extern "C" __attribute__((weak)) int other_entry() { return 2; }
extern "C" __attribute__((visibility("hidden"))) int hidden_entry() { return 3; }
extern "C" int optional_hook() __attribute__((weak));
int use() { return optional_hook ? optional_hook() : 0; }
)";

std::span<const std::uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

template <class T>
T object_at(const std::string& bytes, std::size_t offset) {
  T out{};
  std::memcpy(&out, bytes.data() + offset, sizeof(T));
  return out;
}

// Returns the end of the last loadable segment: a shorter file cannot be mapped.
std::size_t load_end(const std::string& bytes) {
  const auto header = object_at<Elf64_Ehdr>(bytes, 0);
  std::size_t end = 0;
  for (unsigned i = 0; i < header.e_phnum; ++i) {
    const auto s = object_at<Elf64_Phdr>(bytes, header.e_phoff + i * sizeof(Elf64_Phdr));
    if (s.p_type == PT_LOAD) end = std::max<std::size_t>(end, s.p_offset + s.p_filesz);
  }
  return end;
}

TEST_F(ElfInspect, ReadsWhatTheLinkerWrote) {
  const std::string path = build("plugin.so", kPlugin,
                                 "-Wl,-soname,plugin.so.3 -Wl,--build-id=0x0123456789abcdef "
                                 "-Wl,--enable-new-dtags '-Wl,-rpath,$ORIGIN/lib:/opt/x'");
  const ElfInfo info = inspect_elf(path);
  EXPECT_EQ(info.problem, "");
  EXPECT_EQ(info.kind, ElfKind::kSharedLibrary);
  EXPECT_EQ(info.bits, 64);
  EXPECT_EQ(info.architecture, host_architecture());
  EXPECT_EQ(info.soname, "plugin.so.3");
  EXPECT_EQ(info.build_id, "0123456789abcdef");
  EXPECT_EQ(info.runpath, (std::vector<std::string>{"$ORIGIN/lib", "/opt/x"}));
  EXPECT_TRUE(info.rpath.empty());
  EXPECT_EQ(std::count(info.needed.begin(), info.needed.end(), "libc.so.6"), 1);
  EXPECT_TRUE(info.exports("te_fl_plugin_query"));
  EXPECT_TRUE(info.exports("other_entry"));
  EXPECT_FALSE(info.exports("hidden_entry"));
  EXPECT_FALSE(info.exports("optional_hook"));
  EXPECT_FALSE(info.exports("te_fl_plugin_quer"));
  EXPECT_FALSE(info.executable_stack);
  EXPECT_FALSE(info.writable_executable);
  EXPECT_FALSE(info.text_relocations);
  const auto undefined = [&](const std::string& name) {
    return std::find_if(info.undefined.begin(), info.undefined.end(),
                        [&](const ElfSymbol& s) { return s.name == name; });
  };
  ASSERT_NE(undefined("getenv"), info.undefined.end());
  EXPECT_EQ(undefined("getenv")->version_file, "libc.so.6");
  EXPECT_TRUE(undefined("getenv")->version.starts_with("GLIBC_2.")) << undefined("getenv")->version;
  EXPECT_FALSE(undefined("getenv")->weak);
  ASSERT_NE(undefined("optional_hook"), info.undefined.end());
  EXPECT_TRUE(undefined("optional_hook")->weak);
}

TEST_F(ElfInspect, ReadsAnOldRpathAndASysvHash) {
  const ElfInfo info = inspect_elf(build(
      "old.so", kPlugin, "-Wl,--disable-new-dtags -Wl,-rpath,/opt/y -Wl,--hash-style=sysv -s"));
  EXPECT_EQ(info.rpath, std::vector<std::string>{"/opt/y"});
  EXPECT_TRUE(info.runpath.empty());
  EXPECT_TRUE(info.exports("te_fl_plugin_query"));
}

TEST_F(ElfInspect, HeadersOnlyLeaveSymbolsOut) {
  const ElfInfo info = inspect_elf(build("plugin.so", kPlugin), ElfDepth::kHeaders);
  EXPECT_TRUE(info.sound());
  EXPECT_FALSE(info.needed.empty());
  EXPECT_FALSE(info.version_needs.empty());
  EXPECT_TRUE(info.defined.empty());
}

TEST_F(ElfInspect, NotesDangerousProperties) {
  const std::string stack = build("stack.so", kPlugin, "-Wl,-z,execstack");
  EXPECT_TRUE(inspect_elf(stack).executable_stack);
  const std::string textrel = build(
      "textrel.so", std::string(kPlugin) + "asm(\".text\\n.balign 8\\n.quad other_entry\\n\");",
      "-Wl,-z,notext");
  EXPECT_TRUE(inspect_elf(textrel).text_relocations);
  const std::string unique = build("unique.so",
                                   "template <class T> struct Box { static int value; };\n"
                                   "template <class T> int Box<T>::value = 3;\n"
                                   "int* use() { return &Box<int>::value; }\n");
  EXPECT_EQ(inspect_elf(unique).unique, std::vector<std::string>{"_ZN3BoxIiE5valueE"});
  EXPECT_HAS(preflight(unique, "").to_string(), "Box<int>::value");
  const std::string closed = build("closed.so", kPlugin, "-Wl,-z,nodlopen");
  EXPECT_TRUE(inspect_elf(closed).no_dlopen);
  EXPECT_FALSE(preflight(closed, "").ok());

  std::string bytes = test::read_file(folder_ / "stack.so");
  const auto header = object_at<Elf64_Ehdr>(bytes, 0);
  EXPECT_FALSE(inspect_elf(bytes_of(bytes)).writable_executable);
  const Elf64_Word all = PF_R | PF_W | PF_X;
  std::memcpy(bytes.data() + header.e_phoff + offsetof(Elf64_Phdr, p_flags), &all, sizeof(all));
  EXPECT_TRUE(inspect_elf(bytes_of(bytes)).writable_executable);
}

TEST_F(ElfInspect, NamesWhatIsNotALibrary) {
  const auto kind = [&](const std::string& content) {
    return inspect_elf(folder_.write("file", content)).kind;
  };
  EXPECT_EQ(kind(""), ElfKind::kEmpty);
  EXPECT_EQ(kind("hello\n"), ElfKind::kText);
  EXPECT_EQ(kind("/* GNU ld script */\nINPUT(libx.so.1)\n"), ElfKind::kText);
  EXPECT_HAS(inspect_elf(folder_ / "file").problem, "linker script");
  EXPECT_EQ(kind("version https://git-lfs.github.com/spec/v1\n"), ElfKind::kText);
  EXPECT_HAS(inspect_elf(folder_ / "file").problem, "git lfs pull");
  EXPECT_EQ(kind("!<arch>\nabc"), ElfKind::kArchive);
  EXPECT_EQ(kind("PK\x03\x04 ...."), ElfKind::kArchive);
  EXPECT_EQ(kind(std::string("MZ\x90\x00\x03\x00", 6)), ElfKind::kForeign);
  EXPECT_EQ(kind(std::string("\x00\x01\x02\x03", 4)), ElfKind::kUnknown);
  EXPECT_EQ(kind("\x7f"
                 "EL"),
            ElfKind::kTruncated);
  EXPECT_EQ(inspect_elf(folder_.path()).kind, ElfKind::kFolder);
  EXPECT_EQ(inspect_elf("/dev/null").kind, ElfKind::kSpecial);
  EXPECT_EQ(inspect_elf(folder_ / "absent").kind, ElfKind::kMissing);
  EXPECT_EQ(inspect_elf(std::string("/bin/sh\0.so", 11)).kind, ElfKind::kMissing);
  ASSERT_EQ(mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  // inspect_elf() does not block on a named pipe.
  EXPECT_EQ(inspect_elf(folder_ / "fifo").kind, ElfKind::kSpecial);

  // If several of -shared, -c and -pie are given, the compiler uses the last one.
  EXPECT_EQ(inspect_elf(build("plugin.o", kPlugin, "-c")).kind, ElfKind::kRelocatable);
  const std::string program = "int main() { return 0; }";
  folder_.write("program.cpp", program);
  const std::string to = "cd '" + folder_.path() + "' && " TE_FL_TEST_CXX " program.cpp -o ";
  ASSERT_EQ(std::system((to + "pie -fPIE -pie").c_str()), 0);
  ASSERT_EQ(std::system((to + "fixed -fno-PIE -no-pie").c_str()), 0);
  EXPECT_EQ(inspect_elf(folder_ / "pie").kind, ElfKind::kExecutable);
  EXPECT_EQ(inspect_elf(folder_ / "fixed").kind, ElfKind::kExecutable);
}

TEST_F(ElfInspect, NamesAnotherArchitecture) {
  std::string bytes = test::read_file(build("plugin.so", kPlugin));
  const bool on_x86 = host_architecture() == "x86_64";
  const std::uint16_t machine = on_x86 ? EM_AARCH64 : EM_X86_64;
  std::memcpy(bytes.data() + offsetof(Elf64_Ehdr, e_machine), &machine, sizeof(machine));
  const ElfInfo info = inspect_elf(bytes_of(bytes));
  EXPECT_TRUE(info.wrong_host);
  EXPECT_EQ(info.problem, on_x86 ? "is an aarch64 library, and this host is x86_64"
                                 : "is an x86_64 library, and this host is " + host_architecture());
  bytes[EI_CLASS] = ELFCLASS32;
  bytes[EI_DATA] = ELFDATA2MSB;  // swaps the bytes of e_type and e_machine
  std::swap(bytes[16], bytes[17]);
  const std::uint16_t big_endian_ppc = EM_PPC << 8;
  std::memcpy(bytes.data() + offsetof(Elf64_Ehdr, e_machine), &big_endian_ppc, 2);
  EXPECT_EQ(inspect_elf(bytes_of(bytes)).problem,
            "is a ppc library, and this host is " + host_architecture());
}

TEST_F(ElfInspect, EveryTruncationIsRefusedOrHarmless) {
  const std::string whole = test::read_file(build("plugin.so", kPlugin));
  const std::size_t needed = load_end(whole);
  ASSERT_GT(needed, 0u);
  ASSERT_LT(needed, whole.size());
  for (std::size_t size = 0; size < whole.size(); size += 64) {
    const std::string part = whole.substr(0, size);
    const ElfInfo info = inspect_elf(bytes_of(part));
    EXPECT_EQ(info.sound(), size >= needed) << size << ": " << info.problem;
    if (size == 0) continue;
    if (size < needed) {
      EXPECT_EQ(info.kind, ElfKind::kTruncated) << size;
    } else {
      EXPECT_FALSE(info.warnings.empty()) << size;
      EXPECT_TRUE(info.exports("te_fl_plugin_query")) << size;
    }
  }
}

TEST_F(ElfInspect, FlippedBytesNeverCrash) {
  const std::string whole = test::read_file(build("plugin.so", kPlugin));
  std::mt19937 random(20240501);
  const auto below = [&](std::size_t n) {
    return std::uniform_int_distribution<std::size_t>(0, n - 1)(random);
  };
  std::size_t refused = 0;
  for (int round = 0; round < 6000; ++round) {
    std::string damaged = whole;
    // Half of the rounds damage only the headers and the tables that directly follow them.
    const std::size_t reach =
        round % 2 ? damaged.size() : std::min<std::size_t>(3072, damaged.size());
    for (std::size_t flips = 1 + below(8); flips > 0; --flips) {
      damaged[below(reach)] = static_cast<char>(below(256));
    }
    const ElfInfo info = inspect_elf(bytes_of(damaged));
    refused += info.sound() ? 0 : 1;
    if (round % 40 != 0) continue;
    const PreflightReport report =
        preflight(folder_.write("damaged.so", damaged), "te_fl_plugin_query");
    const std::string text = report.to_string();
    EXPECT_FALSE(text.empty());
    EXPECT_EQ(text.find('\0'), std::string::npos);
  }
  EXPECT_GT(refused, 600u);  // the damage has an effect
}

TEST_F(ElfInspect, FieldsAtTheirExtremesNeverCrash) {
  const std::string whole = test::read_file(build("plugin.so", kPlugin));
  const auto header = object_at<Elf64_Ehdr>(whole, 0);
  std::vector<std::size_t> fields;
  for (std::size_t at = 16; at + 8 <= sizeof(Elf64_Ehdr); at += 2) fields.push_back(at);
  for (unsigned i = 0; i < header.e_phnum; ++i) {
    const std::size_t at = header.e_phoff + i * sizeof(Elf64_Phdr);
    for (std::size_t f = 0; f < sizeof(Elf64_Phdr); f += 8) fields.push_back(at + f);
    const auto s = object_at<Elf64_Phdr>(whole, at);
    if (s.p_type != PT_DYNAMIC) continue;
    for (std::size_t f = 0; f < s.p_filesz; f += 8) fields.push_back(s.p_offset + f);
  }
  ASSERT_GT(fields.size(), 100u);
  for (const std::size_t at : fields) {
    for (const std::uint64_t value :
         {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0}, std::uint64_t{1} << 63,
          std::uint64_t{1} << 40, std::uint64_t{whole.size()}, std::uint64_t{whole.size() - 1}}) {
      std::string damaged = whole;
      std::memcpy(damaged.data() + at, &value, sizeof(value));
      const ElfInfo info = inspect_elf(bytes_of(damaged));
      EXPECT_LE(info.defined.size() + info.undefined.size(), whole.size() / sizeof(Elf64_Sym));
    }
  }
}

}  // namespace
}  // namespace te_fl::plugins
