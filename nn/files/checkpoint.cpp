#include <algorithm>
#include <charconv>
#include <optional>

#include "nn/base/tensor_ops.hpp"
#include "nn/files/optimizer_files.hpp"
#include "nn/files/place_text.hpp"
#include "nn/files/shard_files.hpp"
#include "te_fl/nn/autograd/context.hpp"
#include "te_fl/nn/files/safetensors.hpp"

namespace te_fl::nn {
namespace {

constexpr std::string_view kOptimizerPrefix = "optimizer.";
constexpr const char* kSeed = "te_fl.rng_seed";
constexpr const char* kOffset = "te_fl.rng_offset";
// Metadata keys for the RNG state (seed and offset) of TensorParallel::random, of which every rank
// has its own, and for the number of ranks when the checkpoint was saved.
constexpr const char* kOwnSeed = "te_fl.rng_own_seed";
constexpr const char* kOwnOffset = "te_fl.rng_own_offset";
constexpr const char* kOwnRanks = "te_fl.rng_own_ranks";

bool of_optimizer(std::string_view name) { return name.starts_with(kOptimizerPrefix); }

Result<uint64_t> number(const Metadata& metadata, const char* key, const std::string& path,
                        uint64_t most = UINT64_MAX) {
  auto found = metadata.find(key);
  if (found == metadata.end()) {
    return Status(StatusCode::kNotFound,
                  path + ": metadata has no \"" + key + "\"; the file is not a te-fl checkpoint");
  }
  const std::string& text = found->second;
  uint64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value > most) {
    return Status(StatusCode::kDataLoss, path + ": metadata \"" + key + "\" is \"" + text +
                                             "\"; it must be an integer from 0 to " +
                                             std::to_string(most));
  }
  return value;
}

// Pairs of a tensor in the file and its destination.
using Copies = std::vector<std::pair<Tensor, Tensor>>;

Result<Copies> match_optimizer(const std::vector<NamedTensor>& tensors, const Optimizer& optimizer,
                               const std::string& path) {
  std::map<std::string, const Tensor*> in_file;
  for (const NamedTensor& t : tensors) {
    if (of_optimizer(t.name)) in_file.emplace(t.name, &t.tensor);
  }
  std::map<std::string, StatePart> parts;
  for (StatePart& part : optimizer.state_parts()) parts.emplace(part.name, std::move(part));
  Copies copies;
  for (const NamedTensor& target : optimizer.state()) {
    auto found = in_file.find(target.name);
    if (found == in_file.end()) {
      return Status(StatusCode::kNotFound, path + ": tensor " + target.name +
                                               " is missing; the optimizer needs it as " +
                                               target.tensor.describe());
    }
    Tensor tensor = *found->second;
    const auto part = parts.find(detail::parameter_name(target.name));
    const std::span<const int64_t> shape =
        part == parts.end() ? target.tensor.shape() : std::span<const int64_t>(part->second.shape);
    if (tensor.dtype() != target.tensor.dtype() || !std::ranges::equal(tensor.shape(), shape)) {
      return invalid_argument(path + ": tensor " + target.name + " is " + tensor.describe() +
                              "; it must be " +
                              (part == parts.end() ? target.tensor.describe()
                                                   : "f32 of the shape of " + part->second.name));
    }
    if (part != parts.end()) {
      TE_FL_ASSIGN_OR_RETURN(tensor, tensor.view({-1}));
      TE_FL_ASSIGN_OR_RETURN(tensor, tensor.slice(0, part->second.begin, part->second.end));
    }
    TE_FL_ASSIGN_OR_RETURN(Tensor staged, tensor.to(target.tensor.device()));
    copies.emplace_back(std::move(staged), target.tensor);
    in_file.erase(found);
  }
  // Ignores the state of parameters of which this rank has no elements; other ranks have it.
  std::erase_if(in_file, [&](const auto& t) {
    const auto part = parts.find(detail::parameter_name(t.first));
    return part != parts.end() && part->second.begin == part->second.end;
  });
  if (!in_file.empty()) {
    return Status(StatusCode::kNotFound,
                  path + ": tensor " + in_file.begin()->first +
                      " is not in the optimizer; it was written by another kind of optimizer or "
                      "for other parameters");
  }
  return copies;
}

}  // namespace

namespace {

Status write_checkpoint(const std::string& path, const Module& module, const Optimizer* optimizer,
                        const Metadata& metadata, const Metadata& places) {
  Metadata all = metadata;
  all.insert(places.begin(), places.end());
  for (const auto& [key, value] : metadata) {
    if (key.starts_with("te_fl.")) {
      return invalid_argument("save_checkpoint: metadata key \"" + key +
                              "\" begins with \"te_fl.\", which is reserved");
    }
  }
  std::vector<NamedTensor> tensors = module.state();
  if (optimizer != nullptr) {
    all[detail::kOptimizerSteps] = std::to_string(optimizer->steps());
    if (optimizer->state_ranks() > 1) {
      TE_FL_RETURN_IF_ERROR(detail::save_optimizer_part(path, *optimizer));
      if (optimizer->state_rank() > 0) return {};  // the module is identical on all ranks
      all[detail::kOptimizerParts] = std::to_string(optimizer->state_ranks());
    } else {
      std::vector<NamedTensor> state = optimizer->state();
      tensors.insert(tensors.end(), state.begin(), state.end());
    }
  }
  const RandomPosition random = Context::current().random();
  all[kSeed] = std::to_string(random.seed);
  all[kOffset] = std::to_string(random.offset);
  return save_safetensors(path, tensors, all);
}

Result<Metadata> restore(SafetensorsFile file, const std::string& path, Module& module,
                         Optimizer* optimizer) {
  TE_FL_RETURN_IF_ERROR(module.check_state(file.tensors, path, of_optimizer));
  RandomPosition random;
  TE_FL_ASSIGN_OR_RETURN(random.seed, number(file.metadata, kSeed, path));
  TE_FL_ASSIGN_OR_RETURN(random.offset, number(file.metadata, kOffset, path));
  uint64_t steps = 0;
  Copies copies;
  if (optimizer != nullptr) {
    constexpr uint64_t kMostSteps = INT64_MAX - 1;  // the next step must not overflow
    TE_FL_ASSIGN_OR_RETURN(steps, number(file.metadata, detail::kOptimizerSteps, path, kMostSteps));
    TE_FL_ASSIGN_OR_RETURN(copies, match_optimizer(file.tensors, *optimizer, path));
  }
  TE_FL_RETURN_IF_ERROR(module.load_state(file.tensors, path, of_optimizer));
  for (const auto& [from, to] : copies) TE_FL_RETURN_IF_ERROR(detail::copy(from, to));
  if (optimizer != nullptr) optimizer->set_steps(static_cast<int64_t>(steps));
  Context::current().set_random(random);
  std::erase_if(file.metadata, [](const auto& item) { return item.first.starts_with("te_fl."); });
  return file.metadata;
}

}  // namespace

Status save_checkpoint(const std::string& path, const Module& module, const Optimizer* optimizer,
                       const Metadata& metadata) {
  return write_checkpoint(path, module, optimizer, metadata, {});
}

Result<Metadata> load_checkpoint(const std::string& path, Module& module, Optimizer* optimizer) {
  TE_FL_ASSIGN_OR_RETURN(SafetensorsFile file, load_safetensors(path));
  if (optimizer != nullptr) TE_FL_RETURN_IF_ERROR(detail::join_optimizer(path, file));
  return restore(std::move(file), path, module, optimizer);
}

Status save_checkpoint(const std::string& path, const TensorParallel& parallel,
                       const Module& module, const Optimizer* optimizer, const Metadata& metadata) {
  const std::string own = detail::shard_path(path, parallel.rank(), parallel.size());
  TE_FL_ASSIGN_OR_RETURN(Metadata places, detail::list_places(module.parameters()));
  if (parallel.random.has_value()) {
    const RandomPosition random = parallel.random->random();
    places[kOwnSeed] = std::to_string(random.seed);
    places[kOwnOffset] = std::to_string(random.offset);
    places[kOwnRanks] = std::to_string(parallel.size());
  }
  return write_checkpoint(own, module, optimizer, metadata, places);
}

Result<Metadata> load_checkpoint(const std::string& path, const TensorParallel& parallel,
                                 Module& module, Optimizer* optimizer) {
  TE_FL_ASSIGN_OR_RETURN(SafetensorsFile file,
                         detail::load_shards(path, parallel.rank(), parallel.size(),
                                             module.parameters(), optimizer != nullptr));
  std::optional<RandomPosition> own;
  const auto ranks = file.metadata.find(kOwnRanks);
  if (parallel.random.has_value() && ranks != file.metadata.end() &&
      ranks->second == std::to_string(parallel.size())) {
    own.emplace();
    TE_FL_ASSIGN_OR_RETURN(own->seed, number(file.metadata, kOwnSeed, path));
    TE_FL_ASSIGN_OR_RETURN(own->offset, number(file.metadata, kOwnOffset, path));
  }
  TE_FL_ASSIGN_OR_RETURN(Metadata metadata, restore(std::move(file), path, module, optimizer));
  if (own.has_value()) Context(*parallel.random).set_random(*own);
  return metadata;
}

}  // namespace te_fl::nn
