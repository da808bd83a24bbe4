#include "registry/in_place.hpp"

#include <algorithm>
#include <cstring>

#include "registry/arguments.hpp"

namespace te_fl::registry {
namespace {

const char* first_byte(const te_fl_tensor* t) noexcept {
  if (t == nullptr || t->dl.data == nullptr) return nullptr;
  return static_cast<const char*>(t->dl.data) + t->dl.byte_offset;
}

bool same_memory(const te_fl_arg_desc& a, const te_fl_arg_desc& b, const void* args) noexcept {
  const auto same = [](const te_fl_tensor* x, const te_fl_tensor* y) {
    return first_byte(x) != nullptr && first_byte(x) == first_byte(y);
  };
  if (a.type == TE_FL_ARG_TENSOR && b.type == TE_FL_ARG_TENSOR) {
    return same(tensor_argument(a, args), tensor_argument(b, args));
  }
  if (a.type != TE_FL_ARG_TENSOR_LIST || b.type != TE_FL_ARG_TENSOR_LIST) return false;
  const TensorList x = list_argument(a, args), y = list_argument(b, args);
  for (int64_t i = 0; i < std::min(x.count, y.count); ++i) {
    if (same(x.data[i], y.data[i])) return true;
  }
  return false;
}

// True if `name` is one of the words of `list`.
bool lists_word(const char* list, const char* name) noexcept {
  const size_t length = std::strlen(name);
  for (const char* at = list; (at = std::strstr(at, name)) != nullptr; at += length) {
    const bool begins = at == list || at[-1] == ' ';
    if (begins && (at[length] == ' ' || at[length] == '\0')) return true;
  }
  return false;
}

}  // namespace

bool allows_in_place(const te_fl_op_schema& schema) noexcept {
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& out = *schema.args[i];
    if (out.role != TE_FL_IN && out.aliases != nullptr && *out.aliases != '\0') return true;
  }
  return false;
}

std::string shared_in_place(const te_fl_op_schema& schema, const void* args) {
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& out = *schema.args[i];
    if (out.role == TE_FL_IN || out.aliases == nullptr) continue;
    for (uint32_t j = 0; j < schema.arg_count; ++j) {
      const te_fl_arg_desc& in = *schema.args[j];
      if (i == j || !lists_word(out.aliases, in.name) || !same_memory(out, in, args)) continue;
      return std::string("output '") + out.name + "' has the memory of '" + in.name + "'";
    }
  }
  return {};
}

}  // namespace te_fl::registry
