"""What all of te_fl.pytorch stands on: devices, random state, constants, errors of arguments."""
