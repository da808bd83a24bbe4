"""Functions that keep no state: rotary embeddings, softmax, cross entropy."""
