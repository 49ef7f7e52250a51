"""Runs the workers of a training to the last step, whatever dies on the way."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec

from storage.access_log import RUN_ID_VARIABLE
from training.account import Account
from training.cluster import RUN_VARIABLE, LocalCluster, NodeEvent, reap
from training.errors import WorkersFailed
from training.hang import Hang, HangWatch, dump_stacks
from training.heartbeat import Beat, clear_beats, read_beats
from training.hot_order import clear_given_up
from training.hot_world import HotWorld
from training.incidents import Incident, clear_failures
from training.network import Network, open_network
from training.node import PRELOAD_VARIABLE, WorldEnd
from training.regroup import ask_to_make_way, clear_requests, has_made_way
from training.rendezvous import Meeting
from training.simulation import Simulation
from training.spec import SPEC_FILE, TrainSpec, WorkerSpec, read_fencing_token
from training.step_follower import OnStep, StepFollower
from training.stragglers import Straggler, StragglerWatch
from training.world import World, explain_end, log_directory

_POLL_SECONDS = 0.25
"""What nodes say is heard at once; this is how often the ranks' beats are looked at."""
_HOT_POLL_SECONDS = 0.1
_PEERS_SECONDS = 1.0
"""In which those that lost a peer leave their word, before they are ended."""
_ANSWER_SECONDS = 10.0
"""In which a node that was told to end its world does, or is killed."""
_HANGING_SECONDS = 1.0
"""A node that has not answered for so long while the world hangs is why it does."""
_SILENT_SECONDS = 2.0
"""A node that has not answered for so long gets no part of a new world."""


def run_workers(
    spec: WorkerSpec,
    on_step: OnStep,
    account: Account | None = None,
    simulation: Simulation | None = None,
    after_step: float | None = None,
) -> None:
    """Run all workers to the last step, again from the last checkpoint when processes or nodes die
    or hang, on fewer nodes when some are lost, and on more when they are back.

    `on_step` gets each logged step beyond `after_step`, of an earlier call too; without it those of
    this call. `account` gets what went wrong; `simulation` does to the nodes what it is for. Raises
    WorkersFailed with the first failing rank's own error, or with all incidents once the budget is
    used up. Whatever ends this call ends every process of the run.
    """
    account = account or Account(lambda event: None)
    reap(spec.run_directory)
    with ExitStack() as stack:
        environment = _environment(spec)
        network = open_network(spec, environment, account, stack)
        environment["GLOO_SOCKET_IFNAME"] = network.device
        is_hot = isinstance(spec, TrainSpec) and spec.is_hot
        if is_hot and find_spec("torchft") is None:
            raise WorkersFailed(
                "train.recovery.mode hot needs torchft, which is not installed: install "
                "torchft==0.2.0, or set the mode to restart in params.yaml"
            )
        if is_hot:
            environment[PRELOAD_VARIABLE] = "training.hot_trainer training.hot_worker"
        surround = None
        if simulation:
            simulation.prepare(spec.run_directory, account)
            surround = simulation.surround
        logs, recovery = log_directory(spec), spec.recovery
        cluster = stack.enter_context(
            LocalCluster(spec.nodes, spec.root, environment, logs, recovery, network, surround)
        )
        if simulation:
            simulation.begin(cluster, network, account, spec.run_directory)
        # A store on one of the nodes would be lost with it, and the others would wait.
        least = spec.least_replicas if isinstance(spec, TrainSpec) and is_hot else None
        meeting = stack.enter_context(Meeting(network, environment, least))
        if spec.nodes > 1 or is_hot:
            meeting.require()  # it loads torch while the nodes do
        steps = StepFollower(spec.run_directory / spec.progress_file, on_step, after_step)
        _Supervision(spec, steps, account, cluster, network, meeting, simulation).run()


class _Supervision:
    def __init__(
        self,
        spec: WorkerSpec,
        steps: StepFollower,
        account: Account,
        cluster: LocalCluster,
        network: Network,
        meeting: Meeting,
        simulation: Simulation | None,
    ) -> None:
        self._spec = spec
        self._account = account
        self._cluster = cluster
        self._network = network
        self._meeting = meeting
        self._simulation = simulation
        self._steps = steps
        self._num_worlds = 0
        self._silenced: dict[int, str] = {}
        """Why nodes of the present world were ended."""

    def run(self) -> None:
        while True:
            world = self._prepare_world()
            if isinstance(world.spec, TrainSpec) and world.spec.is_hot:
                outcome = self._run_hot(world)
            else:
                self._start(world)
                outcome = self._watch(world)
            if outcome is not None:
                self._judge(outcome)
            elif has_made_way(self._spec.run_directory):
                ready = len(self._find_ready())
                self._account.tell_growth(
                    f"the world of {len(world.nodes)} nodes makes way for one of {ready}"
                )
            else:
                return

    def _prepare_world(self) -> World:
        """Nodes, and what they are to do, written where they read it; no earlier world can write
        any more."""
        nodes, spec = self._await_nodes()
        path = spec.run_directory / SPEC_FILE
        if isinstance(spec, TrainSpec):
            # From here on an earlier world, of an earlier call too, can commit nothing.
            token = read_fencing_token(spec.run_directory) + 1
            spec = spec.model_copy(update={"fencing_token": token})
        clear_failures(spec.run_directory)
        clear_beats(spec.run_directory)
        clear_requests(spec.run_directory)
        self._num_worlds += 1
        self._silenced.clear()
        world = World(self._num_worlds, nodes, spec)
        pending = path.with_suffix(".tmp")
        pending.write_text(spec.model_dump_json(indent=1))
        pending.rename(path)
        clear_given_up(spec.run_directory)
        if len(nodes) < self._spec.nodes:
            left = ", ".join(map(str, nodes))
            self._account.tell("fewer_nodes", f"the run goes on on nodes {left} alone")
        return world

    def _start(self, world: World) -> None:
        path = world.spec.run_directory / SPEC_FILE
        rendezvous = self._meeting.require() if world.spec.nodes > 1 else ""
        for rank, node in enumerate(world.nodes):
            order = world.order(rank, self._network.address(node), rendezvous, path)
            self._cluster.start(node, order)

    def _run_hot(self, world: World) -> Incident | None:
        self._meeting.require()
        return HotWorld(
            world,
            world.spec.run_directory / SPEC_FILE,
            self._account,
            self._cluster,
            self._network,
            self._meeting,
            self._steps,
            lambda: self._poll(_HOT_POLL_SECONDS),
            self._admit,
        ).run()

    def _await_nodes(self) -> tuple[tuple[int, ...], WorkerSpec]:
        """All nodes that have not been lost, as many as the work can be cut for.

        Raises WorkersFailed when too few come in time.
        """
        spec = self._spec
        began = time.monotonic()
        while (waited := time.monotonic() - began) < spec.recovery.wait_seconds:
            ready = self._find_ready()
            # A node that does not answer is not waited for to the end, if it can be done without.
            if not self._cluster.awaited or waited > spec.recovery.wait_seconds / 2:
                number, fitting = self._fit(len(ready))
                if fitting:
                    return tuple(ready[:number]), fitting
            self._cluster.admit(spec.min_nodes)
            self._poll()
        raise WorkersFailed(
            f"{len(self._find_ready())} of {spec.nodes} nodes were ready after "
            f"{spec.recovery.wait_seconds:.0f} s, and at least {spec.min_nodes} are needed: see "
            f"{log_directory(spec)}/node-*.log; {spec.after_kill}"
        )

    def _fit(self, num_ready: int) -> tuple[int, WorkerSpec | None]:
        """As many of so many nodes as the work can be cut for, and the work as it is cut."""
        for number in range(num_ready, self._spec.min_nodes - 1, -1):
            if fitting := self._spec.fit(number):
                return number, fitting
        return 0, None

    def _poll(self, seconds: float = _POLL_SECONDS) -> list[NodeEvent]:
        if self._simulation:
            self._simulation.act()
        return self._cluster.poll(seconds)

    def _find_ready(self) -> list[int]:
        """Nodes that have no world, and answer over the network."""
        silent = self._network.find_silent()
        return [n for n in self._cluster.ready if silent.get(n, 0.0) < _SILENT_SECONDS]

    def _watch(self, world: World) -> Incident | None:
        """Until every node has ended its part; None where nothing went wrong."""
        recovery = self._spec.recovery
        hangs = HangWatch(recovery.patience_seconds)
        stragglers = StragglerWatch(
            recovery.straggler_ratio,
            peers=world.spec.num_peers,
            waits_inside=world.spec.waits_inside,
        )
        ends: dict[int, WorldEnd | None] = {}
        hang: Hang | None = None
        failed_at: float | None = None
        asked = False
        while len(ends) < len(world.nodes):
            for event in self._poll():
                if event.node in world.nodes and event.node not in ends:
                    ends[event.node] = event.end
            self._steps.poll()
            beats = read_beats(self._spec.run_directory)
            self._note_progress(beats)
            self._name_stragglers(world, stragglers.look(beats, world.spec.num_workers))
            self._end_silent(world, ends, hang is not None)
            if any(end is None or not end.finished for end in ends.values()):
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > _PEERS_SECONDS:
                    self._stop(world, ends, failed_at)
            elif hang:
                self._stop(world, ends, failed_at or time.monotonic())
            elif hang := hangs.look(beats, world.spec.num_workers):
                self._keep_stacks(world, beats, hang)
                self._end_silent(world, ends, True)
                failed_at = time.monotonic()
            elif not asked and self._could_grow(world, beats):
                ask_to_make_way(self._spec.run_directory)
                asked = True
        self._steps.poll()
        if all(end and end.finished for end in ends.values()):
            return None
        can_lose = self._fit(len(world.nodes) - 1)[1] is not None
        incident = explain_end(world, ends, hang, self._silenced, can_lose)
        if incident.cause == "node_lost" and incident.node is not None and ends[incident.node]:
            self._cluster.lose(incident.node)  # its process is there, its disk is full
        return incident

    def _name_stragglers(self, world: World, found: Sequence[Straggler]) -> None:
        for late in found:
            node = world.find_node(late.rank)
            message = f"rank {late.rank} on node {node} {late.why}"
            self._account.tell("straggler", message, rank=late.rank, node=node)

    def _end_silent(
        self, world: World, ends: Mapping[int, WorldEnd | None], is_hanging: bool
    ) -> None:
        """End nodes of a world that cannot be reached: they count as lost. Of a world that hangs
        they are the cause."""
        limit = _HANGING_SECONDS if is_hanging else self._spec.network.lost_seconds
        for node, seconds in self._network.find_silent().items():
            is_lost = seconds > limit
            if is_lost and node in world.nodes and node not in (*ends, *self._silenced):
                self._silenced[node] = f"it did not answer over the network for {seconds:.1f} s"
                self._cluster.kill([node])

    def _could_grow(self, world: World, beats: Sequence[Beat]) -> bool:
        """Whether nodes are back with which a world that has come to a step could be larger."""
        if len(world.nodes) == self._spec.nodes or not any(beat.step for beat in beats):
            return False
        number, _ = self._fit(len(world.nodes) + len(self._find_ready()))
        return number > len(world.nodes)

    def _stop(self, world: World, ends: dict[int, WorldEnd | None], since: float) -> None:
        """End what the world's nodes still run; a node that does not answer too."""
        left = [node for node in world.nodes if node not in ends]
        self._cluster.stop(left)
        if time.monotonic() - since > _ANSWER_SECONDS:
            self._cluster.kill(left)

    def _note_progress(self, beats: Sequence[Beat]) -> None:
        begun = [beat for beat in beats if beat.step]
        if begun:
            first = max(beat.first_step for beat in begun)
            changed = max(beat.changed for beat in beats)
            self._account.follow(first, max(beat.step for beat in begun), changed)

    def _keep_stacks(self, world: World, beats: Sequence[Beat], hang: Hang) -> None:
        stacks = dump_stacks(beats, self._spec.run_directory)
        said = [f"rank {rank}:\n{stack}" for rank, stack in stacks.items()]
        world.stacks.write_text("\n".join([hang.why, *said]))

    def _judge(self, incident: Incident) -> None:
        """Go on, after a while where nothing was gained since the last time, or raise."""
        stuck = self._account.is_stuck
        self._admit(incident)
        if stuck:
            longest = self._spec.recovery.longest_backoff_seconds
            time.sleep(min(longest, 2.0**self._account.num_restarts))

    def _admit(self, incident: Incident) -> None:
        """Count an incident; raise where it is none to go on after, or one too many."""
        logs = f"Logs of all ranks: {log_directory(self._spec)}"
        detail = self._spec.run_directory / f"failure-{incident.rank}.txt"
        if incident.cause not in self._spec.recovery.retried:
            raise WorkersFailed(f"{incident.message}. {logs}", detail=detail)
        self._account.add(incident)
        num_restarts = self._account.num_restarts
        if num_restarts > self._spec.max_restarts:
            listed = "".join(f"\n  {i.cause}: {i.message}" for i in self._account.incidents)
            raise WorkersFailed(
                f"the workers were ended {num_restarts} times, more than "
                f"train.max_restarts {self._spec.max_restarts} allows; {self._spec.after_kill}. "
                f"{logs}. In order:{listed}"
            )


def _environment(spec: WorkerSpec) -> dict[str, str]:
    environment = dict(os.environ)
    environment[RUN_ID_VARIABLE] = spec.mlflow_run_id
    environment[RUN_VARIABLE] = str(spec.run_directory)
    # It would compile every import anew in every node.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # A `data` folder of the workspace must not hide the package.
    environment["PYTHONSAFEPATH"] = "1"
    # Without it restarted workers can meet the addresses of the dead ones.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # A node that has asked CUDA itself could not be forked any more.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # More threads than one in a node that is forked: the workers would hang.
    environment["OMP_NUM_THREADS"] = "1"
    # torchft writes several lines for each step.
    environment.setdefault("RUST_LOG", "error")
    return environment
