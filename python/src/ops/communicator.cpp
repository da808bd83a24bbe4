#include "ops/communicator.hpp"

#include <atomic>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "py/errors.hpp"
#include "py/interpreter.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/backend/collective.hpp"
#include "te_fl/device.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/op_registry.hpp"

namespace te_fl::python {
namespace {

constexpr const char* kHandleName = "te_fl.communicator";
constexpr const char* kServer = "_communicator";
constexpr const char* kVendor = "torch";
thread_local CommunicatorCall* g_call = nullptr;

// Ids of te_fl::Comm count up from 1. The ids here have the top bit set, so the two kinds never
// collide.
uint64_t next_id() {
  static std::atomic<uint64_t> count{0};
  return uint64_t{1} << 63 | count.fetch_add(1, std::memory_order_relaxed);
}

// The registered implementations of one communicator maker ("torch.BACKEND"). A Maker lives as long
// as its implementations are registered.
struct Maker {
  struct Op {
    const Maker* maker;
    const char* name;
  };
  std::string impl_id, provider, words;
  std::deque<Op> ops;  // a deque, so the descriptors' `self` pointers stay valid
  std::vector<te_fl_op_desc> descs;
};

// The device types that a maker's implementations support. A provider of kDLExtDev devices
// registers implementations for those devices only (R18 of DESIGN.md).
uint64_t device_types(const Maker& maker) {
  const uint64_t ext = TE_FL_BIT(TE_FL_DEVICE_EXT);
  return maker.provider.empty() ? ~ext : ext;
}

template <class Args>
void append(Maker& maker, const char* op, bool graph_safe) {
  te_fl_op_desc desc;
  desc.op_name = op;
  desc.impl_id = maker.impl_id.c_str();
  desc.kind = TE_FL_KIND_VENDOR;
  desc.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC | TE_FL_OP_IN_PLACE_OK;
  if (graph_safe) desc.flags |= TE_FL_OP_GRAPH_SAFE;
  desc.device_types = device_types(maker);
  if (!maker.provider.empty()) desc.provider = maker.provider.c_str();
  desc.self = &maker.ops.emplace_back(Maker::Op{&maker, op});
  desc.run = [](void* self, const te_fl_context* ctx, const void* args) -> te_fl_status {
    return CommunicatorCall::serve(static_cast<const Args*>(args)->comm,
                                   static_cast<const Maker::Op*>(self)->name, ctx->errors);
  };
  desc.describe = [](void* self, const te_fl_context*, const void*,
                     const te_fl_error_sink* text) -> te_fl_status {
    backend::report(text, static_cast<const Maker::Op*>(self)->maker->words.c_str());
    return TE_FL_OK;
  };
  desc.supports = backend::supports_thunk<Args, backend::check_collective<Args>>;
  maker.descs.push_back(desc);
}

std::shared_ptr<Maker> make_maker(const std::string& name, const std::string& backend,
                                  const std::string& provider, bool graph_safe) {
  auto made = std::make_shared<Maker>();
  made->impl_id = "vendor." + name;
  made->provider = provider;
  made->words = "torch.distributed's " + backend;
  append<te_fl_all_reduce_args>(*made, "all_reduce", graph_safe);
  append<te_fl_all_gather_args>(*made, "all_gather", graph_safe);
  append<te_fl_reduce_scatter_args>(*made, "reduce_scatter", graph_safe);
  append<te_fl_all_to_all_args>(*made, "all_to_all", graph_safe);
  append<te_fl_all_to_all_v_args>(*made, "all_to_all_v", graph_safe);
  append<te_fl_moe_dispatch_args>(*made, "moe_dispatch", graph_safe);
  append<te_fl_moe_combine_args>(*made, "moe_combine", graph_safe);
  append<te_fl_broadcast_args>(*made, "broadcast", graph_safe);
  append<te_fl_send_args>(*made, "send", graph_safe);
  append<te_fl_recv_args>(*made, "recv", graph_safe);
  append<te_fl_barrier_args>(*made, "barrier", graph_safe);
  return made;
}

// Registers the maker's implementations unless they are registered already. Called without the
// interpreter's lock.
Status register_maker(const std::string& maker, const std::string& backend,
                      const std::string& provider, bool graph_safe) {
  OpManager::instance();  // plugins must register their implementations first
  const std::shared_ptr<Maker> made = make_maker(maker, backend, provider, graph_safe);
  std::vector<const te_fl_op_desc*> descs;
  for (const te_fl_op_desc& desc : made->descs) descs.push_back(&desc);
  const Status status = OpRegistry::instance().register_ops(descs, maker, kVendor, made);
  // Another thread may have registered the maker in the meantime.
  return status.code() == StatusCode::kAlreadyExists ? Status() : status;
}

// The content of a communicator's capsule.
struct Handle {
  std::string maker;
  te_fl_communicator communicator;
};

}  // namespace

PyObject* make_communicator(PyObject*, PyObject* args) noexcept {
  return guarded([&] {
    const char *backend = nullptr, *where = nullptr;
    int rank = 0, size = 0, graph_safe = 0;
    if (PyArg_ParseTuple(args, "ssiip", &backend, &where, &rank, &size, &graph_safe) == 0)
      throw PythonError();
    const std::string text(where);
    const Device device = value_or_throw(without_lock([&] { return parse_device(text); }));
    const std::string provider =
        device.provider == 0 ? std::string() : devices::provider_name(device.provider);
    auto handle = std::make_unique<Handle>();
    handle->maker = std::string(kVendor) + "." + backend + (provider.empty() ? "" : "." + provider);
    // The makers whose implementations are registered. Guarded by the interpreter's lock.
    static auto* known = new std::set<std::string>();
    if (!known->contains(handle->maker)) {
      const std::string served_by(backend);
      check(without_lock(
          [&] { return register_maker(handle->maker, served_by, provider, graph_safe != 0); }));
      known->insert(handle->maker);
    }
    te_fl_communicator& c = handle->communicator;
    c.device = device.to_c();
    c.device_provider = device.provider;
    c.rank = rank;
    c.size = size;
    c.id = next_id();
    c.maker = known->find(handle->maker)->c_str();
    c.self = handle.get();
    Ref capsule = Ref::take(PyCapsule_New(handle.get(), kHandleName, [](PyObject* capsule) {
      delete static_cast<Handle*>(PyCapsule_GetPointer(capsule, kHandleName));
    }));
    static_cast<void>(handle.release());
    return capsule;
  });
}

Ref find_handle(PyObject* object, const char* name) {
  PyObject* found = PyObject_GetAttrString(object, kServer);
  if (found == nullptr) PyErr_Clear();
  Ref handle = found == nullptr ? Ref() : Ref::take(found);
  if (handle && PyCapsule_IsValid(handle.get(), kHandleName) != 0) return handle;
  throw_type_error(
      std::string("'") + name + "' is a " + type_name(object) +
      ", not a communicator; te_fl.pytorch.distributed.communicator.of(group, device) gives that "
      "of a process group");
}

const te_fl_communicator* communicator_in(const Ref& handle) noexcept {
  return &static_cast<Handle*>(PyCapsule_GetPointer(handle.get(), kHandleName))->communicator;
}

std::string words_of_error(PyObject* value) {
  const Ref text = Ref::take(PyObject_Str(value));
  return type_name(value) + ": " + std::string(to_text(text.get(), "an error's text"));
}

CommunicatorCall::CommunicatorCall(const te_fl_communicator* communicator) noexcept
    : communicator_(communicator), outer_(g_call) {
  g_call = this;
}

CommunicatorCall::~CommunicatorCall() { g_call = outer_; }

te_fl_status CommunicatorCall::serve(const te_fl_communicator* communicator, const char* op,
                                     const te_fl_error_sink* errors) noexcept {
  if (g_call == nullptr || g_call->communicator_ != communicator) {
    backend::report(
        errors,
        "its communicator is a process group's of PyTorch, which serves calls that come "
        "from Python on this thread alone");
    return TE_FL_FAILED_PRECONDITION;
  }
  const InterpreterLock lock;
  if (!lock.held()) {
    backend::report(errors, "its process group is PyTorch's, whose interpreter is ending");
    return TE_FL_FAILED_PRECONDITION;
  }
  try {
    g_call->run(op);
    return TE_FL_OK;
  } catch (const PythonError&) {
  }
  try {
    backend::report(errors, g_call->take_failure().c_str());
  } catch (const PythonError&) {
    PyErr_Clear();
    backend::report(errors, "an exception in Python that cannot be put into words");
  }
  return TE_FL_COMM_FAILED;
}

PythonCall::~PythonCall() {
  Py_XDECREF(type_);
  Py_XDECREF(value_);
  Py_XDECREF(trace_);
}

void PythonCall::raise_failure() {
  if (type_ == nullptr) return;
  PyErr_Restore(std::exchange(type_, nullptr), std::exchange(value_, nullptr),
                std::exchange(trace_, nullptr));
  throw PythonError();
}

void PythonCall::run(const char* op) {
  Ref::take(PyObject_CallMethod(server_, "serve", "sO", op, arguments_));
}

std::string PythonCall::take_failure() {
  PyErr_Fetch(&type_, &value_, &trace_);
  PyErr_NormalizeException(&type_, &value_, &trace_);
  return words_of_error(value_);
}

}  // namespace te_fl::python
