#include "plugins/call_arguments.hpp"

#include <array>

#include "ops/op_call.hpp"
#include "ops/quant_parts.hpp"
#include "plugins/argument_reader.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/dtype.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::python {
namespace {

// Arguments that a Python implementation may accept in addition to the op's own arguments. Their
// names are those of te_fl.ops, if te_fl.ops has the argument.
enum ContextArgument : uint32_t {
  kStream = 1u << 0,
  kSeed = 1u << 1,
  kOffset = 1u << 2,
  kDeterministic = 1u << 3,
  kCapturing = 1u << 4,
  kSeedTensor = 1u << 5,
  kOffsetTensor = 1u << 6,
};
struct ContextName {
  const char* name;
  uint32_t bit;
};
constexpr ContextName kContextNames[] = {{"stream", kStream},
                                         {"seed", kSeed},
                                         {"offset", kOffset},
                                         {"deterministic", kDeterministic},
                                         {"capturing", kCapturing},
                                         {"seed_tensor", kSeedTensor},
                                         {"offset_tensor", kOffsetTensor}};

class Handing {
 public:
  // A tensor on the call's device; None if it is absent.
  Ref part(void* data, DType dtype, std::span<const int64_t> shape, bool writable) const {
    if (data == nullptr) return Ref::share(Py_None);
    return converted(lend(lending_, data, to_c(dtype), shape, writable));
  }

  Handing(const OpBinding& op, const void* args, const std::shared_ptr<Lending>& lending,
          PyObject* convert)
      : args_(op, args), lending_(lending), convert_(convert) {}

  Ref value(const BoundArg& arg) const {
    const te_fl_arg_desc& desc = *arg.desc;
    switch (desc.type) {
      case TE_FL_ARG_TENSOR: {
        const auto* t = args_.read<const te_fl_tensor*>(desc.offset);
        return t != nullptr ? tensor(*t, desc) : Ref::share(Py_None);
      }
      case TE_FL_ARG_TENSOR_LIST:
        return make_list(args_.list<const te_fl_tensor*>(desc),
                         [&](const te_fl_tensor* t) { return tensor(*t, desc); });
      case TE_FL_ARG_I64_LIST:
        return make_list(args_.list<int64_t>(desc), [](int64_t n) { return to_python(n); });
      case TE_FL_ARG_BOOL:
        return to_python(args_.read<int32_t>(desc.offset) != 0);
      case TE_FL_ARG_ENUM: {
        const auto number = static_cast<size_t>(args_.read<int32_t>(desc.offset));
        return to_python(std::string_view(arg.enum_names.at(number)));
      }
      case TE_FL_ARG_I32:
        return to_python(int64_t{args_.read<int32_t>(desc.offset)});
      case TE_FL_ARG_I64:
        return to_python(args_.read<int64_t>(desc.offset));
      case TE_FL_ARG_F32:
        return to_python(double{args_.read<float>(desc.offset)});
      default:
        return to_python(args_.read<double>(desc.offset));
    }
  }

 private:
  Ref converted(Ref lent) const {
    if (convert_ == nullptr) return lent;
    return Ref::take(PyObject_CallFunctionObjArgs(convert_, lent.get(), nullptr));
  }

  Ref tensor(const te_fl_tensor& t, const te_fl_arg_desc& desc) const {
    const bool writable = desc.role != TE_FL_IN;
    if (t.quant != nullptr && t.quant->scaling != TE_FL_SCALING_NONE)
      return quantised(t, *t.quant, desc, writable);
    return converted(lend(lending_, t.dl, t.provider, writable));
  }

  // Wraps the tensor in a te_fl.Quantized, as a Python caller would. Of an argument that is only a
  // quantisation, or of a tensor without elements, `data` is a tensor without elements.
  Ref quantised(const te_fl_tensor& t, const te_fl_quant& q, const te_fl_arg_desc& desc,
                bool writable) const {
    const bool only_quant = (desc.flags & TE_FL_ARG_QUANT_ONLY) != 0;
    const bool no_codes = t.dl.data == nullptr && q.columnwise_data == nullptr;
    if (no_codes && !only_quant && backend::numel(t) != 0) {
      backend::unsupported("argument '" + std::string(desc.name) +
                           "' has no copy of its codes; Python implementations need one");
    }
    const DType codes = value_of_dtype(t.dl.dtype);
    Ref parts = Ref::take(PyDict_New());
    te_fl_dltensor data = t.dl;
    int64_t none_of_it = 0;
    if (only_quant) data.ndim = 1, data.shape = &none_of_it, data.strides = nullptr;
    put(parts, "data",
        t.dl.data != nullptr || no_codes ? converted(lend(lending_, data, t.provider, writable))
                                         : Ref::share(Py_None));
    put(parts, "scaling", to_python(std::string_view(kScalingNames[q.scaling])));
    for_each_part(t, q, codes,
                  [&](const char* name, void* at, DType dtype, std::span<const int64_t> shape) {
                    put(parts, name, part(at, dtype, shape, writable));
                  });
    put(parts, "amax_epsilon", to_python(double{q.amax_epsilon}));
    put(parts, "compute_scale", to_python((q.flags & TE_FL_QUANT_COMPUTE_SCALE) != 0));
    put(parts, "pow2_scale", to_python((q.flags & TE_FL_QUANT_POW2_SCALE) != 0));
    const std::span extents(data.shape, static_cast<size_t>(data.ndim));
    Ref shape = make_list(extents, [](int64_t n) { return to_python(n); });
    put(parts, "shape", Ref::take(PyList_AsTuple(shape.get())));
    const Ref none = Ref::take(PyTuple_New(0));
    return Ref::take(PyObject_Call(quantized_class(), none.get(), parts.get()));
  }

  static DType value_of_dtype(te_fl_dtype dtype) {
    const Result<DType> known = dtype_from_c(dtype);
    if (!known.ok()) backend::unsupported(known.status().message());
    return *known;
  }

  ArgumentReader args_;
  const std::shared_ptr<Lending>& lending_;
  PyObject* convert_;
};

void put_context(const Ref& dict, const Handing& handing, const te_fl_context& ctx,
                 uint32_t wanted) {
  if ((wanted & kStream) != 0) put(dict, "stream", Ref::take(PyLong_FromVoidPtr(ctx.stream)));
  constexpr uint32_t kInMemory = kSeedTensor | kOffsetTensor;
  if ((wanted & (kSeed | kOffset)) != 0 && (wanted & kInMemory) != kInMemory &&
      (ctx.rng->seed_address != nullptr || ctx.rng->offset_address != nullptr)) {
    backend::unsupported(
        "the call's random state is in the device's memory; an implementation reads it if its "
        "function takes seed_tensor and offset_tensor too");
  }
  const auto put_word = [&](const char* name, uint32_t bit, const uint64_t* address) {
    static constexpr std::array<int64_t, 1> one = {1};
    if ((wanted & bit) != 0)
      put(dict, name, handing.part(const_cast<uint64_t*>(address), DType::kU64, one, false));
  };
  put_word("seed_tensor", kSeedTensor, ctx.rng->seed_address);
  put_word("offset_tensor", kOffsetTensor, ctx.rng->offset_address);
  if ((wanted & kSeed) != 0) put(dict, "seed", to_python(ctx.rng->seed));
  if ((wanted & kOffset) != 0) put(dict, "offset", to_python(ctx.rng->offset));
  if ((wanted & kDeterministic) != 0)
    put(dict, "deterministic", to_python((ctx.flags & TE_FL_CALL_DETERMINISTIC) != 0));
  if ((wanted & kCapturing) != 0)
    put(dict, "capturing", to_python((ctx.flags & TE_FL_CALL_CAPTURING) != 0));
}

}  // namespace

Wanted find_wanted(const OpBinding& op, PyObject* names) {
  Wanted wanted;
  for (Py_ssize_t i = 0; i < PyList_Size(names); ++i) {
    PyObject* name = PyList_GetItem(names, i);
    if (const int at = op.find(name); at >= 0) {
      wanted.args.push_back(&op.args[static_cast<size_t>(at)]);
      continue;
    }
    const std::string_view word = to_text(name, "an argument's name");
    const uint32_t before = wanted.context;
    for (const ContextName& known : kContextNames) {
      if (known.name == word) wanted.context |= known.bit;
    }
    if (wanted.context == before)
      throw_type_error("op '" + std::string(op.schema->name) + "' has no argument '" +
                       std::string(word) + "'");
  }
  return wanted;
}

Ref call_arguments(const OpBinding& op, const Wanted& wanted, const te_fl_context& ctx,
                   const void* args, const std::shared_ptr<Lending>& lending, PyObject* convert) {
  const Handing handing(op, args, lending, convert);
  Ref dict = Ref::take(PyDict_New());
  for (const BoundArg* arg : wanted.args)
    check(PyDict_SetItem(dict.get(), arg->name, handing.value(*arg).get()));
  put_context(dict, handing, ctx, wanted.context);
  return dict;
}

}  // namespace te_fl::python
