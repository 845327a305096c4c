"""Architectures in Flax NNX; communication comes in as an object."""
