"""The version, alone in a file so that packaging reads it without importing the library."""

__version__ = "0.1.0"
