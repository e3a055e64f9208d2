"""The catalog of models: what is stored about them and every question asked of it."""

__version__ = "0.1.0"
