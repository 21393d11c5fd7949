"""Training: the loop, its optimizers, checkpoints and progress."""
