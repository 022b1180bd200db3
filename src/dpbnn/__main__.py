"""`python -m dpbnn`: the same as the command `dpbnn`."""

from dpbnn.cli import main

main()
