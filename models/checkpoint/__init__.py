"""What a model's files say: architecture, shapes, tensors. No torch."""
