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

// Random streams by name, each with its own seed and position: for example one that all ranks of a
// group share, and one per rank for sharded tensors. For use by one thread.
//   streams.add("model-parallel", 1234 + rank);
//   { auto scope = streams.fork("model-parallel"); y = dropout->forward(x, &ctx); }
// When activation checkpointing runs a forward again, the forward draws from each stream the same
// numbers as in its first run. A captured graph can only draw from the stream in which its
// GraphedStep was made; using another stream is an error.
class TE_FL_API RandomStreams {
 public:
  // Adds a stream. INVALID_ARGUMENT if the name is empty or already used, or if another stream has
  // the same seed and would therefore give the same numbers.
  Status add(std::string name, uint64_t seed);
  // A context with this random stream, on the thread's current device stream. NOT_FOUND names the
  // existing streams.
  Result<Context> context(std::string_view name) const;
  // While the returned scope lives, modules that the thread calls draw from this stream.
  Result<std::unique_ptr<ContextScope>> fork(std::string_view name) const;

  // The positions of all streams, for a checkpoint. load_state() restores them, either all or none.
  // The names must be exactly those of the existing streams, else NOT_FOUND.
  std::map<std::string, RandomPosition> state() const;
  Status load_state(const std::map<std::string, RandomPosition>& state);

 private:
  std::map<std::string, Context, std::less<>> streams_;
};

}  // namespace te_fl::nn
