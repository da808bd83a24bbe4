// A device for tests without a GPU: host memory under another name, with the late streams, events
// and graphs of DeviceQueues. An enqueued op is a closure over a deep copy of its arguments. The
// ops are the reference backend's; synchronising the stream reports their errors.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "registry/arguments.hpp"
#include "support/device_queues.hpp"
#include "te_fl/te_fl.hpp"

extern "C" const te_fl_plugin_header* te_fl_reference_query(const te_fl_host_info*);

namespace te_fl::testing {

// The arguments of one call, copied deeply except for the tensors' data.
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
  // Registers the device and its ops. Graphs refuse the op `refused`.
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
    queues.drain();
    check_gone();
    for (const auto& [data, bytes] : gone_) std::free(data);
    const Status gone = OpRegistry::instance().unregister_owner("recorder");
    if (!gone.ok()) std::abort();
  }

  const Device& device() const { return device_; }
  te_fl_device_api& api() { return api_; }
  // Finishes all work; returns the number of ops that ran, including those of graph launches.
  int64_t ops_run() {
    queues.drain();
    return ops_run_;
  }
  int64_t ops_recorded() const { return ops_recorded_; }
  int64_t launches() const { return queues.launches(); }
  // Finishes all work; returns the number of memory blocks that are still allocated.
  size_t blocks() {
    queues.drain();
    return blocks_.size();
  }

  DeviceQueues queues;

 private:
  struct Op {
    RecordingDevice* device;
    te_fl_op_desc inner;
    te_fl_op_desc outer;
    const te_fl_op_schema* schema;
  };

  static RecordingDevice& of(void* self) { return *static_cast<RecordingDevice*>(self); }
  void give_back(void* data) {
    const auto block = blocks_.find(data);
    std::memset(data, kGone, block->second);  // a later read of freed memory shows this pattern
    gone_.push_back(*block);
    blocks_.erase(block);
  }
  // Checks that nothing was written to freed memory.
  void check_gone() const {
    for (const auto& [data, bytes] : gone_) {
      const auto* at = static_cast<const unsigned char*>(data);
      if (std::all_of(at, at + bytes, [](unsigned char c) { return c == kGone; })) continue;
      std::fprintf(stderr, "recording device: memory was written after it had been freed\n");
      std::abort();
    }
  }
  void fill_api() {
    api_.struct_size = sizeof api_;
    api_.allocate = [](void* self, const te_fl_memory_desc* memory, void** out,
                       const te_fl_error_sink*) -> te_fl_status {
      if (memory->kind != TE_FL_MEMORY_DEVICE) return te_fl_status{TE_FL_UNSUPPORTED};
      const size_t bytes = memory->bytes;
      void* const stream = memory->stream;
      const size_t size = (bytes + 256) / 256 * 256;
      *out = std::aligned_alloc(256, size);
      std::memset(*out, 0xCD, size);
      of(self).blocks_[*out] = size;
      of(self).queues.allocated(stream, *out);
      return TE_FL_OK;
    };
    api_.free = [](void* self, void* data, uint32_t, void* stream,
                   const te_fl_error_sink*) -> te_fl_status {
      RecordingDevice& device = of(self);
      device.queues.freed(stream, data, [&device, data] { device.give_back(data); });
      return TE_FL_OK;
    };
    api_.copy = [](void* self, void* dst, const void* src, size_t bytes, uint32_t host_flags,
                   void* stream, const te_fl_error_sink*) -> te_fl_status {
      // A copy's source bytes in host memory, read when the copy is enqueued.
      std::shared_ptr<std::vector<char>> read;
      const bool captured = of(self).queues.capturing(stream);
      if ((host_flags & 2) != 0 && !captured) {
        const auto* from = static_cast<const char*>(src);
        read = std::make_shared<std::vector<char>>(from, from + bytes);
      }
      of(self).queues.enqueue(stream, [=]() -> te_fl_status {
        std::memmove(dst, read != nullptr ? read->data() : src, bytes);
        return TE_FL_OK;
      });
      return TE_FL_OK;
    };
    api_.fill = [](void* self, void* dst, uint8_t value, size_t bytes, void* stream,
                   const te_fl_error_sink*) -> te_fl_status {
      of(self).queues.enqueue(stream, [=]() -> te_fl_status {
        std::memset(dst, value, bytes);
        return TE_FL_OK;
      });
      return TE_FL_OK;
    };
    api_.properties = [](void*, te_fl_device_props*, const te_fl_error_sink*) -> te_fl_status {
      return TE_FL_OK;
    };
    queues.install<RecordingDevice>(api_);
  }

  static te_fl_status run(void* self, const te_fl_context* ctx, const void* args) {
    const Op& op = *static_cast<Op*>(self);
    if ((op.schema->flags & TE_FL_SCHEMA_ENQUIRY) != 0)
      return op.inner.run(op.inner.self, ctx, args);
    RecordingDevice& device = *op.device;
    if (device.queues.capturing(ctx->stream)) {
      if ((ctx->flags & TE_FL_CALL_CAPTURING) == 0) return TE_FL_INTERNAL;
      ++device.ops_recorded_;
    }
    te_fl_context later = *ctx;
    later.errors = nullptr;
    later.extensions = nullptr;
    auto copied = std::make_shared<CopiedArgs>(*op.schema, args);
    device.queues.enqueue(ctx->stream, [&op, later, rng = *ctx->rng, copied] {
      ++op.device->ops_run_;
      te_fl_context then = later;
      then.rng = &rng;
      return op.inner.run(op.inner.self, &then, copied->get());
    });
    return TE_FL_OK;
  }
  static te_fl_status supports(void* self, const te_fl_context* ctx, const void* args) {
    const te_fl_op_desc& inner = static_cast<Op*>(self)->inner;
    return inner.supports(inner.self, ctx, args);
  }
  static te_fl_status workspace(void* self, const te_fl_context* ctx, const void* args,
                                size_t* bytes) {
    const te_fl_op_desc& inner = static_cast<Op*>(self)->inner;
    *bytes = 64;  // every op gets some scratch, so that captures include scratch
    if (inner.workspace == nullptr) return TE_FL_OK;
    return inner.workspace(inner.self, ctx, args, bytes);
  }

  void register_ops() {
    const te_fl_plugin_api& api = *te_fl_reference_query(nullptr)->api;
    static void* instance = nullptr;  // never destroyed: its descriptors are used until exit
    static uint32_t count = 0;
    static const te_fl_op_desc* const* list = nullptr;
    if (instance == nullptr) {
      static const te_fl_host_api host{};
      if (api.create(&host, &instance, nullptr) != TE_FL_OK) std::abort();
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
      op.outer.provider = "recorder";
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
  static constexpr unsigned char kGone = 0xDB;
  std::map<void*, size_t> blocks_;
  std::vector<std::pair<void*, size_t>> gone_;  // blocks that were freed
  int64_t ops_run_ = 0, ops_recorded_ = 0;
};

}  // namespace te_fl::testing
