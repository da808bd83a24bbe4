"""A layer's call from PyTorch and its node of autograd, in Python and in C++; recomputation and delayed gradients."""
