#include "dispatch/watch/quarantine.hpp"

#include <elf.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>

#include "core/base/fork.hpp"
#include "dispatch/watch/barred.hpp"
#include "dispatch/watch/quarantine_file.hpp"
#include "plugins/file_trust.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"
#include "te_fl/plugins.hpp"
#include "te_fl/version.hpp"

namespace te_fl {
namespace dispatch {
namespace {

using List = std::vector<Quarantine>;

// A stream on which a captured op was seen while TE_FL_VERIFY was on.
struct CapturingStream {
  Device device;
  void* stream;
  friend bool operator==(const CapturingStream& a, const CapturingStream& b) {
    return a.device == b.device && a.stream == b.stream;
  }
};

struct State {
  std::shared_ptr<const List> list;  // null: the file has not been read
  List held;                         // entries that take effect later
  std::vector<CapturingStream> capturing;
  std::shared_ptr<const RankExchange> exchange;
};

constinit core::ForkMutex mutex(core::LockLevel::kQuarantine);
const core::ForkMutex::Registration registration(mutex);
std::atomic<bool> g_held{false};
constinit thread_local int t_unwatched = 0;

State& state() {
  static State* const instance = new State;  // never freed: threads may run until the end
  return *instance;
}

// The path of the quarantine file; empty if there is none.
std::string file_name() {
  if (const auto set = environment::get_if_set("TE_FL_QUARANTINE_FILE")) return *set;
  if (plugins::privileges_elevated()) return {};
  const auto absolute = [](const char* value) { return value != nullptr && value[0] == '/'; };
  if (const char* folder = std::getenv("XDG_STATE_HOME"); absolute(folder))
    return std::string(folder) + "/te_fl/quarantine.json";
  const char* home = std::getenv("HOME");
  return absolute(home) ? std::string(home) + "/.local/state/te_fl/quarantine.json" : std::string();
}

// The list that is in effect.
std::shared_ptr<const List> entries() {
  {
    const std::lock_guard lock(mutex);
    if (state().list != nullptr) return state().list;
  }
  const std::string path = file_name();  // before the lock, since kEnvironment precedes it
  const QuarantineFile file = path.empty() ? QuarantineFile{} : read_quarantine_file(path);
  const std::lock_guard lock(mutex);
  State& s = state();
  if (s.list == nullptr) {
    for (const std::string& text : file.passed_over) log::warning(text);
    s.list = std::make_shared<const List>(file.entries);
  }
  return s.list;
}

// Takes the lock, with the list loaded.
std::unique_lock<core::ForkMutex> lock_with_list() {
  while (true) {
    (void)entries();
    std::unique_lock lock(mutex);
    if (state().list != nullptr) return lock;  // otherwise it was dropped in between
  }
}

// Reads the build id from the ELF notes of the module that contains this function.
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
  static constinit std::atomic<const std::string*> id{nullptr};
  return core::made_once(id, [] {
    auto* made = new std::string;
    dl_iterate_phdr(&note_of_module, made);
    if (made->empty()) *made = "te-fl " TE_FL_VERSION;
    return made;
  });
}

std::string reason_text(const Quarantine& q) {
  return "quarantined for this op and signature" + (q.chip.empty() ? "" : " on " + q.chip) + ": " +
         q.reason + (q.replay.empty() ? "" : " (" + q.replay + ")");
}

std::string signature_text(const Quarantine& q) {
  return policy::dtype_mask_text(q.dtypes) + " (scaling " + policy::scaling_mask_text(q.scalings) +
         ")";
}

// The number of ranks of the job, from the launcher's environment; 1 if there is none. Ranks must
// make the same choices, so in a job of several ranks none may change its choice on its own.
int ranks_of_job() {
  for (const char* name : {"TE_FL_WORLD_SIZE", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && std::atoi(value) > 1) return std::atoi(value);
  }
  return 1;
}

// True while any recorded stream is being captured. A quarantine that took effect in the middle of
// a capture would give the graph other bits than the eager run. Removes the streams that are no
// longer being captured.
bool any_captured() {
  std::vector<CapturingStream> seen;
  {
    const std::lock_guard lock(mutex);
    seen = state().capturing;
  }
  std::erase_if(seen, [](const CapturingStream& s) {
    const Result<bool> captured = devices::is_capturing(s.device, s.stream);
    return captured.ok() && *captured;
  });  // those left are no longer captured
  const std::lock_guard lock(mutex);
  std::erase_if(state().capturing, [&](const CapturingStream& s) {
    return std::find(seen.begin(), seen.end(), s) != seen.end();
  });
  return !state().capturing.empty();
}

// Runs at process exit: writes entries that never took effect to the file, for later runs.
void write_held() {
  List held;
  {
    const std::lock_guard lock(mutex);
    held = std::exchange(state().held, {});
    g_held.store(false, std::memory_order_release);
  }
  const std::string path = held.empty() ? std::string() : file_name();
  if (path.empty()) return;
  if (const Status written = add_to_quarantine_file(path, held); !written.ok())
    log::warning(written.message());
}

}  // namespace

std::string find_build_id(const std::string& owner) {
  for (const plugins::PluginInfo& info : plugins::list()) {
    if (info.name != owner) continue;
    if (!info.build_id.empty()) return info.build_id;
    if (info.origin == "built-in") return own_build_id();
    return info.version;
  }
  return own_build_id();  // registered by the program itself
}

Chip find_chip(const Device& device) {
  const Result<te_fl_device_props> props = devices::properties(device);
  return props.ok() ? Chip{props->name, props->driver} : Chip{};
}

std::vector<policy::Barred> barred(const OpRow& row, const core::Signature& signature) {
  std::vector<policy::Barred> out;
  if (t_unwatched != 0) return out;
  const std::shared_ptr<const List> list = entries();
  if (list->empty()) return out;
  std::optional<Chip> chip;  // queried only if an entry may match
  for (const auto& impl : row.impls) {
    for (const Quarantine& q : *list) {
      if (q.op != impl->op || q.impl_id != impl->impl_id || q.owner != impl->owner) continue;
      if (q.dtypes != signature.dtypes || q.scalings != signature.scalings) continue;
      if (!chip) chip = find_chip(signature.device);
      if (q.chip != chip->name || q.driver != chip->driver) continue;
      if (q.build_id != find_build_id(impl->owner)) continue;
      out.push_back({impl->impl_id, reason_text(q)});
      break;
    }
  }
  return out;
}

void hold(Quarantine entry) {
  const std::string what = "'" + entry.impl_id + "' will not be used for op '" + entry.op +
                           "' with " + signature_text(entry) + "";
  {
    const std::lock_guard lock(mutex);
    State& s = state();
    if (contains(s.held, entry)) return;
    static bool registered = false;
    if (!registered) std::atexit(&write_held);
    registered = true;
    s.held.push_back(std::move(entry));
    g_held.store(true, std::memory_order_release);
  }
  if (ranks_of_job() == 1) return;  // it takes effect soon and is logged then
  log::warning(
      what + ": as the " + std::to_string(ranks_of_job()) +
      " ranks of this job choose alike, that begins when they agree: at the next step of "
      "an optimizer of te-fl, at te_fl.step_boundary() (in C++ te_fl::step_boundary()), in "
      "PyTorch otherwise some backward passes later; at the latest in the runs after this "
      "one");
}

void note_capture(const Device& device, void* stream) {
  const std::lock_guard lock(mutex);
  auto& seen = state().capturing;
  const CapturingStream it{device, stream};
  if (std::find(seen.begin(), seen.end(), it) == seen.end()) seen.push_back(it);
}

void take_held() {
  if (!g_held.load(std::memory_order_acquire)) [[likely]]
    return;
  if (ranks_of_job() > 1 || any_captured()) return;
  if (const Status taken = step_boundary(); !taken.ok()) log::warning(taken.message());
}

std::string quarantined_for(const std::string& op, const std::string& impl_id,
                            const std::string& owner, const Device& device) {
  std::string text;
  std::optional<Chip> chip;
  const std::shared_ptr<const List> list = entries();  // another thread may replace it
  for (const Quarantine& q : *list) {
    if (q.op != op || q.impl_id != impl_id || q.owner != owner) continue;
    if (!chip) chip = find_chip(device);
    if (q.chip != chip->name || q.driver != chip->driver || q.build_id != find_build_id(owner))
      continue;
    text += (text.empty() ? "" : "; ") + std::string("quarantined for ") + signature_text(q) +
            ": " + q.reason + (q.replay.empty() ? "" : " (" + q.replay + ")");
  }
  return text;
}

void forget_quarantine_file() {
  const std::lock_guard lock(mutex);
  state().list = nullptr;
}

// Cached choices do not distinguish calls inside an Unwatched scope from others, so the cache is
// invalidated at both ends of the scope.
Unwatched::Unwatched() {
  ++t_unwatched;
  registry::choose_again();
}
Unwatched::~Unwatched() {
  --t_unwatched;
  registry::choose_again();
}
bool Unwatched::now() noexcept { return t_unwatched != 0; }

}  // namespace dispatch

namespace dispatch {
namespace {

// Puts entries into effect in one step under the lock, so that concurrent calls lose none.
Status put_into_effect(const List& entries) {
  List added;
  {
    const std::unique_lock lock = lock_with_list();
    State& s = state();
    const std::shared_ptr<const List> before = s.list;
    QuarantineIndex known(*before);
    for (const Quarantine& q : entries) {
      if (known.add(q)) added.push_back(q);
    }
    List all = *before;
    all.insert(all.end(), added.begin(), added.end());
    std::erase_if(s.held, [&](const Quarantine& q) { return known.contains(q); });
    g_held.store(!s.held.empty(), std::memory_order_release);
    if (!added.empty()) s.list = std::make_shared<const List>(std::move(all));
  }
  if (added.empty()) return {};
  for (const Quarantine& q : added) {
    log::warning("'" + q.impl_id + "' is no longer used for op '" + q.op + "' with " +
                 signature_text(q) + ", from the next call on: " + q.reason);
  }
  registry::choose_again();
  const std::string path = file_name();
  return path.empty() ? Status() : add_to_quarantine_file(path, added);
}

List held() {
  const std::lock_guard lock(mutex);
  return state().held;
}

}  // namespace
}  // namespace dispatch

Status step_boundary() {
  using namespace dispatch;
  if (ranks_of_job() == 1) {
    if (!g_held.load(std::memory_order_acquire)) [[likely]]
      return {};
    return put_into_effect(held());
  }
  if (!ranks_exchange_quarantines()) return {};
  std::shared_ptr<const RankExchange> exchange;
  {
    const std::lock_guard lock(mutex);
    exchange = state().exchange;
  }
  if (exchange == nullptr) return {};
  const Result<std::vector<std::string>> texts = (*exchange)(held_quarantines());
  if (!texts.ok()) {
    if (texts.status().code() == StatusCode::kNotFound) return {};
    return texts.status().wrap(
        "the ranks do not agree on quarantines, which therefore begin in "
        "the runs after this one");
  }
  return take_quarantines(*texts);
}

void set_rank_exchange(RankExchange exchange) {
  using namespace dispatch;
  auto made = exchange ? std::make_shared<const RankExchange>(std::move(exchange)) : nullptr;
  const std::lock_guard lock(mutex);
  state().exchange = std::move(made);
}

bool ranks_exchange_quarantines() {
  if (dispatch::ranks_of_job() == 1) return false;
  // Read again after a change only, since every backward of a layer asks.
  static constinit std::atomic<uint64_t> read{0};  // 2 * generation + the answer + 1
  const uint64_t generation = environment::generation();
  uint64_t known = read.load(std::memory_order_acquire);
  if (known == 0 || (known - 1) / 2 != generation) {
    const auto verify = environment::get("TE_FL_VERIFY");
    const auto action = environment::get("TE_FL_VERIFY_ACTION");
    const bool on = verify.ok() && !verify->empty() && action.ok() && *action == "quarantine";
    known = 2 * generation + (on ? 1 : 0) + 1;
    read.store(known, std::memory_order_release);
  }
  return (known - 1) % 2 != 0;
}

std::string held_quarantines() {
  const dispatch::List held = dispatch::held();
  return held.empty() ? std::string() : dispatch::quarantines_text(held);
}

Status take_quarantines(const std::vector<std::string>& texts) {
  dispatch::List all;
  for (const std::string& text : texts) {
    TE_FL_ASSIGN_OR_RETURN(dispatch::List some, dispatch::parse_quarantines(text));
    std::move(some.begin(), some.end(), std::back_inserter(all));
  }
  return dispatch::put_into_effect(all);
}

std::string quarantine_file() { return dispatch::file_name(); }

Result<int> clear_quarantines(const std::string& op, const std::string& impl_id) {
  using namespace dispatch;
  const auto meant = [&](const Quarantine& q) {
    return (op.empty() || q.op == op) && (impl_id.empty() || q.impl_id == impl_id);
  };
  List cleared = *entries();
  std::erase_if(cleared, std::not_fn(meant));
  if (cleared.empty()) return 0;
  const QuarantineIndex index(cleared);
  // Entries that step_boundary() adds from here on stay in effect, in memory and in the file.
  const auto goes = [&](const Quarantine& q) {
    return meant(q) && (index.contains(q) || !contains(*entries(), q));
  };
  if (const std::string path = file_name(); !path.empty()) {
    TE_FL_RETURN_IF_ERROR(remove_from_quarantine_file(path, goes));
  }
  {
    const std::unique_lock lock = lock_with_list();
    List left = *state().list;
    std::erase_if(left, [&](const Quarantine& q) { return index.contains(q); });
    state().list = std::make_shared<const List>(std::move(left));
  }
  registry::choose_again();
  return static_cast<int>(cleared.size());
}

Result<std::vector<Quarantine>> quarantines() { return *dispatch::entries(); }

}  // namespace te_fl
