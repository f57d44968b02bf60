"""What ``torch.distributed.tensor.experimental`` has."""

from tessera._guards import implicit_replication
from tessera._local_map import local_map
from tessera._sharding import TensorSpec, register_sharding

__all__ = ["TensorSpec", "implicit_replication", "local_map", "register_sharding"]
