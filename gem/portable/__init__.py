"""impl="torch": the ops in plain PyTorch, forward and backward, on any device.

Samples are grouped by length, so that nothing is ever padded to the longest one.
"""
