"""Meshes, and how models are laid out and run on them."""
