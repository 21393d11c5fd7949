"""Device code: Triton (portable) and Gluon (Hopper) kernels, one file a kernel with its launcher.

This directory is installed and imported as ``gem.kernels`` (package-dir in ``pyproject.toml``; in a checkout the
link ``gem/kernels`` leads here). It imports nothing from the rest of gem; ``gem.ops`` chooses among what lies here.
"""
