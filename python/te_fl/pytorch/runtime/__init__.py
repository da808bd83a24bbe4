"""Helpers shared by all of te_fl.pytorch: devices, random state, constants, argument errors."""
