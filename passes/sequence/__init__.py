"""Rewrites a computation for parts of sequences: values, lines, the rules of lines that mix positions, and blocks."""
