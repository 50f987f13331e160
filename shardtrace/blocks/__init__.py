"""Repeated blocks are traced once: the lines of the first instance are written again for each further one."""
