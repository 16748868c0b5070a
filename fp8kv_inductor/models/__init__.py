"""Model graphs in plain PyTorch plus the fp8kv operators."""
