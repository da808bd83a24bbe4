"""The tensors that ranks exchange."""
