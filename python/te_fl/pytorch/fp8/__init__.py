"""FP8 in te_fl.pytorch: autocast scopes, FP8 state in checkpoints, weights stored as FP8 codes, and queries of device support."""
