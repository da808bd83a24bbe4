#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "te_fl/nn/optim/optimizer.hpp"

namespace te_fl::nn {

struct GraphedStepOptions {
  // Number of run() calls that run eagerly before the capture; at least 2. These runs create
  // everything that must exist before a capture: plans, scratch memory, FP8 state, cached weights,
  // momentum.
  int64_t warmup = 3;
  // Device tensors that the step reads. run() copies new values into them.
  std::vector<Tensor> inputs = {};
  // The optimizer whose step() the step calls, created with capturable = true. Null: the step calls
  // none. A step that calls another optimizer's step() cannot be captured.
  Optimizer* optimizer = nullptr;
};

// A training step, or any other sequence of module calls, that is captured into a graph once and
// then launched as a whole, which avoids the host's cost of each op. Every run() is one step. Eager
// and launched steps give bitwise the same results if the ops are deterministic
// (PolicySettings::deterministic).
//   nn::GraphedStep::create(device, [&]() -> Result<std::vector<Tensor>> {
//     zero_grad; for each microbatch { autocast; forward; loss; backward }; backward_end; step;
//     return losses;
//   }, {.inputs = {tokens, targets}, .optimizer = adam.get()});
//   for (...) { adam->set_lr(...); losses = graphed->run({{next_tokens, next_targets}}); }
// The step function is called for the eager runs and during the capture, and never again:
// everything that it decides on the host is fixed by the capture. What changes between launches
// must be on the device:
// - the inputs;
// - FP8 scales;
// - random numbers: the Context's Philox position advances at each launch as in an eager step (a
//   step that draws from another context is refused at the capture);
// - step count and learning rate of a capturable optimizer;
// - the decision whether FP8 weights are quantised (ForwardOptions::reuse_weights as one of the
//   inputs): one graph can then be launched for every microbatch. In contrast,
//   is_first_microbatch is decided on the host, so that a graph with it must hold all microbatches.
// The step must not read tensors on the host (item()), copy from or to host memory, or leave an
// autocast or a backward_end() to its caller. Everything runs on the current context's stream if it
// has one, otherwise on a stream of the GraphedStep's own. The caller's stream is synchronised with
// it before and after. Modules, optimizer and every tensor that the step uses must outlive the
// GraphedStep. One run() at a time.
class TE_FL_API GraphedStep {
 public:
  // The step function. It returns the tensors that run() is to return, e.g. losses.
  using Step = std::function<Result<std::vector<Tensor>>()>;

  // Uses the random state of the calling thread's context. Errors: a device that cannot capture,
  // inputs on another device, an optimizer that is not capturable, fewer than 2 warm-up runs.
  static Result<std::unique_ptr<GraphedStep>> create(const Device& device, Step step,
                                                     GraphedStepOptions options);
  ~GraphedStep();
  GraphedStep(const GraphedStep&) = delete;
  GraphedStep& operator=(const GraphedStep&) = delete;

  // Runs one step. `inputs` are copied into GraphedStepOptions::inputs; each must have the same
  // shape and dtype and may be on the host or on the device. Without `inputs`, the step uses the
  // current contents. Once captured, every run() returns the same tensors, which the next run()
  // overwrites. If the capture fails, nothing changes and the next run() tries again; the error
  // says what in the step cannot be captured.
  Result<std::vector<Tensor>> run(std::span<const Tensor> inputs = {});

  // True if the next run() will launch the graph.
  bool captured() const noexcept;
  void* stream() const noexcept;

 private:
  struct Impl;
  explicit GraphedStep(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl::nn
