// The schema of one op with its names as Python objects, prepared once per op.
#pragma once

#include <memory>
#include <vector>

#include "py/py.hpp"
#include "te_fl/op_outputs.hpp"
#include "te_fl/op_registry.hpp"

namespace te_fl::python {

struct BoundArg {
  const te_fl_arg_desc* desc;
  PyObject* name;                       // interned, never freed
  std::vector<std::string> enum_names;  // of an enum
  bool is_matrix;  // true if the shape rule has two dimensions, or "..." and a last one
};

struct OpBinding {
  OpId id;
  const te_fl_op_schema* schema;
  std::vector<BoundArg> args;
  std::vector<std::byte> defaults;  // the argument struct with the default of each argument
  std::vector<uint32_t> inputs;     // the indices in `args` of the arguments with role in
  // The tensors with role out that a call may leave out, because te-fl can allocate them: their
  // indices in `args`, and the set of those that are not optional.
  std::vector<uint32_t> outputs;
  uint64_t required_outputs = 0;
  std::unique_ptr<const OutputRules> rules;  // the extents and dtypes of these tensors

  // The index in `args`; -1 if the op has no argument of this name.
  int find(PyObject* name) const noexcept;
};

// Created on first use and never freed. Throws te_fl.NotFound, naming the nearest op, for an
// unknown name.
const OpBinding& bind(PyObject* name);

}  // namespace te_fl::python
