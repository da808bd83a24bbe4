// The lock under which plugins are loaded and deactivated.
#pragma once

namespace te_fl::plugins {

// A lock that serialises loads and deactivations. The constructor waits for the lock ("the turn").
// A thread that holds it (mine()) must not construct another LoadTurn, for example when a plugin's
// function loads a plugin. exit() waits for the thread that holds it (core/base/process_end.hpp); a
// thread that gets it later checks ends_elsewhere() and does nothing.
class LoadTurn {
 public:
  LoadTurn();
  ~LoadTurn();
  LoadTurn(const LoadTurn&) = delete;
  LoadTurn& operator=(const LoadTurn&) = delete;
  static bool mine() noexcept;

  // Marks the calling thread as acting for another thread, which holds the turn and waits for it.
  // The calling thread then loads no plugin and waits for no load.
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
