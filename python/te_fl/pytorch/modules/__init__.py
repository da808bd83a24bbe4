"""Transformer Engine's modules."""
