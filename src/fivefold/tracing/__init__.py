"""Where the time of a step goes: what every rank did and waited for, beside what its schedule says it should have."""
