// A plan is used for every call with the same key. So the key must contain everything that
// prepare() may read of a call, except what exempt() below lists with a reason. Tests every op of
// the catalogue, member by member.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/op/call_memo.hpp"
#include "core/op/op_table.hpp"
#include "registry/arguments.hpp"
#include "registry/plan_cache.hpp"

namespace te_fl::registry {
namespace {

// A new member of one of these structs must be added to core/op/call_words.hpp and to the lists
// below.
static_assert(sizeof(te_fl_tensor) == 64);
static_assert(sizeof(te_fl_quant) == 64);
static_assert(sizeof(te_fl_saved) == 24);
static_assert(sizeof(te_fl_context) == 88);

te_fl_context context_with(const te_fl_rng* rng) {
  te_fl_context context{};
  context.rng = rng;
  return context;
}

// A call of any op with every argument given. Its tensors have metadata only, because no
// implementation runs.
class AnyCall {
 public:
  struct Whole {
    int64_t shape[2] = {4, 6};
    int64_t strides[2] = {6, 1};
    te_fl_quant quant;
    te_fl_tensor tensor;
  };

  explicit AnyCall(const te_fl_op_schema& op) : schema(op), args_(op.args_size / 8 + 1) {
    put(0, schema.args_size);
    for (uint32_t i = 0; i < schema.arg_count; ++i) {
      const te_fl_arg_desc& arg = *schema.args[i];
      if (arg.type == TE_FL_ARG_TENSOR) {
        put(arg.offset, &tensor(std::string(arg.name)));
      } else if (arg.type == TE_FL_ARG_TENSOR_LIST) {
        auto& list = lists_.emplace_back();
        for (int k = 0; k < 2; ++k) list.push_back(&tensor(arg.name + ("#" + std::to_string(k))));
        put(arg.offset, list.data());
        put(arg.count_offset, int64_t{2});
      } else if (arg.type == TE_FL_ARG_SAVED) {
        record.storage = &tensor(arg.name);
        record.producer = "vendor.a";
        record_offset_ = arg.offset;
        put(arg.offset, &record);
      } else if (arg.type == TE_FL_ARG_COMMUNICATOR) {
        ranks.device = {TE_FL_DEVICE_CUDA, 0};
        ranks.size = 4;
        ranks.id = 7;
        ranks.maker = "acme";
        put(arg.offset, &ranks);
      }
    }
    context.struct_size = sizeof context;
    context.device = {TE_FL_DEVICE_CUDA, 0};
  }

  template <class T>
  void put(uint32_t offset, T value) {
    std::memcpy(reinterpret_cast<char*>(args_.data()) + offset, &value, sizeof value);
  }
  std::string key() const {
    PlanKey made;
    made.set(compiled(), args_.data(), context);
    return std::string(made.text());
  }

  const void* args() const { return args_.data(); }
  bool has_record() const { return record_offset_ != 0; }
  void drop_record() { put(record_offset_, static_cast<te_fl_saved*>(nullptr)); }
  const core::CompiledOp& compiled() const {
    static std::map<const te_fl_op_schema*, std::unique_ptr<const core::CompiledOp>> all;
    auto& op = all[&schema];
    if (op == nullptr) op = core::CompiledOp::compile(schema).value();
    return *op;
  }

  const te_fl_op_schema& schema;
  te_fl_rng rng;
  te_fl_context context = context_with(&rng);
  te_fl_saved record;
  te_fl_communicator ranks;
  std::map<std::string, Whole> tensors;  // in a map, so that their addresses stay valid

 private:
  te_fl_tensor& tensor(const std::string& name) {
    Whole& w = tensors[name];
    // Gives each tensor an address of its own, aligned more strictly than a key can record.
    const auto base = (uintptr_t{1} << 30) * (tensors.size() + 1);
    const auto at = [&](uintptr_t offset) { return reinterpret_cast<void*>(base + offset); };
    w.quant.scaling = TE_FL_SCALING_TENSOR;
    w.quant.columnwise_data = at(1 << 20);
    w.quant.scale_inv = at(2 << 20);
    w.quant.columnwise_scale_inv = at(3 << 20);
    w.quant.amax = static_cast<float*>(at(4 << 20));
    w.quant.scale = static_cast<float*>(at(5 << 20));
    w.tensor.dl.data = at(0);
    w.tensor.dl.device = {TE_FL_DEVICE_CUDA, 0};
    w.tensor.dl.ndim = 2;
    w.tensor.dl.dtype = {TE_FL_CODE_FLOAT, 32, 1};
    w.tensor.dl.shape = w.shape;
    w.tensor.dl.strides = w.strides;
    w.tensor.quant = &w.quant;
    return w.tensor;
  }
  std::vector<uint64_t> args_;
  uint32_t record_offset_ = 0;
  std::deque<std::vector<const te_fl_tensor*>> lists_;
};

using Change = std::function<void(AnyCall&)>;
using Changes = std::vector<std::pair<std::string, Change>>;

template <class T>
T* moved(T* pointer, ptrdiff_t bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) + static_cast<uintptr_t>(bytes));
}

// Returns one change for every member of a tensor.
Changes list_changes(const std::string& name) {
  using W = AnyCall::Whole;
  const std::vector<std::pair<std::string, std::function<void(W&)>>> members = {
      {"struct_size", [](W& w) { w.tensor.struct_size += 8; }},
      {"provider", [](W& w) { w.tensor.provider = 3; }},
      {"data: alignment", [](W& w) { w.tensor.dl.data = moved(w.tensor.dl.data, 16); }},
      {"data: absence", [](W& w) { w.tensor.dl.data = nullptr; }},
      {"byte_offset: alignment", [](W& w) { w.tensor.dl.byte_offset = 32; }},
      {"device type", [](W& w) { w.tensor.dl.device.type = TE_FL_DEVICE_CUDA_HOST; }},
      {"device index", [](W& w) { w.tensor.dl.device.index = 1; }},
      {"ndim", [](W& w) { w.tensor.dl.ndim = 1; }},
      {"dtype code", [](W& w) { w.tensor.dl.dtype.code = TE_FL_CODE_BFLOAT; }},
      {"dtype bits", [](W& w) { w.tensor.dl.dtype.bits = 16; }},
      {"dtype lanes", [](W& w) { w.tensor.dl.dtype.lanes = 2; }},
      {"shape[0]", [](W& w) { w.shape[0] = 5; }},
      {"shape[1]", [](W& w) { w.shape[1] = 7; }},
      {"strides[0]", [](W& w) { w.strides[0] = 8; }},
      {"strides[1]", [](W& w) { w.strides[1] = 2; }},
      {"strides: absence", [](W& w) { w.tensor.dl.strides = nullptr; }},
      {"quant: absence", [](W& w) { w.tensor.quant = nullptr; }},
      {"quant struct_size", [](W& w) { w.quant.struct_size += 8; }},
      {"quant scaling", [](W& w) { w.quant.scaling = TE_FL_SCALING_MXFP8; }},
      {"quant flags", [](W& w) { w.quant.flags = 1; }},
      {"quant amax_epsilon", [](W& w) { w.quant.amax_epsilon = 0.5f; }},
      {"columnwise_data: alignment",
       [](W& w) { w.quant.columnwise_data = moved(w.quant.columnwise_data, 16); }},
      {"columnwise_data: absence", [](W& w) { w.quant.columnwise_data = nullptr; }},
      {"scale_inv: alignment", [](W& w) { w.quant.scale_inv = moved(w.quant.scale_inv, 16); }},
      {"scale_inv: absence", [](W& w) { w.quant.scale_inv = nullptr; }},
      {"columnwise_scale_inv: alignment",
       [](W& w) { w.quant.columnwise_scale_inv = moved(w.quant.columnwise_scale_inv, 16); }},
      {"columnwise_scale_inv: absence", [](W& w) { w.quant.columnwise_scale_inv = nullptr; }},
      {"amax: alignment", [](W& w) { w.quant.amax = moved(w.quant.amax, 16); }},
      {"amax: absence", [](W& w) { w.quant.amax = nullptr; }},
      {"columnwise_amax: presence", [](W& w) { w.quant.columnwise_amax = w.quant.amax; }},
      {"scale: alignment", [](W& w) { w.quant.scale = moved(w.quant.scale, 16); }},
      {"scale: absence", [](W& w) { w.quant.scale = nullptr; }},
  };
  Changes all;
  for (const auto& member : members) {
    const auto& change = member.second;
    const std::string what = member.first;
    all.emplace_back(name + " " + what, [name, change](AnyCall& c) { change(c.tensors.at(name)); });
  }
  return all;
}

Changes list_changes(const te_fl_arg_desc& arg) {
  const std::string name = arg.name;
  const uint32_t at = arg.offset;
  switch (arg.type) {
    case TE_FL_ARG_TENSOR: {
      Changes all = list_changes(name);
      all.emplace_back(name + ": absence",
                       [at](AnyCall& c) { c.put(at, static_cast<te_fl_tensor*>(nullptr)); });
      return all;
    }
    case TE_FL_ARG_TENSOR_LIST: {
      Changes all = list_changes(name + "#0");
      const Changes second = list_changes(name + "#1");
      all.insert(all.end(), second.begin(), second.end());
      const uint32_t count = arg.count_offset;
      all.emplace_back(name + ": count", [count](AnyCall& c) { c.put(count, int64_t{1}); });
      return all;
    }
    case TE_FL_ARG_SAVED: {
      Changes all = list_changes(name);  // changes of the storage
      all.emplace_back(name + ": storage's absence",
                       [](AnyCall& c) { c.record.storage = nullptr; });
      all.emplace_back(name + ": absence",
                       [at](AnyCall& c) { c.put(at, static_cast<te_fl_saved*>(nullptr)); });
      all.emplace_back(name + ": struct_size", [](AnyCall& c) { c.record.struct_size += 8; });
      if (arg.role == TE_FL_IN) {
        all.emplace_back(name + ": opaque", [](AnyCall& c) { c.record.opaque = 1; });
        all.emplace_back(name + ": producer", [](AnyCall& c) { c.record.producer = "vendor.b"; });
        all.emplace_back(name + ": a longer producer",
                         [](AnyCall& c) { c.record.producer = "vendor.a_of_another_name"; });
        all.emplace_back(name + ": producer's absence",
                         [](AnyCall& c) { c.record.producer = nullptr; });
      }
      return all;
    }
    case TE_FL_ARG_COMMUNICATOR:
      return {{name + ": absence",
               [at](AnyCall& c) { c.put(at, static_cast<te_fl_communicator*>(nullptr)); }},
              {name + ": device type", [](AnyCall& c) { c.ranks.device.type = TE_FL_DEVICE_CPU; }},
              {name + ": device index", [](AnyCall& c) { c.ranks.device.index = 1; }},
              {name + ": rank", [](AnyCall& c) { c.ranks.rank = 1; }},
              {name + ": size", [](AnyCall& c) { c.ranks.size = 2; }},
              {name + ": id", [](AnyCall& c) { c.ranks.id = 8; }}};
    case TE_FL_ARG_I64:
      return {{name, [at](AnyCall& c) { c.put(at, int64_t{1} << 40); }}};
    case TE_FL_ARG_F64:
      return {{name, [at](AnyCall& c) { c.put(at, 0x1p-1060); }}};
    case TE_FL_ARG_F32:
      return {{name, [at](AnyCall& c) { c.put(at, -0.0f); }}};
    default:
      return {{name, [at](AnyCall& c) { c.put(at, int32_t{1}); }}};
  }
}

// Returns changes that move the output `out` to the address of another output.
Changes list_sharing_changes(const te_fl_op_schema& schema, const te_fl_arg_desc& out) {
  Changes all;
  const auto begins_at = [&](const std::string& to, const std::string& from) {
    all.emplace_back(to + " begins where " + from + " does", [to, from](AnyCall& c) {
      c.tensors.at(to).tensor.dl.data = c.tensors.at(from).tensor.dl.data;
    });
  };
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& other = *schema.args[i];
    if (&other == &out || other.type != out.type || out.role == TE_FL_IN) continue;
    if (out.type == TE_FL_ARG_TENSOR) begins_at(out.name, other.name);
    if (out.type == TE_FL_ARG_TENSOR_LIST) {
      for (const char* k : {"#0", "#1"})
        begins_at(out.name + std::string(k), other.name + std::string(k));
    }
  }
  return all;
}

Changes changes_of_context() {
  return {
      {"context: deterministic", [](AnyCall& c) { c.context.flags |= TE_FL_CALL_DETERMINISTIC; }},
      {"context: device type", [](AnyCall& c) { c.context.device.type = TE_FL_DEVICE_CPU; }},
      {"context: device index", [](AnyCall& c) { c.context.device.index = 1; }},
      {"context: provider", [](AnyCall& c) { c.context.provider = 2; }},
      {"context: seed on the device",
       [](AnyCall& c) { c.rng.seed_address = reinterpret_cast<const uint64_t*>(4096); }},
      {"context: offset on the device",
       [](AnyCall& c) { c.rng.offset_address = reinterpret_cast<const uint64_t*>(4096); }},
  };
}

// Returns the changes that do not alter the plan, so prepare() must not depend on them.
Changes exempt(const te_fl_op_schema& schema) {
  Changes all = {
      // A captured call uses the plan of an equal earlier call.
      {"context: capturing", [](AnyCall& c) { c.context.flags |= TE_FL_CALL_CAPTURING; }},
      // One plan is used on all streams of a device, and with different random numbers in each
      // call.
      {"context: stream", [](AnyCall& c) { c.context.stream = &c; }},
      {"context: seed", [](AnyCall& c) { c.rng.seed = 7; }},
      {"context: offset", [](AnyCall& c) { c.rng.offset = 8; }},
      // The error sink belongs to the host and to one call.
      {"context: error sink",
       [](AnyCall& c) { c.context.errors = reinterpret_cast<const te_fl_error_sink*>(4096); }},
  };
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    const std::string name = arg.name;
    if (arg.type == TE_FL_ARG_TENSOR) {
      // Addresses of tensors and scales: prepare() must not read the data there.
      all.emplace_back(name + " data", [name](AnyCall& c) {
        te_fl_tensor& t = c.tensors.at(name).tensor;
        t.dl.data = moved(t.dl.data, 1 << 26);
      });
      all.emplace_back(name + " scale_inv", [name](AnyCall& c) {
        te_fl_quant& q = c.tensors.at(name).quant;
        q.scale_inv = moved(q.scale_inv, 1 << 26);
      });
    } else if (arg.type == TE_FL_ARG_SAVED && arg.role != TE_FL_IN) {
      // A saved record that a forward fills in may have stale contents from earlier use.
      all.emplace_back(name + ": opaque", [](AnyCall& c) { c.record.opaque = 1; });
      all.emplace_back(name + ": producer", [](AnyCall& c) { c.record.producer = "vendor.b"; });
    }
  }
  return all;
}

class PlanKeyOf : public ::testing::TestWithParam<const te_fl_op_schema*> {};

TEST_P(PlanKeyOf, HasAllThatPrepareMayReadAndNothingElse) {
  const te_fl_op_schema& schema = *GetParam();
  const std::string plain = AnyCall(schema).key();
  ASSERT_EQ(AnyCall(schema).key(), plain);
  Changes all = changes_of_context();
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    for (const auto& make :
         {list_changes(*schema.args[i]), list_sharing_changes(schema, *schema.args[i])}) {
      all.insert(all.end(), make.begin(), make.end());
    }
  }
  std::map<std::string, std::string> seen{{plain, "the call itself"}};
  for (const auto& [what, change] : all) {
    AnyCall call(schema);
    change(call);
    const auto [at, added] = seen.emplace(call.key(), what);
    EXPECT_TRUE(added || at->second != "the call itself") << schema.name << ": " << what;
  }
  for (const auto& [what, change] : exempt(schema)) {
    AnyCall call(schema);
    change(call);
    EXPECT_EQ(call.key(), plain) << schema.name << ": " << what;
  }
}

struct Known {
  uint64_t filled = 0;
  bool has_plan = true;
  bool has_answer = true;
  void forget_plan() { has_plan = false; }
  void forget_answer() { has_answer = false; }
};

// A thread's memo of a call and its plan matches only calls with an equal plan key. The memo of a
// supports() result matches only an identical call.
TEST_P(PlanKeyOf, IsThatOfEveryCallThatIsKnownByItsPlan) {
  const te_fl_op_schema& schema = *GetParam();
  Changes all;
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    for (const auto& make :
         {list_changes(*schema.args[i]), list_sharing_changes(schema, *schema.args[i])}) {
      all.insert(all.end(), make.begin(), make.end());
    }
  }
  const auto elsewhere = exempt(schema);
  all.insert(all.end(), elsewhere.begin(), elsewhere.end());
  int known = 0;
  for (const auto& [what, change] : all) {
    AnyCall call(schema);
    if (call.has_record()) call.drop_record();  // calls with a saved record are never remembered
    const std::string before = call.key();
    core::CallMemo<Known> memo;
    uint64_t hash = 0;
    ASSERT_EQ(memo.find(call.compiled().layout(), call.args(), hash), nullptr);
    ASSERT_NE(memo.put(call.compiled().layout(), call.args(), hash, {}), nullptr) << schema.name;
    change(call);
    for (const char* when : {"at once", "again"}) {
      const auto* slot = memo.find(call.compiled().layout(), call.args(), hash);
      if (slot == nullptr) continue;
      // The memo does not compare the context, because dispatch does; and this call has no saved
      // record.
      const bool same = what.starts_with("context: ") || what.starts_with("saved");
      EXPECT_TRUE(same || !slot->known.has_answer) << schema.name << ": " << what << ", " << when;
      if (!slot->known.has_plan) continue;
      ++known;
      EXPECT_EQ(call.key(), before) << schema.name << ": " << what << ", " << when;
    }
  }
  // The memo does not recognise a call with lists if the tensors' addresses differ.
  const bool lists = !AnyCall(schema).compiled().layout().lists.empty();
  EXPECT_TRUE(known > 0 || lists) << schema.name;
}

std::vector<const te_fl_op_schema*> all_ops() {
  const auto catalogue = core::catalogue();
  return {catalogue.begin(), catalogue.end()};
}

INSTANTIATE_TEST_SUITE_P(Catalogue, PlanKeyOf, ::testing::ValuesIn(all_ops()),
                         [](const auto& info) { return std::string(info.param->name); });

// A member that lies wholly or partly beyond the struct_size of the argument struct counts as
// absent, and none of its bytes is read.
TEST_P(PlanKeyOf, TakesMembersThatAreCutOffForAbsent) {
  const te_fl_op_schema& schema = *GetParam();
  AnyCall call(schema);
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    const bool scalar = arg.type >= TE_FL_ARG_BOOL && arg.type <= TE_FL_ARG_ENUM;
    if (scalar && scalar_bytes(arg) == 8) call.put(arg.offset, uint64_t{0x0101010101010101});
  }
  const auto make_key = [&](const std::vector<std::byte>& bytes) {
    const auto exact = std::make_unique<std::byte[]>(bytes.size());
    std::memcpy(exact.get(), bytes.data(), bytes.size());
    PlanKey made;
    made.set(call.compiled(), exact.get(), call.context);
    return std::string(made.text());
  };
  for (uint32_t size = 8; size < schema.args_size; size += 4) {
    std::vector<std::byte> bytes(size);
    std::memcpy(bytes.data(), call.args(), size);
    std::memcpy(bytes.data(), &size, sizeof size);
    std::vector<std::byte> absent = bytes;
    const auto clear = [&](uint32_t offset, size_t width) {
      if (offset >= size || offset + width <= size) return;
      std::fill(absent.begin() + offset, absent.end(), std::byte{0});
    };
    for (uint32_t i = 0; i < schema.arg_count; ++i) {
      const te_fl_arg_desc& arg = *schema.args[i];
      const bool scalar = arg.type >= TE_FL_ARG_BOOL && arg.type <= TE_FL_ARG_ENUM;
      clear(arg.offset, scalar ? scalar_bytes(arg) : sizeof(void*));
      if (arg.type == TE_FL_ARG_TENSOR_LIST || arg.type == TE_FL_ARG_I64_LIST) {
        clear(arg.count_offset, sizeof(int64_t));
      }
    }
    EXPECT_EQ(make_key(bytes), make_key(absent)) << schema.name << ": of " << size << " bytes";
  }
}

TEST(PlanKeyArguments, ALongerStructHasAKeyOfItsOwn) {
  // A newer caller's additional members are part of the key, because an implementation newer than
  // the host may read them.
  const te_fl_op_schema& schema = *core::catalogue()[0];
  AnyCall call(schema);
  const std::string plain = call.key();
  call.put(0, schema.args_size + 8);
  EXPECT_NE(call.key(), plain);
}

}  // namespace
}  // namespace te_fl::registry
