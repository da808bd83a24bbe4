"""A defect of PyTorch before 2.9: it frees a Gloo group with the interpreter's lock held and waits for the group's thread, which may wait for that lock
to free the last tensor of a collective."""

import time

import torch
import torch.distributed as dist

from te_fl import frameworks


def let_them_end():
    """Has destroy_process_group() return after the threads of its groups have freed their tensors, since the caller then drops the groups."""
    if frameworks.numbers(torch.__version__) >= (2, 9):
        return
    destroy = dist.destroy_process_group

    def destroy_and_wait(*arguments, **options):
        destroy(*arguments, **options)
        time.sleep(0.2)
    dist.destroy_process_group = destroy_and_wait
