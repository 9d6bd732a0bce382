"""Names of meshes where pickles of version 0.1's first layout look for them. They are defined in `core/mesh.py`."""

from .core.mesh import Mesh, P, Sharding

__all__ = ["Mesh", "P", "Sharding"]
