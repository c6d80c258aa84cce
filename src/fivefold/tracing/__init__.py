"""Where the time of a step goes: what every rank did and waited for, and what its schedule says it should have."""
