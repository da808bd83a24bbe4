"""Tests FP8 state that Transformer Engine wrote, and state over ranks."""

import copy
import io
import os
import pickle
import pickletools
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

import numpy as np
import torch

from forkserver import PYTHON
from common import DELAYED, MODULES, State, each, step, trained
from torch_oracle import DEVICES, near, randn, randomise
import te_fl.pytorch as te
from te_fl import errors
from te_fl.common import recipe
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from te_fl.pytorch.fp8 import extra_state


def stand_in():
    """Provides modules named as Transformer Engine's, with recipes as it would pickle them."""
    names = ("transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe")
    package, common, recipe = (types.ModuleType(n) for n in names)
    code = '''
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float

class Format(Enum):
    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    E5M2 = _FormatHelper(max_fwd=57344, max_bwd=57344)
    HYBRID = _FormatHelper(max_fwd=448, max_bwd=57344)

@dataclass(frozen=True)
class MMParams:
    use_split_accumulator: bool = True

@dataclass(frozen=True)
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

@dataclass(repr=False)
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: object = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: object = None

@dataclass(repr=False)
class Float8CurrentScaling:
    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    def __post_init__(self):
        self.fp8_quant_fwd_inp = QParams()
'''
    exec(compile(code, "recipe", "exec"), recipe.__dict__)
    package.common, common.recipe = common, recipe
    return dict(zip(names, (package, common, recipe)))


def pickled(state, protocol=pickle.DEFAULT_PROTOCOL):
    return torch.frombuffer(bytearray(pickle.dumps(state, protocol)), dtype=torch.uint8)


class TheirState(State):
    """Extra state in Transformer Engine's form: a pickled dict as bytes, with three slots forward and two backward for each product."""

    def delayed(self, products=1, protocol=pickle.DEFAULT_PROTOCOL, **more):
        modules = stand_in()
        with mock.patch.dict(sys.modules, modules):
            recipe = modules["transformer_engine.common.recipe"].DelayedScaling(amax_history_len=4)
            forward = torch.arange(4.0 * 3 * products).reshape(4, 3 * products)
            backward = torch.arange(4.0 * 2 * products).reshape(4, 2 * products) / 8
            state = {
                "recipe": recipe,
                "scale_fwd": torch.tensor([16.0, 128.0, 1.0] * products), "amax_history_fwd": forward,
                "scale_bwd": torch.tensor([64.0, 1.0] * products), "amax_history_bwd": backward,
                "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": products}, **more,
            }
            return pickled(state, protocol)

    def test_their_scales_are_used(self):
        import torch_oracle as oracle
        for device in DEVICES:
            for protocol in (3, 4, 5):
                with self.subTest(device=device, protocol=protocol):
                    module = randomise(te.Linear(32, 16, bias=False, device=device))
                    module.load_state_dict({"weight": module.weight.detach().clone(), "_extra_state": self.delayed(protocol=protocol)})
                    x = randn(16, 32, device=device)

                    def read(t, scale):
                        return torch.from_numpy(oracle.round_to(t.detach().cpu().numpy() * scale, "e4m3")) / scale
                    with torch.no_grad(), te.autocast(recipe=DELAYED):
                        y = module(x)
                    near(self, y.cpu(), read(x, 16.0) @ read(module.weight, 128.0).T, 1e-5 if device == "cpu" else 2e-2, "output")

    def test_each_product_has_its_own(self):
        module = te.LayerNormMLP(32, 64, device="cpu")
        module.load_state_dict({**module.state_dict(), "_extra_state": self.delayed(2)})
        with mock.patch.dict(sys.modules, stand_in()):
            state = pickle.loads(module.get_extra_state().numpy().tobytes())
        self.same([state["scale_fwd"][[0, 1, 3, 4]], state["scale_bwd"][[0, 2]]],
                  [torch.tensor([16.0, 128.0] * 2), torch.tensor([64.0] * 2)])
        self.same([state["amax_history_fwd"][:, [0, 1, 3, 4]]], [torch.arange(24.0).reshape(4, 6)[:, [0, 1, 3, 4]]])
        self.same([state["amax_history_bwd"][:, [0, 2]]], [(torch.arange(16.0).reshape(4, 4) / 8)[:, [0, 2]]])

    def test_they_can_read_ours(self):
        module = trained("Linear", recipe=DELAYED)
        data = module.state_dict()["_extra_state"]
        self.assertEqual(data.dtype, torch.uint8)
        modules = stand_in()
        with mock.patch.dict(sys.modules, modules):
            state = pickle.loads(data.numpy().tobytes())
        self.assertIsInstance(state["recipe"], modules["transformer_engine.common.recipe"].DelayedScaling)
        self.assertEqual(state["recipe"].amax_history_len, 4)
        shapes = {k: tuple(state[k].shape) for k in ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")}
        self.assertEqual(shapes, {"scale_fwd": (3,), "amax_history_fwd": (4, 3), "scale_bwd": (2,), "amax_history_bwd": (4, 2)})
        self.assertIn("extra_fp8_variables", state)

    def test_scales_of_gradients_that_no_amax_has_changed(self):
        """The initial scale is 1 for every format; such a scale stays 1 even if the saved recipe has another format."""
        module = te.Linear(32, 32, device="cpu")
        for fp8_format, backward in ((Format.HYBRID, True), (Format.E4M3, False)):
            with te.autocast(recipe=DelayedScaling(fp8_format=fp8_format)):
                y = module(torch.ones(16, 32))
            if backward:
                (y * 0).sum().backward()
        with mock.patch.dict(sys.modules, stand_in()):
            state = pickle.loads(module.get_extra_state().numpy().tobytes())
        self.assertEqual(state["scale_bwd"].tolist(), [1.0, 1.0])
        self.assertFalse(state["amax_history_bwd"].any())

    def test_it_names_no_class_of_the_program(self):
        """Checks by the pickle opcodes that every name in the saved state belongs to Transformer Engine, PyTorch or Python."""
        class Whole(int):
            pass

        class Options(recipe.QParams):
            pass

        class WithArguments(DelayedScaling):  # Megatron makes its recipe from its own configuration
            def __init__(self, config):
                super().__init__(amax_history_len=config["length"], margin=1)
                self.config = config

        class Twice(WithArguments):
            pass

        class Current(Float8CurrentScaling):
            pass

        with_options = Float8CurrentScaling()
        with_options.fp8_quant_fwd_inp = with_options.fp8_quant_fwd_weight = with_options.fp8_quant_bwd_grad = Options(amax_epsilon=np.float32(0.5))
        recipes = (WithArguments({"length": 4}), Twice({"length": 4}), DelayedScaling(margin=Whole(1), amax_history_len=np.int64(4)),
                   DelayedScaling(margin=1, amax_history_len=4, reduce_amax=np.bool_(True)),
                   DelayedScaling(margin=1, amax_history_len=4, amax_compute_algo=lambda history: history.amax(0)))
        for i, own in enumerate(recipes):
            for name in ("Linear", "LayerNormMLP"):
                for last in (own, Current(), with_options):  # the saved state names the recipe that ran last
                    with self.subTest(recipe=i, module=name, last=type(last).__name__):
                        module = trained(name, recipe=own)
                        if last is not own:
                            step(module, recipe=last)
                        data = module.state_dict()["_extra_state"].numpy().tobytes()
                        strings = [text for _, text, _ in pickletools.genops(data) if isinstance(text, str)]
                        self.assertEqual([s for s in strings if __name__ in s or "numpy" in s or "megatron" in s or "te_fl" in s], [])
                        with mock.patch.dict(sys.modules, stand_in()):
                            state = pickle.loads(data)
                        if last is own:
                            self.assertEqual((state["recipe"].amax_history_len, state["recipe"].margin), (4, 1))
                        copies = (randomise(MODULES[name](device="cpu")), copy.deepcopy(module), pickle.loads(pickle.dumps(module)))
                        copies[0].load_state_dict(module.state_dict())
                        for fresh in copies:
                            self.assertTrue(torch.equal(fresh.state_dict()["_extra_state"], module.state_dict()["_extra_state"]))

    def test_megatrons_recipe_is_read(self):
        """Transformer Engine's modules pickle Megatron's recipe class by its name."""
        places = ("megatron.core.extensions.transformer_engine", "megatron.core.transformer.custom_layers.transformer_engine")
        for place in places:
            with self.subTest(place=place):
                modules = stand_in()
                base = modules["transformer_engine.common.recipe"].DelayedScaling
                theirs = type("TEDelayedScaling", (base,), {"__module__": place})
                levels = [".".join(place.split(".")[:i + 1]) for i in range(place.count(".") + 1)]
                modules.update({level: types.ModuleType(level) for level in levels})
                modules[place].TEDelayedScaling = theirs
                with mock.patch.dict(sys.modules, modules):
                    data = pickled({**pickle.loads(self.delayed().numpy().tobytes()), "recipe": theirs(amax_history_len=4)})
                module = randomise(te.Linear(32, 16, bias=False, device="cpu"))
                module.load_state_dict({"weight": module.weight.detach().clone(), "_extra_state": data})
                right = randomise(te.Linear(32, 16, bias=False, device="cpu"))
                right.load_state_dict({"weight": module.weight.detach().clone(), "_extra_state": self.delayed()})
                self.assertTrue(torch.equal(module.state_dict()["_extra_state"], right.state_dict()["_extra_state"]))
                self.assertTrue(torch.isfinite(step(module, recipe=DELAYED)[0]).all())

    def test_the_same_state_has_the_same_bytes(self):
        for name in ("Linear", "LayerNormMLP"):
            with self.subTest(module=name):
                module = trained(name, recipe=DELAYED)
                # moves the memory of the second state elsewhere
                first, kept = module.state_dict()["_extra_state"], [torch.empty(n) for n in range(1, 50)]
                again = randomise(MODULES[name](device="cpu"))
                again.load_state_dict(module.state_dict())
                self.assertEqual(len(kept), 49)
                for other in (module, again, copy.deepcopy(module)):
                    self.assertTrue(torch.equal(first, other.state_dict()["_extra_state"]))

    def test_of_other_recipes(self):
        modules = stand_in()
        with mock.patch.dict(sys.modules, modules):
            data = pickled({"recipe": modules["transformer_engine.common.recipe"].Float8CurrentScaling(), "extra_fp8_variables": {}})
        module = trained("Linear", recipe=DELAYED)
        module.load_state_dict({**module.state_dict(), "_extra_state": data})
        self.assertTrue(torch.isfinite(step(module, recipe=Float8CurrentScaling())[0]).all())

    def test_recipes_without_state_save_none(self):
        for recipe in (None, Float8CurrentScaling(), Float8BlockScaling()):
            for name in MODULES:
                with self.subTest(module=name, recipe=type(recipe).__name__):
                    for key, data in trained(name, recipe=recipe).state_dict().items():
                        if key.endswith("_extra_state"):
                            self.assertEqual((data.dtype, data.numel()), (torch.uint8, 0), key)

    def test_of_attention(self):
        """In Transformer Engine attention has state of its own, for FP8 attention. A whole checkpoint with it loads."""
        module = trained("TransformerLayer", recipe=DELAYED)
        state = {**module.state_dict(), "self_attention.core_attention._extra_state": self.delayed(3)}
        other = MODULES["TransformerLayer"](device="cpu")
        other.load_state_dict(state)
        self.same(step(other, recipe=DELAYED, seed=7), step(module, recipe=DELAYED, seed=7))

    def test_empty(self):
        for data in (torch.empty(0, dtype=torch.uint8), None):
            module = trained("Linear", recipe=DELAYED)
            module.set_extra_state(data)
            step(module, recipe=DELAYED)

    def test_a_stream_of_bytes(self):
        """Loads the form of older versions, a byte stream."""
        module = te.Linear(32, 16, device="cpu")
        module.set_extra_state(io.BytesIO(self.delayed().numpy().tobytes()))
        with mock.patch.dict(sys.modules, stand_in()):
            self.assertEqual(pickle.loads(module.get_extra_state().numpy().tobytes())["scale_fwd"][1].item(), 128)

    def test_formats_by_name(self):
        """Loads an enumerator as Python 3.11.0 to 3.11.3 pickle it."""
        module, read = randomise(te.Linear(32, 16, device="cpu")), te.Linear(32, 16, device="cpu")
        for _ in range(2):
            with te.autocast(recipe=DelayedScaling(fp8_format=recipe.Format.E4M3)):
                module(randn(4, 32)).sum().backward()
        with mock.patch.object(recipe.Format, "__reduce_ex__", lambda self, protocol: (getattr, (recipe.Format, self.name))):
            state = module.get_extra_state()
        self.assertIn(b"getattr", state.numpy().tobytes())
        read.set_extra_state(state)
        self.assertNotIn(b"getattr", module.get_extra_state().numpy().tobytes())
        self.assertIs(pickle.loads(pickle.dumps(recipe.Format.E4M3)), recipe.Format.E4M3)
        self.assertNotIn(b"getattr", pickle.dumps(recipe.Format.E4M3))
        want, found = (extra_state.read(m.get_extra_state(), "Linear") for m in (module, read))
        self.assertEqual((str(found["recipe"]), found["recipe"].fp8_format), (str(want["recipe"]), recipe.Format.E4M3))
        self.assertTrue(torch.equal(found["scale_fwd"], want["scale_fwd"]))

    def test_code_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            mark = os.path.join(folder, "ran")

            class System:
                def __reduce__(self):
                    return os.system, (f"touch {mark}",)

            class Eval:
                def __reduce__(self):
                    return eval, (f"open({mark!r}, 'w')",)

            class Attribute:
                def __reduce__(self):
                    return getattr, (io.BytesIO, "__init__")

            class Members:
                def __reduce__(self):
                    return getattr, (recipe.Format, "mro")

            class Others:
                def __reduce__(self):
                    return getattr, (recipe.DelayedScaling, "fp8_format")

            def dotted(name):
                words = [b"\x8c" + bytes([len(word)]) + word.encode() for word in ("te_fl.common.recipe", name, f"touch {mark}")]
                return b"\x80\x04" + words[0] + words[1] + b"\x93" + words[2] + b"\x85R."

            class Loads:
                def __reduce__(self):
                    return torch.storage._load_from_bytes, (pickle.dumps(System()),)

            class Nested:
                def __reduce__(self):
                    stream = io.BytesIO()
                    torch.save(System(), stream)
                    return torch.storage._load_from_bytes, (stream.getvalue(),)

            payloads = [pickle.dumps({"recipe": kind()}, protocol)
                        for kind in (System, Eval, Attribute, Members, Others, Loads, Nested) for protocol in (0, 2, 4)]
            payloads += [dotted("os.system"), dotted("_switched_on"), dotted("Callable"), dotted("os")]
            for i, payload in enumerate(payloads):
                with self.subTest(payload=i):
                    module = randomise(te.Linear(32, 16, device="cpu"))
                    with self.assertRaises(errors.DataLoss) as caught:
                        module.set_extra_state(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
                    self.assertTrue(str(caught.exception))
                    self.assertFalse(os.path.exists(mark))

    def test_damage_is_reported(self):
        whole = self.delayed()
        wrong = [whole[:100], torch.zeros(10, dtype=torch.uint8), pickled([1, 2]),
                 pickled({"scale_fwd": torch.ones(2), "amax_history_fwd": torch.ones(4, 2)}),
                 self.delayed(2), pickled({"scale_fwd": 3, "amax_history_fwd": 4}),
                 pickled({"scale_fwd": torch.ones(3), "amax_history_fwd": torch.ones(4, 3), "scale_bwd": torch.ones(2),
                          "amax_history_bwd": torch.ones(3, 3)})]
        for i, data in enumerate(wrong):
            with self.subTest(data=i):
                module = randomise(te.Linear(32, 16, device="cpu"))
                with self.assertRaises(errors.DataLoss) as caught:
                    module.set_extra_state(data)
                self.assertIn("Linear", str(caught.exception))
                module(randn(4, 32))

    def test_not_bytes(self):
        with self.assertRaisesRegex(TypeError, "Linear.*str"):
            te.Linear(32, 16, device="cpu").set_extra_state("state")
        with self.assertRaises((TypeError, errors.DataLoss)):
            te.Linear(32, 16, device="cpu").set_extra_state(torch.ones(5))


class Distributed(State):
    def test_distributed_checkpoint(self):
        import torch.distributed.checkpoint as dcp
        for name in ("Linear", "TransformerLayer"):
            with self.subTest(module=name), tempfile.TemporaryDirectory() as folder:
                module = trained(name, recipe=DELAYED)
                dcp.save({"model": module.state_dict()}, checkpoint_id=folder, no_dist=True)
                other = MODULES[name](device="cpu")
                step(other, recipe=DELAYED)
                state = {"model": other.state_dict()}
                dcp.load(state, checkpoint_id=folder, no_dist=True)
                other.load_state_dict(state["model"])
                want = step(copy.deepcopy(module), recipe=DELAYED, seed=7)
                self.same(step(other, recipe=DELAYED, seed=7), want)

                fresh = MODULES[name](device="cpu")  # has no state of that size yet, except in the autocast
                with te.autocast(recipe=DELAYED):
                    state = {"model": fresh.state_dict()}
                dcp.load(state, checkpoint_id=folder, no_dist=True)
                fresh.load_state_dict(state["model"])
                self.same(step(fresh, recipe=DELAYED, seed=7), want)

    def test_state_before_the_first_forward(self):
        for recipe in (DELAYED, DelayedScaling(amax_history_len=3, fp8_dpa=True)):
            module = te.TransformerLayer(64, 64, 4, hidden_dropout=0, attention_dropout=0, device="cpu")
            with te.autocast(recipe=recipe):
                early = module.state_dict()
            with te.autocast(enabled=False, recipe=recipe):
                self.assertTrue(all(v.numel() == 0 for k, v in module.state_dict().items() if k.endswith("_extra_state")))
            with te.autocast(recipe=recipe):
                module(torch.ones(8, 2, 64)).sum().backward()
            for key, value in module.state_dict().items():
                self.assertEqual(early[key].shape, value.shape, key)
            module.load_state_dict(early)
            for key, value in module.state_dict().items():
                if key.endswith("_extra_state") and value.numel():
                    state = extra_state.read(value, key)
                    self.assertTrue((state["scale_fwd"] == 1).all() and (state["amax_history_bwd"] == 0).all(), key)


# Two ranks with different inputs print their scales, forward and backward, and the number of collectives of a step.
RANK = r"""
import sys, datetime, torch, torch.distributed as dist
import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling
rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
gpus = torch.cuda.device_count() >= ranks
device = f"cuda:{rank}" if gpus else "cpu"
if gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpus else "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=60))
pair, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(ranks)][rank]
count, reduce = 0, dist.all_reduce
def counted(*args, **kwargs):
    global count
    count += 1
    return reduce(*args, **kwargs)
dist.all_reduce = counted
for group, reduces in ((None, True), (pair, True), (alone, True), (None, False)):
    torch.manual_seed(1)
    a, b = (te.Linear(32, 32, bias=False, device=device) for _ in range(2))
    drops = te.TransformerLayer(32, 32, 2, device=device)  # which draws random numbers
    for step in range(2):
        before = count
        x = torch.full((16, 32), float(rank + 1), device=device)
        scope = te.autocast(recipe=DelayedScaling(amax_history_len=2, reduce_amax=reduces), amax_reduction_group=group)
        for _ in range(2 - rank):  # no update, so no collective, though what drops in training counts as training in C++
            with torch.no_grad(), scope:
                drops(x[None])
        with scope:
            y = a(x)
            y = b(y) if step == 0 or rank == 0 else y  # a rank may leave out a layer
        ((rank + 1) * y.sum()).backward()
        print(count - before, end=" ")
    state = dict(a._fp8_state()), dict(b._fp8_state())
    print(*(f"{s[n].tolist()[0]:.6g}" for s in state for n in ("fp8.fwd.scale", "fp8.bwd.scale")), sep=" ")
dist.destroy_process_group()
"""


class Ranks(unittest.TestCase):
    def test_scales_are_those_of_the_largest_amax_of_the_group(self):
        with tempfile.TemporaryDirectory() as folder:
            ranks = [subprocess.Popen([*PYTHON, "-c", RANK, str(rank), "2", os.path.join(folder, "store")], stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE, text=True) for rank in range(2)]
            outputs = [rank.communicate(timeout=300) for rank in ranks]
        for rank, (_, errors) in zip(ranks, outputs):
            self.assertEqual(rank.returncode, 0, errors)
        world, pair, alone, off = zip(*([line.split() for line in out.splitlines() if not line.startswith("[Gloo]")] for out, _ in outputs))  # PyTorch 2.9 reports the connection
        for each in (world, pair):
            self.assertEqual(each[0], each[1])
            self.assertEqual(each[0][:3], ["2", "2", "224"], "two collectives a step; the input's scale is 448 / 2")
            self.assertEqual(each[0][5], "28672", "that of the last gradients is 57344 / 2")
        for each in (alone, off):
            self.assertEqual([rank[:3] for rank in each], [["0", "0", "448"], ["0", "0", "224"]])
            self.assertNotEqual(each[0], each[1])
