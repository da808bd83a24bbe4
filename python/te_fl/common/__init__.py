"""Code shared by Transformer Engine's front ends, independent of frameworks: the recipes."""
