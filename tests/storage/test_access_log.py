"""The access log: appended whole by many, read back in order, honest about damage."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import ValidationError

from storage.access_log import AccessEntry, AccessLog
from storage.canonical import canonical_json
from storage.errors import StorageError

_ROOT = Path(__file__).parents[2]


def _entry(**changes: object) -> AccessEntry:
    fields: dict[str, object] = {
        "actor": "ada",
        "region": "eu",
        "action": "put",
        "object": "shards/ab",
        "artifact": "shard",
        "num_bytes": 7,
        "decision": "allowed",
        "reason": "EU shards may live in eu",
        "run_id": "r1",
    }
    return AccessEntry.model_validate(fields | changes)


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "new/access.log")
    assert list(log.entries()) == []
    written = [_entry(object=f"shards/{i}") for i in range(3)]
    for entry in written:
        log.append(entry)
    assert list(AccessLog(tmp_path / "new/access.log").entries()) == written
    assert (tmp_path / "new/access.log").stat().st_mode & 0o777 == 0o600


def test_an_entry_is_one_canonical_line(tmp_path: Path) -> None:
    time = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    AccessLog(tmp_path / "log").append(_entry(time=time, host="h", reason="line\nbreak"))
    (line,) = (tmp_path / "log").read_bytes().splitlines()
    fields = json.loads(line)
    assert canonical_json(fields) == line
    assert fields["time"] == "2026-01-02T03:04:05Z"
    assert fields["reason"] == "line\nbreak"


def test_time_and_host_are_filled_in(tmp_path: Path) -> None:
    entry = _entry()
    assert entry.time.tzinfo is not None
    assert entry.host


@pytest.mark.parametrize(
    "changes",
    [{"action": "peek"}, {"decision": "maybe"}, {"content": "x"}, {"time": datetime(2026, 1, 1)}],
)
def test_entries_are_checked(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        _entry(**changes)


def test_many_append_at_once(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "log")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: log.append(_entry(num_bytes=i)), range(200)))
    assert sorted(entry.num_bytes for entry in log.entries()) == list(range(200))


def test_a_full_disk_leaves_no_half_entry(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
from storage.access_log import AccessLog
from tests.storage.test_access_log import _entry
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
while True:
    AccessLog(Path(sys.argv[1])).append(_entry())
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "log")],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "StorageError: the access log" in ran.stderr
    log = AccessLog(tmp_path / "log")
    num_entries = len(list(log.entries()))
    assert num_entries > 3
    log.append(_entry())
    assert len(list(log.entries())) == num_entries + 1


def test_damage_is_named_with_its_line(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "log")
    log.append(_entry())
    with (tmp_path / "log").open("ab") as file:
        file.write(b'{"actor":')
    with pytest.raises(StorageError, match="holds no entry in line 2: it was edited or cut"):
        list(log.entries())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file/log", tmp_path):
        with pytest.raises(StorageError, match=r"the access log .* cannot be written"):
            AccessLog(path).append(_entry())
