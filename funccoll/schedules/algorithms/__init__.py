"""The algorithms: short generator functions, registered when this package is imported."""
