"""Instruction streams: the lowered form of a schedule, verified on its own."""
