"""The access log around a stage: whole before it, closed and signed after it."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

from pipeline import workspace
from pipeline.config import Config
from storage.access_log import AccessLog
from storage.log_checkpoint import Notary

Result = TypeVar("Result")


def open_log(config: Config) -> AccessLog:
    """The workspace's access log; its entries name the present policy."""
    return AccessLog(workspace.ACCESS_LOG, config.audit, config.residency.digest)


@contextlib.contextmanager
def recording(config: Config) -> Iterator[AccessLog]:
    """Record for the length of a block, however it ends, and sign the log after it.

    Raises StorageError before the block if the log was cut or its second place does not answer,
    and after it if something could not be recorded or signed.
    """
    log, notary = open_log(config), Notary(workspace.ACCESS_LOG, config.audit)
    notary.publish()
    try:
        yield log
    finally:
        log.close()
        notary.publish()


def recorded(stage: Callable[[Config], Result]) -> Callable[[Config], Result]:
    """The stage, within `recording`."""

    @functools.wraps(stage)
    def run(config: Config) -> Result:
        with recording(config):
            return stage(config)

    return run
