"""Tests the recipes: Transformer Engine's defaults, predicates and texts, and which recipes te-fl's layers refuse."""

import os
import subprocess
import sys
import unittest
from unittest import mock

from te_fl.common import recipe
from te_fl.errors import InvalidArgument, Unsupported


class Recipes(unittest.TestCase):
    def test_defaults(self):
        delayed = recipe.DelayedScaling()
        self.assertEqual((delayed.margin, delayed.fp8_format, delayed.amax_history_len), (0, recipe.Format.HYBRID, 1024))
        self.assertEqual(delayed.amax_compute_algo, "max")
        self.assertTrue(delayed.reduce_amax)
        self.assertEqual(recipe.Float8BlockScaling().fp8_format, recipe.Format.E4M3)
        self.assertFalse(recipe.Float8CurrentScaling().fp8_gemm_fprop.use_split_accumulator)
        self.assertEqual(recipe.Format.HYBRID.value.max_fwd, 448)
        self.assertEqual(recipe.Format.HYBRID.value.max_bwd, 57344)
        self.assertEqual(recipe.NVFP4BlockScaling().fp4_quant_bwd_grad,
                         recipe.QParams(random_hadamard_transform=True, stochastic_rounding=True))

    def test_questions_about_the_kind(self):
        kinds = {"delayed": recipe.DelayedScaling, "float8_current_scaling": recipe.Float8CurrentScaling,
                 "float8_block_scaling": recipe.Float8BlockScaling, "mxfp8": recipe.MXFP8BlockScaling, "nvfp4": recipe.NVFP4BlockScaling}
        for question in kinds:
            for name, kind in kinds.items():
                self.assertEqual(getattr(kind(), question)(), name == question, (name, question))
                self.assertEqual(getattr(kind, question)(), name == question)
        self.assertTrue(recipe.CustomRecipe(qfactory=print).custom())
        for kind in kinds.values():
            self.assertEqual(kind().float8_per_tensor_scaling(), kind in (recipe.DelayedScaling, recipe.Float8CurrentScaling))

    def test_texts(self):
        self.assertEqual(str(recipe.DelayedScaling(margin=2)),
                         "recipe_type=DelayedScaling, margin=2, format=HYBRID, amax_history_len=1024, reduce_amax=True, fp8_dpa=False, "
                         "fp8_mha=False, backward_override=None")
        self.assertEqual(str(recipe.MXFP8BlockScaling()),
                         "recipe_type=MXFP8BlockScaling, margin=0, format=E4M3, backward_override=None, enable_2d_quantization=False")

    def test_a_change_shows_in_the_text_and_in_equality(self):
        a, b = recipe.DelayedScaling(), recipe.DelayedScaling()
        self.assertEqual(a, b)
        b.margin = 1
        self.assertNotEqual(a, b)
        self.assertNotEqual(str(a), str(b))

    def test_nonsense_is_refused_at_once(self):
        for make, named in ((lambda: recipe.DelayedScaling(fp8_format=recipe.Format.E5M2), "fp8_format"),
                            (lambda: recipe.DelayedScaling(fp8_format="HYBRID"), "fp8_format"),
                            (lambda: recipe.DelayedScaling(amax_compute_algo="mean"), "amax_compute_algo"),
                            (lambda: recipe.DelayedScaling(scaling_factor_compute_algo="max"), "scaling_factor_compute_algo"),
                            (lambda: recipe.DelayedScaling(amax_history_len=0), "amax_history_len"),
                            (lambda: recipe.DelayedScaling(amax_history_len="16"), "amax_history_len is '16'"),
                            (lambda: recipe.DelayedScaling(margin="two"), "margin is 'two'"),
                            (lambda: recipe.DelayedScaling(backward_override="dequantized"), "backward_override"),
                            (lambda: recipe.Float8BlockScaling(x_block_scaling_dim=2), "only one"),
                            (lambda: recipe.Float8BlockScaling(fp8_dpa=True), "fp8_dpa"),
                            (lambda: recipe.NVFP4BlockScaling(fp4_format=recipe.Format.E4M3), "fp4_format"),
                            (lambda: recipe.NVFP4BlockScaling(nvfp4_4over6="some"), "nvfp4_4over6"),
                            (lambda: recipe.CustomRecipe(qfactory=print, quantization_alignment=0), "quantization_alignment")):
            with self.assertRaisesRegex(InvalidArgument, named):
                make()

    def test_unknown_keywords_have_no_effect(self):
        """Megatron passes override_linear_precision and params_dtype to DelayedScaling; Transformer Engine 2.20 accepts and ignores such keywords."""
        for kind in (recipe.DelayedScaling, recipe.Float8CurrentScaling, recipe.Float8BlockScaling, recipe.MXFP8BlockScaling):
            with self.assertWarnsRegex(UserWarning, f"{kind.__name__} has no argument override_linear_precision, params_dtype: .*no effect"):
                made = kind(override_linear_precision=(False, False, False), params_dtype=None)
            self.assertEqual(repr(made), repr(kind()))
        for kind, name in ((recipe.Float8BlockScaling, "use_power_2_scales"), (recipe.DelayedScaling, "interval")):
            with self.assertWarnsRegex(UserWarning, f"{kind.__name__} has no argument {name}: .*no effect"):
                kind(**{name: 1})
        with self.assertRaises(TypeError):
            recipe.DelayedScaling(*range(20))

    def test_misspelt_keywords_name_the_nearest(self):
        for kind in recipe.Recipe.__subclasses__():
            for field in kind.__dataclass_fields__:
                for misspelt in (field + "s", field[1:], field.replace("_", "")):
                    if misspelt not in kind.__dataclass_fields__:
                        with self.assertRaisesRegex(TypeError, rf"{kind.__name__}\(\) has no argument '{misspelt}'; did you mean '", msg=(kind, misspelt)):
                            kind(**{misspelt: 1})
        with self.assertRaisesRegex(TypeError, "'amax_history_length'; did you mean 'amax_history_len'"):
            recipe.DelayedScaling(amax_history_length=16)

    def test_native_values(self):
        own = max
        self.assertEqual(recipe.native_of(recipe.DelayedScaling(margin=1, amax_history_len=16, amax_compute_algo=own, fp8_dpa=True)),
                         {"kind": "delayed", "format": "hybrid", "fp8_dpa": True, "margin": 1, "amax_history_len": 16,
                          "amax_compute_algo": "max", "reduce_amax": True, "functions": mock.ANY})
        self.assertEqual(recipe.native_of(recipe.Float8CurrentScaling(use_power_2_scales=True, fp8_format=recipe.Format.E4M3)),
                         {"kind": "current", "format": "e4m3", "fp8_dpa": False, "backward_override": None, "pow2_scale": True, "amax_epsilon": 0.0})
        block = recipe.Float8BlockScaling()
        self.assertEqual(recipe.native_of(block),
                         {"kind": "block", "format": "e4m3", "fp8_dpa": False, "backward_override": None, "pow2_scale": True, "amax_epsilon": 0.0})
        self.assertEqual(recipe.native_of(recipe.Float8BlockScaling(fp8_format=recipe.Format.HYBRID))["format"], "hybrid")
        block.fp8_quant_fwd_inp = block.fp8_quant_fwd_weight = block.fp8_quant_bwd_grad = recipe.QParams(amax_epsilon=1e-3)
        self.assertEqual(recipe.native_of(block)["amax_epsilon"], 1e-3)
        self.assertFalse(recipe.native_of(block)["pow2_scale"])

    def test_block_formats(self):
        self.assertEqual(recipe.native_of(recipe.MXFP8BlockScaling(enable_2d_quantization=True, backward_override="dequantized")),
                         {"kind": "mxfp8", "format": "e4m3", "fp8_dpa": False, "backward_override": "dequantized", "square_weights": True})
        own = recipe.native_of(recipe.NVFP4BlockScaling())
        self.assertEqual([recipe.NVFP4Rules(*own[name]) for name in ("input", "weight", "gradient")],
                         [recipe.NVFP4Rules(hadamard=True), recipe.NVFP4Rules(square=True), recipe.NVFP4Rules(hadamard=True, stochastic=True)])
        adaptive = recipe.NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="activations", nvfp4_4over6_err_mode="MSE", row_scaled_activation=True,
                                            backward_override="high_precision")
        own = recipe.native_of(adaptive)
        self.assertEqual(recipe.NVFP4Rules(*own["input"]), recipe.NVFP4Rules(by_rows=True, four_over_six=True, largest_scale=256.0, squared=True))
        for made in (recipe.NVFP4BlockScaling(), adaptive, recipe.NVFP4BlockScaling(disable_2d_quantization=True, disable_stochastic_rounding=True)):
            self.assertEqual(recipe.native_of(recipe.nvfp4_of(recipe.native_of(made))), recipe.native_of(made))

    def test_attention_in_fp8_by_either_name(self):
        for arguments in (dict(fp8_dpa=True), dict(fp8_mha=True), dict(fp8_dpa=True, fp8_mha=True)):
            self.assertTrue(recipe.native_of(recipe.DelayedScaling(**arguments))["fp8_dpa"], arguments)

    def test_native_values_follow_the_fields(self):
        import copy
        import pickle
        delayed = recipe.DelayedScaling(margin=1)
        self.assertIs(recipe.native_of(delayed), recipe.native_of(delayed))
        twins = [copy.copy(delayed), copy.deepcopy(delayed), pickle.loads(pickle.dumps(delayed))]
        delayed.margin = 2
        self.assertEqual(recipe.native_of(delayed)["margin"], 2)
        for twin in twins:
            self.assertEqual(recipe.native_of(twin)["margin"], 1)
            self.assertEqual(set(vars(twin)), set(recipe.DelayedScaling.__dataclass_fields__))
        self.assertIsNone(recipe.native_of(delayed)["functions"])
        delayed.scaling_factor_compute_algo = max
        self.assertIs(recipe.native_of(delayed)["functions"].scale, max)
        self.assertIs(recipe.native_of(delayed)["functions"], recipe.native_of(delayed)["functions"])
        current = recipe.Float8CurrentScaling()
        self.assertFalse(recipe.native_of(current)["pow2_scale"])
        current.fp8_quant_fwd_inp = current.fp8_quant_fwd_weight = current.fp8_quant_bwd_grad = recipe.QParams(power_2_scale=True)
        self.assertTrue(recipe.native_of(current)["pow2_scale"])

    def test_what_is_not_honoured_is_refused_in_use(self):
        uneven = recipe.Float8CurrentScaling()
        uneven.fp8_quant_bwd_grad = recipe.QParams(power_2_scale=True)
        for arguments, named in ((recipe.Float8CurrentScaling(fp8_mha=True), "fp8_mha=True"),
                             (recipe.Float8CurrentScaling(fp8_gemm_fprop=recipe.MMParams(True)), "fp8_gemm_fprop"),
                             (recipe.Float8BlockScaling(w_block_scaling_dim=1), "w_block_scaling_dim=1"),
                             (recipe.MXFP8BlockScaling(fp8_dpa=True), "MXFP8BlockScaling.*fp8_dpa"), (recipe.NVFP4BlockScaling(fp8_mha=True), "fp8_mha"),
                             (recipe.CustomRecipe(qfactory=print, fp8_dpa=True), "CustomRecipe.*fp8_dpa"), (uneven, "fp8_quant_bwd_grad")):
            with self.assertRaisesRegex(Unsupported, named):
                recipe.native_of(arguments)
        with self.assertRaisesRegex(TypeError, "'delayed'"):
            recipe.native_of("delayed")

    def test_variables_set_defaults(self):
        code = ("from te_fl.common import recipe; block = recipe.Float8BlockScaling(backward_override=None); "
                "print(block.use_f32_scales, recipe.Float8CurrentScaling().backward_override, recipe.native_of(block)['pow2_scale'])")
        variables = {**os.environ, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "NVTE_BACKWARD_OVERRIDE": "dequantized"}
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables)
        self.assertEqual(shown.stdout.split(), ["True", "dequantized", "False"])

    def test_no_framework_is_imported(self):
        code = "import sys; from te_fl.common import recipe; assert not {'torch', 'jax', 'numpy', 'pydantic'} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)
