#include "registry/quarantine.hpp"

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <tuple>

#include "core/fork.hpp"
#include "core/text.hpp"
#include "plugins/byte_source.hpp"
#include "plugins/file_trust.hpp"
#include "registry/replay_command.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"
#include "te_fl/plugins.hpp"
#include "te_fl/version.hpp"

namespace te_fl {
namespace registry {
namespace {

using nlohmann::json;
using List = std::vector<Quarantine>;

struct State {
  std::shared_ptr<const List> list;  // null: the file has not been read
  Status error;                      // of reading it
  List held;                         // until the next step boundary
};

constinit core::ForkMutex mutex(77);
const core::ForkMutex::Registration registration(mutex);
std::atomic<bool> g_held{false};
constinit thread_local int t_unwatched = 0;

State& state() {
  static State* const instance = new State;  // threads may outlive static destruction
  return *instance;
}

auto key_of(const Quarantine& q) {
  return std::tie(q.op, q.impl_id, q.owner, q.build_id, q.chip, q.driver, q.dtypes, q.scalings);
}
bool same(const Quarantine& a, const Quarantine& b) { return key_of(a) == key_of(b); }

bool contains(const List& list, const Quarantine& q) {
  return std::any_of(list.begin(), list.end(), [&](const auto& e) { return same(e, q); });
}

// Empty: none is kept.
std::string file_name() {
  if (const auto set = environment::get_if_set("TE_FL_QUARANTINE_FILE")) return *set;
  if (plugins::privileges_elevated()) return {};
  const auto absolute = [](const char* value) { return value != nullptr && value[0] == '/'; };
  if (const char* folder = std::getenv("XDG_STATE_HOME"); absolute(folder))
    return std::string(folder) + "/te_fl/quarantine.json";
  const char* home = std::getenv("HOME");
  return absolute(home) ? std::string(home) + "/.local/state/te_fl/quarantine.json" : std::string();
}

template <class Name>
json names_of(uint32_t mask, int count, Name&& name) {
  json out = json::array();
  for (int i = 0; i < count; ++i) {
    if ((mask >> i & 1) != 0) out.push_back(name(i));
  }
  return out;
}

json to_json(const Quarantine& q) {
  return {{"op", q.op},
          {"impl", q.impl_id},
          {"owner", q.owner},
          {"build", q.build_id},
          {"chip", q.chip},
          {"driver", q.driver},
          {"dtypes", names_of(q.dtypes, TE_FL_DTYPE_COUNT,
                              [](int i) { return std::string(name(static_cast<DType>(i))); })},
          {"scalings", names_of(q.scalings, TE_FL_SCALING_COUNT,
                                [](int i) { return std::string(name(static_cast<Scaling>(i))); })},
          {"reason", q.reason},
          {"case", q.case_file}};
}

Result<Quarantine> from_json(const json& j) {
  Quarantine q;
  q.op = j.at("op"), q.impl_id = j.at("impl"), q.owner = j.at("owner"), q.build_id = j.at("build");
  q.chip = j.at("chip"), q.driver = j.at("driver");
  q.reason = j.value("reason", ""), q.case_file = j.value("case", "");
  for (const json& item : j.at("dtypes")) {
    TE_FL_ASSIGN_OR_RETURN(const DType dtype, parse_dtype(item.get<std::string>()));
    q.dtypes |= TE_FL_BIT(static_cast<uint32_t>(dtype));
  }
  for (const json& item : j.at("scalings")) {
    TE_FL_ASSIGN_OR_RETURN(const Scaling scaling, parse_scaling(item.get<std::string>()));
    q.scalings |= TE_FL_BIT(static_cast<uint32_t>(scaling));
  }
  return q;
}

Result<List> read_file(const std::string& path) {
  List list;
  std::ifstream in(path);
  // One that could not be opened and is there now was made in between, by another thread or
  // process.
  for (int again = 0; !in && again < 100; ++again) {
    std::error_code code;
    if (!std::filesystem::exists(path, code)) return list;
    in.open(path);
  }
  const json text = json::parse(in, nullptr, false);
  std::string why = "it is not JSON with \"te_fl_quarantine\": 1";
  try {
    if (text.is_object() && text.value("te_fl_quarantine", 0) == 1) {
      for (const json& item : text.at("entries")) {
        Result<Quarantine> q = from_json(item);
        if (!q.ok()) return q.status().wrap("the quarantine file " + path);
        list.push_back(std::move(q).value());
      }
      return list;
    }
  } catch (const json::exception& e) {
    why = e.what();
  }
  return Status(StatusCode::kDataLoss,
                "the quarantine file " + path + " cannot be read: " + why +
                    "; correct it, move it away, or name another (TE_FL_QUARANTINE_FILE)");
}

Status cannot_write(const std::string& path, const std::string& why) {
  return failed_precondition("the quarantine file " + path + " cannot be written (" + why +
                             "): later runs will not know what this one found");
}

// Changes the file's entries by `change(list)`, whatever other processes do meanwhile.
template <class F>
Status change_file(const std::string& path, F&& change) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code code;
  if (!folder.empty()) std::filesystem::create_directories(folder, code);
  const int lock = open((path + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (lock < 0) return cannot_write(path, std::strerror(errno));
  const std::unique_ptr<const int, void (*)(const int*)> closes(&lock,
                                                                [](const int* fd) { close(*fd); });
  if (flock(lock, LOCK_EX) != 0) return cannot_write(path, std::strerror(errno));
  TE_FL_ASSIGN_OR_RETURN(List list, read_file(path));
  change(list);
  json out = {{"te_fl_quarantine", 1}, {"entries", json::array()}};
  for (const Quarantine& q : list) out["entries"].push_back(to_json(q));
  const std::string text = out.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
  if (!plugins::replace_file(path, text)) return cannot_write(path, std::strerror(errno));
  return {};
}

Status add_to_file(const std::string& path, const List& added) {
  return change_file(path, [&](List& list) {
    for (const Quarantine& q : added) {
      if (!contains(list, q)) list.push_back(q);
    }
  });
}

// The list in force.
Result<std::shared_ptr<const List>> entries() {
  {
    const std::lock_guard lock(mutex);
    State& s = state();
    if (!s.error.ok()) return s.error;
    if (s.list != nullptr) return s.list;
  }
  const std::string path = file_name();  // not under the lock: the environment has its own
  Result<List> list = path.empty() ? Result<List>(List{}) : read_file(path);
  const std::lock_guard lock(mutex);
  State& s = state();
  if (!list.ok()) return s.error = list.status();
  if (s.list == nullptr) s.list = std::make_shared<const List>(std::move(list).value());
  return s.list;
}

// The build id in the notes of the module that holds this function.
int note_of_module(dl_phdr_info* module, size_t, void* out) {
  const auto here = reinterpret_cast<uintptr_t>(&note_of_module);
  bool mine = false;
  for (int i = 0; i < module->dlpi_phnum; ++i) {
    const ElfW(Phdr)& p = module->dlpi_phdr[i];
    const uintptr_t begin = module->dlpi_addr + p.p_vaddr;
    mine = mine || (p.p_type == PT_LOAD && here >= begin && here < begin + p.p_memsz);
  }
  if (!mine) return 0;
  for (int i = 0; i < module->dlpi_phnum; ++i) {
    const ElfW(Phdr)& p = module->dlpi_phdr[i];
    if (p.p_type != PT_NOTE) continue;
    const char* at = reinterpret_cast<const char*>(module->dlpi_addr + p.p_vaddr);
    const char* const end = at + p.p_memsz;
    while (at + sizeof(ElfW(Nhdr)) <= end) {
      ElfW(Nhdr) note;
      std::memcpy(&note, at, sizeof note);
      const char* name = at + sizeof note;
      const char* data = name + (note.n_namesz + 3) / 4 * 4;
      if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 &&
          std::memcmp(name, "GNU", 4) == 0) {
        constexpr char kHex[] = "0123456789abcdef";
        for (uint32_t k = 0; k < note.n_descsz; ++k) {
          const auto byte = static_cast<unsigned char>(data[k]);
          *static_cast<std::string*>(out) += {kHex[byte >> 4], kHex[byte & 15]};
        }
        return 1;
      }
      at = data + (note.n_descsz + 3) / 4 * 4;
    }
  }
  return 1;
}

const std::string& own_build_id() {
  static const std::string* const id = [] {
    auto* made = new std::string;
    dl_iterate_phdr(&note_of_module, made);
    if (made->empty()) *made = "te-fl " TE_FL_VERSION;
    return made;
  }();
  return *id;
}

std::string reason_of(const Quarantine& q) {
  return "quarantined for this op and signature" + (q.chip.empty() ? "" : " on " + q.chip) + ": " +
         q.reason + (q.case_file.empty() ? "" : " (" + replay_command(q.owner, q.case_file) + ")");
}

}  // namespace

std::string build_id_of(const std::string& owner) {
  for (const plugins::PluginInfo& info : plugins::list()) {
    if (info.name != owner) continue;
    if (!info.build_id.empty()) return info.build_id;
    if (info.origin == "built-in") return own_build_id();
    return info.version;
  }
  return own_build_id();  // registered by the program itself
}

Chip chip_of(const Device& device) {
  const Result<te_fl_device_props> props = devices::properties(device);
  return props.ok() ? Chip{props->name, props->driver} : Chip{};
}

Result<std::vector<policy::Barred>> barred(const OpRow& row, const core::Signature& signature) {
  std::vector<policy::Barred> out;
  if (t_unwatched != 0) return out;
  TE_FL_ASSIGN_OR_RETURN(const std::shared_ptr<const List> list, entries());
  if (list->empty()) return out;
  std::optional<Chip> chip;  // asked only if an entry may fit
  for (const auto& impl : row.impls) {
    for (const Quarantine& q : *list) {
      if (q.op != impl->op || q.impl_id != impl->impl_id || q.owner != impl->owner) continue;
      if (q.dtypes != signature.dtypes || q.scalings != signature.scalings) continue;
      if (!chip) chip = chip_of(signature.device);
      if (q.chip != chip->name || q.driver != chip->driver) continue;
      if (q.build_id != build_id_of(impl->owner)) continue;
      out.push_back({impl->impl_id, reason_of(q)});
      break;
    }
  }
  return out;
}

void hold(Quarantine entry) {
  const std::lock_guard lock(mutex);
  State& s = state();
  if (!contains(s.held, entry)) s.held.push_back(std::move(entry));
  g_held.store(true, std::memory_order_release);
}

void forget_quarantine_file() {
  const std::lock_guard lock(mutex);
  state().list = nullptr;
  state().error = Status();
}

// Choices are kept per policy, not per scope of this kind, so they are made anew on both sides.
Unwatched::Unwatched() {
  ++t_unwatched;
  choose_again();
}
Unwatched::~Unwatched() {
  --t_unwatched;
  choose_again();
}
bool Unwatched::now() noexcept { return t_unwatched != 0; }

}  // namespace registry

Status step_boundary() {
  using namespace registry;
  if (!g_held.load(std::memory_order_acquire)) [[likely]]
    return {};
  List held;
  {
    const std::lock_guard lock(mutex);
    held.swap(state().held);
    g_held.store(false, std::memory_order_release);
  }
  const Result<std::shared_ptr<const List>> before = entries();
  List all = before.ok() ? **before : List{};
  std::erase_if(held, [&](const Quarantine& q) { return contains(all, q); });
  if (held.empty()) return {};
  for (const Quarantine& q : held) {
    log::warning("'" + q.impl_id + "' does not serve op '" + q.op + "' with " +
                 policy::dtype_mask_text(q.dtypes) + " (scaling " +
                 policy::scaling_mask_text(q.scalings) + ") any more: " + q.reason);
    all.push_back(q);
  }
  {
    const std::lock_guard lock(mutex);
    state().list = std::make_shared<const List>(std::move(all));
    state().error = Status();
  }
  choose_again();
  const std::string path = file_name();
  return path.empty() ? Status() : add_to_file(path, held);
}

std::string quarantine_file() { return registry::file_name(); }

Result<int> clear_quarantines(const std::string& op, const std::string& impl_id) {
  using namespace registry;
  const auto meant = [&](const Quarantine& q) {
    return (op.empty() || q.op == op) && (impl_id.empty() || q.impl_id == impl_id);
  };
  TE_FL_ASSIGN_OR_RETURN(const auto before, entries());
  List left = *before;
  const auto cleared = static_cast<int>(std::erase_if(left, meant));
  if (cleared == 0) return 0;
  if (const std::string path = file_name(); !path.empty()) {
    TE_FL_RETURN_IF_ERROR(change_file(path, [&](List& list) { std::erase_if(list, meant); }));
  }
  {
    const std::lock_guard lock(mutex);
    state().list = std::make_shared<const List>(std::move(left));
  }
  choose_again();
  return cleared;
}

Result<std::vector<Quarantine>> quarantines() {
  TE_FL_ASSIGN_OR_RETURN(const auto list, registry::entries());
  return *list;
}

}  // namespace te_fl
