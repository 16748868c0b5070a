"""Triton templates of the reads, as data files."""
