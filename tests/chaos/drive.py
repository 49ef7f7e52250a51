"""One run of the flow while its faults happen."""

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from tests.chaos.plan import STAGES, Fault
from tests.chaos.site import Site, StageLog, cut_link, join_link

ENDED = ("COMPLETED", "FAILED", "CANCELLED")
_POLL_SECONDS = 0.02
_RECOVERY_SECONDS = 120.0


@dataclass(frozen=True)
class Happened:
    """A fault that was done."""

    fault: Fault
    stage: str
    step: int
    """That a rank was in; 0 where there was none."""
    victims: tuple[str, ...]


class Drive:
    """Does the faults of one run, one after the other, each at its moment."""

    def __init__(self, site: Site, faults: list[Fault], tell: Callable[[str], None]) -> None:
        self._site = site
        self._faults = list(faults)
        self._log = StageLog(site)
        self._tell = tell
        self._wait_for_progress: tuple[float, int, frozenset[int]] | None = None
        self._threads: list[threading.Thread] = []
        self._state = ""
        self._began = time.time()
        self.happened: list[Happened] = []
        self.missed: list[Fault] = []
        """Those whose moment did not come."""

    def run(self, seconds: float) -> str:
        """Start a run of the deployment and wait for the end of its last life; gives its state.

        Raises TimeoutError when there is none in time.
        """
        answer = self._site.api.ask_for_run()
        assert answer.ok, answer.text
        ended = threading.Event()
        # Beside the faults: Prefect may be away for a while, and they are not to wait.
        follower = threading.Thread(target=self._watch_lives, args=(answer.json()["id"], ended))
        follower.start()
        deadline = time.monotonic() + seconds
        try:
            while follower.is_alive():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the flow has not ended after {seconds:.0f} s")
                self._log.look()
                self._act()
                time.sleep(_POLL_SECONDS)
        finally:
            ended.set()
            for thread in (follower, *self._threads):
                thread.join()
        self.missed += self._faults
        return self._state

    def _watch_lives(self, run_id: str, ended: threading.Event) -> None:
        """Until the last life of a run has ended, or nobody waits for it."""
        while not ended.wait(1.0):
            run_id, self._state = self._follow(run_id)
            if self._state in ENDED:
                return

    def _follow(self, run_id: str) -> tuple[str, str]:
        """The life that goes on with a run, and its state; the same as before while Prefect is
        away."""
        try:
            found = self._site.api.runs()
        except OSError:  # requests' errors are
            return run_id, ""
        # Of a server that is half up it may be an error instead.
        runs = {run["id"]: run for run in found} if isinstance(found, list) else {}
        if run_id not in runs:
            return run_id, ""
        while True:
            following = [r for r in runs.values() if r["parameters"].get("continues") == run_id]
            alive = [r for r in following if r["state_type"] != "CANCELLED"]
            if not alive:
                return run_id, runs[run_id]["state_type"]
            run_id = alive[0]["id"]

    def _act(self) -> None:
        """Do the next fault if its moment is now."""
        while self._faults and self._log.stage and self._is_over(self._faults[0].stage):
            self.missed.append(self._faults.pop(0))
        if not self._faults or self._recovers():
            return
        fault = self._faults[0]
        if self._log.stage != fault.stage:
            return
        beats = self._site.read_beats() if fault.stage == "train" else []
        step = max((beat.step for beat in beats), default=0)
        if fault.at_end:
            if not self._site.has_trained(self._began):
                return
        elif fault.stage == "train":
            if step < fault.step or any(beat.phase == "ended" for beat in beats):
                return
            if fault.in_save and not self._site.is_saving():
                return
            time.sleep(fault.after_seconds)
        elif time.monotonic() - self._log.since < fault.after_seconds:
            return
        pids = frozenset(beat.pid for beat in beats)
        seconds = time.monotonic() - self._log.since
        stage = self._log.stage
        victims = self._strike(fault)
        if not victims:
            return  # between two lives
        self._faults.pop(0)
        if fault.kind.stages == ("train",):
            self._wait_for_progress = (time.monotonic(), step, pids)
        happened = Happened(fault, stage, step, victims)
        self.happened.append(happened)
        where = "its end" if fault.at_end else f"step {step}" if step else f"{seconds:.1f} s"
        self._tell(f"{fault.stage:<9} {where:<10} {fault.kind.name:<18} {', '.join(victims)}")

    def _is_over(self, stage: str) -> bool:
        """Whether the flow is beyond a stage, which may have taken less time than it did before."""
        return STAGES.index(stage) < STAGES.index(self._log.stage)

    def _recovers(self) -> bool:
        """Whether the world has not yet come to a step after the last fault in it."""
        if self._wait_for_progress is None:
            return False
        since, step, pids = self._wait_for_progress
        beats = self._site.read_beats()
        is_new = beats and not pids & {beat.pid for beat in beats}
        began = all(beat.step > (0 if is_new else step) for beat in beats) if beats else False
        if began or self._log.stage != "train":
            self._wait_for_progress = None
        return not began and time.monotonic() - since < _RECOVERY_SECONDS

    def _strike(self, fault: Fault) -> tuple[str, ...]:
        kind = fault.kind
        if kind.victim == "machine":
            number = self._site.restart_machine()
            self._log.begin_again()
            return (f"all {number} processes of convoy up",)
        if kind.action == "cut":
            return self._cut(fault)
        if kind.victim in self._site.servers:
            return self._strike_server(fault)
        found = self._find(fault)
        names = tuple(_name(process) for process in found)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL if kind.action == "kill" else signal.SIGSTOP)
        if kind.action == "pause":
            self._continue_later(found, fault.pause_seconds)
            names = (*names, f"for {fault.pause_seconds} s")
        return names if found else ()

    def _find(self, fault: Fault) -> list[psutil.Process]:
        site, victim = self._site, fault.kind.victim
        try:
            if victim in ("rank", "agent", "node", "switch", "meeting"):
                found = site.find_named(f"convoy-{victim}")
                # Stopped again, it would be none the worse.
                found = [one for one in found if one.status() != psutil.STATUS_STOPPED]
                return [found[int(fault.choice * len(found))]] if found else []
            if victim in ("prefect", "mlflow"):
                guard = site.find_guard(victim)
                return guard.children(recursive=True) if guard else []
            process = site.find_worker() if victim == "worker" else site.find_flow_run()
            return [process] if process else []
        except psutil.NoSuchProcess:
            return []

    def _cut(self, fault: Fault) -> tuple[str, ...]:
        """Take the link of a node down, from outside, and up again after a while, if the product
        has not given its place to a new node with a link of its own meanwhile."""
        try:
            switch, ports = self._site.find_links()
            if not ports:
                return ()
            port = ports[int(fault.choice * len(ports))]
            cut_link(switch, port)
        except subprocess.CalledProcessError:  # gone meanwhile
            return ()
        self._later(fault.pause_seconds, lambda: join_link(switch, port))
        return (f"the link of {port} for {fault.pause_seconds} s",)

    def _strike_server(self, fault: Fault) -> tuple[str, ...]:
        server = self._site.servers[fault.kind.victim]
        if server.is_away:
            return ()
        if fault.kind.action == "kill":
            server.is_away = True
            thread = threading.Thread(target=server.restart)
            thread.start()
            self._threads.append(thread)
            return (f"process {server.pid}, started again after 0.5 s",)
        process = psutil.Process(server.pid)
        process.suspend()
        self._continue_later([process], fault.pause_seconds)
        return (f"process {server.pid} for {fault.pause_seconds} s",)

    def _continue_later(self, processes: list[psutil.Process], seconds: float) -> None:
        def work() -> None:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

        self._later(seconds, work)

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, work)
        timer.start()
        self._threads.append(timer)


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.name()} {process.pid}"
    return f"process {process.pid}"
