"""One builder a file; each returns the order in which every rank computes."""
