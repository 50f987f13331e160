"""Transport of parameters and gradients: the collectives' symbols, a file for each transport, copies to the host."""
