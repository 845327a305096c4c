"""The default corpus."""
