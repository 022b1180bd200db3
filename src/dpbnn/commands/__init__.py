"""The commands that work on tables; `dpbnn.cli` registers them."""
