"""Public names whose docstrings `test_docstrings.py` finds incomplete; one in a line, sorted, so that edits seldom conflict."""

# fmt: off
TODO: dict[str, set[str]] = {
    "draw": {
        "Drawing",
        "buckets",
        "chunk_table",
        "costs",
        "draw_schedule",
        "link_matrix",
        "program",
        "sharding",
        "space_time",
        "timelines",
    },
}
# fmt: on
