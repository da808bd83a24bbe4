// The store keys by which ranks exchange their state, except for those of agreement.cpp, and the
// removal of keys.
#include "comm/process_mark.hpp"
#include "comm/state.hpp"

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

std::string made_key(const Comm::State& state, int rank) {
  return state.face->key(kMade + std::to_string(rank));
}

}  // namespace

void forget(NamespacedStore& face, const std::string& prefix) noexcept {
  try_to([&] { (void)face.store().forget(face.key(prefix)); });
}

void publish_made(Comm::State& state) noexcept {
  if (state.c.size == 1) return;
  try_to([&] { (void)state.face->store().set(made_key(state, state.c.rank), process_mark()); });
}

int find_ended_process(Comm::State& state, int rank) {
  const auto mark = state.face->store().look(made_key(state, rank));
  return mark.ok() && mark->has_value() ? ended_process(**mark) : 0;
}

void forget_making(Comm::State& state) noexcept {
  if (state.c.size == 1 || state.c.rank != 0 || state.failed.load()) return;
  try_to([&] {
    for (int r = 0; r < state.c.size; ++r) {
      const auto made = state.face->store().look(made_key(state, r));
      if (!made.ok() || !made->has_value()) return;
    }
    for (const char* prefix : kMaking) forget(*state.face, prefix);
  });
}

void publish_abort(Comm::State& state, const std::string& text) {
  // The store keeps the first text. Ignores errors: the other ranks then report their own failure.
  if (state.c.size > 1) (void)state.face->store().set(state.face->key(kAborted), text);
}

Result<std::string> read_abort(Comm::State& state) {
  if (state.c.size == 1) return std::string();
  TE_FL_ASSIGN_OR_RETURN(const std::optional<std::string> found,
                         state.face->store().look(state.face->key(kAborted)));
  return found.value_or("");
}

}  // namespace te_fl::comm
