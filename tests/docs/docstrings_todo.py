"""Public names whose docstrings `test_docstrings.py` finds incomplete; one in a line, sorted, so that edits seldom conflict."""

# fmt: off
TODO: dict[str, set[str]] = {
}
# fmt: on
