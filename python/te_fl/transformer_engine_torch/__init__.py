"""A replacement of transformer_engine_torch, the C++ extension module of NVIDIA's Python package transformer_engine, based on te-fl's ops
(docs/inside-transformer-engine.md).

A vendor may register functions with the same arguments, which the module then dispatches (te_fl.tex_form).

Names, arguments, defaults and results are those of version 2.20.2; older.py adapts functions to older versions. Quantizers and tensor classes are the
package's own. Names that te-fl does not support exist, and calling them raises te_fl.errors.Unsupported (absent.py).
"""

from te_fl import tex_form
from te_fl.transformer_engine_torch.enums import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.attention import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.context_parallel import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.dropout import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.rope import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.sequences import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.softmax import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.activation import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.experts import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.gemm import generic_gemm  # noqa: F401
from te_fl.transformer_engine_torch.grouped import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.grouped_gemm import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.normalization import *  # noqa: F401,F403
from te_fl.multi_tensor import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.nvfp4 import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.nvfp4_shards import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.partial_casts import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.quantize import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.scaled_activation import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.swizzle import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.enquiries import *  # noqa: F401,F403
from te_fl.transformer_engine_torch.absent import *  # noqa: F401,F403

from te_fl.transformer_engine_torch import typed_ops as _typed_ops  # noqa: E402

_complete = True  # from here on tex_form may replace functions
tex_form.install()
del tex_form
