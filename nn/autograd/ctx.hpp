#pragma once

#include <memory>
#include <string_view>

#include "te_fl/nn/autograd/ctx.hpp"

namespace te_fl::nn::detail {

// Makes what a forward that is given `ctx` fills for its backward; FAILED_PRECONDITION, naming the
// module, if ctx still holds another forward. Comes first in a forward, so that a session of FP8
// learns of every one that fails.
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
