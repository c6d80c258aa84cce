"""Settings for every test."""

from hypothesis import settings

# Machines that run tests are busy: a slow example is not a failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
