"""The access log around a stage: whole before it, closed and signed after it."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

from pipeline import workspace
from pipeline.borders import log_refusals
from pipeline.checks import check_witness
from pipeline.config import Config
from storage.access_log import AccessEntry, AccessLog
from storage.log_checkpoint import Checkpoint
from storage.notary import Notary
from storage.signed_note import VerifierKey

Result = TypeVar("Result")


def open_log(config: Config) -> AccessLog:
    """The workspace's access log; its entries name the present policy."""
    return AccessLog(workspace.ACCESS_LOG, config.audit, config.residency.digest)


def sign_log(config: Config) -> Checkpoint | None:
    """Sign what the log is now and copy that to its second place; None of an empty log.

    Raises ResidencyError, and the log has the refusal, where the policy keeps the log from there;
    StorageError.
    """
    log_refusals(config, lambda: check_witness(config))
    return Notary(workspace.ACCESS_LOG, config.audit).publish()


def rotate_key(config: Config) -> VerifierKey:
    """Hand the log over to a new signing key, and sign with that. Raises as `sign_log`."""
    log_refusals(config, lambda: check_witness(config))
    log = open_log(config)
    log.append(
        AccessEntry(
            region=config.site.name,
            action="rotate",
            object="audit.signing_key",
            artifact="log",
            decision="allowed",
            reason="handed over to a new key",
        )
    )
    log.close()
    key = Notary(workspace.ACCESS_LOG, config.audit).rotate()
    sign_log(config)
    return key


@contextlib.contextmanager
def recording(config: Config) -> Iterator[AccessLog]:
    """Record for the length of a block, however it ends, and sign the log after it.

    Raises ResidencyError before the block if the second place may not have the log, StorageError
    if the log was cut or that place does not answer, and after the block if something could not be
    recorded or signed.
    """
    sign_log(config)
    log, notary = open_log(config), Notary(workspace.ACCESS_LOG, config.audit)
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
