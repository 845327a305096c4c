"""Implementations of the codec: bare arrays in, bare arrays out; no mesh, no Flax."""
