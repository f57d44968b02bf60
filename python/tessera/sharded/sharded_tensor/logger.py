"""One record for each call of the API, at level DEBUG, where somebody asked for the logger."""

import logging

from tessera import _C


def _get_or_create_logger() -> logging.Logger:
    """The logger "tessera.sharded". From now on calls of the API are logged, on all ranks of this process."""
    logger = logging.getLogger("tessera.sharded")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
        logger.setLevel(logging.DEBUG)
        logger.propagate = False

    def log(call: str, rank: int, detail: str) -> None:
        logger.debug("rank %d: %s(%s)", rank, call, detail)

    _C.set_sharded_log_handler(log)
    return logger
