"""Gluon kernels for Hopper (compute capability 9.0): copy engine, wgmma and warps of different jobs, by hand.

``parts`` is what they share, ``choose`` which kernel a call gets, ``ops`` how it is launched.
"""
