#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "te_fl/nn/optim/optimizer.hpp"

namespace te_fl::nn {

struct GraphedStepOptions {
  // Calls of run() that run eagerly before the one that captures; at least 2. They make what must
  // exist by then: plans, scratch memory, FP8 state, cached weights, momentum.
  int64_t warmup = 3;
  // Tensors on the device that the step reads and run() copies new values into.
  std::vector<Tensor> inputs = {};
  // The optimizer whose step() the step calls, created with capturable = true; null: none. A step
  // that calls another one's cannot be captured.
  Optimizer* optimizer = nullptr;
};

// A training step (or any sequence of module calls) that is captured into a graph once and then
// launched as a whole, without the host's cost of its ops. Every run() is one step, eager or not,
// with the same results bit by bit where its ops are deterministic (the policy's flag says so).
//   nn::GraphedStep::create(device, [&]() -> Result<std::vector<Tensor>> {
//     zero_grad; for each microbatch { autocast; forward; loss; backward }; backward_end; step;
//     return losses;
//   }, {.inputs = {tokens, targets}, .optimizer = adam.get()});
//   for (...) { adam->set_lr(...); losses = graphed->run({{next_tokens, next_targets}}); }
// The step is called as it is captured and not again: whatever it decides on the host is fixed from
// then on. What changes lives on the device: inputs, FP8 scales, random numbers (the Context's
// Philox position advances at each launch as it does eagerly; drawing from another context in the
// step is refused when it is captured), step count and learning rate (a capturable optimizer), and
// whether FP8 weights are quantised (ForwardOptions::reuse_weights, one of the inputs: then a graph
// of one microbatch serves them all). is_first_microbatch is decided on the host: a graph with it
// holds all the microbatches of a step. The step must not read tensors on the host (item()), copy
// from or to host memory, or leave an autocast or a backward_end() to its caller. Everything runs
// on a stream of its own, or the current context's if it has one; the caller's stream is ordered
// before and after. Modules, optimizer and every tensor that the step used must outlive it. One
// run() at a time.
class TE_FL_API GraphedStep {
 public:
  // Returns the tensors that run() is to return, e.g. losses.
  using Step = std::function<Result<std::vector<Tensor>>()>;

  // Random numbers are those of the calling thread's context. Errors: a device
  // that cannot capture, inputs elsewhere, an optimizer that is not capturable, fewer than 2
  // warm-up runs.
  static Result<std::unique_ptr<GraphedStep>> create(const Device& device, Step step,
                                                     GraphedStepOptions options);
  ~GraphedStep();
  GraphedStep(const GraphedStep&) = delete;
  GraphedStep& operator=(const GraphedStep&) = delete;

  // One step. `inputs` are copied into the static ones, each of the same shape and dtype, on the
  // host or on the device; none: the static ones are taken as they are. What it returns is, once
  // captured, the same tensors every time: the next run() overwrites them.
  // A capture that fails changes nothing and the next run() tries again; its error says what in the
  // step cannot be captured.
  Result<std::vector<Tensor>> run(std::span<const Tensor> inputs = {});

  // True if the next run() launches the graph.
  bool captured() const noexcept;
  void* stream() const noexcept;

 private:
  struct Impl;
  explicit GraphedStep(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl::nn
