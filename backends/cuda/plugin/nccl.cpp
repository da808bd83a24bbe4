#include "plugin/nccl.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <type_traits>

#include "device/open_library.hpp"

namespace te_fl::cuda {
namespace {

// Formats NCCL's version number. Before 2.9 it was 1000 major + 100 minor + patch.
std::string version_text(int number) {
  const int major = number / (number < 10000 ? 1000 : 10000);
  return std::to_string(major) + "." +
         std::to_string(number % (number < 10000 ? 1000 : 10000) / 100) + "." +
         std::to_string(number % 100);
}

void read_environment(Nccl& table) {
  std::string set;
  const auto value_of = [&](const char* name) -> std::string {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') return {};
    set += (set.empty() ? "" : ", ") + std::string(name) + "=" + value;
    return value;
  };
  const std::string switches = value_of("NCCL_NVLS_ENABLE"), algorithm = value_of("NCCL_ALGO");
  table.switches_are_out = switches == "0" || !algorithm.empty();
  table.compared_text = table.version_text + (set.empty() ? "" : " (" + set + ")");
}

struct Library {
  Nccl table;
  std::string missing;

  Library() {
    std::string reason;
    void* handle = open_library({"libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2"}, reason);
    if (handle == nullptr) {
      missing = "NCCL was not found (" + reason +
                "): install NCCL 2 (Debian and Ubuntu: libnccl2 of NVIDIA's repository; PyPI: "
                "nvidia-nccl-cu13), or set LD_LIBRARY_PATH";
      return;
    }
    const auto look = [&](auto& slot, const char* name) {
      slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(dlsym(handle, name));
    };
    const std::string remedy = ": install NCCL " + version_text(kNcclMinimum) + " or newer";
    const auto find = [&](auto& slot, const char* name) {
      look(slot, name);
      if (slot == nullptr && missing.empty()) {
        missing = std::string("NCCL has no ") + name + remedy;
      }
    };
    find(table.version, "ncclGetVersion");
    find(table.error_text, "ncclGetErrorString");
    find(table.unique_id, "ncclGetUniqueId");
    find(table.create, "ncclCommInitRank");
    find(table.destroy, "ncclCommDestroy");
    find(table.abort, "ncclCommAbort");
    find(table.async_error, "ncclCommGetAsyncError");
    find(table.group_start, "ncclGroupStart");
    find(table.group_end, "ncclGroupEnd");
    find(table.send, "ncclSend");
    find(table.recv, "ncclRecv");
    find(table.broadcast, "ncclBroadcast");
    find(table.all_reduce, "ncclAllReduce");
    find(table.reduce_scatter, "ncclReduceScatter");
    find(table.all_gather, "ncclAllGather");
    look(table.split, "ncclCommSplit");
    look(table.last_error, "ncclGetLastError");
    look(table.revoke, "ncclCommRevoke");
    if (!missing.empty()) return;
    table.path = path_of(reinterpret_cast<const void*>(table.version));
    if (const int status = table.version(&table.number); status != 0) {
      missing = "NCCL (" + table.path + ") does not tell its version (" + table.error_text(status) +
                ")" + remedy;
    } else if (table.number < kNcclMinimum) {
      missing = "NCCL " + version_text(table.number) + " (" + table.path + ") is too old" + remedy;
    }
    table.version_text = version_text(table.number);
    read_environment(table);
  }
};

const Library& library() {
  static const Library instance;
  return instance;
}

}  // namespace

const Nccl* nccl() noexcept {
  const Library& found = library();
  return found.missing.empty() ? &found.table : nullptr;
}
const char* nccl_missing() noexcept { return library().missing.c_str(); }

}  // namespace te_fl::cuda
