// The command-line options of te-fl check.
#pragma once

#include <cstdint>
#include <string>

namespace te_fl_tool {

struct CheckOptions {
  std::string plugin;   // path, or a name from the manifests
  std::string builtin;  // alternatively the name of a built-in backend
  std::string python;   // not empty: the interpreter that loads the module `plugin`
  std::string op, family, impl, device;
  std::string name;               // part of a case's name
  uint64_t seed = 1;              // of random cases
  bool quick = false;             // a quarter of the cases, no speed tests
  bool thorough = false;          // more random cases, and larger ones (--long)
  bool stop = false;              // ends at the first failure
  double time_limit = 30;         // in seconds, for one call
  int jobs = 0;                   // number of child processes; 0: number of processors
  std::string json, junit, html;  // files to write; empty: none
  bool worker = false;            // child process: reads orders from descriptor 3, answers on 4
};

}  // namespace te_fl_tool
