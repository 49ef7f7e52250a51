"""Where the runs happen: a workspace, its `convoy up`, and the stores' servers."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.plan import LINKS, SERVERS
from tests.flows.convoy_up import Up, find_processes, read_urls, start_up
from tests.flows.prefect_api import PrefectApi, wait_until
from tests.servers import DIE_WITH_PARENT, openbao, seaweedfs
from tests.workspaces import PARAMS, Workspace, make_workspace
from training.errors import NetworkUnavailable
from training.heartbeat import Beat, read_beats
from training.network import NamespaceNetwork

WORKLOAD = Path(__file__).with_name("workload.py")
BUCKETS = ("eu", "us", "cn")
_STAGE = re.compile(r" - (ingest|shard|upload|train|evaluate|register): (.*)")


@dataclass
class Server:
    """A server of the stores, started again as a process manager would."""

    pid: int
    restarted: subprocess.Popen[bytes] | None = None
    is_away: bool = False
    """Killed, and not started again yet."""

    def restart(self) -> None:
        """Kill it with its children, and start it again with what it was started with."""
        process = psutil.Process(self.pid)
        command, directory = process.cmdline(), process.cwd()
        environment = process.environ()
        family = [process, *process.children(recursive=True)]
        for one in family:
            one.kill()
        if self.restarted:
            self.restarted.wait()
        time.sleep(0.5)
        with (Path(directory) / f"restarted-{process.pid}.log").open("wb") as log:
            self.restarted = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, *command],
                cwd=directory,
                env=environment,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        self.pid = self.restarted.pid
        self.is_away = False

    def close(self) -> None:
        """End it, if it is not the first that was started, which ends with its context."""
        if self.restarted:
            self.restarted.kill()
            self.restarted.wait()


@dataclass
class Site:
    """A workspace whose `convoy up` runs, and what it needs."""

    workspace: Workspace
    up: Up
    servers: dict[str, Server] = field(default_factory=dict)
    world: str = "restored"
    """One of `WORLDS`."""
    has_links: bool = False
    """Whether its nodes have network namespaces of their own."""

    @property
    def api(self) -> PrefectApi:
        return self.up.api

    @property
    def has(self) -> tuple[str, ...]:
        """Which of the things that kinds of faults need there are."""
        return (SERVERS,) * bool(self.servers) + (LINKS,) * self.has_links

    def find_guard(self, *names: str) -> psutil.Process | None:
        """The guard of one of the servers of `convoy up`."""
        for guard in psutil.Process(self.up.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if any(name in guard.cmdline() for name in names):
                    return guard
        return None

    def find_worker(self) -> psutil.Process | None:
        """The process that serves the deployment."""
        guard = self.find_guard("flows.cli")
        return next(iter(guard.children()), None) if guard else None

    def find_flow_run(self) -> psutil.Process | None:
        """The process of the flow run that is at work."""
        worker = self.find_worker()
        for child in worker.children() if worker else ():
            with contextlib.suppress(psutil.Error):
                # Beside it there is Python's tracker of shared memory, and who was killed.
                if any("spawn_main" in part for part in child.cmdline()):
                    return child
        return None

    def find_named(self, name: str) -> list[psutil.Process]:
        """Nodes, agents or ranks at work in the workspace, in a fixed order."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # gone meanwhile
                if process.name().startswith(name) and process.cwd() == str(self.workspace.path):
                    found.append(process)
        return sorted(found, key=lambda process: (process.name(), process.pid))

    def read_beats(self) -> list[Beat]:
        """Where the ranks of the present world are."""
        runs = self.workspace.path.glob(".convoy/runs/*/progress")
        return [beat for directory in runs for beat in read_beats(directory.parent)]

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        found = self.workspace.path.glob(".convoy/runs/*/checkpoints/step-*")
        for path in found:
            with contextlib.suppress(FileNotFoundError):
                # One that was killed in mid-save may stay for a while.
                is_new = time.time() - path.stat().st_mtime < 0.5
                if is_new and not (path / "committed.json").exists():
                    return True
        return False

    def find_links(self) -> tuple[int, list[str]]:
        """The process that holds the nodes' links, and the ends of them there; none while it is
        gone."""
        switch = self.find_named("convoy-switch")
        if not switch:
            return 0, []
        seen = _call_inside(switch[0].pid, "ip", "-o", "link")
        return switch[0].pid, sorted(re.findall(r"^\d+: (node\d+)@", seen, re.MULTILINE))

    def has_trained(self, since: float) -> bool:
        """Whether training has written since then that it is finished."""
        for path in self.workspace.path.glob(".convoy/runs/*/ended"):
            with contextlib.suppress(FileNotFoundError):  # another training begins
                if path.stat().st_mtime > since:
                    return path.read_text().startswith("FINISHED")
        return False

    def restart_machine(self) -> int:
        """Kill every process of `convoy up` at once, and start it again at the same ports; gives
        how many there were."""
        up = psutil.Process(self.up.process.pid)
        family = [up, *up.children(recursive=True), *self.find_named("")]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.up.process.communicate()
        wait_until(lambda: not find_processes(self.workspace), 60)
        ports = [url.rsplit(":", 1)[1] for url in (self.up.prefect, self.up.mlflow)]
        process = self.workspace.start(
            "convoy", "up", "--prefect-port", ports[0], "--mlflow-port", ports[1]
        )
        urls = read_urls(process)
        assert urls == (self.up.prefect, self.up.mlflow)
        self.up = Up(self.workspace, process, self.api, *urls)
        return len({process.pid for process in family})


def cut_link(switch: int, port: str) -> None:
    """Take a node's link down, from outside."""
    _call_inside(switch, "ip", "link", "set", port, "down")


def join_link(switch: int, port: str) -> None:
    """Take it up again, if that switch and that link still are there."""
    with contextlib.suppress(subprocess.CalledProcessError):
        _call_inside(switch, "ip", "link", "set", port, "up")


def _call_inside(pid: int, *command: str) -> str:
    """In the network namespace of a process."""
    inside = ("nsenter", "--net", "--target", str(pid))
    done = subprocess.run([*inside, *command], check=True, capture_output=True, text=True)
    return done.stdout


class StageLog:
    """In which stage the flow is, by what its runs print."""

    def __init__(self, site: Site) -> None:
        self._path = site.workspace.path / ".convoy/logs/serve.log"
        self._offset = self._path.stat().st_size
        self.stage = ""
        self.since = 0.0

    def begin_again(self) -> None:
        """Of another `convoy up`."""
        self._offset, self.stage = 0, ""

    def look(self) -> None:
        """Read what was printed since."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read().rpartition(b"\n")
        self._offset += len(content[0] + content[1])
        for stage, said in _STAGE.findall(content[0].decode(errors="replace")):
            if said.startswith(("done in", "up to date")):
                self.stage = ""
            elif stage != self.stage:
                self.stage, self.since = stage, time.monotonic()


def can_have_links() -> bool:
    """Whether this machine lets nodes have network namespaces of their own."""
    try:
        NamespaceNetwork(1, {**os.environ, "PYTHONSAFEPATH": "1"}).close()
    except NetworkUnavailable:
        return False
    return True


@contextlib.contextmanager
def open_site(
    home: Path, train: dict[str, Any], *, world: str = "restored", with_servers: bool
) -> Iterator[Site]:
    """A site in `home`; everything of it ends with the block."""
    with contextlib.ExitStack() as stack:
        regions: dict[str, Any] = PARAMS["regions"]
        # Nodes in namespaces reach no server.
        has_links = not with_servers and can_have_links()
        network = {"namespaces": has_links}
        environment: dict[str, str] = {}
        servers: dict[str, Server] = {}
        if with_servers:
            regions, environment, servers = _start_servers(home, stack)
        workspace = make_workspace(
            home / "w",
            {"TMPDIR": str(home / "tmp"), **environment},
            regions=regions,
            train=PARAMS["train"] | train | {"network": network},
            schedule={"cron": None, "retries": 3, "max_resubmissions": 20},
        )
        (home / "tmp").mkdir()
        shutil.copy(WORKLOAD, workspace.path / PARAMS["workload"]["code"])
        process = start_up(workspace)
        prefect, mlflow = read_urls(process)
        api = PrefectApi(f"{prefect}/api", "toy")
        up = Up(workspace, process, api, prefect, mlflow)
        site = Site(workspace, up, servers, world, has_links)
        try:
            yield site
        finally:
            api.close()
            site.up.process.send_signal(signal.SIGINT)
            site.up.process.communicate(timeout=90)
            for server in servers.values():
                server.close()


def _start_servers(
    home: Path, stack: contextlib.ExitStack
) -> tuple[dict[str, Any], dict[str, str], dict[str, Server]]:
    (home / "s3").mkdir()
    (home / "vault").mkdir()
    s3 = stack.enter_context(seaweedfs(home / "s3"))
    vault = stack.enter_context(openbao(home / "vault"))
    for bucket in BUCKETS:
        s3.make_bucket(f"convoy-{bucket}")
    regions = {
        name: {
            "jurisdiction": name.upper(),
            "store": s3.store_url(f"convoy-{name}"),
            "wrapping_key": vault.wrapping_key_url(name),
        }
        for name in BUCKETS
    }
    servers = {}
    for child in psutil.Process(os.getpid()).children():
        command = " ".join(child.cmdline())
        if str(home / "s3") in command:
            servers["s3"] = Server(child.pid)
        elif str(home / "vault") in command:
            servers["key service"] = Server(child.pid)
    assert len(servers) == 2
    return regions, {**s3.environment, **vault.environment}, servers
