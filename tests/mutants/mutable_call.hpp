#pragma once

// A copy of an op's argument struct whose arguments can be read and replaced by name.

#include <cstdint>
#include <cstring>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "mutation.hpp"
#include "te_fl/plugin.h"

namespace te_fl::mutants {

class MutableCall {
 public:
  MutableCall(const te_fl_op_schema& schema, const void* args);

  void* args() { return memory_.data(); }
  // The argument's description. Throws std::invalid_argument if the op has none of the name.
  const te_fl_arg_desc& argument(const std::string& name) const;
  // The arguments that the op writes and that are tensors or lists.
  std::vector<const te_fl_arg_desc*> outputs() const;
  // The tensors of an argument that is a tensor or a list; empty if it is absent.
  std::vector<const te_fl_tensor*> tensors(const te_fl_arg_desc& arg) const;
  // Replaces tensor i of the argument. The call keeps `tensor`.
  te_fl_tensor& replace(const te_fl_arg_desc& arg, size_t i, const te_fl_tensor& tensor);
  // Memory that lives as long as this object.
  void* memory(size_t bytes);
  double number(const te_fl_arg_desc& arg) const;
  void set_number(const te_fl_arg_desc& arg, double value);
  // Removes a tensor or a list, or sets a number to its neutral value.
  void neutralise(const te_fl_arg_desc& arg);
  bool fulfils(const Condition& condition) const;

 private:
  template <class T>
  T get(size_t offset) const {
    T value;
    std::memcpy(&value, bytes() + offset, sizeof value);
    return value;
  }
  template <class T>
  void put(size_t offset, T value) {
    std::memcpy(reinterpret_cast<char*>(memory_.data()) + offset, &value, sizeof value);
  }
  const char* bytes() const { return reinterpret_cast<const char*>(memory_.data()); }
  bool is_present(const te_fl_arg_desc& arg) const;
  bool in_place(const te_fl_arg_desc& arg) const;

  const te_fl_op_schema& schema_;
  std::vector<uint64_t> memory_;
  std::list<te_fl_tensor> tensors_;
  std::list<std::vector<const te_fl_tensor*>> lists_;
  std::list<std::vector<uint64_t>> blocks_;
};

bool is_tensor(const te_fl_arg_desc& arg);

}  // namespace te_fl::mutants
