#include "te_fl/nn/autograd/ctx.hpp"

#include <string>
#include <utility>

#include "nn/fp8/autocast.hpp"

namespace te_fl::nn {

Ctx::Record::~Record() {
  if (unfinished) detail::note_forward(true);
}
Ctx::Ctx() = default;
Ctx::~Ctx() = default;
Ctx::Ctx(const Ctx& other) : input_grad(other.input_grad) {
  if (other.record_ == nullptr || other.record_->copy == nullptr) return;
  record_ = other.record_->copy(*other.record_);
  owner_ = other.owner_;
}
Ctx& Ctx::operator=(const Ctx& other) { return *this = Ctx(other); }
Ctx::Ctx(Ctx&&) noexcept = default;
Ctx& Ctx::operator=(Ctx&&) noexcept = default;

void Ctx::reset() noexcept {
  record_.reset();
  owner_ = nullptr;
}

void Ctx::visit(const Visitor& visitor) {
  if (record_ != nullptr && record_->visit != nullptr) record_->visit(*record_, visitor);
}

Status Ctx::check_empty(std::string_view module) const {
  if (record_ == nullptr) return {};
  return failed_precondition(
      std::string(module) +
      ": forward got a ctx that still holds another forward, whose backward has not run; give each "
      "microbatch its own, or drop that one with reset()");
}

Status Ctx::store(const void* owner, std::unique_ptr<Record> record) {
  TE_FL_RETURN_IF_ERROR(check_empty("Ctx::store"));
  record_ = std::move(record);
  record_->unfinished = false;
  owner_ = owner;
  detail::note_forward(false);
  return {};
}

Result<std::unique_ptr<Ctx::Record>> Ctx::take(const void* owner, std::string_view module) {
  if (record_ == nullptr) {
    return failed_precondition(std::string(module) +
                               ": backward got an empty ctx; pass the ctx that forward filled, "
                               "once per forward");
  }
  if (owner_ != owner) {
    return failed_precondition(std::string(module) +
                               ": backward got a ctx that another module's forward filled");
  }
  owner_ = nullptr;
  return std::move(record_);
}

}  // namespace te_fl::nn
