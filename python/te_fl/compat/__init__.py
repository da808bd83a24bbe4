"""Imports te-fl under Transformer Engine's names: the import finder, the table of supported names, and warnings for unsupported environment
variables.
"""
