"""Speed, measured: systems in turns, one result."""
