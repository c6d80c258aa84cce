"""`fivefold checkup`: proves and measures the machines of a cluster in a first hour, and writes what it found."""
