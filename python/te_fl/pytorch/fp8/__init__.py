"""Autocast's scopes, FP8 state in checkpoints, weights of FP8 codes alone, and what a device has of FP8."""
