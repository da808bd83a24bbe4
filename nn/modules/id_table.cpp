#include "nn/modules/id_table.hpp"

#include <array>
#include <cstring>
#include <string>

#include "nn/base/tensor_ops.hpp"

namespace te_fl::nn::detail {

Status check_has_ranks(const char* module, const TensorParallel& parallel) {
  if (!parallel.divides() || parallel.ranks != nullptr) return {};
  return invalid_argument(std::string(module) +
                          ": the ranks of a vocabulary are those of a te_fl::Comm, and "
                          "TensorParallel::ranks is null; set it");
}

IdTable::IdTable(std::vector<DType> columns, int64_t count, std::optional<int64_t> ignored,
                 const std::function<void(int64_t, Word*)>& row)
    : columns_(std::move(columns)),
      count_(count),
      ignored_(ignored),
      words_(static_cast<size_t>(count + 1) * columns_.size()) {
  for (int64_t id = 0; id <= count; ++id) {
    const bool is_ignored = id == count || id == ignored;
    row(is_ignored ? -1 : id, &words_[static_cast<size_t>(id) * columns_.size()]);
  }
}

Result<std::vector<Tensor>> IdTable::look_up(const Tensor& ids) {
  if (ids.dtype() != DType::kI32 && ids.dtype() != DType::kI64) {
    return invalid_argument("ids of a divided vocabulary are " + ids.describe() +
                            "; they must be I32 or I64");
  }
  return ids.device().is_host() ? on_host(ids) : on_device(ids);
}

Result<std::vector<Tensor>> IdTable::on_host(const Tensor& ids) const {
  TE_FL_ASSIGN_OR_RETURN(const Tensor from, compact(ids));
  std::vector<Tensor> results;
  for (const DType dtype : columns_) {
    TE_FL_ASSIGN_OR_RETURN(Tensor column, empty_like(from, dtype));
    results.push_back(std::move(column));
  }
  for (int64_t i = 0; i < from.numel(); ++i) {
    const int64_t id =
        from.dtype() == DType::kI64 ? from.data<int64_t>()[i] : from.data<int32_t>()[i];
    const bool inside = id >= 0 && id < count_;
    if (!inside && id != ignored_) {
      return invalid_argument("id number " + std::to_string(i) + " is " + std::to_string(id) +
                              "; it must lie in [0, " + std::to_string(count_) +
                              "), the vocabulary that the ranks divide");
    }
    const Word* words = &words_[static_cast<size_t>(inside ? id : count_) * columns_.size()];
    for (size_t c = 0; c < columns_.size(); ++c) results[c].data<Word>()[i] = words[c];
  }
  return results;
}

// The 32-bit entries of the table reinterpreted as F32. Copying them as F32 preserves the bits,
// since no entry is a NaN: integers are non-negative.
Result<Tensor> IdTable::table_on(const Device& device) {
  for (const auto& [where, table] : copies_) {
    if (where == device) return table;
  }
  const auto width = static_cast<int64_t>(columns_.size());
  TE_FL_ASSIGN_OR_RETURN(Tensor table, Tensor::empty({count_, width}, DType::kF32));
  std::memcpy(table.raw_data(), words_.data(), static_cast<size_t>(count_ * width) * sizeof(Word));
  TE_FL_ASSIGN_OR_RETURN(table, table.to(device));
  copies_.emplace_back(device, table);
  return table;
}

Result<std::vector<Tensor>> IdTable::on_device(const Tensor& ids) {
  TE_FL_ASSIGN_OR_RETURN(const Tensor table, table_on(ids.device()));
  const int64_t count = ids.numel();
  const auto width = static_cast<int64_t>(columns_.size());
  TE_FL_ASSIGN_OR_RETURN(const Tensor from, compact(ids));
  TE_FL_ASSIGN_OR_RETURN(const Tensor flat, from.view({count}));
  TE_FL_ASSIGN_OR_RETURN(const Tensor rows,
                         Tensor::empty({count, width}, DType::kF32, ids.device()));
  te_fl_embedding_fwd_args args{};
  args.indices = flat;
  args.weight = table;
  args.output = rows;
  TE_FL_RETURN_IF_ERROR(ops::embedding_fwd(args, call_options(ids.device())));
  std::vector<Tensor> results;
  for (size_t c = 0; c < columns_.size(); ++c) {
    const std::array<int64_t, 1> shape = {count}, strides = {width};
    char* const at = rows.data<char>() + c * sizeof(Word);
    TE_FL_ASSIGN_OR_RETURN(const Tensor words,
                           Tensor::wrap(at, shape, strides, columns_[c], ids.device(), nullptr));
    TE_FL_ASSIGN_OR_RETURN(const Tensor column, Tensor::empty({count}, columns_[c], ids.device()));
    TE_FL_RETURN_IF_ERROR(copy(words, column));
    TE_FL_ASSIGN_OR_RETURN(Tensor shaped, column.view(ids.shape()));
    results.push_back(std::move(shaped));
  }
  return results;
}

}  // namespace te_fl::nn::detail
