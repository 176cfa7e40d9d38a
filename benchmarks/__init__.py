"""Measurements on a GPU. Not part of the distribution."""
