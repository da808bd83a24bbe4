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

// INVALID_ARGUMENT if a vocabulary is sharded over ranks without a communicator.
Status check_has_ranks(const char* module, const TensorParallel& parallel);

// A table with several 32-bit numbers for each id of a sharded vocabulary, as seen from one rank.
// The look-up runs on the device of the ids, so it needs no synchronisation. Not thread-safe.
class IdTable {
 public:
  union Word {
    int32_t integer;  // non-negative
    float real;
  };
  // `columns`: the type of each column, I32 or F32. The function row(id, words) sets the entries of
  // one id from 0 to count - 1, and with id = -1 those of ids that a loss ignores. `ignored`: the
  // id that means "ignore".
  IdTable(std::vector<DType> columns, int64_t count, std::optional<int64_t> ignored,
          const std::function<void(int64_t, Word*)>& row);

  int64_t count() const noexcept { return count_; }
  // Returns for each column a tensor with the shape and device of the ids, which are I32 or I64. An
  // id outside of [0, count) is INVALID_ARGUMENT as in embedding_fwd. `ignored` may be outside of
  // that range for ids on the host, but not for ids on a device.
  Result<std::vector<Tensor>> look_up(const Tensor& ids);

 private:
  Result<std::vector<Tensor>> on_host(const Tensor& ids) const;
  Result<std::vector<Tensor>> on_device(const Tensor& ids);
  Result<Tensor> table_on(const Device& device);

  std::vector<DType> columns_;
  int64_t count_;
  std::optional<int64_t> ignored_;
  std::vector<Word> words_;  // [count + 1][columns]; last row: ignored ids
  std::vector<std::pair<Device, Tensor>> copies_;
};

}  // namespace te_fl::nn::detail
