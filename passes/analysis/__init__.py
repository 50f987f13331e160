"""Facts about a trace: the table of symbols, recognisers, FLOPs, traffic, memory, and the proof of the invariants."""
