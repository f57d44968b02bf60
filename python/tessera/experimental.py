"""What ``torch.distributed.tensor.experimental`` has."""

from tessera._guards import implicit_replication
from tessera._local_map import local_map

__all__ = ["implicit_replication", "local_map"]
