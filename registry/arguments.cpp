#include "registry/arguments.hpp"

#include <algorithm>

#include "te_fl/tensor.hpp"

namespace te_fl::registry {

std::string describe_arguments(const te_fl_op_schema& schema, const void* args) {
  constexpr int64_t kShown = 3;  // maximum number of list elements in the text
  std::string out;
  const auto add = [&](const std::string& text) { out += (out.empty() ? "" : ", ") + text; };
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    if (arg.type == TE_FL_ARG_TENSOR) {
      if (const te_fl_tensor* t = tensor_argument(arg, args))
        add(std::string(arg.name) + " " + describe(t));
    } else if (arg.type == TE_FL_ARG_TENSOR_LIST) {
      const TensorList list = list_argument(arg, args);
      std::string items;
      for (int64_t k = 0; k < std::min(list.count, kShown); ++k) {
        items += (k == 0 ? "" : "; ") + describe(list.data[k]);
      }
      if (list.count > kShown) items += "; ...";
      if (list.count > 0)
        add(std::string(arg.name) + " (" + std::to_string(list.count) + ": " + items + ")");
    } else if (arg.type == TE_FL_ARG_I64_LIST) {
      const IntegerList list = integers_argument(arg, args);
      std::string items;
      for (int64_t k = 0; k < std::min(list.count, kShown); ++k) {
        items += (k == 0 ? "" : "; ") + std::to_string(list.data[k]);
      }
      if (list.count > kShown) items += "; ...";
      if (list.count > 0)
        add(std::string(arg.name) + " (" + std::to_string(list.count) + ": " + items + ")");
    }
  }
  return out.empty() ? "no tensors" : out;
}

}  // namespace te_fl::registry
