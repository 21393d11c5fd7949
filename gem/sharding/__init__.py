"""Parallelism on torch.distributed: which rank holds what, and the collectives between them."""
