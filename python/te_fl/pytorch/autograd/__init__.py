"""Calls of te-fl's layers from PyTorch and their autograd nodes (in Python and in C++), activation recomputation, and deferred weight gradients."""
