"""The proof that a sharded step is the unsharded program: see :mod:`passes.proof.prove`."""
