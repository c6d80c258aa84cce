"""Results as text, tables, pictures and pages."""
