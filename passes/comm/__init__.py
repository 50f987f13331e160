"""How parameters and gradients travel: the collectives' symbols, one file for each transport, copies to the host."""
