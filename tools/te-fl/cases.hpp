// Selects the calls that `te-fl bench` times and `te-fl explain --shape` explains: benchmark cases
// that match the user's op, dtype, variant and shape.
#pragma once

#include <string>
#include <vector>

#include "bench/cases/case.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl_tool {

// Formats extents as "8192x4096".
std::string shape_text(const te_fl::bench::Shape& extents);
// Splits a variant into words: "fp8, bf16 out" into fp8, bf16 and out.
std::vector<std::string> split_words(const std::string& text);

// Returns the op's cases of a dtype whose variant contains a text; an empty argument matches any.
// NOT_FOUND lists the available cases.
te_fl::Result<std::vector<const te_fl::bench::CaseSpec*>> find_cases(const std::string& op,
                                                                     const std::string& dtype,
                                                                     const std::string& variant);
// Parses the extents in `shape`; if it is empty, returns the case's default extents for the device.
te_fl::Result<te_fl::bench::Shape> parse_extents(const te_fl::bench::CaseSpec& spec,
                                                 const std::string& shape,
                                                 const te_fl::Device& device);

}  // namespace te_fl_tool
