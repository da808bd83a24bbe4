#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "te_fl/op_manager.hpp"
#include "te_fl/op_registry.hpp"
#include "te_fl/tensor.hpp"

// Custom ops and scripted implementations for dispatch tests, using the public API only.
namespace te_fl::testing {

// test::five: out = a + b + c + d, all of one shape; `gain` is an argument of a later version.
struct FiveArgs {
  uint32_t struct_size = sizeof(FiveArgs);
  const te_fl_tensor* a = nullptr;
  const te_fl_tensor* b = nullptr;
  const te_fl_tensor* c = nullptr;
  const te_fl_tensor* d = nullptr;
  const te_fl_tensor* out = nullptr;
  float gain = 1;
};

// test::save_fwd and test::save_bwd: the forward saves a record that the backward reads.
struct SaveArgs {
  uint32_t struct_size = sizeof(SaveArgs);
  const te_fl_tensor* x = nullptr;
  const te_fl_tensor* y = nullptr;
  te_fl_saved* saved = nullptr;
};

inline te_fl_arg_desc tensor_arg(const char* name, te_fl_arg_role role, uint32_t offset) {
  te_fl_arg_desc a{};
  a.struct_size = sizeof a;
  a.type = TE_FL_ARG_TENSOR;
  a.role = static_cast<uint8_t>(role);
  a.offset = offset;
  a.dtypes = TE_FL_MASK_ANY_DTYPE;
  a.scalings = 0x3f;
  a.name = name;
  a.shape = "...";
  return a;
}

inline const te_fl_op_schema& five_schema() {
  static const te_fl_arg_desc a = tensor_arg("a", TE_FL_IN, offsetof(FiveArgs, a));
  static const te_fl_arg_desc b = tensor_arg("b", TE_FL_IN, offsetof(FiveArgs, b));
  static const te_fl_arg_desc c = tensor_arg("c", TE_FL_IN, offsetof(FiveArgs, c));
  static const te_fl_arg_desc d = tensor_arg("d", TE_FL_IN, offsetof(FiveArgs, d));
  static const te_fl_arg_desc out = [] {
    te_fl_arg_desc o = tensor_arg("out", TE_FL_OUT, offsetof(FiveArgs, out));
    o.aliases = "a b";
    return o;
  }();
  static const te_fl_arg_desc gain = [] {
    te_fl_arg_desc g{};
    g.struct_size = sizeof g;
    g.type = TE_FL_ARG_F32;
    g.flags = TE_FL_ARG_LATER;
    g.offset = offsetof(FiveArgs, gain);
    g.name = "gain";
    g.neutral = 1;
    return g;
  }();
  static const te_fl_arg_desc* const args[] = {&a, &b, &c, &d, &out, &gain};
  static const te_fl_op_schema schema = {sizeof(te_fl_op_schema),
                                         0,
                                         sizeof(FiveArgs),
                                         offsetof(FiveArgs, out) + sizeof(void*),
                                         6,
                                         0,
                                         args,
                                         "test::five",
                                         "Sum of four.",
                                         "out = gain (a + b + c + d)",
                                         "tests"};
  return schema;
}

inline const te_fl_op_schema& save_schema(bool forward) {
  static const te_fl_arg_desc x = tensor_arg("x", TE_FL_IN, offsetof(SaveArgs, x));
  static const te_fl_arg_desc y = tensor_arg("y", TE_FL_OUT, offsetof(SaveArgs, y));
  static const auto record = [](te_fl_arg_role role) {
    te_fl_arg_desc s{};
    s.struct_size = sizeof s;
    s.type = TE_FL_ARG_SAVED;
    s.role = static_cast<uint8_t>(role);
    s.flags = TE_FL_ARG_OPTIONAL;
    s.offset = offsetof(SaveArgs, saved);
    s.name = "saved";
    return s;
  };
  static const te_fl_arg_desc written = record(TE_FL_OUT);
  static const te_fl_arg_desc read = record(TE_FL_IN);
  static const te_fl_arg_desc* const fwd[] = {&x, &y, &written};
  static const te_fl_arg_desc* const bwd[] = {&x, &y, &read};
  static const auto make = [](const char* name, const te_fl_arg_desc* const* args) {
    return te_fl_op_schema{sizeof(te_fl_op_schema),
                           0,
                           sizeof(SaveArgs),
                           sizeof(SaveArgs),
                           3,
                           0,
                           args,
                           name,
                           "s.",
                           "y = f(x)",
                           "tests"};
  };
  static const te_fl_op_schema forward_schema = make("test::save_fwd", fwd);
  static const te_fl_op_schema backward_schema = make("test::save_bwd", bwd);
  return forward ? forward_schema : backward_schema;
}

// A fake implementation: the test sets the status and the text that each of its functions returns.
// It must outlive its registration.
class Fake {
 public:
  using Body = std::function<te_fl_status(const te_fl_context&, const void*)>;

  explicit Fake(std::string id, const te_fl_op_schema& schema = five_schema())
      : id_(std::move(id)) {
    desc.op_name = schema.name;
    desc.impl_id = id_.c_str();
    desc.kind = id_.starts_with("vendor.")      ? TE_FL_KIND_VENDOR
                : id_.starts_with("reference.") ? TE_FL_KIND_REFERENCE
                                                : TE_FL_KIND_DEFAULT;
    desc.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_STATIC_SUPPORT | TE_FL_OP_DETERMINISTIC |
                 TE_FL_OP_IN_PLACE_OK;
    if (&schema == &five_schema()) desc.later_args = "gain";
    desc.device_types = uint64_t{1} << TE_FL_DEVICE_CPU;
    desc.self = this;
    desc.run = [](void* self, const te_fl_context* ctx, const void* args) {
      auto* f = static_cast<Fake*>(self);
      f->runs.fetch_add(1, std::memory_order_relaxed);
      return f->answer(f->run_body, f->run_status, f->run_text, ctx, args);
    };
    desc.schema = &schema;
  }

  // Gives the implementation a supports() that dispatch calls every time.
  Fake& with_supports() {
    desc.flags &= ~uint32_t{TE_FL_OP_STATIC_SUPPORT};
    desc.supports = [](void* self, const te_fl_context* ctx, const void* args) {
      auto* f = static_cast<Fake*>(self);
      f->asked.fetch_add(1, std::memory_order_relaxed);
      return f->answer(f->supports_body, f->supports_status, f->supports_text, ctx, args);
    };
    return *this;
  }

  // Gives the implementation a describe() function.
  Fake& with_describe(
      std::function<te_fl_status(const te_fl_context&, const te_fl_error_sink&)> f) {
    describe_body = std::move(f);
    desc.describe = [](void* self, const te_fl_context* ctx, const void*,
                       const te_fl_error_sink* text) {
      auto* f = static_cast<Fake*>(self);
      f->described.fetch_add(1, std::memory_order_relaxed);
      return f->describe_body(*ctx, *text);
    };
    return *this;
  }
  Fake& that_says(std::string words) {
    return with_describe([words](const te_fl_context&, const te_fl_error_sink& text) {
      text.write(text.host, words.c_str());
      return te_fl_status{TE_FL_OK};
    });
  }

  te_fl_op_desc desc;
  std::atomic<int> runs{0};
  std::atomic<int> described{0};
  std::atomic<int> asked{0};
  te_fl_status run_status = TE_FL_OK;
  std::string run_text;
  Body run_body;
  te_fl_status supports_status = TE_FL_OK;
  std::string supports_text;
  Body supports_body;
  std::function<te_fl_status(const te_fl_context&, const te_fl_error_sink&)> describe_body;

 private:
  static te_fl_status answer(const Body& body, te_fl_status status, const std::string& text,
                             const te_fl_context* ctx, const void* args) {
    if (body) return body(*ctx, args);
    if (status != TE_FL_OK && !text.empty() && ctx->errors != nullptr) {
      ctx->errors->write(ctx->errors->host, text.c_str());
    }
    return status;
  }
  std::string id_;
};

// Five tensors of one shape, and an argument struct that points to them.
struct FiveCall {
  explicit FiveCall(DType dtype = DType::kF32, std::vector<int64_t> shape = {2, 3}) {
    for (Tensor& t : tensors) t = Tensor::zeros(shape, dtype).value();
    args.a = tensors[0];
    args.b = tensors[1];
    args.c = tensors[2];
    args.d = tensors[3];
    args.out = tensors[4];
  }
  FiveCall(const FiveCall&) = delete;
  FiveCall& operator=(const FiveCall&) = delete;
  Tensor tensors[5];
  FiveArgs args;
};

}  // namespace te_fl::testing
