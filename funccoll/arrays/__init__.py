"""Arrays on a mesh, and putting values there."""
