"""What a model is: its config, its weights and its forward pass."""
