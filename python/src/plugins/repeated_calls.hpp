// Calls that repeat an earlier one with other tensors (te_fl.OpImpl.repeat).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ops/op_binding.hpp"
#include "plugins/argument_reader.hpp"
#include "plugins/call_arguments.hpp"
#include "py/lent_tensor.hpp"
#include "py/py.hpp"
#include "te_fl/plugin.h"

namespace te_fl::python {

// A call's tensors and the parts of its quantised tensors, in the order of its arguments, and its
// signature: all else that a function of the tensors may depend on.
class FlatCall {
 public:
  // Returns false, with this object in any state, for calls that are not repeated: with tensors of
  // FP4, quantised tensors without codes, or long lists.
  bool set(const OpBinding& op, const Wanted& wanted, const te_fl_context& ctx, const void* args);

  std::string_view signature() const noexcept {
    return {reinterpret_cast<const char*>(words_.data()), words_.size() * sizeof words_[0]};
  }
  // A list of torch.Tensor that view the call's memory. Throws PythonError.
  Ref tensors(const std::shared_ptr<Lending>& lending) const;

 private:
  static constexpr int kMaxRank = 8;
  struct Part {
    te_fl_dltensor dl;
    int64_t shape[kMaxRank], strides[kMaxRank];
  };
  void add(uint64_t word) { words_.push_back(word); }
  bool add_argument(const BoundArg& arg, const ArgumentReader& args);
  bool add_tensor(const te_fl_tensor& t);
  bool add_part(const te_fl_dltensor& dl);

  std::vector<uint64_t> words_;
  std::vector<Part> parts_;
};

// Keeps the state of an implementation's signatures. Guarded by the interpreter's lock.
class RepeatedCalls {
 public:
  struct Entry {
    bool accepted = false;  // by supports()
    // A function is made by the second call, so that a program whose shapes always differ does not
    // pay for functions that it never uses.
    bool ran = false;
    bool tried = false;
    PyObject* function = nullptr;  // owned; null: there is none
  };
  RepeatedCalls() = default;
  ~RepeatedCalls() { clear(); }
  RepeatedCalls(const RepeatedCalls&) = delete;
  RepeatedCalls& operator=(const RepeatedCalls&) = delete;

  // The entry of a signature. Valid until Python code runs or at() is called again.
  Entry& at(std::string_view signature);
  // Keeps the function. An object that cannot be called: the signature's calls are not repeated.
  void keep(std::string_view signature, PyObject* function);

 private:
  static constexpr size_t kMost = 512;  // beyond it all are forgotten
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const noexcept {
      return std::hash<std::string_view>()(text);
    }
  };
  void clear() noexcept;

  std::unordered_map<std::string, Entry, Hash, std::equal_to<>> entries_;
};

}  // namespace te_fl::python
