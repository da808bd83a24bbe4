#pragma once

// Each file of cases/ adds cases to several tables. It ends with its CaseFile, which is named after
// the file: cases/rope.cpp defines te_fl::conformance::rope_cases. CMake collects the CaseFiles of
// the folder, so that a new file needs no line elsewhere. Long lists of variants, which a file of
// cases/ uses, are in cases/parts.

#include <span>

#include "bench/cases/case.hpp"
#include "conformance/case.hpp"
#include "conformance/huge/cases.hpp"

namespace te_fl::conformance {

// Functions that append to a table, one for each kind of cases. Null: the file has none.
struct CaseFile {
  void (*cases)(Table&) = nullptr;
  void (*drawn)(Drawn&) = nullptr;       // random cases and sweeps, see fuzz_cases()
  void (*huge)(huge::Cases&) = nullptr;  // calls with tensors of more than 2^31 elements
  void (*bench)(bench::Cases&) = nullptr;
};

// The CaseFiles of the folder cases/, by name. CMake writes the definition.
std::span<const CaseFile* const> case_files();

}  // namespace te_fl::conformance
