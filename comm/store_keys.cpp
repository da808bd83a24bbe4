// The store keys by which ranks inform each other, apart from the agreement, and the removal of
// keys.
#include "comm/process_mark.hpp"
#include "comm/rep.hpp"

namespace te_fl::comm {
namespace {

constexpr char kMade[] = "made/";
constexpr char kAborted[] = "aborted";

// The keys that no rank reads after all ranks have made the communicator. The last one is the
// prefix of the provider's keys.
constexpr const char* kMaking[] = {"facts", "differs/", "agreed", "id", kMade, "provider/"};

// Runs f and ignores its failure.
template <class F>
void try_to(F&& f) noexcept {
  try {
    f();
  } catch (...) {  // no memory or the store's error: a key stays or is missing
  }
}

std::string made_key(const Comm::Rep& rep, int rank) {
  return rep.face->key(kMade + std::to_string(rank));
}

}  // namespace

void forget(StoreFace& face, const std::string& prefix) noexcept {
  try_to([&] { (void)face.store().forget(face.key(prefix)); });
}

void tell_made(Comm::Rep& rep) noexcept {
  if (rep.c.size == 1) return;
  try_to([&] { (void)rep.face->store().set(made_key(rep, rep.c.rank), process_mark()); });
}

int ended_process_of(Comm::Rep& rep, int rank) {
  const auto mark = rep.face->store().look(made_key(rep, rank));
  return mark.ok() && mark->has_value() ? ended_process(**mark) : 0;
}

void forget_making(Comm::Rep& rep) noexcept {
  if (rep.c.size == 1 || rep.c.rank != 0 || rep.failed.load()) return;
  try_to([&] {
    for (int r = 0; r < rep.c.size; ++r) {
      const auto made = rep.face->store().look(made_key(rep, r));
      if (!made.ok() || !made->has_value()) return;
    }
    for (const char* prefix : kMaking) forget(*rep.face, prefix);
  });
}

void tell_abort(Comm::Rep& rep, const std::string& text) {
  // The store keeps the first text. Ignores errors: the other ranks then report their own failure.
  if (rep.c.size > 1) (void)rep.face->store().set(rep.face->key(kAborted), text);
}

Result<std::string> told_abort(Comm::Rep& rep) {
  if (rep.c.size == 1) return std::string();
  TE_FL_ASSIGN_OR_RETURN(const std::optional<std::string> told,
                         rep.face->store().look(rep.face->key(kAborted)));
  return told.value_or("");
}

}  // namespace te_fl::comm
