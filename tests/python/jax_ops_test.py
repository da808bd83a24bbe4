"""Tests te_fl.ops on JAX arrays, which are immutable."""

import unittest

import jax
import jax.numpy as jnp
import numpy as np

import te_fl


class Jax(unittest.TestCase):
    def test_arrays_are_inputs(self):
        x, y = jax.device_put(jnp.linspace(-1, 1, 9), jax.devices("cpu")[0]), np.zeros(9, np.float32)
        te_fl.ops.relu(input=x, output=y)
        np.testing.assert_array_equal(y, np.maximum(np.asarray(x), 0))

    def test_arrays_are_no_outputs(self):
        x, y = jnp.ones(9), jnp.zeros(9)
        with self.assertRaisesRegex(ValueError, "'output' is written by this op, and its memory is read-only"):
            te_fl.ops.relu(input=x, output=y)
        self.assertFalse(bool(y.any()))


if __name__ == "__main__":
    unittest.main()
