"""What is measured, against whom, one command each: `python -m benchmarks.<name>`."""
