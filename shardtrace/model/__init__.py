"""A sharded model: its state, and its tracing by Thunder."""
