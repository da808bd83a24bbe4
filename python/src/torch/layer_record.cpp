#include "torch/layer_record.hpp"

#include <mutex>
#include <unordered_map>

#include "py/errors.hpp"
#include "py/mutex.hpp"

namespace te_fl::python {

namespace {

// The records of forwards that await their backward, by number. A token that was copied to another
// process may hold a number that no longer exists.
struct Records {
  Mutex mutex{AtFork::kTaken};
  std::unordered_map<int64_t, std::shared_ptr<Record>> by_number;
  int64_t last = 0;
};
// Never destroyed: tokens may be freed after static destruction.
Records& g_records = *new Records();

}  // namespace

int64_t add_record(std::shared_ptr<Record> record) {
  const std::lock_guard lock(g_records.mutex);
  g_records.by_number.emplace(++g_records.last, std::move(record));
  return g_records.last;
}
void drop_record(int64_t number) {
  std::shared_ptr<Record> dropped;  // destroyed after the mutex is unlocked
  const std::lock_guard lock(g_records.mutex);
  const auto found = g_records.by_number.find(number);
  if (found == g_records.by_number.end()) return;
  dropped = std::move(found->second);
  g_records.by_number.erase(found);
}

std::shared_ptr<Record> find_record(PyObject* token) {
  const Tensor number = to_tensor(token, "token", false);
  if (!number.device().is_host() || number.dtype() != DType::kI64 || number.numel() != 1) {
    throw_type_error("the token is " + number.describe() + "; it must be the int64 of a forward");
  }
  {
    const std::lock_guard lock(g_records.mutex);
    const auto found = g_records.by_number.find(*number.data<int64_t>());
    if (found != g_records.by_number.end()) return found->second;
  }
  throw_status(Status(StatusCode::kFailedPrecondition,
                      "what this forward kept for its backward has gone: a hook for saved tensors "
                      "replaced it by a copy, or the process was forked since; run the forward "
                      "again"));
}

std::shared_ptr<Record> record_that_waits(PyObject* object) {
  const Tensor number = to_tensor(object, "token", false);
  if (!number.device().is_host() || number.dtype() != DType::kI64 || number.numel() != 1) {
    return nullptr;
  }
  const std::lock_guard lock(g_records.mutex);
  const auto found = g_records.by_number.find(*number.data<int64_t>());
  const bool same = found != g_records.by_number.end() && found->second->token == number.raw_data();
  return same ? found->second : nullptr;
}

}  // namespace te_fl::python
