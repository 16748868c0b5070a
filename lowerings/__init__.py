"""How each operator becomes Inductor IR."""

if __name__ != "fp8kv_inductor.lowerings":
    raise ImportError("import this package as fp8kv_inductor.lowerings")


def register() -> None:
    """Register the lowerings once."""
