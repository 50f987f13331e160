"""What the forward of a module asks of torch: recorded on fake tensors, written as lines of a trace, and guarded."""
