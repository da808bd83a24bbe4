#include "nn/modules/gathered_rows.hpp"

#include <utility>

#include "core/tensor/tensor_access.hpp"
#include "nn/base/tensor_ops.hpp"

namespace te_fl::nn {

SequenceRanks::~SequenceRanks() = default;
SequenceRanks::Work::~Work() = default;

Result<std::unique_ptr<SequenceRanks::Chunks>> SequenceRanks::scatter_chunks(const Tensor&,
                                                                             const Tensor&) {
  return internal_error("scatter_chunks: these ranks have no size from which they sum in chunks");
}

namespace detail {
namespace {

constexpr int64_t kBlock = 128;

Status wait_for(std::unique_ptr<SequenceRanks::Work>& work) {
  if (work == nullptr) return {};
  const Status status = work->wait();
  work.reset();
  return status;
}

// Allocates an FP8 tensor for the rows of all ranks. Uses the scale of `part`, which is equal on
// all ranks.
Result<Tensor> codes_like(const Tensor& part, const Shape& shape, bool columnwise) {
  TE_FL_ASSIGN_OR_RETURN(Tensor whole, Tensor::empty(shape, part.dtype(), part.device()));
  struct Owner {
    std::shared_ptr<void> scales;  // owns the scales only
    Tensor columns;
  };
  auto owner = std::make_shared<Owner>(Owner{Tensor::Access::quant_storage(part), Tensor()});
  te_fl_quant quant = Tensor::Access::quant(part);
  quant.columnwise_data = nullptr;
  if (columnwise) {
    TE_FL_ASSIGN_OR_RETURN(owner->columns,
                           Tensor::empty({shape[1], shape[0]}, part.dtype(), part.device()));
    quant.columnwise_data = owner->columns.raw_data();
  }
  Tensor::Access::set_quant(whole, quant, std::move(owner));
  return whole;
}

// Allocates a tensor for the rows of all ranks, in the format of `part`.
Result<Tensor> join_parts(const Tensor& part, int size, Copies copies) {
  const Shape shape = {part.size(0) * size, part.size(1)};
  if (!part.quantized()) return Tensor::empty(shape, part.dtype(), part.device());
  // With per-tensor scaling the column-wise data are computed from the row-wise data, which always
  // exist.
  if (part.scaling() == Scaling::kTensor) return codes_like(part, shape, copies.columnwise);
  const QuantSpec spec{.dtype = part.dtype(),
                       .scaling = part.scaling(),
                       .rowwise = copies.rowwise,
                       .columnwise = copies.columnwise,
                       .clear_scales = false};
  return Tensor::empty_quantized(shape, spec, part.device());
}

}  // namespace

bool in_chunks(const SequenceRanks& ranks, const Tensor& part) {
  if (part.quantized() && part.scaling() != Scaling::kTensor) return false;
  const int64_t from = ranks.chunked_from();
  return from != 0 && bytes_for(part.dtype(), part.numel()) >= from;
}

Result<Tensor> take_rows(const Tensor& x, int64_t begin, int64_t count) {
  const Tensor rowwise = x.quantized() ? x.rowwise_only() : x;
  return rowwise.slice(0, begin, begin + count);
}

bool gathers_codes(const SequenceRanks& ranks, const Fp8Mode& mode, Role role, int64_t rows) {
  // The backward of an override reads other operands than the quantised rows.
  if (!mode.quantises_gradients()) return false;
  if (mode.delayed() != nullptr) return ranks.share_amaxes(mode.reduction.get());
  if (std::holds_alternative<Float8CurrentScaling>(*mode.recipe)) return true;
  if (!std::holds_alternative<Float8BlockScaling>(*mode.recipe)) return false;
  // With block scaling, FP8 data are not gathered for gradients: they would need row-wise and
  // column-wise data, which have as many bytes as BF16.
  return role == Role::kInput && rows % kBlock == 0;
}

Result<Tensor> quantised_part(SequenceRanks& ranks, const Float8CurrentScaling& recipe, Role role,
                              const Tensor& x) {
  TE_FL_ASSIGN_OR_RETURN(const Tensor amax, Tensor::empty({1}, DType::kF32, x.device()));
  te_fl_compute_amax_args args{};
  args.input = x;
  args.amax = amax;
  TE_FL_RETURN_IF_ERROR(ops::compute_amax(args, call_options(x.device())));
  TE_FL_RETURN_IF_ERROR(ranks.largest(amax));
  // The quantise op derives the scale from the amax of its input. To get the scale for the amax of
  // all ranks, a tensor with this amax as its only element is quantised.
  QuantSpec spec{.dtype = fp8_dtype(recipe, role),
                 .compute_scale = true,
                 .pow2_scale = recipe.pow2_scale,
                 .amax_epsilon = recipe.amax_epsilon,
                 .clear_scales = false};
  TE_FL_ASSIGN_OR_RETURN(const Tensor value, amax.view({1, 1}));
  TE_FL_ASSIGN_OR_RETURN(const Tensor one,
                         Tensor::empty_quantized(value.shape(), spec, x.device()));
  TE_FL_RETURN_IF_ERROR(quantize(value, one));
  const Tensor scale = one.scale();
  spec.compute_scale = spec.amax = false;
  TE_FL_ASSIGN_OR_RETURN(Tensor part, Tensor::empty_quantized(x.shape(), spec, x.device(), &scale));
  TE_FL_RETURN_IF_ERROR(quantize(x, part));
  return part;
}

Status RowGather::Begun::add(SequenceRanks& ranks, const Tensor& from, const Tensor& to,
                             bool side_by_side, bool now) {
  Array& array = arrays[count++];
  array.from = from;
  array.gathered = to;
  if (side_by_side) {
    array.to = to;
    TE_FL_ASSIGN_OR_RETURN(array.gathered, Tensor::empty({from.size(0) * size, from.size(1)},
                                                         to.dtype(), to.device()));
  }
  TE_FL_ASSIGN_OR_RETURN(array.work, ranks.all_gather(array.from, array.gathered, now));
  return {};
}

Result<RowGather> RowGather::begin(SequenceRanks& ranks, const Tensor& part, Copies copies,
                                   bool now) {
  RowGather gather;
  gather.begun_ = std::make_unique<Begun>();
  Begun& begun = *gather.begun_;
  begun.part = part;
  begun.copies = copies;
  begun.size = ranks.size();
  begun.rank = ranks.rank();
  TE_FL_ASSIGN_OR_RETURN(begun.whole, join_parts(part, begun.size, copies));
  const Tensor& whole = begun.whole;
  if (!part.quantized()) {
    TE_FL_RETURN_IF_ERROR(begun.add(ranks, part, whole, false, now));
  } else if (part.scaling() == Scaling::kTensor) {
    TE_FL_RETURN_IF_ERROR(
        begun.add(ranks, part.rowwise_codes(), whole.rowwise_codes(), false, now));
  } else if (copies.columnwise) {  // data [n, rows], scales [rows / 128, n]
    TE_FL_RETURN_IF_ERROR(
        begun.add(ranks, part.columnwise_codes(), whole.columnwise_codes(), true, now));
    TE_FL_RETURN_IF_ERROR(
        begun.add(ranks, part.columnwise_scale_inv(), whole.columnwise_scale_inv(), false, now));
  } else {  // data [rows, n], scales [n / 128, rows]
    TE_FL_RETURN_IF_ERROR(
        begun.add(ranks, part.rowwise_codes(), whole.rowwise_codes(), false, now));
    TE_FL_RETURN_IF_ERROR(begun.add(ranks, part.scale_inv(), whole.scale_inv(), true, now));
  }
  return gather;
}

Result<Tensor> RowGather::take_whole() {
  Begun& begun = *begun_;
  for (int i = 0; i < begun.count; ++i) {
    Array& array = begun.arrays[i];
    TE_FL_RETURN_IF_ERROR(wait_for(array.work));
    if (!array.to.defined()) continue;
    const int64_t n = array.from.size(0), k = array.from.size(1);
    TE_FL_ASSIGN_OR_RETURN(const Tensor parts, array.gathered.view({begun.size, n, k}));
    TE_FL_ASSIGN_OR_RETURN(const Tensor ordered, parts.transpose(0, 1));
    TE_FL_ASSIGN_OR_RETURN(const Tensor to, array.to.view({n, begun.size, k}));
    TE_FL_RETURN_IF_ERROR(copy(ordered, to));
  }
  Tensor& whole = begun.whole;
  if (!whole.quantized() || whole.scaling() != Scaling::kTensor) return std::move(whole);
  if (begun.copies.columnwise) TE_FL_RETURN_IF_ERROR(fill_columns(whole));
  return begun.copies.rowwise ? std::move(whole) : whole.columnwise_only();
}

Status RowGather::arrive() {
  for (int i = 0; i < begun_->count; ++i) {
    TE_FL_RETURN_IF_ERROR(wait_for(begun_->arrays[i].work));
  }
  return {};
}

Result<Tensor> gather_rows_now(SequenceRanks& ranks, const Tensor& part, Copies copies) {
  if (part.quantized()) {
    TE_FL_ASSIGN_OR_RETURN(RowGather gather, RowGather::begin(ranks, part, copies, true));
    return gather.take_whole();
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor whole, join_parts(part, ranks.size(), copies));
  TE_FL_ASSIGN_OR_RETURN(auto work, ranks.all_gather(part, whole, true));
  TE_FL_RETURN_IF_ERROR(wait_for(work));
  return whole;
}

Result<RowScatter> RowScatter::begin(SequenceRanks& ranks, Tensor whole) {
  RowScatter scatter;
  TE_FL_ASSIGN_OR_RETURN(scatter.part, Tensor::empty({whole.size(0) / ranks.size(), whole.size(1)},
                                                     whole.dtype(), whole.device()));
  scatter.whole = std::move(whole);
  TE_FL_ASSIGN_OR_RETURN(scatter.work, ranks.reduce_scatter(scatter.whole, scatter.part, false));
  return scatter;
}

Result<Tensor> scatter_rows_now(SequenceRanks& ranks, const Tensor& whole) {
  TE_FL_ASSIGN_OR_RETURN(Tensor part, Tensor::empty({whole.size(0) / ranks.size(), whole.size(1)},
                                                    whole.dtype(), whole.device()));
  TE_FL_ASSIGN_OR_RETURN(auto work, ranks.reduce_scatter(whole, part, true));
  TE_FL_RETURN_IF_ERROR(wait_for(work));
  return part;
}

Result<RowScatter> RowScatter::in_chunks(SequenceRanks& ranks, Tensor whole,
                                         const std::function<Status(int64_t, int64_t)>& product) {
  const int size = ranks.size(), own = ranks.rank();
  const int64_t rows = whole.size(0) / size;
  RowScatter scatter;
  TE_FL_ASSIGN_OR_RETURN(scatter.part,
                         Tensor::empty({rows, whole.size(1)}, whole.dtype(), whole.device()));
  TE_FL_ASSIGN_OR_RETURN(std::unique_ptr<SequenceRanks::Chunks> chunks,
                         ranks.scatter_chunks(whole, scatter.part));
  scatter.whole = std::move(whole);
  for (int i = 1; i <= size; ++i) {  // this rank's own rows, which are not sent, come last
    const int rank = (own + i) % size;
    TE_FL_RETURN_IF_ERROR(product(rank * rows, rows));
    TE_FL_RETURN_IF_ERROR(chunks->rows_done(rank));
  }
  scatter.work = std::move(chunks);
  return scatter;
}

Result<Tensor> RowScatter::take_part() {
  TE_FL_RETURN_IF_ERROR(wait_for(work));
  return std::move(part);
}

}  // namespace detail
}  // namespace te_fl::nn
