"""Stateless functions: rotary embeddings, softmax, cross entropy, permutation, routing."""
