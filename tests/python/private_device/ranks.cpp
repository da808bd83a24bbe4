// A c10d backend for the devices of backend.cpp, as a vendor's extension has one (NCCL's kin):
// far.py registers it as `far_ccl`. The ranks' bytes travel by Gloo on copies in host memory. A
// collective works on a stream of the backend's own, which waits for the caller's current stream;
// a reader that does not wait for the Work sees the tensor without the result.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
template <class T>
using Pointer = c10::intrusive_ptr<T>;

class Done final : public c10d::Work {
 public:
  // Call it with the stream that the collective ran on as the current one.
  Done(OpType op, const Tensors& outputs, Tensors kept, const c10::Stream& ran)
      : Work(-1, op),
        end_(ran.device_type()),
        kept_(std::move(kept)),
        future_(
            c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{ran.device()})) {
    end_.record(ran);
    future_->markCompleted(c10::IValue(outputs));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds) override {
    const auto device = future_->devices().front();
    end_.block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    kept_.clear();
    return true;
  }
  Pointer<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::Event end_;
  Tensors
      kept_;  // The caller may drop them before the backend's stream has reached the collective.
  Pointer<c10::ivalue::Future> future_;
};

at::Tensor bytes(const at::Tensor& t) { return t.cpu().contiguous().view({-1}).view(at::kByte); }
void put(const at::Tensor& to, const at::Tensor& raw) {
  to.copy_(raw.view(to.scalar_type()).view(to.sizes()));
}

class FarBackend final : public c10d::Backend {
 public:
  explicit FarBackend(Pointer<c10d::Backend> host)
      : Backend(host->getRank(), host->getSize()), host_(std::move(host)) {}
  const std::string getBackendName() const override { return "far_ccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  Pointer<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run(OpType::ALLREDUCE, tensors, tensors, [&] {
      for (const at::Tensor& t : tensors) t.copy_(reduced(t, options.reduceOp));
    });
  }
  Pointer<c10d::Work> allreduce_coalesced(Tensors& tensors,
                                          const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  Pointer<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return run(OpType::_REDUCE_SCATTER_BASE, outputs, inputs, [&] {
      for (size_t i = 0; i < inputs.size(); ++i) {
        outputs[i].copy_(reduced(inputs[i], options.reduceOp)
                             .view({getSize(), -1})[getRank()]
                             .view(outputs[i].sizes()));
      }
    });
  }
  Pointer<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& options) override {
    Tensors outputs = {output}, inputs = {input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  Pointer<c10d::Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions&) override {
    return run(OpType::_ALLGATHER_BASE, outputs, inputs, [&] {
      for (size_t i = 0; i < inputs.size(); ++i) put(outputs[i], at::cat(gathered(inputs[i])));
    });
  }
  Pointer<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& options) override {
    Tensors outputs = {output}, inputs = {input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  Pointer<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions&) override {
    return run(OpType::ALLGATHER, outputs.front(), inputs, [&] {
      const Tensors all = gathered(inputs.front());
      for (size_t i = 0; i < all.size(); ++i) put(outputs.front()[i], all[i]);
    });
  }
  Pointer<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run(OpType::BROADCAST, tensors, tensors, [&] {
      Tensors copies = {bytes(tensors.front())};
      host_->broadcast(copies, options)->wait();
      put(tensors.front(), copies.front());
    });
  }
  Pointer<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                    std::vector<int64_t>& output_rows,
                                    std::vector<int64_t>& input_rows,
                                    const c10d::AllToAllOptions& options) override {
    return run(OpType::ALLTOALL_BASE, {output}, {input}, [&] {
      const auto rows = [](const at::Tensor& t) {
        return bytes(t).view({t.dim() == 0 ? 1 : t.size(0), -1});
      };
      at::Tensor to = rows(output), from = rows(input);
      host_->alltoall_base(to, from, output_rows, input_rows, options)->wait();
      put(output, to.view({-1}));
    });
  }
  Pointer<c10d::Work> send(Tensors& tensors, int to, int tag) override {
    return run(OpType::SEND, {}, tensors, [&] {
      Tensors copies = {bytes(tensors.front())};
      host_->send(copies, to, tag)->wait();
    });
  }
  Pointer<c10d::Work> recv(Tensors& tensors, int from, int tag) override {
    return run(OpType::RECV, tensors, tensors, [&] {
      Tensors copies = {bytes(tensors.front())};
      host_->recv(copies, from, tag)->wait();
      put(tensors.front(), copies.front());
    });
  }
  Pointer<c10d::Work> barrier(const c10d::BarrierOptions&) override { return host_->barrier(); }

 private:
  template <class Function>
  Pointer<c10d::Work> run(OpType op, const Tensors& outputs, const Tensors& inputs,
                          const Function& work) {
    const c10::Device device = inputs.front().device();
    const c10::impl::VirtualGuardImpl guards(device.type());
    auto found = streams_.find(device.index());
    if (found == streams_.end())
      found = streams_.emplace(device.index(), guards.getNewStream(device)).first;
    const c10::Stream own = found->second;
    c10::Event begin(device.type());
    begin.record(guards.getStream(device));
    begin.block(own);
    const c10::StreamGuard on(own);
    const at::NoGradGuard no_grad;
    work();
    Tensors kept = inputs;
    kept.insert(kept.end(), outputs.begin(), outputs.end());
    return c10::make_intrusive<Done>(op, outputs, std::move(kept), own);
  }

  // The sum, average or largest of all ranks' tensors, in host memory. Sums are FP32, as a chip's
  // are.
  at::Tensor reduced(const at::Tensor& t, const c10d::ReduceOp& reduction) {
    at::Tensor copy = t.cpu().contiguous();
    if (copy.scalar_type() == at::kBFloat16 || copy.scalar_type() == at::kHalf)
      copy = copy.to(at::kFloat);
    c10d::AllreduceOptions options;
    const bool average = reduction == c10d::ReduceOp::AVG;
    options.reduceOp = average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : reduction;
    Tensors copies = {copy};
    host_->allreduce(copies, options)->wait();
    return average ? copy.div_(getSize()) : copy;
  }

  Tensors gathered(const at::Tensor& t) {
    Tensors from = {bytes(t)};
    std::vector<Tensors> to(1);
    for (int i = 0; i < getSize(); ++i) to.front().push_back(at::empty_like(from.front()));
    host_->allgather(to, from)->wait();
    return to.front();
  }

  Pointer<c10d::Backend> host_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
};

}  // namespace

PYBIND11_MODULE(private_device_ranks, m) {
  m.def(
      "make",
      [](const Pointer<c10d::Backend>& host) -> Pointer<c10d::Backend> {
        return c10::make_intrusive<FarBackend>(host);
      },
      "Returns the backend for far devices; host: a Gloo backend of the same ranks, for its "
      "transfers.");
}
