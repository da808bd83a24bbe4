// libFuzzer target: the ELF inspector on arbitrary bytes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "plugins/elf_inspect.hpp"
#include "plugins/library_search.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace te_fl::plugins;
  const ElfInfo info = inspect_elf({data, size});
  // A valid library has no error text; every other input has one.
  if (info.sound() != (info.kind == ElfKind::kSharedLibrary && !info.wrong_host)) std::abort();
  if (!info.defined.empty() && !info.exports(info.defined.front().name)) std::abort();
  parse_library_cache({data, size});
  return 0;
}
