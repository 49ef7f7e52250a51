"""The access log: appended whole by many, read back in order, honest about who fell silent."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from storage.access_log import AccessEntry, AccessLog, encode_entry
from storage.canonical import canonical_json
from storage.errors import StorageError
from storage.log_verification import verify_log

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


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Where a log may be; what this process wrote there ends with the test."""
    path = tmp_path / "new" / "log.jsonl"
    yield path
    AccessLog(path).close()


def _said(path: Path) -> list[AccessEntry]:
    """The entries less what the log says of itself."""
    entries = AccessLog(path).entries()
    return [entry.model_copy(update={"writer": "", "sequence": 0}) for entry in entries]


def test_entries_come_back_in_order(path: Path) -> None:
    log = AccessLog(path)
    assert list(log.entries()) == []
    written = [_entry(object=f"shards/{i}") for i in range(3)]
    for entry in written:
        log.append(entry)
    assert _said(path) == written
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}


def test_a_writer_numbers_its_entries_from_its_opening_to_its_close(path: Path) -> None:
    log = AccessLog(path, policy_digest="ab")
    log.append(_entry())
    AccessLog(path).append(_entry(action="get", policy_digest="cd"))
    log.close()
    log.append(_entry())
    *first, opened, last = (entry for _, entry in log.numbered())
    assert [entry.action for entry in first] == ["open", "put", "get", "close"]
    assert [entry.sequence for entry in first] == [0, 1, 2, 3]
    assert len({entry.writer for entry in first}) == 1
    assert [entry.policy_digest for entry in first] == ["", "ab", "cd", ""]
    assert opened.writer == last.writer != first[0].writer


def test_an_entry_is_one_canonical_line(path: Path) -> None:
    time = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    log = AccessLog(path)
    log.append(_entry(time=time, host="h", reason="line\nbreak \u2028 \x7f é"))
    log.flush()
    _, line = path.read_bytes().split(b"\n")[:2]
    fields = json.loads(line)
    assert canonical_json(fields) == line
    assert fields["time"] == "2026-01-02T03:04:05Z"
    assert fields["reason"] == "line\nbreak \u2028 \x7f é"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.text(st.characters(max_codepoint=127)),
        st.text() | st.integers(0, 2**53 - 1),
    )
)
def test_the_encoding_is_that_of_rfc_8785(fields: dict[str, str | int]) -> None:
    assert encode_entry(fields) == canonical_json(fields)


def test_what_is_not_said_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVOY_RUN_ID", "r7")
    entry = AccessEntry(
        region="eu", action="get", object="o", artifact="shard", decision="allowed", reason="r"
    )
    assert entry.time.tzinfo is not None
    assert entry.host
    assert entry.actor
    assert entry.run_id == "r7"


@pytest.mark.parametrize(
    "changes",
    [
        {"action": "peek"},
        {"decision": "maybe"},
        {"content": "x"},
        {"time": datetime(2026, 1, 1)},
        {"num_bytes": -1},
        {"num_bytes": 2**53},
    ],
)
def test_entries_are_checked(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        _entry(**changes)


def test_many_threads_append_at_once(path: Path) -> None:
    log = AccessLog(path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: log.append(_entry(num_bytes=i)), range(2000)))
    assert sorted(entry.num_bytes for entry in _said(path)) == list(range(2000))
    log.close()
    assert verify_log(path, [], None).findings == ()


def test_gets_wait_for_others_and_not_for_long(path: Path) -> None:
    log = AccessLog(path)
    log.append(_entry())
    log.append(_entry(action="get"))
    assert path.read_bytes().count(b"\n") == 2
    deadline = time.monotonic() + 10
    while path.read_bytes().count(b"\n") < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.read_bytes().count(b"\n") == 3
    log.append(_entry(action="get"))
    log.append(_entry(action="refuse", decision="refused"))
    assert path.read_bytes().count(b"\n") == 5


def _work(path: Path, number: int) -> None:
    log = AccessLog(path)
    for i in range(50):
        log.append(_entry(action="get", num_bytes=1000 * number + i))


def test_many_processes_append_at_once_and_say_that_they_end(path: Path) -> None:
    AccessLog(path).append(_entry(action="get", num_bytes=7))
    AccessLog(path).append(_entry(action="get", num_bytes=8))  # waits while others are forked
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_work, args=(path, number)) for number in (1, 2, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    AccessLog(path).close()
    expected = [7, 8, *(1000 * number + i for number in (1, 2, 3) for i in range(50))]
    assert sorted(entry.num_bytes for entry in _said(path)) == expected
    verification = verify_log(path, [], None)
    assert verification.findings == ()
    assert verification.silent_writers == ()


_WRITING = """
import sys, time
from pathlib import Path
from storage.access_log import AccessLog
from tests.storage.test_access_log import _entry
log = AccessLog(Path(sys.argv[1]))
print("up", flush=True)
for i in range(10**9):
    log.append(_entry(action="get", num_bytes=i))
"""


def _start(script: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_writer_leaves_whole_entries_and_a_gap_that_shows(path: Path) -> None:
    for _ in range(5):
        with _start(_WRITING, path) as process:
            assert process.stdout is not None
            process.stdout.readline()
            deadline = time.monotonic() + 30
            before = path.stat().st_size if path.exists() else 0
            while (not path.exists() or path.stat().st_size == before) and (
                time.monotonic() < deadline
            ):
                time.sleep(0.001)
            time.sleep(0.02)
            os.kill(process.pid, signal.SIGKILL)
    verification = verify_log(path, [], None)
    assert verification.findings == ()
    assert len(verification.silent_writers) == 5
    last = verification.silent_writers[-1]
    assert last.last_entry == verification.num_entries - 1
    assert last.what.startswith(f"ended without saying so after entry {last.last_entry}")
    # Those who come after go on from the last whole entry.
    AccessLog(path).append(_entry())
    AccessLog(path).close()
    again = verify_log(path, [], None)
    assert again.findings == ()
    assert again.num_entries == verification.num_entries + 3


@pytest.mark.parametrize("cut", [0, 1, 40, 400])
def test_what_a_killed_writer_had_begun_is_settled(path: Path, cut: int) -> None:
    log = AccessLog(path)
    log.append(_entry())
    tree = path.with_suffix(".tree").read_bytes()
    log.append(_entry(num_bytes=1))
    log.append(_entry(num_bytes=2))
    log.flush()
    # The tree is written last: so it looks after a kill within the write of the last two.
    path.with_suffix(".tree").write_bytes(tree)
    os.truncate(path, path.stat().st_size - cut)
    assert verify_log(path, [], None).findings == ()
    log.append(_entry(num_bytes=3))
    kept = {0: [7, 1, 2, 3], 1: [7, 1, 3], 40: [7, 1, 3], 400: [7, 3]}[cut]
    assert [entry.num_bytes for entry in _said(path)] == kept


@pytest.mark.parametrize("action", ["get", "refuse"])
def test_a_full_disk_stops_and_leaves_no_half_entry(path: Path, action: str) -> None:
    script = f"""
import resource, sys
from pathlib import Path
from storage.access_log import AccessLog
from tests.storage.test_access_log import _entry
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
while True:
    AccessLog(Path(sys.argv[1])).append(_entry(action={action!r}))
"""
    with _start(script, path) as process:
        _, stderr = process.communicate(timeout=60)
    assert "StorageError: the access log" in stderr
    assert process.returncode == 1
    num_entries = len(list(AccessLog(path).entries()))
    assert num_entries >= (1 if action == "get" else 5)
    AccessLog(path).append(_entry())
    assert len(list(AccessLog(path).entries())) == num_entries + 1
    assert verify_log(path, [], None).findings == ()


def test_an_entry_that_could_not_be_written_is_written_later(path: Path) -> None:
    log = AccessLog(path)
    log.append(_entry())
    path.parent.chmod(0o700)
    moved = path.with_name("away")
    path.rename(moved)
    path.mkdir()
    with pytest.raises(StorageError, match=r"cannot be written .*no record|nothing goes on"):
        log.append(_entry(action="refuse", num_bytes=1))
    with pytest.raises(StorageError):
        log.close()
    path.rmdir()
    moved.rename(path)
    log.append(_entry(action="get", num_bytes=2))
    assert [entry.num_bytes for entry in _said(path)] == [7, 1, 2]


def test_damage_is_named_with_its_line(path: Path) -> None:
    log = AccessLog(path)
    log.append(_entry())
    with path.open("ab") as file:
        file.write(b'{"actor":')
    with pytest.raises(StorageError, match="holds no entry in line 3: it was edited or cut"):
        list(log.entries())
    os.truncate(path, path.stat().st_size - len(b'{"actor":'))


@pytest.mark.parametrize("suffix", [".jsonl", ".hashes"])
def test_nothing_is_appended_to_a_log_that_was_changed(path: Path, suffix: str) -> None:
    log = AccessLog(path)
    log.append(_entry())
    log.close()
    file = path.with_suffix(suffix)
    content = file.read_bytes()
    file.write_bytes(content[:-40])
    with pytest.raises(StorageError, match=r"was changed \(its end is missing: it held 3 entries"):
        log.append(_entry())
    file.write_bytes(content)
    if suffix == ".jsonl":
        path.write_bytes(content + b"{}\n")
        with pytest.raises(StorageError, match="something was added after entry 2"):
            log.append(_entry())
        path.write_bytes(content)
    log.append(_entry())
    assert verify_log(path, [], None).findings == ()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file/log", tmp_path / "folder"):
        log = AccessLog(path)
        with pytest.raises(StorageError, match=r"the access log .* cannot be written"):
            log.append(_entry(action="get"))
    (tmp_path / "file").unlink()
    (tmp_path / "folder").rmdir()
    for path in (tmp_path / "file/log", tmp_path / "folder"):
        AccessLog(path).close()
