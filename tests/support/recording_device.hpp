// A device for tests without a GPU: host memory under another name, with streams, events and graphs
// that record what is enqueued as closures over deep copies of the arguments, as a device does that
// captures. Its ops are the reference backend's.
#pragma once

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "registry/arguments.hpp"
#include "te_fl/te_fl.hpp"

extern "C" const te_fl_plugin_header* te_fl_reference_query(const te_fl_host_info*);

namespace te_fl::testing {

// The arguments of one call, copied with everything that they point to except the data.
class CopiedArgs {
 public:
  CopiedArgs(const te_fl_op_schema& schema, const void* args) {
    uint32_t size = 0;
    std::memcpy(&size, args, sizeof size);
    bytes_.assign(static_cast<const char*>(args), static_cast<const char*>(args) + size);
    for (uint32_t i = 0; i < schema.arg_count; ++i) {
      const te_fl_arg_desc& arg = *schema.args[i];
      if (arg.type == TE_FL_ARG_TENSOR) {
        if (const te_fl_tensor* t = registry::tensor_argument(arg, args)) put(arg.offset, copy(*t));
      } else if (arg.type == TE_FL_ARG_TENSOR_LIST) {
        const registry::TensorList list = registry::list_argument(arg, args);
        if (list.count == 0) continue;
        auto& pointers = lists_.emplace_back();
        for (int64_t k = 0; k < list.count; ++k) {
          pointers.push_back(list.data[k] != nullptr ? copy(*list.data[k]) : nullptr);
        }
        put(arg.offset, static_cast<const te_fl_tensor* const*>(pointers.data()));
      } else if (arg.type == TE_FL_ARG_SAVED) {
        const auto* record = registry::member_or<te_fl_saved*>(arg.offset, args, nullptr);
        if (record == nullptr) continue;
        te_fl_saved& own = saved_.emplace_back(*record);
        if (own.storage != nullptr) own.storage = copy(*own.storage);
        put(arg.offset, &own);
      }
    }
  }
  CopiedArgs(const CopiedArgs&) = delete;
  const void* get() const { return bytes_.data(); }

 private:
  struct Copied {
    te_fl_tensor tensor;
    te_fl_quant quant;
    std::vector<int64_t> shape, strides;
  };
  const te_fl_tensor* copy(const te_fl_tensor& from) {
    Copied& c = tensors_.emplace_back();
    c.tensor = from;
    c.shape.assign(from.dl.shape, from.dl.shape + from.dl.ndim);
    c.tensor.dl.shape = c.shape.data();
    if (from.dl.strides != nullptr) {
      c.strides.assign(from.dl.strides, from.dl.strides + from.dl.ndim);
      c.tensor.dl.strides = c.strides.data();
    }
    if (from.quant != nullptr) {
      c.quant = *from.quant;
      c.tensor.quant = &c.quant;
    }
    return &c.tensor;
  }
  template <class T>
  void put(uint32_t offset, T value) {
    std::memcpy(bytes_.data() + offset, &value, sizeof value);
  }

  std::vector<char> bytes_;
  std::deque<Copied> tensors_;
  std::deque<std::vector<const te_fl_tensor*>> lists_;
  std::deque<te_fl_saved> saved_;
};

class RecordingDevice {
 public:
  // Registers the device and its ops; `refused` is the op that its graphs do not allow.
  explicit RecordingDevice(std::string refused = "") : refused_(std::move(refused)) {
    fill_api();
    desc_.struct_size = sizeof desc_;
    desc_.device = {TE_FL_DEVICE_EXT, 0};
    desc_.provider = "recorder";
    desc_.self = this;
    desc_.api = &api_;
    OpManager::instance();
    device_ = devices::add(&desc_).value();
    register_ops();
  }
  ~RecordingDevice() {
    const Status gone = OpRegistry::instance().unregister_owner("recorder");
    if (!gone.ok()) std::abort();
  }

  const Device& device() const { return device_; }
  te_fl_device_api& api() { return api_; }
  int64_t ops_run() const { return ops_run_; }
  int64_t ops_recorded() const { return ops_recorded_; }
  int64_t launches() const { return launches_; }
  // Blocks of memory that have been allocated and not been given back.
  size_t blocks() const { return blocks_.size(); }

 private:
  struct Graph {
    std::vector<std::function<te_fl_status()>> work;
    std::vector<void*> kept;   // freed while it was captured
    std::set<void*> borrowed;  // allocated then, and still in use
    std::vector<void*> after;  // the same, freed later
    int64_t ops = 0;
  };
  struct Stream {
    std::unique_ptr<Graph> capture;
  };
  struct Op {
    RecordingDevice* device;
    te_fl_op_desc inner;
    te_fl_op_desc outer;
    const te_fl_op_schema* schema;
  };

  static RecordingDevice& of(void* self) { return *static_cast<RecordingDevice*>(self); }
  static Graph* capture_of(void* stream) {
    return stream != nullptr ? static_cast<Stream*>(stream)->capture.get() : nullptr;
  }
  // Runs `work` now, or records it.
  template <class F>
  static te_fl_status enqueue(void* stream, F work) {
    Graph* graph = capture_of(stream);
    if (graph == nullptr) return work();
    graph->work.push_back(std::move(work));
    return TE_FL_OK;
  }
  void give_back(void* data) {
    std::memset(data, 0xDB, blocks_.at(data));  // what is read from now on shows
    blocks_.erase(data);
    std::free(data);
  }
  void destroy(Graph* graph) {
    for (void* data : graph->kept) give_back(data);
    for (void* data : graph->after) give_back(data);
    for (void* data : graph->borrowed) owners_.erase(data);
    delete graph;
  }
  void release(void* data, void* stream) {
    if (Graph* graph = capture_of(stream)) {
      graph->kept.push_back(data);
      if (graph->borrowed.erase(data) > 0) owners_.erase(data);
      return;
    }
    const auto owner = owners_.find(data);
    if (owner == owners_.end()) return give_back(data);
    owner->second->borrowed.erase(data);
    owner->second->after.push_back(data);
    owners_.erase(owner);
  }

  void fill_api() {
    api_.struct_size = sizeof api_;
    api_.allocate = [](void* self, size_t bytes, void* stream, void** out,
                       const te_fl_error_sink*) -> te_fl_status {
      const size_t size = (bytes + 256) / 256 * 256;
      *out = std::aligned_alloc(256, size);
      std::memset(*out, 0xCD, size);
      of(self).blocks_[*out] = size;
      if (Graph* graph = capture_of(stream)) {
        graph->borrowed.insert(*out);
        of(self).owners_[*out] = graph;
      }
      return TE_FL_OK;
    };
    api_.free = [](void* self, void* data, void* stream, const te_fl_error_sink*) -> te_fl_status {
      of(self).release(data, stream);
      return TE_FL_OK;
    };
    api_.copy = [](void*, void* dst, const void* src, size_t bytes, uint32_t, void* stream,
                   const te_fl_error_sink*) -> te_fl_status {
      return enqueue(stream, [=]() -> te_fl_status {
        std::memmove(dst, src, bytes);
        return TE_FL_OK;
      });
    };
    api_.fill = [](void*, void* dst, uint8_t value, size_t bytes, void* stream,
                   const te_fl_error_sink*) -> te_fl_status {
      return enqueue(stream, [=]() -> te_fl_status {
        std::memset(dst, value, bytes);
        return TE_FL_OK;
      });
    };
    api_.synchronize = [](void*, void* stream, const te_fl_error_sink*) -> te_fl_status {
      return capture_of(stream) == nullptr ? TE_FL_OK : TE_FL_INTERNAL;
    };
    api_.properties = [](void*, te_fl_device_props*, const te_fl_error_sink*) -> te_fl_status {
      return TE_FL_OK;
    };
    api_.create_stream = [](void*, void** out, const te_fl_error_sink*) -> te_fl_status {
      *out = new Stream;
      return TE_FL_OK;
    };
    api_.destroy_stream = [](void*, void* stream, const te_fl_error_sink*) -> te_fl_status {
      delete static_cast<Stream*>(stream);
      return TE_FL_OK;
    };
    api_.create_event = [](void*, void** out, const te_fl_error_sink*) -> te_fl_status {
      *out = new char;
      return TE_FL_OK;
    };
    api_.destroy_event = [](void*, void* event, const te_fl_error_sink*) -> te_fl_status {
      delete static_cast<char*>(event);
      return TE_FL_OK;
    };
    api_.record_event = api_.wait_event =
        [](void*, void*, void*, const te_fl_error_sink*) -> te_fl_status { return TE_FL_OK; };
    api_.is_capturing = [](void*, void* stream, int32_t* capturing,
                           const te_fl_error_sink*) -> te_fl_status {
      *capturing = capture_of(stream) != nullptr ? 1 : 0;
      return TE_FL_OK;
    };
    api_.begin_capture = [](void*, void* stream, const te_fl_error_sink* errors) -> te_fl_status {
      if (capture_of(stream) != nullptr) {
        errors->write(errors->host, "the stream is being captured already");
        return TE_FL_FAILED_PRECONDITION;
      }
      static_cast<Stream*>(stream)->capture = std::make_unique<Graph>();
      return TE_FL_OK;
    };
    api_.end_capture = [](void*, void* stream, void** out,
                          const te_fl_error_sink*) -> te_fl_status {
      *out = static_cast<Stream*>(stream)->capture.release();
      return TE_FL_OK;
    };
    api_.launch_graph = [](void* self, void* graph, void*,
                           const te_fl_error_sink*) -> te_fl_status {
      ++of(self).launches_;
      of(self).ops_run_ += static_cast<Graph*>(graph)->ops;
      for (const auto& work : static_cast<Graph*>(graph)->work) {
        if (const te_fl_status status = work()) return status;
      }
      return TE_FL_OK;
    };
    api_.destroy_graph = [](void* self, void* graph, const te_fl_error_sink*) -> te_fl_status {
      of(self).destroy(static_cast<Graph*>(graph));
      return TE_FL_OK;
    };
  }

  static te_fl_status run(void* self, const te_fl_context* ctx, const void* args) {
    const Op& op = *static_cast<Op*>(self);
    Graph* graph = capture_of(ctx->stream);
    if (graph == nullptr) {
      ++op.device->ops_run_;
      return op.inner.run(op.inner.self, ctx, args);
    }
    if ((ctx->flags & TE_FL_CALL_CAPTURING) == 0) return TE_FL_INTERNAL;
    ++op.device->ops_recorded_;
    ++graph->ops;
    te_fl_context later = *ctx;
    later.errors = nullptr;
    later.extensions = nullptr;
    auto copied = std::make_shared<CopiedArgs>(*op.schema, args);
    graph->work.emplace_back(
        [&op, later, copied] { return op.inner.run(op.inner.self, &later, copied->get()); });
    return TE_FL_OK;
  }
  static te_fl_status supports(void* self, const te_fl_context* ctx, const void* args) {
    const te_fl_op_desc& inner = static_cast<Op*>(self)->inner;
    return inner.supports(inner.self, ctx, args);
  }
  static te_fl_status workspace(void* self, const te_fl_context* ctx, const void* args,
                                size_t* bytes) {
    const te_fl_op_desc& inner = static_cast<Op*>(self)->inner;
    *bytes = 64;  // every op has some, so that scratch is captured too
    if (inner.workspace == nullptr) return TE_FL_OK;
    return inner.workspace(inner.self, ctx, args, bytes);
  }

  void register_ops() {
    const te_fl_plugin_api& api = *te_fl_reference_query(nullptr)->api;
    static void* instance = nullptr;  // never destroyed: its descriptors are used until the end
    static uint32_t count = 0;
    static const te_fl_op_desc* const* list = nullptr;
    if (instance == nullptr) {
      if (api.create(nullptr, &instance, nullptr) != TE_FL_OK) std::abort();
      if (api.ops(instance, &count, &list, nullptr) != TE_FL_OK) std::abort();
    }
    std::vector<const te_fl_op_desc*> outers;
    for (uint32_t i = 0; i < count; ++i) {
      const te_fl_op_desc& inner = *list[i];
      const OpId id = OpRegistry::instance().find(inner.op_name).value();
      Op& op = ops_.emplace_back(Op{this, inner, inner, OpRegistry::instance().schema(id)});
      op.outer.impl_id = "default.recorder";
      op.outer.kind = TE_FL_KIND_DEFAULT;
      op.outer.device_types = uint64_t{1} << TE_FL_DEVICE_EXT;
      op.outer.self = &op;
      op.outer.run = run;
      op.outer.flags |= TE_FL_OP_GRAPH_SAFE;
      if (refused_ == inner.op_name) op.outer.flags &= ~uint32_t{TE_FL_OP_GRAPH_SAFE};
      if (inner.supports != nullptr) op.outer.supports = supports;
      op.outer.workspace = workspace;
      outers.push_back(&op.outer);
    }
    const Status added = OpRegistry::instance().register_ops(outers, "recorder", "recorder");
    if (!added.ok()) std::abort();
  }

  std::string refused_;
  te_fl_device_api api_{};
  te_fl_device_desc desc_{};
  Device device_;
  std::deque<Op> ops_;
  std::map<void*, size_t> blocks_;
  std::map<void*, Graph*> owners_;  // memory that a living graph lends
  int64_t ops_run_ = 0, ops_recorded_ = 0, launches_ = 0;
};

}  // namespace te_fl::testing
