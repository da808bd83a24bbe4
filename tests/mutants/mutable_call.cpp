#include "mutable_call.hpp"

#include <algorithm>
#include <stdexcept>

#include "view.hpp"

namespace te_fl::mutants {
namespace {

const char* const kDtypes[] = {"f64",    "f32",    "f16", "bf16", "f8e4m3", "f8e5m2",
                               "f4e2m1", "f8e8m0", "i8",  "i16",  "i32",    "i64",
                               "u8",     "u16",    "u32", "u64",  "bool"};
const char* const kScalings[] = {"none", "tensor", "block1x128", "block128x128", "mxfp8", "nvfp4"};

}  // namespace

bool is_tensor(const te_fl_arg_desc& arg) {
  return arg.type == TE_FL_ARG_TENSOR || arg.type == TE_FL_ARG_TENSOR_LIST;
}

MutableCall::MutableCall(const te_fl_op_schema& schema, const void* args)
    : schema_(schema), memory_(schema.args_size / 8 + 1) {
  uint32_t size;
  std::memcpy(&size, args, sizeof size);
  std::memcpy(memory_.data(), args, std::min(size, schema.args_size));
}

const te_fl_arg_desc& MutableCall::argument(const std::string& name) const {
  for (uint32_t i = 0; i < schema_.arg_count; ++i)
    if (name == schema_.args[i]->name) return *schema_.args[i];
  throw std::invalid_argument(std::string(schema_.name) + " has no argument " + name);
}

std::vector<const te_fl_arg_desc*> MutableCall::outputs() const {
  std::vector<const te_fl_arg_desc*> found;
  for (uint32_t i = 0; i < schema_.arg_count; ++i)
    if (schema_.args[i]->role != TE_FL_IN && is_tensor(*schema_.args[i]))
      found.push_back(schema_.args[i]);
  return found;
}

std::vector<const te_fl_tensor*> MutableCall::tensors(const te_fl_arg_desc& arg) const {
  if (arg.type == TE_FL_ARG_TENSOR) {
    const auto* tensor = get<const te_fl_tensor*>(arg.offset);
    return tensor == nullptr ? std::vector<const te_fl_tensor*>() : std::vector{tensor};
  }
  if (arg.type != TE_FL_ARG_TENSOR_LIST) return {};
  const auto* list = get<const te_fl_tensor* const*>(arg.offset);
  return {list, list + get<int64_t>(arg.count_offset)};
}

te_fl_tensor& MutableCall::replace(const te_fl_arg_desc& arg, size_t i,
                                   const te_fl_tensor& tensor) {
  te_fl_tensor& kept = tensors_.emplace_back(tensor);
  if (arg.type == TE_FL_ARG_TENSOR) {
    put<const te_fl_tensor*>(arg.offset, &kept);
  } else {
    auto& list = lists_.emplace_back(tensors(arg));
    list[i] = &kept;
    put<const te_fl_tensor* const*>(arg.offset, list.data());
  }
  return kept;
}

void* MutableCall::memory(size_t bytes) { return blocks_.emplace_back(bytes / 8 + 1).data(); }

double MutableCall::number(const te_fl_arg_desc& arg) const {
  switch (arg.type) {
    case TE_FL_ARG_I64:
      return static_cast<double>(get<int64_t>(arg.offset));
    case TE_FL_ARG_F32:
      return static_cast<double>(get<float>(arg.offset));
    case TE_FL_ARG_F64:
      return get<double>(arg.offset);
    default:
      return get<int32_t>(arg.offset);
  }
}

void MutableCall::set_number(const te_fl_arg_desc& arg, double value) {
  switch (arg.type) {
    case TE_FL_ARG_I64:
      return put(arg.offset, static_cast<int64_t>(value));
    case TE_FL_ARG_F32:
      return put(arg.offset, static_cast<float>(value));
    case TE_FL_ARG_F64:
      return put(arg.offset, value);
    default:
      return put(arg.offset, static_cast<int32_t>(value));
  }
}

void MutableCall::neutralise(const te_fl_arg_desc& arg) {
  switch (arg.type) {
    case TE_FL_ARG_TENSOR_LIST:
    case TE_FL_ARG_I64_LIST:
      put<int64_t>(arg.count_offset, 0);
      [[fallthrough]];
    case TE_FL_ARG_TENSOR:
    case TE_FL_ARG_SAVED:
      return put<void*>(arg.offset, nullptr);
    default:
      return set_number(arg, arg.neutral);
  }
}

bool MutableCall::is_present(const te_fl_arg_desc& arg) const {
  if (arg.type == TE_FL_ARG_I64_LIST) return get<int64_t>(arg.count_offset) != 0;
  if (arg.type == TE_FL_ARG_SAVED) return get<void*>(arg.offset) != nullptr;
  return is_tensor(arg) ? !tensors(arg).empty() : number(arg) != arg.neutral;
}

bool MutableCall::in_place(const te_fl_arg_desc& arg) const {
  const auto out = tensors(arg);
  for (uint32_t i = 0; i < schema_.arg_count; ++i) {
    if (schema_.args[i]->role != TE_FL_IN || !is_tensor(*schema_.args[i])) continue;
    for (const te_fl_tensor* in : tensors(*schema_.args[i]))
      for (const te_fl_tensor* o : out)
        if (backend::numel(*o) > 0 && o->dl.data != nullptr && o->dl.data == in->dl.data)
          return true;
  }
  return false;
}

bool MutableCall::fulfils(const Condition& c) const {
  const te_fl_arg_desc& arg = argument(c.argument);
  if (c.verb == "given") return is_present(arg);
  if (c.verb == "absent") return !is_present(arg);
  if (c.verb == "in_place") return in_place(arg);
  if (c.verb == "==") return number(arg) == c.number;
  if (c.verb == ">") return number(arg) > c.number;
  for (const te_fl_tensor* t : tensors(arg)) {
    const backend::Matrix matrix = backend::as_matrix(*t);
    const int dtype = dtype_index(t->dl.dtype);
    const auto more = [&](int64_t n) { return static_cast<double>(n) > c.number; };
    const bool holds = c.verb == "elements"  ? more(backend::numel(*t))
                       : c.verb == "rows"    ? more(matrix.rows)
                       : c.verb == "columns" ? more(matrix.cols)
                                             : (dtype >= 0 && c.word == kDtypes[dtype]) ||
                                                   c.word == kScalings[backend::scaling(*t)];
    if (holds) return true;
  }
  return false;
}

}  // namespace te_fl::mutants
