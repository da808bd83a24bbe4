// A provider of collectives whose ranks find each other in memory of one process and say of
// processes that they serve them too: right with threads, wrong among processes.
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "te_fl/backend.hpp"
#include "te_fl/backend/collective.hpp"
#include "te_fl/backend/plugin.hpp"

namespace {

namespace b = te_fl::backend;

// The broadcasts of one communicator, one after the other. A root's memory is read until all have.
struct Meeting {
  std::mutex mutex;
  std::condition_variable changed;
  const void* data = nullptr;  // of the root that has come
  int came = 0, done = 0;      // ranks of this broadcast; broadcasts that all have left
};

std::mutex g_mutex;
std::map<std::string, std::weak_ptr<Meeting>> g_meetings;  // by the id that rank 0 drew

struct Comm {
  std::shared_ptr<Meeting> meeting;
};

te_fl_status unique_id(void*, void* id, size_t capacity, size_t* bytes,
                       const te_fl_error_sink*) noexcept {
  static int next = 0;
  const std::lock_guard lock(g_mutex);
  *bytes = sizeof next;
  if (capacity >= sizeof next) std::memcpy(id, &++next, sizeof next);
  return TE_FL_OK;
}

te_fl_status create(void*, const te_fl_comm_config* config, void** comm,
                    const te_fl_error_sink*) noexcept {
  const std::lock_guard lock(g_mutex);
  std::weak_ptr<Meeting>& known =
      g_meetings[std::string(static_cast<const char*>(config->id), config->id_bytes)];
  auto made = std::make_unique<Comm>();
  made->meeting = known.lock();
  if (made->meeting == nullptr) known = made->meeting = std::make_shared<Meeting>();
  *comm = made.release();
  return TE_FL_OK;
}

void destroy(void* comm) noexcept { delete static_cast<Comm*>(comm); }
void abort_it(void*) noexcept {}

bool is_process() { return std::getenv("TE_FL_WORLD_SIZE") != nullptr; }

void broadcast(const te_fl_context&, const te_fl_broadcast_args& a) {
  // Among processes, where a test asks for it, rank 1 dies or rank 0 leaves without a word.
  if (const char* fault = std::getenv("WRONG_RANKS"); fault != nullptr && is_process()) {
    if (std::string_view(fault) == "crash" && a.comm->rank == 1) std::abort();
    if (std::string_view(fault) == "leave" && a.comm->rank == 0) std::_Exit(0);
  }
  Meeting& m = *b::communicator<Comm>(a.comm).meeting;
  constexpr std::chrono::milliseconds kPatience{300};
  std::unique_lock lock(m.mutex);
  const auto wait = [&](auto&& done) {
    if (!m.changed.wait_for(lock, kPatience, done))
      throw b::Error(TE_FL_COMM_FAILED, "the others did not come to this process");
  };
  if (a.comm->rank == a.root) {
    m.data = a.data->dl.data;
  } else {
    wait([&] { return m.data != nullptr; });
    std::memcpy(a.data->dl.data, m.data, static_cast<size_t>(b::bytes_of(*a.data)));
  }
  const int number = m.done;
  if (++m.came == a.comm->size) {
    m.data = nullptr, m.came = 0;
    ++m.done;
  }
  m.changed.notify_all();
  wait([&] { return m.done != number; });
}

constexpr te_fl_comm_api kApi = {
    .unique_id = unique_id, .create = create, .destroy = destroy, .abort = abort_it};
constexpr te_fl_comm_desc kDesc = {
    .name = "wrong_ranks",
    .kind = TE_FL_KIND_VENDOR,
    .device_types = uint64_t{1} << TE_FL_DEVICE_CPU,
    .api = &kApi,
};

struct WrongRanks : b::Instance {
  explicit WrongRanks(const te_fl_host_api&) {
    te_fl_op_desc op;
    op.op_name = "broadcast", op.impl_id = "vendor.wrong_ranks", op.kind = TE_FL_KIND_VENDOR;
    op.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_IN_PLACE_OK;
    op.device_types = uint64_t{1} << TE_FL_DEVICE_CPU;
    op.run = b::run_thunk<te_fl_broadcast_args, broadcast>;
    op.supports =
        b::supports_thunk<te_fl_broadcast_args, b::check_collective<te_fl_broadcast_args>>;
    ops.push_back(op);
  }
  std::vector<const te_fl_comm_desc*> comms = {&kDesc};
};

constexpr te_fl_plugin_header kHeader =
    b::plugin_header<WrongRanks>("wrong_ranks", "wrong", "1.0.0");

}  // namespace

extern "C" TE_FL_PLUGIN_EXPORT const te_fl_plugin_header* te_fl_plugin_query(
    const te_fl_host_info*) {
  return &kHeader;
}
