#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "te_fl/plugin.h"

// Streams, events and graphs of a fake device that executes as late as the plugin ABI allows: work
// enqueued on a stream runs only when a caller waits for the stream, for a later event on it, or
// for the device. A caller that reads results without waiting therefore sees old data.
//
// create_stream() returns the smallest free handle, so two devices have equal handles for different
// streams, and the handle of a destroyed stream is reused. Any other handle counts as a stream that
// a framework made. The default stream does not synchronise with other streams.
namespace te_fl::testing {

class DeviceQueues {
 public:
  using Work = std::function<te_fl_status()>;

  DeviceQueues() = default;
  ~DeviceQueues() { drain(); }
  DeviceQueues(const DeviceQueues&) = delete;
  DeviceQueues& operator=(const DeviceQueues&) = delete;

  // Enqueues `work` on the stream, or records it if the stream is being captured.
  void enqueue(void* stream, Work work) {
    const Lock lock(all());
    add(stream, std::move(work));
  }
  // Runs the first `count` items of work on the stream, or all if there are fewer.
  void run_some(void* stream, size_t count) {
    const Lock lock(all());
    const auto queue = of(stream);
    while (count-- > 0 && !queue->work.empty()) run_one(*queue);
  }
  size_t pending(void* stream) const {
    const Lock lock(all());
    const auto at = queues_.find(stream);
    return at != queues_.end() ? at->second->work.size() : 0;
  }
  // Waits for the device: for all of its streams, including destroyed ones with pending work.
  void drain() {
    const Lock lock(all());
    for (const auto& [handle, queue] : queues_) drain(*queue);
    for (const auto& queue : destroyed_) drain(*queue);
    destroyed_.clear();
  }
  te_fl_status synchronize(void* stream, const te_fl_error_sink* errors) {
    const Lock lock(all());
    const auto queue = of(stream);
    if (queue->capture != nullptr) {
      return say(errors, TE_FL_INTERNAL, "the stream is being captured");
    }
    drain(*queue);
    const te_fl_status failed = std::exchange(queue->failed, te_fl_status{TE_FL_OK});
    return failed == TE_FL_OK ? failed : say(errors, failed, "work on the stream has failed");
  }

  // Enqueues a copy between two devices, ordered on both streams.
  static void enqueue_between(DeviceQueues& to, void* to_stream, DeviceQueues& from,
                              void* from_stream, Work work) {
    const Lock lock(all());
    to.wait(to_stream, from.mark(from_stream));
    to.add(to_stream, std::move(work));
    from.wait(from_stream, to.mark(to_stream));
  }

  // Memory is freed in the order of its stream, or with its graph (R19). `give_back` is called when
  // the block may be reused.
  void allocated(void* stream, void* data) {
    const Lock lock(all());
    if (const auto graph = of(stream)->capture) owners_[data] = graph;
  }
  void freed(void* stream, void* data, std::function<void()> give_back) {
    const Lock lock(all());
    const auto owner = owners_.find(data);
    auto lends = owner != owners_.end() ? owner->second.lock() : nullptr;
    if (owner != owners_.end()) owners_.erase(owner);
    if (const auto graph = of(stream)->capture) lends = graph;
    if (lends != nullptr) {
      lends->kept.push_back(std::move(give_back));
      return;
    }
    of(stream)->work.push_back([give_back = std::move(give_back)]() -> te_fl_status {
      give_back();
      return TE_FL_OK;
    });
  }

  // Makes a stream as a framework does, without te-fl's knowledge.
  void* make_stream() {
    const Lock lock(all());
    uintptr_t handle = kFirst;
    while (made_.count(handle) != 0) handle += kFirst;
    made_.insert(handle);
    return reinterpret_cast<void*>(handle);
  }
  // Destroys a stream; its pending work still runs at some later time.
  void destroy(void* stream) {
    const Lock lock(all());
    made_.erase(reinterpret_cast<uintptr_t>(stream));
    const auto at = queues_.find(stream);
    if (at == queues_.end()) return;
    destroyed_.push_back(at->second);
    queues_.erase(at);
  }
  bool exists(void* stream) const {
    const Lock lock(all());
    return made_.count(reinterpret_cast<uintptr_t>(stream)) != 0;
  }
  bool capturing(void* stream) {
    const Lock lock(all());
    return of(stream)->capture != nullptr;
  }
  int64_t launches() const { return launches_; }

  // Sets the device functions for streams, events and graphs. `self` points to the device's class
  // `D`, which has a member `queues`.
  template <class D>
  static void install(te_fl_device_api& api) {
    install_streams<D>(api);
    install_events<D>(api);
    install_graphs<D>(api);
  }

 private:
  using Lock = std::lock_guard<std::recursive_mutex>;
  struct Graph {
    std::vector<Work> work;
    std::vector<std::function<void()>> kept;  // releases memory that belongs to the graph
    ~Graph() {
      for (const auto& give_back : kept) give_back();
    }
  };
  struct Queue {
    std::deque<Work> work;
    std::shared_ptr<Graph> capture;
    te_fl_status failed = TE_FL_OK;
  };
  // A position on a stream, for events; `graph` is set for a position in a capture.
  struct Mark {
    bool passed = false;
    uint64_t time = 0;  // time in "microseconds" of a clock that counts executed work items
    std::shared_ptr<Queue> queue;
    std::shared_ptr<Graph> graph;
  };
  struct Event {
    bool timed;
    std::shared_ptr<Mark> last;
  };

  // One mutex for all devices, as streams wait for events of other devices.
  static std::recursive_mutex& all() {
    static auto* const mutex = new std::recursive_mutex;
    return *mutex;
  }
  static te_fl_status say(const te_fl_error_sink* errors, te_fl_status status, const char* text) {
    if (errors != nullptr && errors->write != nullptr) errors->write(errors->host, text);
    return status;
  }

  std::shared_ptr<Queue> of(void* stream) {
    auto& queue = queues_[stream];
    if (queue == nullptr) queue = std::make_shared<Queue>();
    return queue;
  }
  void add(void* stream, Work work) {
    const auto queue = of(stream);
    if (queue->capture != nullptr) {
      queue->capture->work.push_back(std::move(work));
    } else {
      queue->work.push_back(std::move(work));
    }
  }
  static uint64_t& clock() {
    static uint64_t now = 0;
    return now;
  }
  static void run_one(Queue& queue) {
    ++clock();
    const Work work = std::move(queue.work.front());
    queue.work.pop_front();
    const te_fl_status status = work();
    if (queue.failed == TE_FL_OK) queue.failed = status;
  }
  static void drain(Queue& queue) {
    while (!queue.work.empty()) run_one(queue);
  }
  // Runs the work before a mark. A mark is recorded before any stream can wait for it, so waits
  // cannot be circular.
  static void pass(Mark& mark) {
    while (!mark.passed && !mark.queue->work.empty()) run_one(*mark.queue);
    if (!mark.passed) std::abort();  // the mark is in a capture whose graph was not launched
  }

  std::shared_ptr<Mark> mark(void* stream) {
    const auto queue = of(stream);
    auto mark = std::make_shared<Mark>();
    mark->graph = queue->capture;
    mark->queue = queue;
    if (mark->graph != nullptr) return mark;
    queue->work.push_back([mark]() -> te_fl_status {
      mark->passed = true;
      mark->time = clock();
      return TE_FL_OK;
    });
    return mark;
  }
  // A stream that waits for a mark in a capture joins the capture. All work of a capture is
  // recorded in one sequence.
  te_fl_status wait(void* stream, const std::shared_ptr<Mark>& mark) {
    const auto queue = of(stream);
    if (mark->graph != nullptr) {
      if (queue->capture == nullptr) queue->capture = mark->graph;
      return TE_FL_OK;
    }
    if (queue->capture != nullptr) return TE_FL_INTERNAL;  // the mark lies outside the capture
    queue->work.push_back([mark]() -> te_fl_status {
      pass(*mark);
      return TE_FL_OK;
    });
    return TE_FL_OK;
  }

  template <class D>
  static DeviceQueues& unwrap_queues(void* self) {
    return static_cast<D*>(self)->queues;
  }

  template <class D>
  static void install_streams(te_fl_device_api& api) {
    api.create_stream = [](void* self, void** out, const te_fl_error_sink*) -> te_fl_status {
      *out = unwrap_queues<D>(self).make_stream();
      return TE_FL_OK;
    };
    api.destroy_stream = [](void* self, void* stream,
                            const te_fl_error_sink* errors) -> te_fl_status {
      if (!unwrap_queues<D>(self).exists(stream)) {
        return say(errors, TE_FL_INVALID_ARGUMENT, "this is no stream of the device");
      }
      unwrap_queues<D>(self).destroy(stream);
      return TE_FL_OK;
    };
    api.synchronize = [](void* self, void* stream, const te_fl_error_sink* errors) {
      return unwrap_queues<D>(self).synchronize(stream, errors);
    };
  }

  template <class D>
  static void install_events(te_fl_device_api& api) {
    api.create_event = [](void*, uint32_t flags, void** out,
                          const te_fl_error_sink*) -> te_fl_status {
      *out = new Event{(flags & TE_FL_EVENT_TIMED) != 0, nullptr};
      return TE_FL_OK;
    };
    api.destroy_event = [](void*, void* event, const te_fl_error_sink*) -> te_fl_status {
      delete static_cast<Event*>(event);
      return TE_FL_OK;
    };
    api.record_event = [](void* self, void* event, void* stream,
                          const te_fl_error_sink*) -> te_fl_status {
      const Lock lock(all());
      static_cast<Event*>(event)->last = unwrap_queues<D>(self).mark(stream);
      return TE_FL_OK;
    };
    api.wait_event = [](void* self, void* event, void* stream,
                        const te_fl_error_sink* errors) -> te_fl_status {
      const Lock lock(all());
      const auto mark = static_cast<Event*>(event)->last;
      if (mark == nullptr) return TE_FL_OK;
      const te_fl_status status = unwrap_queues<D>(self).wait(stream, mark);
      return status == TE_FL_OK ? status : say(errors, status, "a capture waits for other work");
    };
    api.synchronize_event = [](void*, void* event, const te_fl_error_sink*) -> te_fl_status {
      const Lock lock(all());
      const auto mark = static_cast<Event*>(event)->last;
      if (mark != nullptr) pass(*mark);
      return TE_FL_OK;
    };
    api.query_event = [](void*, void* event, int32_t* done,
                         const te_fl_error_sink*) -> te_fl_status {
      const Lock lock(all());
      const auto mark = static_cast<Event*>(event)->last;
      *done = mark == nullptr || mark->passed ? 1 : 0;
      // Each query of an event runs one item of work, as if time passed.
      if (*done == 0 && !mark->queue->work.empty()) run_one(*mark->queue);
      return TE_FL_OK;
    };
    api.elapsed_time = [](void*, void* start, void* end, uint64_t* nanoseconds,
                          const te_fl_error_sink* errors) -> te_fl_status {
      const Lock lock(all());
      const auto from = static_cast<Event*>(start)->last, to = static_cast<Event*>(end)->last;
      if (from == nullptr || to == nullptr || !static_cast<Event*>(start)->timed ||
          !static_cast<Event*>(end)->timed) {
        return say(errors, TE_FL_INVALID_ARGUMENT, "an event that is not timed");
      }
      *nanoseconds = to->time > from->time ? (to->time - from->time) * 1000 : 0;
      return TE_FL_OK;
    };
  }

  template <class D>
  static void install_graphs(te_fl_device_api& api) {
    api.is_capturing = [](void* self, void* stream, int32_t* capturing,
                          const te_fl_error_sink*) -> te_fl_status {
      *capturing = unwrap_queues<D>(self).capturing(stream) ? 1 : 0;
      return TE_FL_OK;
    };
    api.begin_capture = [](void* self, void* stream, const te_fl_error_sink* errors) {
      const Lock lock(all());
      const auto queue = unwrap_queues<D>(self).of(stream);
      if (queue->capture != nullptr) {
        return say(errors, TE_FL_FAILED_PRECONDITION, "the stream is being captured already");
      }
      queue->capture = std::make_shared<Graph>();
      return te_fl_status{TE_FL_OK};
    };
    api.end_capture = [](void* self, void* stream, void** out,
                         const te_fl_error_sink*) -> te_fl_status {
      const Lock lock(all());
      const std::shared_ptr<Graph> graph = unwrap_queues<D>(self).of(stream)->capture;
      for (auto& [handle, queue] : unwrap_queues<D>(self).queues_) {
        if (queue->capture == graph) queue->capture.reset();
      }
      *out = new std::shared_ptr<Graph>(graph);
      return TE_FL_OK;
    };
    // Each item of a graph becomes a work item of the stream, so that tests can interleave launches
    // on two streams.
    api.launch_graph = [](void* self, void* graph, void* stream,
                          const te_fl_error_sink*) -> te_fl_status {
      const Lock lock(all());
      const auto launched = *static_cast<std::shared_ptr<Graph>*>(graph);
      ++unwrap_queues<D>(self).launches_;
      for (const Work& work : launched->work) {
        unwrap_queues<D>(self).add(stream, [launched, &work] { return work(); });
      }
      return TE_FL_OK;
    };
    api.destroy_graph = [](void*, void* graph, const te_fl_error_sink*) -> te_fl_status {
      const Lock lock(all());
      delete static_cast<std::shared_ptr<Graph>*>(graph);
      return TE_FL_OK;
    };
  }

  static constexpr uintptr_t kFirst = 16;
  std::map<void*, std::shared_ptr<Queue>> queues_;
  std::vector<std::shared_ptr<Queue>> destroyed_;
  std::set<uintptr_t> made_;
  std::map<void*, std::weak_ptr<Graph>> owners_;  // memory allocated during a capture
  int64_t launches_ = 0;
};

}  // namespace te_fl::testing
