"""What was communicated and why, where tensors lie, and where time goes. Some have names of ``torch.distributed.tensor.debug``."""

from tessera.debug._comm_mode import CommDebugMode
from tessera.debug._explain import Explain, explain
from tessera.debug._plan_model import StepCost, plan_model
from tessera.debug._trace import Trace
from tessera.debug._visualize import visualize
from tessera.debug._visualize_sharding import visualize_sharding

__all__ = [
    "CommDebugMode",
    "Explain",
    "StepCost",
    "Trace",
    "explain",
    "plan_model",
    "visualize",
    "visualize_sharding",
]
