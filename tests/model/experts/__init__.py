def none() -> None:
    """Nothing is put off."""
