"""Training code from elsewhere against one process: `fivefold verify --adapter`."""
