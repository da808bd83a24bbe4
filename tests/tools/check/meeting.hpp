// A broadcast among ranks that are threads of one process. The ranks find each other through a
// global map.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "te_fl/backend.hpp"
#include "te_fl/backend/collective.hpp"

namespace te_fl_test {

namespace b = te_fl::backend;

// The state of one communicator's broadcasts, which run one after the other. The root's memory must
// stay valid until every rank has read it.
struct Meeting {
  std::mutex mutex;
  std::condition_variable changed;
  const void* data = nullptr;  // memory of the root, set when the root has arrived
  // came: number of ranks that arrived at this broadcast; done: number of finished broadcasts
  int came = 0, done = 0;
};

inline std::mutex g_mutex;
inline std::map<std::string, std::weak_ptr<Meeting>> g_meetings;  // key: the communicator's unique
                                                                  // id, which rank 0 drew

struct Comm {
  std::shared_ptr<Meeting> meeting;
};

inline te_fl_status unique_id(void*, void* id, size_t capacity, size_t* bytes,
                              const te_fl_error_sink*) noexcept {
  static int next = 0;
  const std::lock_guard lock(g_mutex);
  *bytes = sizeof next;
  if (capacity >= sizeof next) std::memcpy(id, &++next, sizeof next);
  return TE_FL_OK;
}

inline te_fl_status create(void*, const te_fl_comm_config* config, void** comm,
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

inline void destroy(void* comm) noexcept { delete static_cast<Comm*>(comm); }
inline void abort_it(void*) noexcept {}

inline void broadcast_by_threads(const te_fl_broadcast_args& a) {
  Meeting& m = *b::communicator<Comm>(a.comm).meeting;
  constexpr std::chrono::milliseconds kPatience{300};
  std::unique_lock lock(m.mutex);
  const auto wait = [&](auto&& done) {
    if (!m.changed.wait_for(lock, kPatience, done))
      throw b::Error(TE_FL_COMM_FAILED, "the other ranks did not connect to this process");
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

inline constexpr te_fl_comm_api kApi = {
    .unique_id = unique_id, .create = create, .destroy = destroy, .abort = abort_it};

}  // namespace te_fl_test
