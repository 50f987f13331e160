"""The functions that a training script calls around a step."""
