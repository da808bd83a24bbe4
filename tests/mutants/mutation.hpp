#pragma once

// A mutation is one planted error of one op, as a line of text:
//
//   OP [if CONDITION, CONDITION ...]: FAULT
//   silu if output is f32, output elements > 700000: write output last
//
// All conditions must hold for a call to be wrong. A condition is one of
//   ARG is NAME           a tensor has this dtype or scaling mode
//   ARG elements > N      also rows (the product of all extents but the last) and columns
//   ARG given             an optional tensor or list is there; a number is not at its neutral value
//   ARG absent            the opposite
//   ARG == N, ARG > N     a number's value
//   ARG in_place          an output begins where an input does
// A fault is one of
//   ignore ARG            the argument has its neutral value
//   set ARG N             the number is N; floor ARG N and cap ARG N: at least, at most N
//   float ARG             the number is rounded to FP32
//   rng PART              the random state's offset, seed_address, offset_address or high half of
//                         the seed is ignored (offset, seed_address, offset_address, high)
//   read ARG KIND [N]     the op sees other values of an input:
//                           clear: zeros; last: the last element is 0; from: elements from N on
//                           are 0; rows: rows from N on are row 0; nan: NaN is 0 from element N
//                           on; inf: infinities are finite; subnormal: subnormals are 0; odd:
//                           numbers other than 1 are 0; scale: the last scale factor is 1
//   write ARG KIND [N]    an output is wrong after the op:
//                           none: not written; last: all but the last element is written; from,
//                           rows: elements or rows from N on are not written; nan: NaN is 0 from
//                           element N on; inf: infinities are finite; truncate: rounded towards
//                           zero; step: codes are one step off from element N on; off: values are
//                           multiplied by 1 + N; old: 0 times the old values are added
//   part ARG PART KIND    a part of a quantised output is not written (none), or all but its last
//                         element is (last): columnwise_data, scale_inv, columnwise_scale_inv,
//                         amax, columnwise_amax or scale
//   scale ARG up          codes are computed with a given scale that is one unit in the last place
//                         larger
//   unscaled ARG N        codes of rows from N on are computed with scale 1
//   ties ARG INPUT        codes round ties away from zero

#include <string>
#include <vector>

namespace te_fl::mutants {

struct Condition {
  std::string argument, verb, word;
  double number = 0;
};

struct Mutation {
  std::string op;
  std::vector<Condition> conditions;
  std::string verb, argument, kind, word;  // of the fault
  double number = 0;
};

// Throws std::invalid_argument, which names the text that is wrong.
Mutation parse(const std::string& text);

}  // namespace te_fl::mutants
