"""Transformer Engine's import names for te-fl: the finder, the table of what is served, and variables that are not honoured."""
