#include "te_fl/nn/autograd/random_streams.hpp"

#include <utility>

namespace te_fl::nn {

Status RandomStreams::add(std::string name, uint64_t seed) {
  if (name.empty()) return invalid_argument("RandomStreams: the name is empty; give one");
  for (const auto& [other, context] : streams_) {
    if (other == name) {
      return invalid_argument("RandomStreams: \"" + name + "\" is there already; use another name");
    }
    if (context.random().seed == seed) {
      return invalid_argument("RandomStreams: the seed of \"" + name + "\" is " +
                              std::to_string(seed) + ", which is that of \"" + other +
                              "\" and gives the same numbers; use another");
    }
  }
  streams_.emplace(std::move(name), Context(seed));
  return {};
}

Result<Context> RandomStreams::context(std::string_view name) const {
  const auto found = streams_.find(name);
  if (found != streams_.end()) {
    return found->second.with_stream(Context::current().stream());
  }
  std::string message = "RandomStreams: there is no \"" + std::string(name) + "\"; there are:";
  for (const auto& [other, context] : streams_) message += " \"" + other + "\"";
  Status status(StatusCode::kNotFound, message + (streams_.empty() ? " none" : ""));
  status.set_clean();
  return status;
}

Result<std::unique_ptr<ContextScope>> RandomStreams::fork(std::string_view name) const {
  TE_FL_ASSIGN_OR_RETURN(Context chosen, context(name));
  return std::make_unique<ContextScope>(std::move(chosen));
}

std::map<std::string, RandomPosition> RandomStreams::state() const {
  std::map<std::string, RandomPosition> state;
  for (const auto& [name, context] : streams_) state.emplace(name, context.random());
  return state;
}

Status RandomStreams::load_state(const std::map<std::string, RandomPosition>& state) {
  for (const auto& [name, position] : state) {
    TE_FL_RETURN_IF_ERROR(context(name).status());
  }
  for (const auto& [name, context] : streams_) {
    if (state.contains(name)) continue;
    return Status(StatusCode::kNotFound,
                  "RandomStreams: the state has no \"" + name + "\", which was added here");
  }
  for (const auto& [name, position] : state) streams_.find(name)->second.set_random(position);
  return {};
}

}  // namespace te_fl::nn
