"""Other people's models and engines on our pools; nothing else of the package imports these."""
