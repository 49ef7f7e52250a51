"""The directory store: what reaches the disk, and the disks that refuse."""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from storage.errors import ObjectExists, StoreUnavailable
from storage.region import Region
from storage.store import check_store, open_store
from tests.storage.conftest import file_region

_ROOT = Path(__file__).parents[2]

_PUT = """
import sys
from storage.errors import StoreUnavailable
from storage.store import open_store
from tests.storage.conftest import file_region
from pathlib import Path
store = open_store(file_region(Path(sys.argv[1])))
"""


def test_objects_are_private_to_their_owner(tmp_path: Path, region: Region) -> None:
    open_store(region).put("shards/a", b"x")
    stores = tmp_path / "stores"
    assert (stores / "eu/shards/a").stat().st_mode & 0o777 == 0o600
    assert (stores / "eu/shards").stat().st_mode & 0o777 == 0o700


def test_a_relative_url_is_relative_to_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, region: Region
) -> None:
    monkeypatch.chdir(tmp_path)
    open_store(region.model_copy(update={"store": "file:here/eu"})).put("o", b"x")
    assert (tmp_path / "here/eu/o").read_bytes() == b"x"


def test_an_object_is_synced_before_it_has_its_name(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    replace, fsync = Path.replace, os.fsync

    def noted_fsync(descriptor: int) -> None:
        calls.append("fsync")
        fsync(descriptor)

    def noted_replace(path: Path, target: Path) -> Path:
        calls.append("replace")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    store = open_store(region)
    store.put("o", b"x")
    calls.clear()
    store.put("o", b"y")
    assert calls == ["fsync", "replace", "fsync"]


def test_a_killed_writer_leaves_no_partial_object(tmp_path: Path, region: Region) -> None:
    script = _PUT + "i = 0\nwhile True:\n    store.put(f'o{i % 7}', bytes([i % 256]) * 3_000_000)\n"
    script += "    i += 1\n    print(i, flush=True)\n"
    for delay in (0.0, 0.003, 0.011):
        writer = _python(script, tmp_path, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    found = list(open_store(region).list())
    assert found
    for info in found:
        assert info.num_bytes == 3_000_000
        assert len(set(open_store(region).get(info.name))) == 1


def test_the_next_writer_takes_over_what_a_killed_one_left(tmp_path: Path, region: Region) -> None:
    script = _PUT + "def parts():\n    yield bytes(1_000_000)\n    print('half', flush=True)\n"
    script += "    import time\n    time.sleep(60)\nstore.put('o', parts())\n"
    for _ in range(3):
        writer = _python(script, tmp_path, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    assert len(list(tmp_path.rglob("*~*"))) == 1
    assert list(open_store(region).list()) == []
    open_store(region).put("o", iter([b"a", b"b"]))
    assert open_store(region).get("o") == b"ab"
    assert not list(tmp_path.rglob("*~*"))


def test_an_object_is_not_taken_for_what_a_killed_writer_left(
    tmp_path: Path, region: Region
) -> None:
    """One that was killed between giving an object its name and removing the other name."""
    store = open_store(region)
    store.put("o", b"first", overwrite=False)
    (path,) = tmp_path.rglob("o")
    path.with_name("o~0").hardlink_to(path)
    with pytest.raises(ObjectExists):
        store.put("o", b"second", overwrite=False)
    assert store.get("o") == b"first"
    assert not list(tmp_path.rglob("*~*"))


def test_a_file_too_large_leaves_the_old_object(tmp_path: Path, region: Region) -> None:
    open_store(region).put("o", b"old")
    script = _PUT + "store.put('o', bytes(2_000_000))\n"
    writer = _python(script, tmp_path, stderr=subprocess.PIPE, max_file_bytes=1_000_000)
    _, errors = writer.communicate(timeout=60)
    assert writer.returncode == 1
    assert "StoreRefused: regions.eu.store" in errors
    assert "raise the limit on file size" in errors
    assert open_store(region).get("o") == b"old"
    assert [info.name for info in open_store(region).list()] == ["o"]
    assert not list(tmp_path.rglob("*~*"))


def test_a_full_disk_is_named_with_its_remedy(tmp_path: Path) -> None:
    script = _PUT + "store.put('small', b'x')\nstore.put('o', bytes(2_000_000))\n"
    errors = _on_small_disk(tmp_path, script, "size=1m")
    assert re.search(r"regions\.eu\.store .* cannot write o \(No space left on device\)", errors)
    assert "free space on that disk" in errors


def test_a_read_only_disk_is_named_with_its_remedy(tmp_path: Path) -> None:
    script = "from storage.store import check_store\n" + _PUT
    script += "check_store(file_region(Path(sys.argv[1])))\n"
    errors = _on_small_disk(tmp_path, script, "ro")
    assert re.search(r"regions\.eu\.store .* \(Read-only file system\): mount it", errors)


def test_a_file_in_the_way_is_named(tmp_path: Path, region: Region) -> None:
    (tmp_path / "stores").write_bytes(b"")
    with pytest.raises(
        StoreUnavailable, match=r"regions\.eu\.store .*stores/eu.*: remove the file"
    ):
        check_store(region)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreUnavailable, match="give this user read and write permission"):
            check_store(file_region(tmp_path))
    finally:
        tmp_path.chmod(0o700)


def _python(
    script: str,
    directory: Path,
    *,
    stdout: int | None = None,
    stderr: int | None = None,
    max_file_bytes: int = resource.RLIM_INFINITY,
) -> subprocess.Popen[str]:
    limited = (
        f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({max_file_bytes},) * 2)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", limited + script, str(directory)],
        cwd=_ROOT,
        stdout=stdout,
        stderr=stderr,
        text=True,
    )


def _on_small_disk(directory: Path, script: str, options: str) -> str:
    """Run a script that must fail on a tmpfs of its own, and return its stderr."""
    mount = f'mount -t tmpfs -o {options} none "$1" && exec "$2" -c "$3" "$1"'
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, "sh", str(directory), sys.executable, script],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "StoreRefused" not in ran.stderr and "Traceback" not in ran.stderr:
        pytest.skip(f"cannot mount a tmpfs here: {ran.stderr.strip()}")
    return ran.stderr
