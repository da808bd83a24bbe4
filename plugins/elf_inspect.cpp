#include "plugins/elf_inspect.hpp"

#include <elf.h>

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "plugins/byte_source.hpp"
#include "plugins/elf_dynamic.hpp"

namespace te_fl::plugins {
namespace {

constexpr std::uint16_t kLoongArch = 258;  // EM_LOONGARCH, missing in older <elf.h>
constexpr std::uint16_t kMaxSegments = 1024;
constexpr std::uint64_t kMaxNoteBytes = 64 << 10;

#if defined(__x86_64__)
constexpr std::uint16_t kHostMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr std::uint16_t kHostMachine = EM_AARCH64;
#elif defined(__riscv)
constexpr std::uint16_t kHostMachine = EM_RISCV;
#elif defined(__powerpc64__)
constexpr std::uint16_t kHostMachine = EM_PPC64;
#elif defined(__s390x__)
constexpr std::uint16_t kHostMachine = EM_S390;
#elif defined(__loongarch__)
constexpr std::uint16_t kHostMachine = kLoongArch;
#else
#error "name this host's e_machine here"
#endif
constexpr int kHostBits = static_cast<int>(sizeof(void*) * 8);
constexpr bool kHostBigEndian = std::endian::native == std::endian::big;

bool starts_with(std::span<const std::uint8_t> bytes, std::string_view magic) {
  return bytes.size() >= magic.size() &&
         std::equal(magic.begin(), magic.end(), bytes.begin(),
                    [](char a, std::uint8_t b) { return static_cast<std::uint8_t>(a) == b; });
}

bool looks_like_text(std::span<const std::uint8_t> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::uint8_t c) {
    return c >= 0x20 ? c != 0x7f : (c == '\n' || c == '\r' || c == '\t' || c == '\f');
  });
}

void set(ElfInfo& info, ElfKind kind, std::string problem) {
  info.kind = kind;
  info.problem = std::move(problem);
}

// Classifies a file that lacks the ELF magic.
void classify_foreign(std::span<const std::uint8_t> head, ElfInfo& info) {
  const std::string_view text(reinterpret_cast<const char*>(head.data()), head.size());
  if (starts_with(head, "!<arch>\n") || starts_with(head, "!<thin>\n")) {
    set(info, ElfKind::kArchive, "is a static library (ar archive); a shared library is needed");
  } else if (starts_with(head, "PK\x03\x04")) {
    set(info, ElfKind::kArchive, "is a zip archive (a Python wheel, perhaps); unpack it");
  } else if (starts_with(head, "\x1f\x8b")) {
    set(info, ElfKind::kArchive, "is gzip-compressed; unpack it");
  } else if (starts_with(head, "MZ")) {
    set(info, ElfKind::kForeign, "is a Windows library or program");
  } else if (starts_with(head, "\xcf\xfa\xed\xfe") || starts_with(head, "\xca\xfe\xba\xbe")) {
    set(info, ElfKind::kForeign, "is a macOS library or program");
  } else if (starts_with(head, "version https://git-lfs")) {
    set(info, ElfKind::kText, "is a Git LFS pointer, not the library; run: git lfs pull");
  } else if (looks_like_text(head)) {
    const bool script = text.find("GNU ld script") != text.npos ||
                        text.find("INPUT(") != text.npos || text.find("INPUT (") != text.npos ||
                        text.find("GROUP (") != text.npos;
    set(info, ElfKind::kText,
        script ? "is a linker script (text); name the library that it points to"
               : "is a text file, not a shared library");
  } else {
    set(info, ElfKind::kUnknown, "is not a shared library (it does not begin with the ELF magic)");
  }
}

std::uint16_t swap_if(bool swap, std::uint16_t v) {
  return swap ? static_cast<std::uint16_t>((v >> 8) | (v << 8)) : v;
}

std::string with_article(const std::string& word) {
  const bool vowel =
      !word.empty() && std::string_view("aei").find(word[0]) != std::string_view::npos;
  return (vowel ? "an " : "a ") + word;
}

// Reads e_ident, e_type and e_machine, which have the same offsets for both word sizes. Returns
// false if nothing more can be read.
bool read_identity(std::span<const std::uint8_t> head, ElfInfo& info) {
  std::uint16_t type = 0;
  std::uint16_t machine = 0;
  if (!get_object(head, 16, type) || !get_object(head, 18, machine)) {
    set(info, ElfKind::kTruncated, "is truncated inside the ELF header");
    return false;
  }
  const std::uint8_t word = head[EI_CLASS];
  const std::uint8_t order = head[EI_DATA];
  if ((word != ELFCLASS32 && word != ELFCLASS64) ||
      (order != ELFDATA2LSB && order != ELFDATA2MSB) || head[EI_VERSION] != EV_CURRENT) {
    set(info, ElfKind::kCorrupt, "has a damaged ELF header (class, byte order or version)");
    return false;
  }
  info.bits = word == ELFCLASS64 ? 64 : 32;
  info.big_endian = order == ELFDATA2MSB;
  const bool swap = info.big_endian != kHostBigEndian;
  info.machine = swap_if(swap, machine);
  info.architecture = architecture_name(info.machine, info.bits, info.big_endian);
  type = swap_if(swap, type);
  const std::string arch = info.architecture;
  if (type == ET_REL) {
    set(info, ElfKind::kRelocatable,
        "is a relocatable object file (.o) for " + arch + "; link it with -shared");
  } else if (type == ET_EXEC) {
    set(info, ElfKind::kExecutable, "is an executable for " + arch + ", not a shared library");
  } else if (type == ET_CORE) {
    set(info, ElfKind::kCore, "is a core dump, not a shared library");
  } else if (type != ET_DYN) {
    set(info, ElfKind::kCorrupt, "has an ELF type that is none of library, program and object");
  } else {
    info.kind = ElfKind::kSharedLibrary;
    if (info.machine != kHostMachine || info.bits != kHostBits ||
        info.big_endian != kHostBigEndian) {
      info.wrong_host = true;
      info.problem =
          "is " + with_article(arch) + " library, and this host is " + host_architecture();
    }
  }
  return info.kind == ElfKind::kSharedLibrary;
}

bool read_segments(const ByteSource& bytes, const Elf64_Ehdr& header, std::vector<Elf64_Phdr>& out,
                   ElfInfo& info) {
  if (header.e_phentsize != sizeof(Elf64_Phdr) || header.e_phnum == 0 ||
      header.e_phnum > kMaxSegments) {
    set(info, ElfKind::kCorrupt, "has a damaged program header table");
    return false;
  }
  std::vector<std::uint8_t> raw;
  if (!bytes.read(header.e_phoff, std::uint64_t{header.e_phnum} * sizeof(Elf64_Phdr), raw)) {
    set(info, ElfKind::kTruncated,
        "is truncated: its program headers lie past the end of the file");
    return false;
  }
  out.resize(header.e_phnum);
  std::memcpy(out.data(), raw.data(), raw.size());
  return true;
}

void read_build_id(const ByteSource& bytes, const Elf64_Phdr& segment, ElfInfo& info) {
  std::vector<std::uint8_t> note;
  if (!info.build_id.empty() || segment.p_filesz > kMaxNoteBytes ||
      !bytes.read(segment.p_offset, segment.p_filesz, note)) {
    return;
  }
  const std::uint64_t align = segment.p_align == 8 ? 8 : 4;
  const auto padded = [align](std::uint64_t n) { return (n + align - 1) / align * align; };
  Elf64_Nhdr entry{};
  for (std::uint64_t at = 0; get_object(note, at, entry);) {
    const std::uint64_t name = at + sizeof(entry);
    const std::uint64_t data = at + padded(sizeof(entry) + std::uint64_t{entry.n_namesz});
    const std::uint64_t end = data + entry.n_descsz;
    if (end > note.size()) return;
    if (entry.n_type == NT_GNU_BUILD_ID && entry.n_namesz == 4 && entry.n_descsz <= 64 &&
        std::memcmp(note.data() + name, "GNU", 4) == 0) {
      constexpr std::string_view kHex = "0123456789abcdef";
      for (std::uint64_t i = data; i < end; ++i) {
        info.build_id += kHex[note[i] >> 4];
        info.build_id += kHex[note[i] & 15];
      }
      return;
    }
    at = padded(end);
  }
}

// Checks that the segments lie inside the file, and records their protections.
bool check_segments(const ByteSource& bytes, const std::vector<Elf64_Phdr>& segments,
                    ElfInfo& info) {
  bool loadable = false;
  const Elf64_Phdr* stack = nullptr;
  for (const Elf64_Phdr& s : segments) {
    if (s.p_type == PT_GNU_STACK) stack = &s;
    if (s.p_type == PT_NOTE) read_build_id(bytes, s, info);
    if (s.p_type != PT_LOAD) continue;
    loadable = true;
    if (s.p_filesz > s.p_memsz || s.p_vaddr + s.p_memsz < s.p_vaddr) {
      set(info, ElfKind::kCorrupt, "has a damaged segment (sizes contradict each other)");
      return false;
    }
    if (!bytes.contains(s.p_offset, s.p_filesz)) {
      set(info, ElfKind::kTruncated,
          "is truncated: it has " + std::to_string(bytes.size()) + " bytes and a segment ends at " +
              std::to_string(s.p_offset + s.p_filesz) + "; copy it again");
      return false;
    }
    if ((s.p_flags & PF_W) && (s.p_flags & PF_X)) info.writable_executable = true;
  }
  // Without a PT_GNU_STACK header, x86_64 defaults to an executable stack; aarch64 and RISC-V do
  // not.
  info.executable_stack = stack ? (stack->p_flags & PF_X) != 0 : kHostMachine == EM_X86_64;
  if (!loadable) set(info, ElfKind::kCorrupt, "has no loadable segment");
  return loadable;
}

ElfInfo inspect(const ByteSource& bytes, ElfDepth depth) {
  ElfInfo info;
  switch (bytes.state()) {
    case FileState::kRegular:
      break;
    case FileState::kMissing:
      return set(info, ElfKind::kMissing, "does not exist (" + bytes.error() + ")"), info;
    case FileState::kUnreadable:
      return set(info, ElfKind::kUnreadable, "cannot be read: " + bytes.error()), info;
    case FileState::kFolder:
      return set(info, ElfKind::kFolder, "is a folder, not a shared library"), info;
    case FileState::kSpecial:
      return set(info, ElfKind::kSpecial, bytes.error() + ", not a shared library"), info;
  }
  if (bytes.size() == 0) return set(info, ElfKind::kEmpty, "is an empty file"), info;
  const std::vector<std::uint8_t> head = bytes.read_some(0, 512);
  if (head.empty()) return set(info, ElfKind::kUnreadable, "cannot be read"), info;
  if (!starts_with(head, ELFMAG)) {
    classify_foreign(head, info);
    const std::string_view text(reinterpret_cast<const char*>(head.data()), head.size());
    if (std::string_view(ELFMAG, SELFMAG).starts_with(text)) {
      set(info, ElfKind::kTruncated, "is truncated inside the ELF header");
    }
    return info;
  }
  if (!read_identity(head, info)) return info;
  if (info.bits != 64 || info.big_endian != kHostBigEndian) return info;

  Elf64_Ehdr header{};
  std::vector<Elf64_Phdr> segments;
  if (!bytes.read_object(0, header)) {
    return set(info, ElfKind::kTruncated, "is truncated inside the ELF header"), info;
  }
  const std::string host_problem = std::move(info.problem);
  info.problem.clear();
  if (read_segments(bytes, header, segments, info) && check_segments(bytes, segments, info)) {
    read_elf_dynamic(bytes, header, segments, depth, info);
  }
  // A wrong architecture takes precedence over damage: the file is useless on this host in any
  // case.
  if (!host_problem.empty()) info.problem = host_problem;
  return info;
}

auto symbols_named(const ElfInfo& info, std::string_view name) {
  struct ByName {
    bool operator()(const ElfSymbol& a, std::string_view b) const { return a.name < b; }
    bool operator()(std::string_view a, const ElfSymbol& b) const { return a < b.name; }
  };
  return std::equal_range(info.defined.begin(), info.defined.end(), name, ByName{});
}

}  // namespace

bool ElfInfo::exports(std::string_view name) const {
  const auto [first, last] = symbols_named(*this, name);
  return first != last;
}

bool ElfInfo::provides(std::string_view name, std::string_view version) const {
  const auto [first, last] = symbols_named(*this, name);
  return std::any_of(first, last, [&](const ElfSymbol& s) {
    return version.empty() || s.version.empty() || s.version == version;
  });
}

ElfInfo inspect_elf(const std::string& path, ElfDepth depth) {
  return inspect(ByteSource(path), depth);
}

ElfInfo inspect_elf(std::span<const std::uint8_t> bytes, ElfDepth depth) {
  return inspect(ByteSource(bytes), depth);
}

std::string architecture_name(std::uint16_t machine, int bits, bool big_endian) {
  const bool wide = bits == 64;
  switch (machine) {
    case EM_X86_64:
      return wide ? "x86_64" : "x32";
    case EM_386:
      return "i386";
    case EM_AARCH64:
      return big_endian ? "aarch64_be" : "aarch64";
    case EM_ARM:
      return "arm";
    case EM_RISCV:
      return wide ? "riscv64" : "riscv32";
    case EM_PPC64:
      return big_endian ? "ppc64" : "ppc64le";
    case EM_PPC:
      return "ppc";
    case EM_S390:
      return wide ? "s390x" : "s390";
    case EM_MIPS:
      return wide ? "mips64" : "mips";
    case EM_SPARCV9:
      return "sparc64";
    case EM_IA_64:
      return "ia64";
    case EM_CUDA:
      return "NVIDIA GPU";
    case EM_AMDGPU:
      return "AMD GPU";
    case kLoongArch:
      return wide ? "loongarch64" : "loongarch32";
    default:
      return "machine " + std::to_string(machine);
  }
}

std::string host_architecture() {
  return architecture_name(kHostMachine, kHostBits, kHostBigEndian);
}

}  // namespace te_fl::plugins
