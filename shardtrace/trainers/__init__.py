"""What trainers of other libraries need to train a sharded model. None of these libraries is imported here."""
