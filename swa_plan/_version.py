"""The version of the whole distribution: the four packages are released together, so there is one number."""

__version__ = "0.1.0"
