"""How often tests that draw from the operating system may fail by chance."""

LEVEL = 1e-8
"""Of one check; a test with k checks is marked `os_entropy(k * LEVEL)`."""
LIMIT = 1e-5
"""Of a run of the whole suite."""
