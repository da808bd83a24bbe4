#include "families.hpp"

namespace te_fl::cpu {

void append_softmax(std::vector<te_fl_op_desc>&) {}

}  // namespace te_fl::cpu
