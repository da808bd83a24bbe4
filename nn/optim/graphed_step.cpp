#include "te_fl/nn/optim/graphed_step.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "nn/autograd/context.hpp"
#include "nn/autograd/gradients.hpp"
#include "nn/autograd/step_capture.hpp"
#include "nn/base/tensor_ops.hpp"
#include "nn/fp8/autocast.hpp"

namespace te_fl::nn {

using Tensors = std::vector<Tensor>;

struct GraphedStep::Impl {
  Impl(const Device& d, Step s, GraphedStepOptions o, Context c)
      : device(d), step(std::move(s)), options(std::move(o)), context(std::move(c)) {}

  Status check_inputs(std::span<const Tensor> inputs) const;
  Status copy_inputs(std::span<const Tensor> inputs) const;
  Status write_random(RandomPosition position) const;
  Result<Tensors> record(Graph& captured);
  Status capture();
  Result<Tensors> launch();
  Result<Tensors> run_on_stream(std::span<const Tensor> inputs);

  Device device;
  Step step;
  GraphedStepOptions options;
  Context context;
  Stream own_stream;
  Event before, after;  // order our stream with the caller's, if they differ
  int64_t runs = 0;

  Tensor random;              // U64 [2]: seed and offset of a launch
  uint64_t random_count = 0;  // random counters used per step
  Graph graph;
  Tensors outputs;
  std::vector<detail::StepCapture::Touched> gradients;
  std::vector<std::shared_ptr<const void>> kept;  // memory that the graph uses
};

Status GraphedStep::Impl::check_inputs(std::span<const Tensor> inputs) const {
  if (inputs.empty()) return {};
  if (inputs.size() != options.inputs.size()) {
    return invalid_argument("GraphedStep::run: " + std::to_string(inputs.size()) +
                            " inputs, but the step has " + std::to_string(options.inputs.size()));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Tensor &from = inputs[i], &to = options.inputs[i];
    const bool fits = from.defined() && !from.quantized() && from.contiguous() &&
                      from.dtype() == to.dtype() && std::ranges::equal(from.shape(), to.shape()) &&
                      (from.device() == device || from.device().is_host());
    if (fits) continue;
    return invalid_argument("GraphedStep::run: input " + std::to_string(i) + " is " +
                            from.describe() + "; the step was made for " + to.describe() +
                            ", compact, on that device or on the host: other shapes need a "
                            "GraphedStep of their own");
  }
  return {};
}

Status GraphedStep::Impl::copy_inputs(std::span<const Tensor> inputs) const {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Tensor &from = inputs[i], &to = options.inputs[i];
    if (from.raw_data() == to.raw_data()) continue;
    const auto bytes = static_cast<size_t>(bytes_for(to.dtype(), to.numel()));
    TE_FL_RETURN_IF_ERROR(devices::copy(device, to.raw_data(), from.device(), from.raw_data(),
                                        bytes, context.stream()));
  }
  return {};
}

Status GraphedStep::Impl::write_random(RandomPosition position) const {
  const uint64_t words[] = {position.seed, position.offset};
  return devices::copy(device, random.raw_data(), Device(), words, sizeof words, context.stream());
}

// Captures one step into a graph.
Result<Tensors> GraphedStep::Impl::record(Graph& captured) {
  TE_FL_ASSIGN_OR_RETURN(Capture recording, Capture::begin(device, context.stream()));
  Result<Tensors> result = step();
  Result<Graph> ended = recording.end();
  if (!result.ok()) return result;  // the step's own error is more specific
  TE_FL_ASSIGN_OR_RETURN(captured, std::move(ended));
  return result;
}

Status GraphedStep::Impl::capture() {
  if (detail::current_frame() != nullptr) {
    return failed_precondition(
        "GraphedStep: run() was called inside an autocast, whose scale update no graph would "
        "repeat; open the autocast inside the step");
  }
  detail::RandomState& state = context.state();
  if (!random.defined()) {
    TE_FL_ASSIGN_OR_RETURN(random, Tensor::empty({2}, DType::kU64, device));
  }
  TE_FL_RETURN_IF_ERROR(devices::synchronize(device, context.stream()));
  // Hides older pending updates during the capture, so that the graph contains only updates of the
  // step itself.
  const std::shared_ptr<detail::GradientUpdates> updates = detail::current_gradient_updates();
  std::vector<detail::PendingUpdate> pending = updates->take();
  RandomPosition start;
  {
    std::lock_guard lock(state.mutex);
    start = state.position;
    state.captured = random;
    state.captured_at = start.offset;
  }
  Graph captured;
  detail::StepCapture writes(options.optimizer);
  Result<Tensors> result = record(captured);
  std::vector<detail::StepCapture::Touched> touched = writes.take();
  // The capture has drawn no random numbers, so the RNG offset is reset; each launch advances it.
  const bool updates_left = !updates->take().empty();
  updates->put_back(std::move(pending));
  uint64_t count = 0;
  {
    std::lock_guard lock(state.mutex);
    count = state.position.offset - start.offset;
    state.position = start;
    state.captured = Tensor();
  }
  if (!result.ok()) return result.status().wrap("GraphedStep: the step cannot be captured");
  if (updates_left) {
    return failed_precondition(
        "GraphedStep: the step leaves gradient scales without their update, which no graph would "
        "repeat; call backward_end() inside the step, or the optimizer's step(), which does it");
  }
  random_count = count;
  outputs = *std::move(result);
  gradients = std::move(touched);
  kept = writes.take_kept();
  graph = std::move(captured);
  return {};
}

Result<Tensors> GraphedStep::Impl::launch() {
  if (random_count > 0) TE_FL_RETURN_IF_ERROR(write_random(context.random()));
  TE_FL_RETURN_IF_ERROR(detail::prepare_launch(gradients));
  if (options.optimizer != nullptr) TE_FL_RETURN_IF_ERROR(options.optimizer->advance());
  TE_FL_RETURN_IF_ERROR(graph.launch());
  detail::launched(gradients);
  {
    std::lock_guard lock(context.state().mutex);
    context.state().position.offset += random_count;
  }
  return outputs;
}

Result<Tensors> GraphedStep::Impl::run_on_stream(std::span<const Tensor> inputs) {
  const ContextScope scope(context);
  TE_FL_RETURN_IF_ERROR(copy_inputs(inputs));
  if (runs < options.warmup) {
    Result<Tensors> result = step();
    if (result.ok()) ++runs;
    return result;
  }
  if (graph.get() == nullptr) TE_FL_RETURN_IF_ERROR(capture());
  return launch();
}

GraphedStep::GraphedStep(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GraphedStep::~GraphedStep() = default;

bool GraphedStep::captured() const noexcept { return impl_->graph.get() != nullptr; }
void* GraphedStep::stream() const noexcept { return impl_->context.stream(); }

Result<std::unique_ptr<GraphedStep>> GraphedStep::create(const Device& device, Step step,
                                                         GraphedStepOptions options) {
  if (Status status = devices::check_capture(device); !status) return status.wrap("GraphedStep");
  if (options.warmup < 2) {
    return invalid_argument("GraphedStep: warmup is " + std::to_string(options.warmup) +
                            "; it must be at least 2");
  }
  if (options.optimizer != nullptr && !options.optimizer->capturable()) {
    return invalid_argument(
        "GraphedStep: the optimizer keeps its step count and learning rate on the host; create it "
        "with capturable = true");
  }
  for (size_t i = 0; i < options.inputs.size(); ++i) {
    const Tensor& input = options.inputs[i];
    if (input.defined() && input.device() == device && input.contiguous() && !input.quantized()) {
      continue;
    }
    return invalid_argument("GraphedStep: static input " + std::to_string(i) + " is " +
                            input.describe() + "; it must be compact, not quantised, on " +
                            to_string(device));
  }
  auto impl =
      std::make_unique<Impl>(device, std::move(step), std::move(options), Context::current());
  impl->context = impl->context.with_stream(device, devices::current_stream(device));
  if (impl->context.stream() == nullptr) {
    TE_FL_ASSIGN_OR_RETURN(impl->own_stream, Stream::create(device));
    impl->context = impl->context.with_stream(device, impl->own_stream.get());
  }
  TE_FL_ASSIGN_OR_RETURN(impl->before, Event::create(device));
  TE_FL_ASSIGN_OR_RETURN(impl->after, Event::create(device));
  return std::unique_ptr<GraphedStep>(new GraphedStep(std::move(impl)));
}

Result<Tensors> GraphedStep::run(std::span<const Tensor> inputs) {
  Impl& impl = *impl_;
  TE_FL_RETURN_IF_ERROR(impl.check_inputs(inputs));
  void *caller = devices::current_stream(impl.device), *stream = impl.context.stream();
  if (caller == stream) return impl.run_on_stream(inputs);
  TE_FL_RETURN_IF_ERROR(impl.before.record(caller));
  TE_FL_RETURN_IF_ERROR(devices::wait_event(impl.device, impl.before.get(), stream));
  Result<Tensors> result = impl.run_on_stream(inputs);
  TE_FL_RETURN_IF_ERROR(impl.after.record(stream));
  TE_FL_RETURN_IF_ERROR(devices::wait_event(impl.device, impl.after.get(), caller));
  return result;
}

}  // namespace te_fl::nn
