#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/op/op_table.hpp"

// libFuzzer target: the argument check reads nothing outside the struct that it gets, for any
// struct_size, counts, shapes and enum values. The input selects an op and fills the op's struct
// and the tensors that the struct points to. The check never reads element data, so data pointers
// may be arbitrary.
namespace {

using te_fl::core::CompiledOp;

const std::vector<std::unique_ptr<const CompiledOp>>& ops() {
  static const auto all = [] {
    std::vector<std::unique_ptr<const CompiledOp>> list;
    for (const te_fl_op_schema* schema : te_fl::core::catalogue()) {
      auto compiled = CompiledOp::compile(*schema);
      if (!compiled.ok()) std::abort();
      list.push_back(std::move(*compiled));
    }
    return list;
  }();
  return all;
}

struct Input {
  const uint8_t* data;
  size_t left;
  template <class T>
  T take() {
    T value{};
    const size_t n = std::min(left, sizeof(T));
    std::memcpy(&value, data, n);
    data += n;
    left -= n;
    return value;
  }
};

// A tensor whose fields all come from the input. The check reads ndim before shape and strides, so
// both stay within their arrays. struct_size may be smaller than the struct.
struct FuzzTensor {
  std::array<int64_t, 8> shape{}, strides{};
  te_fl_quant quant{};
  te_fl_tensor tensor{};
  void fill(Input& in) {
    static const te_fl_dtype dtypes[] = {{2, 32, 1}, {2, 16, 1}, {4, 16, 1}, {10, 8, 1},
                                         {12, 8, 1}, {0, 32, 1}, {1, 8, 1}};
    const uint8_t mode = in.take<uint8_t>();
    tensor.struct_size = (mode & 1) ? in.take<uint16_t>() : sizeof tensor;
    tensor.dl.data = reinterpret_cast<void*>(static_cast<uintptr_t>(in.take<uint16_t>()));
    tensor.dl.device = {(mode & 2) ? in.take<int8_t>() : 1, 0};
    tensor.dl.ndim = (mode & 4) ? in.take<int8_t>() : in.take<uint8_t>() % 5;
    if (mode & 8) {
      tensor.dl.dtype = in.take<te_fl_dtype>();
    } else {
      tensor.dl.dtype = dtypes[in.take<uint8_t>() % 7];
    }
    for (auto& s : shape) s = (mode & 16) ? in.take<int64_t>() : in.take<uint8_t>() % 8;
    for (auto& s : strides) s = in.take<int8_t>();
    tensor.dl.shape = shape.data();
    tensor.dl.strides = (mode & 32) ? strides.data() : nullptr;
    if (mode & 64) {
      quant = in.take<te_fl_quant>();
      if (mode & 128) quant.struct_size = sizeof quant;
      tensor.quant = &quant;
    }
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in{data, size};
  const CompiledOp& op = *ops()[in.take<uint16_t>() % ops().size()];
  const te_fl_op_schema& schema = op.schema();
  const uint32_t claimed = in.take<uint8_t>() < 32 ? in.take<uint16_t>() : schema.args_size;
  // Allocates exactly as many bytes as the struct's struct_size claims, so that the address
  // sanitizer reports a read beyond the end.
  const size_t bytes = std::min<size_t>(std::max<uint32_t>(claimed, sizeof(uint32_t)), 4096);
  std::unique_ptr<uint64_t[]> storage(new uint64_t[(bytes + 7) / 8]());
  auto* args = reinterpret_cast<uint8_t*>(storage.get());
  std::vector<std::unique_ptr<FuzzTensor>> tensors;
  std::vector<std::unique_ptr<std::vector<const te_fl_tensor*>>> lists;
  auto put = [&](uint32_t offset, const void* value, size_t n) {
    if (offset + n <= bytes) std::memcpy(args + offset, value, n);
  };
  auto tensor = [&]() -> const te_fl_tensor* {
    if (in.take<uint8_t>() < 16) return nullptr;
    tensors.push_back(std::make_unique<FuzzTensor>());
    tensors.back()->fill(in);
    return &tensors.back()->tensor;
  };
  te_fl_communicator ranks;
  int64_t integers[3];
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& a = *schema.args[i];
    if (a.type == TE_FL_ARG_TENSOR) {
      const te_fl_tensor* t = tensor();
      put(a.offset, &t, sizeof t);
    } else if (a.type == TE_FL_ARG_TENSOR_LIST) {
      auto list = std::make_unique<std::vector<const te_fl_tensor*>>();
      const int n = in.take<uint8_t>() % 4;
      for (int k = 0; k < n; ++k) list->push_back(tensor());
      const te_fl_tensor* const* first = list->data();
      const int64_t count = in.take<uint8_t>() < 8 ? std::min<int64_t>(in.take<int8_t>(), n) : n;
      put(a.offset, &first, sizeof first);
      put(a.count_offset, &count, sizeof count);
      lists.push_back(std::move(list));
    } else if (a.type == TE_FL_ARG_SAVED) {
      continue;  // stays null: the caller defines the struct of a saved record
    } else if (a.type == TE_FL_ARG_COMMUNICATOR) {
      ranks.struct_size = in.take<uint8_t>() < 200 ? sizeof ranks : in.take<uint32_t>();
      ranks.rank = in.take<int8_t>();
      ranks.size = in.take<int8_t>();
      ranks.id = in.take<uint8_t>();
      ranks.maker = in.take<uint8_t>() < 200 ? "acme" : nullptr;
      const te_fl_communicator* address = in.take<uint8_t>() < 200 ? &ranks : nullptr;
      put(a.offset, &address, sizeof address);
    } else if (a.type == TE_FL_ARG_I64_LIST) {
      const int64_t* first = integers;
      const int64_t count = in.take<uint8_t>() % 4;
      for (int64_t& value : integers) value = in.take<int16_t>();
      put(a.offset, &first, sizeof first);
      put(a.count_offset, &count, sizeof count);
    } else if (a.type == TE_FL_ARG_I64 || a.type == TE_FL_ARG_F64) {
      const auto v = in.take<uint64_t>();
      put(a.offset, &v, sizeof v);
    } else {
      const uint32_t v = in.take<uint8_t>() < 200 ? in.take<uint8_t>() % 4 : in.take<uint32_t>();
      put(a.offset, &v, sizeof v);
    }
  }
  std::memcpy(args, &claimed, sizeof claimed);
  te_fl::core::Signature signature;
  const bool good = op.check(args, signature);
  // The fast check and the full check agree, and every error has a message.
  const te_fl::Status status = op.check_status(args);
  if (good != status.ok() || (!good && status.message().empty())) std::abort();
  return 0;
}
