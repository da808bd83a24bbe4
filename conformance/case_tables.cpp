// The tables of cases, made of all files of cases/.
#include <set>
#include <stdexcept>

#include "conformance/case_file.hpp"
#include "conformance/drawn.hpp"

namespace te_fl::conformance {
namespace {

// Calls one function of each file that has it.
template <class Add, class To>
void add_files(Add CaseFile::*add, To& to) {
  for (const CaseFile* file : case_files()) {
    if (file->*add != nullptr) (file->*add)(to);
  }
}

}  // namespace

Table all_cases() {
  Table table;
  add_files(&CaseFile::cases, table);
  add_special_cases(table);
  std::set<std::string> names;
  for (const Case& c : table)
    if (!names.insert(c.name).second) throw std::logic_error("two cases are named " + c.name);
  return table;
}

Table fuzz_cases(uint64_t seed, int per_op) {
  Table table;
  Drawn drawn(table, seed, per_op);
  add_files(&CaseFile::drawn, drawn);
  return table;
}

Table sweep_cases(const std::string& op, uint64_t seed, bool thorough) {
  Table table;
  Drawn drawn(table, op, seed, thorough);
  add_files(&CaseFile::drawn, drawn);
  put_special_values(table);
  return table;
}

}  // namespace te_fl::conformance

namespace te_fl::huge {

Cases all_cases() {
  Cases cases;
  conformance::add_files(&conformance::CaseFile::huge, cases);
  return cases;
}

}  // namespace te_fl::huge

namespace te_fl::bench {

const Cases& all_cases() {
  static const Cases table = [] {
    Cases cases;
    conformance::add_files(&conformance::CaseFile::bench, cases);
    return cases;
  }();
  return table;
}

}  // namespace te_fl::bench
