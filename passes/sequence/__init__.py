"""How a computation is rewritten for parts of sequences: values and lines, rules of lines that mix positions, blocks."""
