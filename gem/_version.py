"""The version, in one place: read by the build (``pyproject.toml``) and by ``gem.__version__`` without installed metadata."""

__version__ = "0.1.0"
