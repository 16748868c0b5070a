"""What 8-bit KV rows cost: a small model, trained here, and its quality in every cache format."""
