// The calls that `te-fl bench` times and `te-fl explain --shape` asks about: the cases of the
// benchmarks, chosen by what the user says of them.
#pragma once

#include <string>
#include <vector>

#include "bench/cases/case.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool {

// "8192x4096".
std::string text_of(const te_fl::bench::Shape& extents);
// The words of a variant: "fp8, bf16 out" has fp8, bf16 and out.
std::vector<std::string> words_of(const std::string& text);

// The op's cases of a dtype whose variant contains a text; empty ones mean any. NOT_FOUND says
// which there are.
te_fl::Result<std::vector<const te_fl::bench::CaseSpec*>> cases_of(const std::string& op,
                                                                   const std::string& dtype,
                                                                   const std::string& variant);
// The extents that `shape` says; if it is empty, the case's own for the device.
te_fl::Result<te_fl::bench::Shape> extents_of(const te_fl::bench::CaseSpec& spec,
                                              const std::string& shape,
                                              const te_fl::Device& device);

}  // namespace te_fl_tool
