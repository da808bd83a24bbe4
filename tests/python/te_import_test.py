"""Tests te-fl under Transformer Engine's import name. Each test runs in its own process, because imports cannot be undone."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from forkserver import PYTHON

ROOT = pathlib.Path(__file__).resolve().parents[2]
try:
    import torch
except ModuleNotFoundError:
    torch = None
try:
    import flax
except ModuleNotFoundError:
    flax = None


def run(code, expect=0, python=(sys.executable,), **variables):
    environment = {**{k: v for k, v in os.environ.items() if not k.startswith("NVTE_")}, **variables}
    done = subprocess.run([*python, "-c", code], capture_output=True, text=True, env=environment)
    if done.returncode != expect:
        raise AssertionError(f"exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.strip() + done.stderr.strip()


ALIAS = "import sys, te_fl; te_fl.as_transformer_engine(); "


class Import(unittest.TestCase):
    def test_recipes_without_a_framework(self):
        run(ALIAS + "import transformer_engine as te; from transformer_engine.common.recipe import DelayedScaling, Format; "
            "assert te.common.recipe.DelayedScaling is DelayedScaling; assert DelayedScaling().fp8_format is Format.HYBRID; "
            "assert te.__version__ == '2.20.2'; assert not {'torch', 'jax', 'numpy'} & set(sys.modules), sys.modules.keys()")

    def test_the_distribution(self):
        run(ALIAS + "import importlib.metadata as m, importlib.util as u; assert m.version('transformer_engine') == '2.20.2'; "
            "assert m.version('transformer-engine') == '2.20.2'; assert u.find_spec('transformer_engine').origin == 'te-fl'; "
            "assert m.metadata('transformer_engine')['Name'] == 'transformer_engine'; "
            "assert 'transformer_engine' in m.packages_distributions(); assert 'transformer_engine' not in sys.modules")
        self.assertIn("PackageNotFoundError", run(ALIAS + "import importlib.metadata as m; m.version('transformer_engine_x')", expect=1))

    def test_nothing_happens_without_a_request(self):
        run("import sys, te_fl, importlib.util as u; s = u.find_spec('transformer_engine'); assert s is None or s.origin != 'te-fl'; "
            "assert 'te_fl.compat' not in sys.modules")

    def test_twice_is_once(self):
        run(ALIAS + "n = len(sys.meta_path); te_fl.as_transformer_engine(); assert len(sys.meta_path) == n; "
            "from te_fl.compat.finder import status; assert status()['active']")

    def test_plugins_of_transformer_engine_fl(self):
        run(ALIAS + "from transformer_engine.plugin.core import OpRegistry, OpImpl, BackendImplKind, OpManager; "
            "from transformer_engine.plugin.core.types import OpImpl as same; assert same is OpImpl and issubclass(OpImpl, te_fl.OpImpl)")

    def test_policies_of_transformer_engine_fl(self):
        run(ALIAS + """
from transformer_engine.plugin.core import (BackendImplKind, OpImpl, SelectionPolicy, get_default_manager, get_manager, get_policy, policy_context,
                                            reset_default_manager, reset_global_policy, set_global_policy, with_denied_vendors, with_strict_mode)
from transformer_engine.plugin.core.policy import SelectionPolicy as same
import threading
assert same is SelectionPolicy and get_manager() is get_default_manager()
manager = get_manager()
for kind, vendor in (("default", None), ("vendor", "acme"), ("vendor", "other"), ("reference", None)):
    impl_id = f"{kind}.{vendor or 'plain'}"
    manager.registry.register_impl(OpImpl("my_op", impl_id, BackendImplKind(kind), lambda impl_id=impl_id: impl_id, vendor=vendor))
assert manager.call("my_op") == "default.plain" and get_policy() == SelectionPolicy()

def of_a_thread():
    served = []
    thread = threading.Thread(target=lambda: served.append(manager.call("my_op")))
    thread.start(), thread.join()
    return served[0]

before = set_global_policy(SelectionPolicy(prefer="reference", deny_vendors=frozenset({"acme"})))
assert before == SelectionPolicy() and te_fl.ops.my_op() == "reference.plain" == of_a_thread(), te_fl.policy_text()
assert manager.get_selected_impl_id("my_op") == "reference.plain"
with policy_context(SelectionPolicy(prefer="vendor", strict=True)) as _:
    # A whole policy: nothing is denied in it any more.
    assert manager.call("my_op") == "vendor.acme" and get_policy().strict and of_a_thread() == "reference.plain"
with with_denied_vendors("other"), te_fl.policy(prefer="vendor"):
    assert get_policy().deny_vendors == {"acme", "other"} and manager.call("my_op") == "default.plain"
with with_strict_mode():
    assert get_policy() == SelectionPolicy(prefer="reference", deny_vendors=frozenset({"acme"}), strict=True)
orders = SelectionPolicy.from_dict(per_op_order={"my_op": ["vendor:other", "flagos"]})
with policy_context(orders):
    assert manager.call("my_op") == "vendor.other" and get_policy().per_op_order == (("my_op", ("vendor:other", "flagos")),)
with policy_context(SelectionPolicy.from_dict(allow_vendors={"other"}, prefer="vendor")):
    assert manager.call("my_op") == "vendor.other" and get_policy().allow_vendors == {"other"}
for wrong in (lambda: SelectionPolicy(prefer="vendr"), lambda: set_global_policy(SelectionPolicy.from_dict(per_op_order={"my_opp": ["vendor"]})),
              lambda: policy_context(SelectionPolicy(allow_vendors=frozenset()))):
    try:
        wrong()
        raise SystemExit("nothing was raised")
    except ValueError as error:
        pass
assert te_fl.ops.my_op() == "reference.plain"
reset_global_policy()
assert te_fl.ops.my_op() == "default.plain" and te_fl.usage()
reset_default_manager()
assert not manager.registry.get_implementations("my_op") and get_manager() is not manager and not te_fl.usage()
""")

    def test_pickles_of_transformer_engine(self):
        """Loads pickles as Transformer Engine's package writes them: a format by its value, which is a named tuple of a private class, or by that
        class alone; and a recipe."""
        run(ALIAS + """
import pickle
from te_fl.common import recipe
from te_fl.common.recipe import DelayedScaling, Format
theirs = b"transformer_engine.common.recipe"
for name in ("E4M3", "E5M2", "HYBRID", "E2M1"):
    written = b"c" + theirs + b"\\n_FormatHelper\\n(G" + b"".join(__import__("struct").pack(">d", v) + b"G" for v in Format[name].value)[:-1] + b"t\\x81."
    assert pickle.loads(b"\\x80\\x02" + written) == Format[name].value, name
    assert pickle.loads(b"\\x80\\x02c" + theirs + b"\\nFormat\\n" + written[:-1] + b"\\x85R.") is Format[name]
for protocol in (2, 4, 5):
    made = pickle.dumps(DelayedScaling(margin=2, fp8_format=Format.E4M3), protocol)
    if protocol == 2:
        made = made.replace(b"te_fl.common.recipe", theirs)
    assert pickle.loads(made) == DelayedScaling(margin=2, fp8_format=Format.E4M3)
""")

    def test_a_misspelt_name(self):
        output = run(ALIAS + "import transformer_engine.common.recipe as r; r.DelayedScalling", expect=1)
        self.assertIn("did you mean 'DelayedScaling'?", output)
        self.assertIn("did you mean 'OpRegistry'?", run("import te_fl; te_fl.OpRegisty", expect=1))
        self.assertIn("build-node", run("import sys, te_fl.__main__ as m; sys.argv = ['te_fl', '--help']; m.main()"))
        ask = "import sys, te_fl.__main__ as m; sys.argv = ['te_fl', 'build-node', {!r}]; sys.exit(m.main())"
        self.assertIn("build-node compiles te_fl.pytorch's node", run(ask.format("--help")))
        self.assertIn("takes no arguments, and '--fast' is given", run(ask.format("--fast"), expect=2))
        self.assertIn("gelu by default.cpu: 1 calls", run("import te_fl, numpy as np; x = np.ones(4, 'f'); te_fl.ops.gelu(input=x, output=x); "
                                                          "assert te_fl.fingerprint() == te_fl.fingerprint() != ''", TE_FL_USAGE="1"))
        if torch is not None:
            self.assertIn("did you mean 'Linear'?", run("import te_fl.pytorch as te; te.Linaer", expect=1))

    def test_a_name_that_neither_has(self):
        output = run(ALIAS + "import transformer_engine.common.recipe as r; assert not hasattr(r, 'Delayed'); r.Delayed", expect=1)
        self.assertIn("AttributeError: module 'transformer_engine.common.recipe' of te-fl has no attribute 'Delayed'", output)
        self.assertIn("ModuleNotFoundError", run(ALIAS + "import transformer_engine.nothing", expect=1))

    def test_variables_that_do_nothing_are_said_once(self):
        output = run(ALIAS + "te_fl.as_transformer_engine()", NVTE_FLASH_ATTN="0", NVTE_UNKNOWN="1", NVTE_BACKWARD_OVERRIDE="dequantized")
        self.assertEqual(output.count("te-fl does not honour NVTE_FLASH_ATTN (see TE_FL_PER_OP), NVTE_UNKNOWN;"), 1)
        self.assertNotIn("NVTE_BACKWARD_OVERRIDE", output)
        self.assertEqual(run(ALIAS), "")


class OtherPackage(unittest.TestCase):
    """Tests with a transformer_engine that another party installed."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        package = pathlib.Path(self.folder.name, "transformer_engine")
        package.mkdir()
        (package / "__init__.py").write_text("__version__ = 'other'\n")
        self.path = self.folder.name + os.pathsep + os.environ.get("PYTHONPATH", "")

    def test_only_deterministic_algorithms(self):
        output = "import te_fl, te_fl.pytorch as te; print(te_fl.policy_text()); import os; os.environ.update(later); te.Linear(8, 8, device='cpu'); " \
               "print(te_fl.policy_text())"
        asked = dict(NVTE_ALLOW_NONDETERMINISTIC_ALGO="0")
        self.assertEqual(run("later = {}; " + output, python=PYTHON, **asked).split(), ["deterministic=1"] * 2)
        self.assertEqual(run(f"later = {asked}; " + output, python=PYTHON).splitlines(), ["pure priority", "deterministic=1"])
        self.assertEqual(run("later = {}; " + output, python=PYTHON, TE_FL_DETERMINISTIC="0", **asked).splitlines(), ["pure priority"] * 2)

    def test_an_installed_one_is_passed_over(self):
        output = run(ALIAS + "import transformer_engine; from te_fl.compat.finder import status; "
                   "print(transformer_engine.__version__, status()['other'])", PYTHONPATH=self.path)
        self.assertEqual(output, f"2.20.2 {self.folder.name}/transformer_engine/__init__.py")

    def test_doctor_says_who_answers(self):
        output = run(ALIAS + "from te_fl import doctor; print([f.what for f in doctor._check_frameworks()])",
                   PYTHONPATH=self.path)
        self.assertIn("import transformer_engine gives te-fl, as version 2.20.2, and passes over the one in " + self.folder.name, output)

    def test_an_imported_one_is_an_error(self):
        output = run("import transformer_engine; " + ALIAS, expect=1, PYTHONPATH=self.path)
        self.assertIn(f"another transformer_engine was imported from {self.folder.name}", output)

    def test_the_variable(self):
        # A wheel puts this file at the root of site-packages; here a folder stands for site-packages.
        pathlib.Path(self.folder.name, "x.pth").write_text((ROOT / "python/te_fl_as_transformer_engine.pth").read_text())
        code = f"import site; site.addsitedir({self.folder.name!r}); import transformer_engine; print(transformer_engine.__version__)"
        for value, version in (("1", "2.20.2"), ("True", "2.20.2"), ("0", "other"), ("", "other")):
            self.assertEqual(run(code, PYTHONPATH=self.path, TE_FL_AS_TRANSFORMER_ENGINE=value), version)
        # te-fl's library reads the variable too.
        use = "import te_fl, numpy as n; te_fl.ops.gelu(input=n.zeros(1, n.float32), output=n.zeros(1, n.float32))"
        self.assertEqual(run(use, TE_FL_AS_TRANSFORMER_ENGINE="1"), "")
        run(f"import site, sys; site.addsitedir({self.folder.name!r}); assert 'te_fl' not in sys.modules")


@unittest.skipIf(torch is None, "needs PyTorch")
class PyTorch(unittest.TestCase):
    USE = ALIAS + "import transformer_engine.pytorch as te; from te_fl.errors import Unsupported\n"

    def run_forked(self, code):
        """Runs the code in a process where PyTorch was imported first, as in most programs."""
        return run(code, python=PYTHON)

    def test_names_come_from_te_fl(self):
        run(self.USE + "from transformer_engine.pytorch.optimizers import FusedAdam; import te_fl.pytorch.optimizers as o\n"
            "assert FusedAdam is o.FusedAdam is te.optimizers.FusedAdam\n"
            "from transformer_engine.pytorch.fp8 import check_mxfp8_support; assert check_mxfp8_support()[0] is True\n"
            "from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb as a, RotaryPositionEmbedding as r\n"
            "assert r is te.RotaryPositionEmbedding is te.attention.RotaryPositionEmbedding\n"
            "from transformer_engine.pytorch.attention.inference import InferenceParams as i, NonPagedKVCacheManager; assert i is te.attention.InferenceParams\n"
            "from transformer_engine.pytorch.distributed import CudaRNGStatesTracker as c; assert c is te.CudaRNGStatesTracker\n"
            "assert te.is_fp8_available() in (True, False); assert 'jax' not in sys.modules")

    def test_modules_answer_by_transformer_engines_names(self):
        """Classes have Transformer Engine's `__module__`, whether the object was made by te_fl.pytorch or by transformer_engine; pickles contain te-fl's
        names and load where `transformer_engine` is not te-fl."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "layer.pt")
            run(ALIAS + f"""
import copy, torch, te_fl.pytorch as own, transformer_engine.pytorch as te
layer = own.TransformerLayer(16, 32, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
for part, place in ((layer, "transformer"), (layer.self_attention, "attention.multi_head_attention"), (layer.layernorm_mlp, "module.layernorm_mlp"),
                    (layer.self_attention.proj, "module.linear"), (te.ops.Linear(4, 4, device="cpu"), "ops.linear")):
    assert part.__module__ == type(part).__module__ == "transformer_engine.pytorch." + place, part.__module__
class Mine(te.Linear):
    pass
assert Mine.__module__ == "__main__"
twin, x = copy.deepcopy(layer), torch.ones(3, 1, 16)
assert type(twin) is type(layer) and torch.equal(twin(x), layer(x))
torch.save((layer, layer(x)), {path!r})
assert b"transformer_engine" not in open({path!r}, "rb").read()
""", python=PYTHON)
            run(f"import torch; layer, y = torch.load({path!r}, weights_only=False); assert torch.equal(layer(torch.ones(3, 1, 16)), y); "
                "assert type(layer).__module__.startswith('te_fl.')", python=PYTHON)

    def test_private_names_can_be_imported(self):
        run(ALIAS + "from te_fl.errors import Unsupported; from transformer_engine.pytorch.module.grouped_linear import _GroupedLinear\n"
            "from transformer_engine.pytorch.module.linear import _Linear\n"
            "try: _GroupedLinear.apply(1)\nexcept Unsupported as error: assert 'call GroupedLinear' in str(error), error\nelse: raise SystemExit(1)",
            python=PYTHON)

    def test_refused_names_raise_when_they_are_used(self):
        self.run_forked(self.USE + """
from transformer_engine.pytorch import GatedDeltaNetAttention, initialize_ub, MXFP8Tensor
from transformer_engine.pytorch.ops import Linear as FusibleLinear, register_forward_fusion
from transformer_engine.pytorch.ops.fuser import OperationFuser
import torch
assert not isinstance(torch.empty(1), MXFP8Tensor) and not isinstance(1, (str, MXFP8Tensor)) and not issubclass(int, GatedDeltaNetAttention)
class Gated(GatedDeltaNetAttention):  # programs define these where they are imported
    def __init__(self, *arguments):
        super().__init__(*arguments)
class Both(torch.nn.Module, GatedDeltaNetAttention):
    pass
assert not isinstance(1, Gated) and FusibleLinear is te.ops.Linear is not te.Linear and FusibleLinear.__module__ == 'transformer_engine.pytorch.ops.linear'
for use in (lambda: GatedDeltaNetAttention(1, 2, 3), lambda: initialize_ub(), lambda: MXFP8Tensor.from_numpy, lambda: register_forward_fusion(print), lambda: OperationFuser([]),
            lambda: MXFP8Tensor[int], lambda: Gated(1), lambda: Both()):
    try:
        use()
    except Unsupported as error:
        assert 'is not supported by te-fl; ' in str(error) and 'transformer_engine.pytorch' in str(error), error
    else:
        raise AssertionError(use)
""")

    def test_the_extension_module(self):
        self.run_forked(self.USE + """
import transformer_engine_torch as tex
assert not hasattr(tex, 'gelu')
try:
    tex.gelu
except Unsupported as error:
    assert 'te_fl.ops' in str(error)
else:
    raise AssertionError
""")
        self.assertIn("ImportError", run(ALIAS + "from transformer_engine_torch import gelu", expect=1))

    def test_functions_of_the_extension_that_frameworks_call(self):
        self.run_forked(self.USE + """
import torch, transformer_engine_torch as tex
ends = torch.tensor([0, 4, 12], dtype=torch.int32)  # sequences of 4 and 8 tokens; a rank of 2 has the first and the last quarter of each
assert tex.thd_get_partitioned_indices(ends, 12, 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
assert tex.thd_get_partitioned_indices(ends, 12, 2, 1).tolist() == [1, 2, 6, 7, 8, 9]
import transformer_engine.pytorch.cpp_extensions as cpp
from transformer_engine.pytorch.constants import TE_DType
x, w = torch.randn(3, 8), torch.rand(8)
y, _, _ = cpp.rmsnorm_fwd(x, w, 1e-5, None, None, TE_DType[x.dtype], 16, False)
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,), w, 1e-5))
""")

    def test_a_replaced_function_is_warned_of(self):
        self.run_forked(self.USE + """
import warnings, transformer_engine.pytorch.cpp_extensions as cpp
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    own = cpp.general_gemm
    cpp.general_gemm = own
    assert not caught, caught
    cpp.general_gemm = print
[warning] = caught
assert "transformer_engine.pytorch.cpp_extensions.general_gemm was replaced: te-fl's modules do not call it" in str(warning.message), warning.message
assert warning.filename == '<string>' or 'te_fl' not in warning.filename, warning.filename
""")

    def test_the_scope_that_a_program_is_in(self):
        self.run_forked(self.USE + """
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as state
from transformer_engine.common.recipe import Float8CurrentScaling, DelayedScaling
assert not state.is_fp8_enabled() and isinstance(state.get_fp8_recipe(), DelayedScaling)
with te.autocast(recipe=Float8CurrentScaling()):
    assert state.is_fp8_enabled() and not state.is_fp8_calibration() and state.get_fp8_recipe().float8_current_scaling()
assert state.is_mxfp8_available()[0] is True and not hasattr(state, 'quantizer')
for name, way_out in (('reduce_and_update_fp8_tensors', 'make_graphed_callables'), ('add_fp8_tensors_to_global_buffer', 'cuda_graph_impl'), ('quantizer', 'is_fp8_enabled')):
    try:
        getattr(state, name)
    except Unsupported as error:
        assert way_out in str(error) and name in str(error), error
    else:
        raise AssertionError
""")

    def test_a_star_imports_what_is_supported(self):
        self.run_forked(self.USE + "from transformer_engine.pytorch.optimizers import *; FusedSGD, multi_tensor_adam_fp8")
        self.run_forked(self.USE + "from transformer_engine.pytorch.distributed import *; allreduce; assert 'FullyShardedDataParallel' not in globals()")

    def test_a_missing_framework_is_an_import_error(self):
        blocked = "import sys; sys.modules['torch'] = None; " + ALIAS
        self.assertIn("ModuleNotFoundError", run(blocked + "import transformer_engine.pytorch", expect=1))
        run(blocked + "import transformer_engine.common.recipe")


@unittest.skipIf(flax is None, "needs JAX and Flax")
class Jax(unittest.TestCase):
    def test_names_come_from_te_fl(self):
        run(ALIAS + "import transformer_engine.jax as te, te_fl.jax.flax as own; from transformer_engine.jax.flax import DenseGeneral\n"
            "assert te.flax.DenseGeneral is DenseGeneral is own.DenseGeneral and te.autocast and 'torch' not in sys.modules\n"
            "from transformer_engine.jax.sharding import MeshResource; assert MeshResource is te.MeshResource")
