#include "ranks.hpp"

#include <cstdio>
#include <utility>

#include "te_fl/te_fl.hpp"

namespace train_gpt {

namespace nn = te_fl::nn;
using te_fl::Comm;
using te_fl::Result;
using te_fl::Status;

Result<Ranks> Ranks::create(const Options& options, const te_fl::Device& device) {
  Ranks ranks;
  TE_FL_ASSIGN_OR_RETURN(const te_fl::Job job, te_fl::Job::from_environment());
  const int64_t wanted = options.tp * options.dp;
  if (wanted != job.size) {
    return te_fl::invalid_argument(
        "--tp " + std::to_string(options.tp) + " times --dp " + std::to_string(options.dp) +
        " is " + std::to_string(wanted) + ", and the job has " + std::to_string(job.size) +
        (job.size == 1 ? " rank" : " ranks") + "; start as many: tools/launch.py -n " +
        std::to_string(wanted) + " -- train_gpt ...");
  }
  if (job.size == 1) return ranks;
  TE_FL_ASSIGN_OR_RETURN(Comm world, Comm::world(device));
  ranks.world = std::make_shared<const Comm>(std::move(world));
  const int tp = static_cast<int>(options.tp), rank = ranks.world->rank();
  if (options.tp > 1) {
    TE_FL_ASSIGN_OR_RETURN(Comm row, ranks.world->split(rank / tp, rank, "tensor"));
    ranks.tensor.ranks = std::make_shared<const Comm>(std::move(row));
    ranks.tensor.sequence_parallel = options.sp;
    ranks.tensor.random =
        nn::Context(nn::init::subseed(options.seed, 2000 + static_cast<uint64_t>(rank)));
  }
  if (options.dp > 1) {
    TE_FL_ASSIGN_OR_RETURN(Comm column, ranks.world->split(rank % tp, rank, "data"));
    ranks.data = std::make_shared<const Comm>(std::move(column));
  }
  ranks.amaxes = std::make_shared<nn::AmaxReduction>(ranks.world);
  return ranks;
}

Status average(const Ranks& ranks, const std::vector<te_fl::Tensor>& losses) {
  if (ranks.data == nullptr) return {};
  for (const te_fl::Tensor& loss : losses) {
    te_fl_all_reduce_args args{};
    args.input = loss;
    args.output = loss;
    args.comm = ranks.data->c();
    args.reduction = TE_FL_REDUCTION_AVG;
    TE_FL_RETURN_IF_ERROR(te_fl::ops::all_reduce(args));
  }
  return {};
}

void print_collectives(const Ranks& ranks) {
  if (ranks.world == nullptr) return;
  std::printf("%d ranks, provider %s:", ranks.world->size(), ranks.world->provider().c_str());
  for (const auto& [op, impl] : ranks.world->implementations()) {
    std::printf(" %s=%s", op.c_str(), impl.c_str());
  }
  std::printf("\n");
}

}  // namespace train_gpt
