"""Arrays on a mesh."""
