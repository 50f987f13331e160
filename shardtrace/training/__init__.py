"""What a training script calls around a step."""
