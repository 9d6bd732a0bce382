"""Names of meshes for pickles of version 0.1's first layout. They are defined in `core`."""

from .core.mesh import Mesh
from .core.partition_spec import P
from .core.sharding import Sharding

__all__ = ["Mesh", "P", "Sharding"]
