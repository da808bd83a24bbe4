#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "te_fl/nn/modules/tensor_parallel.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn::detail {

// INVALID_ARGUMENT unless ranks that divide a vocabulary are those of a communicator.
Status check_has_ranks(const char* module, const TensorParallel& parallel);

// Tells what one rank of those that divide a vocabulary knows of each id of the whole: numbers of
// 32 bits, looked up where the ids are, so that nothing waits for a device. Belongs to one thread.
class IdTable {
 public:
  union Word {
    int32_t integer;  // at least 0
    float real;
  };
  // columns: I32 or F32 each. row(id, words) sets the words of ids 0 to count - 1, and those of
  // ids that a loss ignores, for which id is -1; `ignored` is the id that stands for them.
  IdTable(std::vector<DType> columns, int64_t count, std::optional<int64_t> ignored,
          const std::function<void(int64_t, Word*)>& row);

  int64_t count() const noexcept { return count_; }
  // A tensor of the ids' shape and device for each column. ids I32 or I64; one that is outside of
  // [0, count) is INVALID_ARGUMENT as in embedding_fwd. On the host one that is `ignored` may lie
  // outside; on a device it must lie inside.
  Result<std::vector<Tensor>> look_up(const Tensor& ids);

 private:
  Result<std::vector<Tensor>> on_host(const Tensor& ids) const;
  Result<std::vector<Tensor>> on_device(const Tensor& ids);
  Result<Tensor> table_on(const Device& device);

  std::vector<DType> columns_;
  int64_t count_;
  std::optional<int64_t> ignored_;
  std::vector<Word> words_;  // [count + 1][columns]; the last row is that of ignored ids
  std::vector<std::pair<Device, Tensor>> copies_;
};

}  // namespace te_fl::nn::detail
