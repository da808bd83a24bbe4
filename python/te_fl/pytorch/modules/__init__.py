"""te-fl's implementations of Transformer Engine's modules."""
