"""Shared by Transformer Engine's front ends, without any framework: the recipes."""
