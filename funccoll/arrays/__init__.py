"""Arrays on a mesh, and the placement of values there."""
