"""te-fl's layers in graphs: those of torch.compile and those of CUDA."""
