"""Tests, by folders: CONTRIBUTING.md says which is which. A package, for ranks and scripts import `tests.support`, too."""
