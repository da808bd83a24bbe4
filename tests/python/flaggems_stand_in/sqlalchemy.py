"""A stand-in: te-fl looks whether the packages that FlagGems imports are installed."""
