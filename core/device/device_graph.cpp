#include <string>
#include <utility>

#include "core/device/current_stream.hpp"
#include "core/device/device_list.hpp"
#include "core/device/device_use.hpp"

namespace te_fl {
namespace {

using core::DeviceEntry;
using core::DeviceUse;
using core::ErrorText;
using core::slot;
using Api = te_fl_device_api;

const char* missing_function(const Api& api) {
  if (slot(api, &Api::is_capturing) == nullptr) return "is_capturing";
  if (slot(api, &Api::begin_capture) == nullptr) return "begin_capture";
  if (slot(api, &Api::end_capture) == nullptr) return "end_capture";
  if (slot(api, &Api::launch_graph) == nullptr) return "launch_graph";
  if (slot(api, &Api::destroy_graph) == nullptr) return "destroy_graph";
  return nullptr;
}

void destroy_graph(const Device& device, void* graph) noexcept {
  const core::Inside inside(device);
  if (inside.too_late()) return;
  DeviceEntry* entry = core::find_device(device);
  if (entry == nullptr) return;  // does not happen: a live graph keeps its device in the list
  const te_fl_device_desc& d = *entry->desc;
  ErrorText errors;
  core::report_release(
      errors.call([&] { return d.api->destroy_graph(d.self, graph, errors.sink()); }), errors,
      device);
  entry->release();
}

// Ends the capture on `stream`. The reference to the device that the capture's start took passes to
// the graph.
Result<void*> end_capture(const Device& device, void* stream) {
  const core::Inside inside(device);
  if (inside.too_late()) return core::process_ends("no capture is ended");
  DeviceEntry* entry = core::find_device(device);
  if (entry == nullptr) return internal_error("a device went while a stream of it was captured");
  const te_fl_device_desc& d = *entry->desc;
  ErrorText errors;
  void* graph = nullptr;
  const te_fl_status code =
      errors.call([&] { return d.api->end_capture(d.self, stream, &graph, errors.sink()); });
  return core::made_object(entry, errors, code, graph, "the end of a capture on ");
}

}  // namespace

namespace devices {

Status check_capture(const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(const DeviceUse use, DeviceUse::of(device));
  const char* function = missing_function(*use->desc->api);
  if (function == nullptr) return {};
  return Status(StatusCode::kUnsupported, te_fl::to_string(device) +
                                              " cannot capture graphs (its " + function +
                                              " is NULL); run the work as it is, without a graph");
}

}  // namespace devices

Graph::Graph(Graph&& other) noexcept
    : device_(std::exchange(other.device_, Device{})),
      handle_(std::exchange(other.handle_, nullptr)),
      stream_(std::exchange(other.stream_, nullptr)),
      stream_owner_(std::move(other.stream_owner_)) {}

Graph& Graph::operator=(Graph&& other) noexcept {
  Graph old(std::move(other));
  std::swap(device_, old.device_);
  std::swap(handle_, old.handle_);
  std::swap(stream_, old.stream_);
  std::swap(stream_owner_, old.stream_owner_);
  return *this;
}

Graph::~Graph() {
  if (handle_ != nullptr) destroy_graph(device_, handle_);
}

Status Graph::launch() const {
  if (handle_ != nullptr && stream_owner_->get() == nullptr) {
    return failed_precondition(
        "the stream that this Graph was captured on has been retired; give "
        "launch() another one");
  }
  return launch(stream_);
}

Status Graph::launch(void* stream) const {
  if (handle_ == nullptr) {
    return failed_precondition("an empty Graph cannot be launched; Capture::end makes one");
  }
  TE_FL_ASSIGN_OR_RETURN(const DeviceUse use, DeviceUse::of(device_));
  if (use->closed()) return core::withdrawn_device(device_);
  const te_fl_device_desc& d = *use->desc;
  if (auto* tell = core::g_device_hooks.on_launching.load(std::memory_order_acquire)) {
    tell(device_, stream);
  }
  ErrorText errors;
  const te_fl_status code =
      errors.call([&] { return d.api->launch_graph(d.self, handle_, stream, errors.sink()); });
  if (code == TE_FL_OK) return {};
  return core::device_status(device_, stream, errors, code,
                             "launch of a graph on " + to_string(device_));
}

Result<Capture> Capture::begin(const Device& device, void* stream) {
  TE_FL_RETURN_IF_ERROR(devices::check_capture(device));
  if (stream == nullptr) {
    return invalid_argument("the default stream of " + to_string(device) +
                            " cannot be captured; make one with Stream::create");
  }
  TE_FL_ASSIGN_OR_RETURN(const DeviceUse use, DeviceUse::of(device));
  TE_FL_ASSIGN_OR_RETURN(DeviceEntry * entry, core::acquire_device(device));
  const te_fl_device_desc& d = *entry->desc;
  ErrorText errors;
  const te_fl_status code =
      errors.call([&] { return d.api->begin_capture(d.self, stream, errors.sink()); });
  if (code != TE_FL_OK) {
    entry->release();
    return core::device_status(device, stream, errors, code,
                               "the beginning of a capture on " + to_string(device));
  }
  Capture capture;
  capture.device_ = device;
  capture.stream_ = stream;
  capture.stream_owner_ = core::stream_record(device, stream);
  return capture;
}

Capture::Capture(Capture&& other) noexcept
    : device_(other.device_),
      stream_(std::exchange(other.stream_, nullptr)),
      stream_owner_(std::move(other.stream_owner_)) {}

Capture::~Capture() {
  if (stream_ != nullptr) (void)end();
}

Result<Graph> Capture::end() {
  if (stream_ == nullptr) return failed_precondition("this capture has already ended");
  void* stream = std::exchange(stream_, nullptr);
  TE_FL_ASSIGN_OR_RETURN(void* handle, end_capture(device_, stream));
  Graph graph;
  graph.device_ = device_;
  graph.handle_ = handle;
  graph.stream_ = stream;
  graph.stream_owner_ = std::move(stream_owner_);
  return graph;
}

}  // namespace te_fl
