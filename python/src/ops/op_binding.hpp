// One op as Python calls it: its schema with the names as Python objects, compiled once.
#pragma once

#include <memory>
#include <vector>

#include "py/py.hpp"
#include "te_fl/op_registry.hpp"

namespace te_fl::python {

struct BoundArg {
  const te_fl_arg_desc* desc;
  PyObject* name;                       // interned, kept for ever
  std::vector<std::string> enum_names;  // of an enum
  bool is_matrix;  // by its rule a tensor of two dimensions, or of any number before the last
};

struct OpBinding {
  OpId id;
  const te_fl_op_schema* schema;
  std::vector<BoundArg> args;
  std::vector<std::byte> defaults;  // the argument struct without any argument given

  // The place in `args`, -1 if the op has no such argument.
  int find(PyObject* name) const noexcept;
};

// Made on first use and kept for ever. Throws te_fl.NotFound, naming the nearest op.
const OpBinding& bind(PyObject* name);

}  // namespace te_fl::python
