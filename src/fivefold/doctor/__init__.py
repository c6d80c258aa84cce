"""Whether the machines of a job are well: every rank measures, and the slow or odd one is named against its peers."""
