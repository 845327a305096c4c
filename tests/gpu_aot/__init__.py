"""Compile for GPUs on a machine without one, and read what came out."""
