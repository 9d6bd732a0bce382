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
    "torch": {
        "DistributedDataParallel",
        "SyncBatchNorm",
        "all_gather",
        "all_reduce",
        "all_to_all",
        "barrier",
        "broadcast",
        "empty",
        "empty_like",
        "gather",
        "permute",
        "reduce",
        "reduce_scatter",
        "scatter",
    },
}
# fmt: on
