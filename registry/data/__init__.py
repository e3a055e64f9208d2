"""Data that travels with the package; `README.md` beside it says what each file is and what it can't show."""
