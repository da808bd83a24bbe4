#include "torch/process_group.hpp"

#include <algorithm>
#include <span>

#include "ops/communicator.hpp"
#include "py/errors.hpp"
#include "py/framework_tensor.hpp"
#include "py/interpreter.hpp"
#include "te_fl/device.hpp"
#include "te_fl/ops.hpp"
#include "torch/arguments.hpp"
#include "torch/callback.hpp"

namespace te_fl::python {
namespace {

Status interpreter_ended() {
  return failed_precondition(
      "the interpreter has ended, so the process group's collectives cannot run");
}

// The interned name of a Python method; never freed.
PyObject* word(const char* text) { return Ref::take(PyUnicode_InternFromString(text)).release(); }

// Wraps a Python te_fl.pytorch.distributed.sequence_ranks.SequenceRanks.
class Group {
 public:
  explicit Group(PyObject* object)
      : object_(object),
        like_(Ref::take(PyObject_GetAttrString(object, "like")).get()),
        handle_(find_handle(object, "SequenceRanks").get()),
        communicator_(communicator_in(Ref::share(handle_.get()))) {}
  PyObject* object() const noexcept { return object_.get(); }
  PyObject* like() const noexcept { return like_.get(); }
  const te_fl_communicator* communicator() const noexcept { return communicator_; }

 private:
  Kept object_, like_, handle_;
  const te_fl_communicator* communicator_;
};

// A collective that torch.distributed has started on a stream.
class GroupWork final : public nn::SequenceRanks::Work {
 public:
  // begun: a tuple of the work, its op, its first tensor, and its sequence number in the group.
  GroupWork(std::shared_ptr<const Group> group, Ref begun, const Device& device, void* stream)
      : group_(std::move(group)), begun_(begun.release()), device_(device), stream_(stream) {}
  ~GroupWork() override {
    if (begun_ == nullptr) return;
    // Drops an error of wait(): the caller has already got the error that ended the call.
    static_cast<void>(wait());
    const InterpreterLock lock;
    if (lock.held()) PyErr_Clear();
  }
  Status wait() override {
    const InterpreterLock lock;
    if (!lock.held()) return interpreter_ended();
    static PyObject* const plain = word("wait");
    static PyObject* const elsewhere = word("wait_on");
    const Ref begun = Ref::take(std::exchange(begun_, nullptr));
    try {
      const Ref stream = other_stream(group_->like(), device_, stream_);
      PyObject* const work = PyTuple_GetItem(begun.get(), 0);
      if (work == nullptr) throw PythonError();
      Ref::take(stream.get() == Py_None ? PyObject_CallMethodObjArgs(work, plain, nullptr)
                                        : PyObject_CallMethodObjArgs(group_->object(), elsewhere,
                                                                     work, stream.get(), nullptr));
      return {};
    } catch (const PythonError&) {
      return failed(begun.get());
    }
  }

 private:
  // Converts the exception that is set to a status, with a note that describes the collective.
  Status failed(PyObject* begun) {
    static PyObject* const note = word("add_note_to");
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject* const noted = value == nullptr ? nullptr
                                             : PyObject_CallMethodObjArgs(group_->object(), note,
                                                                          value, begun, nullptr);
    if (noted == nullptr) PyErr_Clear();
    Py_XDECREF(noted);
    PyErr_Restore(type, value, trace);
    return collective_failed();
  }

  std::shared_ptr<const Group> group_;
  PyObject* begun_;  // null after wait()
  Device device_;
  void* stream_;
};

// A collective dispatched as a te-fl op; the process group's implementation starts it in Python.
class GroupCall final : public CommunicatorCall {
 public:
  GroupCall(const std::shared_ptr<const Group>& group, const char* way, const Tensor& from,
            const Tensor& to, bool now)
      : CommunicatorCall(group->communicator()),
        group_(group),
        way_(way),
        from_(from),
        to_(to),
        stream_(devices::current_stream(from.device())),
        now_(now) {}
  ~GroupCall() override {
    // Destroying a work waits for the collective that it started.
    if (begun_ != nullptr) take_work();
  }
  // Converts the op's result to a work; null if the stream already orders the whole collective.
  nn::SequenceRanks::Begun ended(const Status& op) {
    if (!failure_.ok()) return failure_;
    TE_FL_RETURN_IF_ERROR(op);
    return take_work();
  }

 private:
  std::unique_ptr<nn::SequenceRanks::Work> take_work() {
    if (begun_ == nullptr) return nullptr;
    const InterpreterLock lock;
    if (!lock.held()) return nullptr;
    return std::make_unique<GroupWork>(group_, Ref::take(std::exchange(begun_, nullptr)),
                                       from_.device(), stream_);
  }
  void run(const char*) override {
    static PyObject* const begin = word("begin");
    const Ref from = to_framework(from_, group_->like());
    const Ref to = &from_ == &to_ ? Ref::share(from.get()) : to_framework(to_, group_->like());
    const Ref way = to_python(std::string_view(way_));
    const Ref stream = other_stream(group_->like(), from_.device(), stream_);
    Ref begun = Ref::take(PyObject_CallMethodObjArgs(group_->object(), begin, way.get(), from.get(),
                                                     to.get(), now_ ? Py_True : Py_False,
                                                     stream.get(), nullptr));
    if (begun.get() != Py_None) begun_ = begun.release();
  }
  std::string take_failure() override {
    failure_ = collective_failed();
    return std::string(failure_.message());
  }

  const std::shared_ptr<const Group>& group_;
  const char* way_;
  const Tensor &from_, &to_;
  void* stream_;
  bool now_;
  PyObject* begun_ = nullptr;
  Status failure_;
};

// A reduce-scatter whose rows are sent to their ranks as soon as they are written.
class GroupChunks final : public nn::SequenceRanks::Chunks {
 public:
  GroupChunks(Ref chunks, const Device& device) : chunks_(chunks.release()), device_(device) {}
  ~GroupChunks() override {
    if (chunks_ == nullptr) return;
    // Drops an error of wait(): the caller has already got the error that ended the call.
    static_cast<void>(wait());
    const InterpreterLock lock;
    if (lock.held()) PyErr_Clear();
  }
  Status rows_done(int rank) override {
    const InterpreterLock lock;
    if (!lock.held()) return interpreter_ended();
    const Ref stream = Ref::take(PyLong_FromVoidPtr(devices::current_stream(device_)));
    PyObject* const done = PyObject_CallMethod(chunks_, "rows_done", "iO", rank, stream.get());
    if (done == nullptr) return collective_failed();
    Py_DECREF(done);
    return {};
  }
  Status wait() override {
    const InterpreterLock lock;
    if (!lock.held()) return interpreter_ended();
    const Ref chunks = Ref::take(std::exchange(chunks_, nullptr));
    PyObject* const done = PyObject_CallMethod(chunks.get(), "wait", nullptr);
    if (done == nullptr) return collective_failed();
    Py_DECREF(done);
    return {};
  }

 private:
  PyObject* chunks_;  // null after wait()
  Device device_;
};

class GroupRanks final : public nn::SequenceRanks {
 public:
  explicit GroupRanks(PyObject* object) : group_(std::make_shared<Group>(object)) {
    size_ = static_cast<int>(to_integer(Ref::take(PyObject_GetAttrString(object, "size")).get()));
    rank_ = static_cast<int>(to_integer(Ref::take(PyObject_GetAttrString(object, "rank")).get()));
    ranks_ = to_ranks(Ref::take(PyObject_GetAttrString(object, "ranks")).get());
    chunked_from_ = to_integer(Ref::take(PyObject_GetAttrString(object, "chunked_from")).get());
  }
  int size() const noexcept override { return size_; }
  int rank() const noexcept override { return rank_; }
  Begun all_gather(const Tensor& part, const Tensor& whole, bool now) override {
    te_fl_all_gather_args args{};
    args.input = part;
    args.output = whole;
    args.comm = group_->communicator();
    GroupCall call(group_, "all_gather", part, whole, now);
    return call.ended(ops::all_gather(args, options_on(part.device())));
  }
  Begun reduce_scatter(const Tensor& whole, const Tensor& part, bool now) override {
    if (chunked_from_ > 0 && bytes_for(part.dtype(), part.numel()) >= chunked_from_) {
      return scattered_in_pieces(whole, part);
    }
    te_fl_reduce_scatter_args args{};
    args.input = whole;
    args.output = part;
    args.comm = group_->communicator();
    GroupCall call(group_, "reduce_scatter", whole, part, now);
    return call.ended(ops::reduce_scatter(args, options_on(part.device())));
  }
  int64_t chunked_from() const noexcept override { return chunked_from_; }
  Result<std::unique_ptr<Chunks>> scatter_chunks(const Tensor& whole, const Tensor& part) override {
    TE_FL_ASSIGN_OR_RETURN(auto chunks, split_for_group("scatter_chunks", whole, part));
    return std::unique_ptr<Chunks>(std::move(chunks));
  }
  Status sum(const Tensor& values) override { return reduce("sum", values, TE_FL_REDUCTION_SUM); }
  Status largest(const Tensor& values) override {
    return reduce("max", values, TE_FL_REDUCTION_MAX);
  }
  bool share_amaxes(const nn::AmaxReduction* reduction) const noexcept override {
    if (reduction == nullptr || ranks_.empty()) return false;
    const auto& reduced = static_cast<const GroupReduction*>(reduction)->ranks();
    return std::ranges::includes(reduced, ranks_);
  }

 private:
  static CallOptions options_on(const Device& device) {
    CallOptions options;
    options.stream = devices::current_stream(device);
    return options;
  }
  Status reduce(const char* way, const Tensor& values, int32_t reduction) {
    te_fl_all_reduce_args args{};
    args.input = values;
    args.output = values;
    args.comm = group_->communicator();
    args.reduction = reduction;
    GroupCall call(group_, way, values, values, true);
    TE_FL_ASSIGN_OR_RETURN(auto work,
                           call.ended(ops::all_reduce(args, options_on(values.device()))));
    return work == nullptr ? Status() : work->wait();
  }
  Begun scattered_in_pieces(const Tensor& whole, const Tensor& part) {
    TE_FL_ASSIGN_OR_RETURN(auto chunks, split_for_group("reduce_scatter", whole, part));
    return std::unique_ptr<Work>(std::move(chunks));
  }
  // Calls object.METHOD(whole, part, stream), which returns a Python _Chunks.
  Result<std::unique_ptr<GroupChunks>> split_for_group(const char* method, const Tensor& whole,
                                                       const Tensor& part) {
    const InterpreterLock lock;
    if (!lock.held()) return interpreter_ended();
    try {
      const Ref from = to_framework(whole, group_->like());
      const Ref to = to_framework(part, group_->like());
      const Ref stream = Ref::take(PyLong_FromVoidPtr(devices::current_stream(whole.device())));
      return std::make_unique<GroupChunks>(
          Ref::take(PyObject_CallMethod(group_->object(), method, "OOO", from.get(), to.get(),
                                        stream.get())),
          whole.device());
    } catch (const PythonError&) {
      return collective_failed();
    }
  }

  std::shared_ptr<const Group> group_;
  int size_ = 1, rank_ = 0;
  int64_t chunked_from_ = 0;
  std::vector<int64_t> ranks_;  // sorted
};

// moe_dispatch or moe_combine as a te-fl op, which the process group's implementation runs in
// Python.
class RowsCall final : public CommunicatorCall {
 public:
  RowsCall(const Group& group, const nn::RowsWithProbs& from, const nn::RowsWithProbs& to,
           std::span<const int64_t> sent, std::span<const int64_t> received)
      : CommunicatorCall(group.communicator()),
        group_(group),
        from_(from),
        to_(to),
        sent_(sent),
        received_(received) {}
  Status ended(const Status& op) const { return failure_.ok() ? op : failure_; }

 private:
  Ref framework_or_none(const Tensor& t) const {
    return t.defined() ? to_framework(t, group_.like()) : Ref::share(Py_None);
  }
  static Ref list(std::span<const int64_t> rows) {
    Ref list = Ref::take(PyList_New(0));
    for (const int64_t n : rows) {
      const Ref number = Ref::take(PyLong_FromLongLong(n));
      check(PyList_Append(list.get(), number.get()));
    }
    return list;
  }
  void run(const char* op) override {
    const Device device = from_.rows.device();
    const Ref stream = other_stream(group_.like(), device, devices::current_stream(device));
    const Ref rows = framework_or_none(from_.rows), probs = framework_or_none(from_.probs);
    const Ref to_rows = framework_or_none(to_.rows), to_probs = framework_or_none(to_.probs);
    const Ref sent = list(sent_), received = list(received_);
    Ref::take(PyObject_CallMethod(group_.object(), "move_rows", "sOOOOOOO", op, rows.get(),
                                  probs.get(), to_rows.get(), to_probs.get(), sent.get(),
                                  received.get(), stream.get()));
  }
  std::string take_failure() override {
    failure_ = collective_failed();
    return std::string(failure_.message());
  }

  const Group& group_;
  const nn::RowsWithProbs &from_, &to_;
  std::span<const int64_t> sent_, received_;
  Status failure_;
};

class GroupExperts final : public nn::ExpertRanks {
 public:
  explicit GroupExperts(PyObject* object) : group_(std::make_shared<Group>(object)) {}
  int size() const noexcept override { return group_->communicator()->size; }
  int rank() const noexcept override { return group_->communicator()->rank; }
  Device device() const override {
    const te_fl_communicator& c = *group_->communicator();
    return {c.device.type, c.device.index, c.device_provider};
  }
  Status all_to_all(const Tensor& from, const Tensor& to) override {
    te_fl_all_to_all_args args{};
    args.input = from;
    args.output = to;
    args.comm = group_->communicator();
    GroupCall call(group_, "all_to_all", from, to, true);
    TE_FL_ASSIGN_OR_RETURN(auto work, call.ended(ops::all_to_all(args, options(from))));
    return work == nullptr ? Status() : work->wait();
  }
  Status move_rows(bool dispatches, const nn::RowsWithProbs& from, const nn::RowsWithProbs& to,
                   std::span<const int64_t> sent, std::span<const int64_t> received) override {
    te_fl_moe_transfer_args args{};
    args.input = from.rows;
    args.output = to.rows;
    if (from.probs.defined()) {
      args.probs = from.probs;
      args.output_probs = to.probs;
    }
    args.comm = group_->communicator();
    args.input_rows = sent.data();
    args.output_rows = received.data();
    args.input_rows_count = args.output_rows_count = static_cast<int64_t>(sent.size());
    const RowsCall call(*group_, from, to, sent, received);
    return call.ended(dispatches ? ops::moe_dispatch(args, options(from.rows))
                                 : ops::moe_combine(args, options(from.rows)));
  }

 private:
  static CallOptions options(const Tensor& t) {
    CallOptions options;
    options.stream = devices::current_stream(t.device());
    return options;
  }
  std::shared_ptr<const Group> group_;
};

}  // namespace

Ref other_stream(PyObject* like, const Device& device, void* stream) {
  if (device.is_host() || find_current_stream(like, device) == stream) return Ref::share(Py_None);
  return Ref::take(PyLong_FromVoidPtr(stream));
}

std::vector<int64_t> to_ranks(PyObject* tuple) {
  std::vector<int64_t> ranks;
  for (PyObject* rank : list_items(tuple, "ranks")) ranks.push_back(to_integer(rank));
  std::ranges::sort(ranks);
  return ranks;
}

std::shared_ptr<nn::SequenceRanks> make_sequence_ranks(PyObject* object) {
  return std::make_shared<GroupRanks>(object);
}

std::shared_ptr<nn::ExpertRanks> make_expert_ranks(PyObject* object) {
  return std::make_shared<GroupExperts>(object);
}

}  // namespace te_fl::python
