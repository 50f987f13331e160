"""A sharded model: what it remembers, and how Thunder traces it."""
