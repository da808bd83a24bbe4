"""What Transformer Engine's front ends share and no framework is needed for: the recipes."""
