"""What was communicated, and where tensors lie: the names of ``torch.distributed.tensor.debug``."""

from tessera.debug._comm_mode import CommDebugMode
from tessera.debug._visualize_sharding import visualize_sharding

__all__ = ["CommDebugMode", "visualize_sharding"]
