/* The public C headers compile as strict C99 and are self-contained; compiled with -pedantic
 * -Werror. */
#include "te_fl/ops/activation.h"
#include "te_fl/ops/attention.h"
#include "te_fl/ops/collective.h"
#include "te_fl/ops/dropout.h"
#include "te_fl/ops/gemm.h"
#include "te_fl/ops/norm.h"
#include "te_fl/ops/optimizer.h"
#include "te_fl/ops/quantize.h"
#include "te_fl/ops/rope.h"
#include "te_fl/ops/softmax.h"
#include "te_fl/ops/tensor.h"

const te_fl_generic_gemm_args te_fl_c99_gemm_defaults = TE_FL_GENERIC_GEMM_ARGS_INIT;
