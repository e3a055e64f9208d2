"""What `make demo` runs, and the models it shows."""
