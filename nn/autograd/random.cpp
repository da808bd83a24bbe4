#include "nn/autograd/random.hpp"

#include <mutex>

#include "nn/autograd/context.hpp"
#include "nn/base/capture.hpp"
#include "nn/base/run_log.hpp"
#include "nn/base/tensor_ops.hpp"

namespace te_fl::nn::detail {

namespace {

// Reserves the next `count` random numbers for a call and puts the RNG state into `options`. If a
// device tensor defines where they start, sets `start` to it.
Status draw(RandomState& state, int64_t count, bool captured, CallOptions& options, Tensor& start) {
  std::lock_guard lock(state.mutex);
  start = state.captured;
  RandomPosition& random = state.position;
  options.rng.seed = random.seed;
  options.rng.offset = random.offset;
  if (state.captured.defined()) {
    options.rng.seed_address = state.captured.data<uint64_t>();
    options.rng.offset_address = options.rng.seed_address + 1;
    options.rng.offset -= state.captured_at;
  } else if (captured) {
    return failed_precondition(
        "dropout: the stream is being captured into a graph, and every launch would take the same "
        "random numbers; draw from the context that the GraphedStep was made in, whose position "
        "its launches advance");
  }
  random.offset += (static_cast<uint64_t>(count) + 3) / 4;
  return {};
}

}  // namespace

Result<CallOptions> random_options(int64_t count, const Device& device) {
  Context context = Context::current();
  CallOptions options = call_options(device);
  if (replaying()) {
    TE_FL_RETURN_IF_ERROR(replay_draw(count, device, options));
    return options;
  }
  TE_FL_ASSIGN_OR_RETURN(const bool captured, capturing(device));
  Tensor start;
  TE_FL_RETURN_IF_ERROR(draw(context.state(), count, captured, options, start));
  if (noting()) TE_FL_RETURN_IF_ERROR(note_draw(count, device, options, start));
  return options;
}
}  // namespace te_fl::nn::detail
