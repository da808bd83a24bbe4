#pragma once

#include <memory>
#include <string_view>

#include "te_fl/nn/autograd/ctx.hpp"

namespace te_fl::nn::detail {

// Makes the record that a forward pass with `ctx` fills for its backward pass. FAILED_PRECONDITION,
// with the module's name, if ctx still holds the record of another forward. Must be the first step
// of a forward, so that an FP8 session sees all failed forwards.
template <class Record>
Result<std::unique_ptr<Record>> new_record(const Ctx* ctx, std::string_view module) {
  auto record = std::make_unique<Record>();
  record->unfinished = ctx != nullptr;
  if (ctx != nullptr) TE_FL_RETURN_IF_ERROR(ctx->check_empty(module));
  record->copy = [](const Ctx::Record& other) -> std::unique_ptr<Ctx::Record> {
    return std::make_unique<Record>(static_cast<const Record&>(other));
  };
  if constexpr (requires(Record & made, const Ctx::Visitor& visitor) {
                  made.visit_tensors(visitor);
                }) {
    record->visit = [](Ctx::Record& made, const Ctx::Visitor& visitor) {
      static_cast<Record&>(made).visit_tensors(visitor);
    };
  }
  return record;
}

}  // namespace te_fl::nn::detail
