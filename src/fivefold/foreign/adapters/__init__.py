"""Adapters that ship: `fivefold verify --adapter NAME` reads NAME.py. Each needs the package that it is for."""
