"""How the program speaks: errors, formatting, reading of tables, files."""
