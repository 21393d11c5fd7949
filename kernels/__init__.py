"""Device code: portable Triton kernels, one file a kernel with its launcher; in ``hopper`` Gluon kernels for Hopper.

This directory is installed and imported as ``gem.kernels`` (package-dir in ``pyproject.toml``; in a checkout the
link ``gem/kernels`` leads here). It imports nothing from the rest of gem; ``gem.ops`` chooses among what lies here.
"""
