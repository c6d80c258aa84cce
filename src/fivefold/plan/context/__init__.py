"""Ring, all-gather or Ulysses, and from which length on."""
