// The turn to load or deactivate a plugin.
#pragma once

namespace te_fl::plugins {

// Loads and deactivations go one after the other. Waits for its turn; not to be made by a thread
// that has it (mine()), as a plugin that loads another from its own entry would. exit() waits for
// who has it (core/base/process_end.hpp); who gets it then asks ends_elsewhere() and does nothing.
class LoadTurn {
 public:
  LoadTurn();
  ~LoadTurn();
  LoadTurn(const LoadTurn&) = delete;
  LoadTurn& operator=(const LoadTurn&) = delete;
  static bool mine() noexcept;

  // The calling thread has the turn of another, which waits for it: it loads nothing and waits for
  // no load.
  class Lent {
   public:
    Lent() noexcept;
    ~Lent();
    Lent(const Lent&) = delete;
    Lent& operator=(const Lent&) = delete;

   private:
    const bool before_;
  };
};

}  // namespace te_fl::plugins
