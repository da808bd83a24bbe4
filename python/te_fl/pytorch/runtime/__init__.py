"""Shared by all of te_fl.pytorch: devices, random state, constants, errors of arguments."""
