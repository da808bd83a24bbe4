#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "te_fl/export.hpp"
#include "te_fl/nn/autograd/context.hpp"
#include "te_fl/status.hpp"

namespace te_fl::nn {

// Random streams by name, each with its seed and position: e.g. one that all ranks of a group
// share, and one that is each rank's own for what is sharded. For one thread.
//   streams.add("model-parallel", 1234 + rank);
//   { auto scope = streams.fork("model-parallel"); y = dropout->forward(x, &ctx); }
// A recomputed piece draws from each the numbers of its first run again. A captured graph draws
// from the stream that its GraphedStep was made in alone, and refuses others.
class TE_FL_API RandomStreams {
 public:
  // INVALID_ARGUMENT for a name that is empty or there already, or the seed of another stream,
  // which would give the same numbers.
  Status add(std::string name, uint64_t seed);
  // The stream, on the thread's current device stream; NOT_FOUND names those that there are.
  Result<Context> context(std::string_view name) const;
  // While the scope lives, modules that the thread calls draw from the stream.
  Result<std::unique_ptr<ContextScope>> fork(std::string_view name) const;

  // Gives what to save, and takes it back: all or nothing, the names and seeds that add() gave
  // being kept.
  std::map<std::string, RandomPosition> state() const;
  Status load_state(const std::map<std::string, RandomPosition>& state);

 private:
  std::map<std::string, Context, std::less<>> streams_;
};

}  // namespace te_fl::nn
