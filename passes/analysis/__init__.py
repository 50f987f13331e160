"""What a trace says: recognisers, FLOPs, traffic, memory, and the proof of its invariants."""
