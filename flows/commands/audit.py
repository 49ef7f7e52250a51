"""`convoy audit`: is the access log whole, what does it say, and proofs for others."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel

from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.recording import rotate_key, sign_log
from pipeline.workspace import ACCESS_LOG, lock_workspace
from storage.access_log import AccessEntry, AccessLog
from storage.errors import StorageError
from storage.log_checkpoint import AuditConfig
from storage.log_proof import Notes, prove_entry, prove_extension
from storage.log_verification import Verification, verify_log
from storage.notary import read_signing_key
from storage.signed_note import VerifierKey
from storage.witness import Witness


def main(options: argparse.Namespace) -> int:
    config = Config.load()
    act: dict[str, Callable[[argparse.Namespace, AuditConfig], int]] = {
        "verify": _verify,
        "show": _show,
        "prove": _prove,
        "key": _print_key,
    }
    if options.action == "checkpoint":
        return _checkpoint(config)
    if options.action == "rotate":
        return _rotate(config)
    return act[options.action](options, config.audit)


def _verify(options: argparse.Namespace, audit: AuditConfig) -> int:
    witness = Witness(audit.witness)
    log = options.log or ACCESS_LOG
    key = _find_key(options, audit, witness)
    outside, handovers = _outside(witness, key)
    verification = verify_log(log, outside, key, handovers)
    if options.json:
        print(verification.model_dump_json(indent=2))
    else:
        print("\n".join(_describe(verification, log)))
    return 0 if verification.is_whole else 1


def _describe(verification: Verification, log: Path) -> Iterator[str]:
    for finding in verification.findings:
        where = "" if finding.entry is None else f"entry {finding.entry}: "
        yield f"NOT WHOLE  {where}{finding.what}"
    for silent in verification.silent_writers:
        yield f"note       writer {silent.writer} on {silent.host} {silent.what}"
    if verification.silent_writers:
        yield (
            "note       a process that is killed ends so: what it did after its last entry, for at "
            "most a second, may be missing; nothing was taken out"
        )
    if verification.is_whole:
        num_after = verification.num_entries - verification.num_proven
        yield (
            f"whole      {log}: {verification.num_entries} entries, none changed, removed or put "
            f"in; {verification.num_proven} of them are proven by the newest of "
            f"{verification.num_checkpoints} signed checkpoints in the second place, {num_after} "
            "came after it"
        )
    yield f"key        {verification.key or 'none yet'}"


def _show(options: argparse.Namespace, audit: AuditConfig) -> int:
    since, until = _time(options.since, "--since"), _time(options.until, "--until")
    wanted = {"region": options.region, "actor": options.actor, "decision": options.decision}
    wanted = {name: value for name, value in wanted.items() if value is not None}

    def matches(entry: AccessEntry) -> bool:
        return (
            all(getattr(entry, name) == value for name, value in wanted.items())
            and (options.object is None or options.object in entry.object)
            and (since is None or entry.time >= since)
            and (until is None or entry.time < until)
        )

    for number, entry in AccessLog(options.log or ACCESS_LOG).numbered():
        if matches(entry):
            if options.json:
                print(json.dumps({"entry": number, **entry.model_dump(mode="json")}))
            else:
                print(_line(number, entry))
    return 0


def _line(number: int, entry: AccessEntry) -> str:
    where = entry.region or "-"
    if entry.from_region or entry.to_region:
        where = f"{entry.from_region or '-'}>{entry.to_region or '-'}"
    return (
        f"{number:>7} {entry.time:%Y-%m-%dT%H:%M:%SZ} {entry.actor}@{entry.host} {entry.action} "
        f"{entry.decision} {where} {entry.artifact} {entry.object} {entry.num_bytes} "
        f"({entry.reason})"
    )


def _prove(options: argparse.Namespace, audit: AuditConfig) -> int:
    witness = Witness(audit.witness)
    key = _find_key(options, audit, witness)
    if key is None:
        raise StorageError("there is no checkpoint yet: run a stage, or `convoy audit checkpoint`")
    log = options.log or ACCESS_LOG
    outside, handovers = _outside(witness, key)
    proof: BaseModel
    if options.extends is not None:
        proof = prove_extension(log, options.extends, outside, key, handovers)
    elif options.entry is not None:
        proof = prove_entry(log, options.entry, outside, key, handovers)
    else:
        raise PipelineError("name an entry by its number, or a checkpoint by --extends SIZE")
    text = proof.model_dump_json(indent=2) + "\n"
    if options.output is None:
        sys.stdout.write(text)
    else:
        options.output.write_text(text, encoding="utf-8")
    return 0


def _checkpoint(config: Config) -> int:
    checkpoint = sign_log(config)
    print(f"{checkpoint.size} entries" if checkpoint else f"{ACCESS_LOG} is empty")
    return 0


def _rotate(config: Config) -> int:
    with lock_workspace(Path.cwd(), "convoy audit rotate"):
        key = rotate_key(config)
    print(key)
    return 0


def _outside(witness: Witness, key: VerifierKey | None) -> tuple[Notes, Notes]:
    """Checkpoints and hand-overs of the key's log."""
    return (witness.checkpoints(key), witness.handovers(key)) if key else ((), ())


def _print_key(options: argparse.Namespace, audit: AuditConfig) -> int:
    key = _find_key(options, audit, Witness(audit.witness))
    if key is None:
        raise StorageError("there is no key yet: the first checkpoint makes it")
    print(key)
    return 0


def _find_key(
    options: argparse.Namespace, audit: AuditConfig, witness: Witness
) -> VerifierKey | None:
    """The key that was given, else this log's own, else the one in the second place."""
    if options.key is not None:
        try:
            return VerifierKey.parse(options.key)
        except ValueError as error:
            raise PipelineError(f"--key: {error}; `convoy audit key` prints it") from None
    if audit.signing_key.exists():
        return read_signing_key(audit.signing_key).verifier
    keys = witness.logs()
    if len(keys) > 1:
        raise PipelineError("--key: say which, for audit.witness holds the keys of several logs")
    return keys[0] if keys else None


def _time(text: str | None, option: str) -> datetime | None:
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise PipelineError(
            f"{option}: {text!r} is no time: use 2026-01-31 or 2026-01-31T12:00:00+02:00"
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
