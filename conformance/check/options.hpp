// The options of te-fl check, as its command line gives them.
#pragma once

#include <cstdint>
#include <string>

namespace te_fl_tool {

struct CheckOptions {
  std::string plugin;   // path, or a name from the manifests
  std::string builtin;  // instead: the name of a backend that is part of te-fl
  std::string python;   // not empty: the interpreter whose module `plugin` is
  std::string op, family, impl, device;
  std::string name;               // part of a case's name
  uint64_t seed = 1;              // of the drawn cases
  bool quick = false;             // a quarter of the table, no speed
  double time_limit = 30;         // seconds that one call may take
  int jobs = 0;                   // children at a time; 0: as many as there are processors
  std::string json, junit, html;  // files to write; empty: none
  bool worker = false;            // a child: it serves orders on the descriptors 3 and 4
};

}  // namespace te_fl_tool
