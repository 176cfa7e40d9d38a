"""The only package that may import both frameworks, and then only when a command or a call needs one.

So far it holds the command line `swa` (`bridge._cli`). Exchanging arrays between PyTorch and JAX through DLPack
is not part of this version.
"""
