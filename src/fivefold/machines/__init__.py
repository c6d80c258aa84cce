"""What the device at hand reaches, as an accelerator file."""
