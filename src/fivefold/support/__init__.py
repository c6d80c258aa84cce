"""Helpers for all packages: errors, formatting, reading of tables, files."""
