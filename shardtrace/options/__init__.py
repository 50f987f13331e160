"""The arguments of ``fsdp``, in their canonical form."""
