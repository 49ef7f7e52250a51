"""A world of replicas that come and go: one that is lost is started again, and the others go on."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from training.account import Account
from training.activity import read_state
from training.cluster import LocalCluster, NodeEvent
from training.hang import Hang, HangWatch, dump_stacks
from training.heartbeat import Beat, clear_beat, read_beats
from training.hot_loss import Replica, explain_loss, group_losses, name_loss
from training.hot_order import REPLICA_VARIABLE, ReplicaOrder, give_up
from training.incidents import Incident
from training.memory import count_oom_kills
from training.network import Network
from training.node import WorldEnd
from training.rendezvous import Meeting
from training.spec import TrainSpec
from training.step_follower import StepFollower
from training.stragglers import StragglerWatch
from training.world import World

_GATHER_SECONDS = 0.3
"""In which the ends of replicas count as one: all may be going."""
_ANSWER_SECONDS = 10.0
"""In which a node that was told to end a replica does, or is killed."""
_HANGING_SECONDS = 1.0
"""A node that has not answered for so long while the world hangs is why it does."""
_LEAVE_SECONDS = 30.0
"""In which the others leave, once one has come to the end."""


class HotWorld:
    """Runs one world of replicas to its end.

    poll: what happened to nodes meanwhile. survive: takes an incident that the world survives,
    and raises WorkersFailed where it should not.
    """

    def __init__(
        self,
        world: World,
        spec_file: Path,
        account: Account,
        cluster: LocalCluster,
        network: Network,
        meeting: Meeting,
        steps: StepFollower,
        poll: Callable[[], list[NodeEvent]],
        survive: Callable[[Incident], None],
    ) -> None:
        assert isinstance(world.spec, TrainSpec)
        self._world = world
        self._spec: TrainSpec = world.spec
        self._spec_file = spec_file
        self._directory = world.spec.run_directory
        self._account = account
        self._cluster = cluster
        self._network = network
        self._meeting = meeting
        self._steps = steps
        self._poll = poll
        self._survive = survive
        self._num_local = self._spec.num_workers // self._spec.nodes
        self._num_lives = 0
        self._live: dict[int, Replica] = {}
        self._gone: list[Replica] = []
        """Whose end was not judged yet."""
        self._ending: dict[str, tuple[int, float]] = {}
        """Nodes that were told to end a replica, by its name, and when."""
        self._finished: set[int] = set()
        self._start_at: dict[int, float] = {}
        """When the place of a lost replica may be taken, by the monotonic clock."""
        self._num_stuck: dict[int, int] = {}
        """Starts one after another of a replica that came to no step."""
        self._silenced: dict[int, str] = {}
        self._awaited: int | None = None
        """The step after which the world has recovered from what befell it."""
        self._newest = 0
        self._left_since: float | None = None
        self._is_meeting_hung = False
        self._short_until = 0.0
        """When there were last too few replicas to make a step."""
        self._num_oom_kills = count_oom_kills()
        self._hangs = HangWatch(self._spec.recovery.patience_seconds)
        self._stragglers = StragglerWatch(self._spec.recovery.straggler_ratio)
        self._compared: frozenset[int] = frozenset()
        """Processes that it compares."""

    def run(self) -> Incident | None:
        """None when the training is done; else why all has to start again."""
        founders = [
            n for n in range(self._spec.num_workers) if self._node_of(n) in self._world.nodes
        ]
        for number in founders:
            self._start(number, len(founders))
        for number in range(self._spec.num_workers):
            if number not in founders:
                self._start_at[number] = 0.0
        while True:
            for event in self._poll():
                self._note(event)
            self._steps.poll()
            beats = self._read_beats()
            self._note_progress(beats)
            if self._finished and self._have_left(beats):
                self._steps.poll()
                return None
            self._end_silent(self._spec.network.lost_seconds)
            self._end_hanging(beats)
            if incident := self._judge(beats):
                return self._end_all(incident)
            if not self._finished:
                self._name_stragglers(beats)
                self._start_lost()

    def _node_of(self, number: int) -> int:
        return number // self._num_local

    def _start(self, number: int, num_founders: int | None = None) -> None:
        """Start a replica: one that the world begins with, or one that joins it."""
        self._num_lives += 1
        node = self._node_of(number)
        world = f"world-{os.getpid()}-{self._world.number}"
        replica = Replica(number, node, self._num_lives, f"{world}-life-{self._num_lives}")
        clear_beat(self._directory, number)
        (self._directory / f"failure-{number}.json").unlink(missing_ok=True)
        meeting = self._meeting.require()
        place = ReplicaOrder(
            number=number,
            life=replica.life,
            num_replicas=self._spec.num_workers,
            local_rank=number % self._num_local,
            num_local=self._num_local,
            address=self._network.address(node),
            lighthouse=self._meeting.lighthouse,
            meeting=meeting,
            world=world,
            num_founders=num_founders or 0,
            least_step=None if num_founders else max(0, self._newest - 1),
        )
        order = self._world.order(0, place.address, "", self._spec_file)
        own = {"name": replica.name, "num_nodes": 1, "workers_per_node": 1}
        own |= {"environment": {REPLICA_VARIABLE: place.model_dump_json()}}
        self._live[number] = replica
        self._cluster.start(node, order.model_copy(update=own))

    def _start_lost(self) -> None:
        now = time.monotonic()
        busy = {node for node, _ in self._ending.values()}
        for number, at in list(self._start_at.items()):
            node = self._node_of(number)
            if at <= now and self._newest and node not in busy and self._cluster.is_up(node):
                del self._start_at[number]
                self._start(number)
        self._cluster.admit(self._spec.min_nodes)

    def _note(self, event: NodeEvent) -> None:
        """What became of a node, or of what it ran."""
        for name, (node, _) in list(self._ending.items()):
            if node == event.node and (event.end is None or event.end.name == name):
                del self._ending[name]
        for replica in list(self._live.values()):
            if event.end is None and replica.node == event.node:
                self._lose(replica, None)
            elif event.end is not None and event.end.name == replica.name:
                if event.end.finished:
                    self._finished.add(replica.number)
                    del self._live[replica.number]
                else:
                    self._lose(replica, event.end)

    def _lose(self, replica: Replica, end: WorldEnd | None) -> None:
        give_up(self._directory, replica.life)
        replica.gone, replica.end = time.monotonic(), end
        replica.last_step = self._newest
        del self._live[replica.number]
        self._gone.append(replica)

    def _dismiss(self, replica: Replica, beats: Sequence[Beat]) -> None:
        """End a replica that is still there, at once."""
        self._lose(replica, None)
        for beat in beats:
            if beat.rank == replica.number:  # its node may be stopped, and not do it
                with suppress(ProcessLookupError):
                    os.kill(beat.pid, signal.SIGKILL)
        self._ending[replica.name] = (replica.node, time.monotonic())
        self._cluster.stop([replica.node], replica.name)

    def _read_beats(self) -> list[Beat]:
        """Of the replicas that are there."""
        return [beat for beat in read_beats(self._directory) if beat.rank in self._live]

    def _note_progress(self, beats: Sequence[Beat]) -> None:
        newest = max((beat.step for beat in beats), default=0)
        self._newest = max(self._newest, newest)
        if not newest or self._gone or (self._awaited is not None and newest <= self._awaited):
            return
        for beat in beats:
            if beat.step:
                self._num_stuck.pop(beat.rank, None)
        first = min(beat.first_step for beat in beats if beat.step)
        if self._awaited is not None:
            first, self._awaited = self._awaited, None
        self._account.follow(first, newest, max(beat.changed for beat in beats))

    def _judge(self, beats: Sequence[Beat]) -> Incident | None:
        """Have what was lost counted and started again; or why the world has to end: nobody is
        left who has the state."""
        if self._is_meeting_hung:
            self._meeting.close()
            what = "the process that replicas meet at is stopped"
            return name_loss(self._world, "hang", what, self._newest)
        if not self._meeting.is_there and not self._finished:
            what = "the process that replicas meet at was ended"
            return name_loss(self._world, "killed", what, self._newest)
        if not self._gone or time.monotonic() - (self._gone[0].gone or 0.0) < _GATHER_SECONDS:
            return None
        gone, self._gone = self._gone, []
        if self._finished:
            return None
        if not any(beat.step for beat in beats):
            return self._explain(gone)
        for some in group_losses(gone):
            incident = self._explain(some)
            self._awaited = incident.last_step
            self._survive(incident)
            for replica in some:
                self._start_at[replica.number] = self._again_at(replica)
        self._hangs = HangWatch(self._spec.recovery.patience_seconds)
        return None

    def _again_at(self, replica: Replica) -> float:
        """At once, but for one that came to no step the last time either."""
        stuck = self._num_stuck.get(replica.number, 0)
        self._num_stuck[replica.number] = stuck + 1
        longest = self._spec.recovery.longest_backoff_seconds
        return time.monotonic() + (min(longest, 2.0**stuck) if stuck else 0.0)

    def _explain(self, gone: Sequence[Replica]) -> Incident:
        before, self._num_oom_kills = self._num_oom_kills, count_oom_kills()
        incident = explain_loss(self._world, gone, self._silenced, self._num_oom_kills > before)
        for replica in gone:
            self._silenced.pop(replica.node, None)
        return incident

    def _end_silent(self, limit: float) -> None:
        """End nodes that have not answered for so long: they count as lost."""
        for node, seconds in self._network.find_silent().items():
            there = [replica for replica in self._live.values() if replica.node == node]
            if seconds > limit and there and node not in self._silenced:
                self._silenced[node] = f"it did not answer over the network for {seconds:.1f} s"
                for replica in there:
                    give_up(self._directory, replica.life)
                self._cluster.kill([node])

    def _end_hanging(self, beats: Sequence[Beat]) -> None:
        """End the replica that keeps the others."""
        self._end_unanswering()
        hang = self._find_left_behind(beats)
        if hang is None and len(beats) >= self._spec.least_replicas:
            hang = self._hangs.look(beats, len(self._live))
        if hang is None or hang.rank not in self._live:
            return
        if self._meeting.is_stopped:
            self._is_meeting_hung = True
            return
        self._end_silent(_HANGING_SECONDS)
        if self._live[hang.rank].node in self._silenced:
            return
        stacks = dump_stacks(beats, self._directory)
        said = [f"rank {rank}:\n{stack}" for rank, stack in stacks.items()]
        self._world.stacks.write_text("\n".join([hang.why, *said]))
        replica = self._live[hang.rank]
        replica.hang = hang
        self._dismiss(replica, beats)

    def _end_unanswering(self) -> None:
        """End nodes that were told to end a replica, and do not."""
        for node, at in self._ending.values():
            if time.monotonic() - at > _ANSWER_SECONDS:
                self._cluster.kill([node])

    def _find_left_behind(self, beats: Sequence[Beat]) -> Hang | None:
        """One that is stopped, and without which the others go on, for the lighthouse hears of it
        no more; or that has come to no step in all its time."""
        now = time.monotonic()
        there = {beat.rank for beat in beats}
        if len(there) < self._spec.least_replicas:
            self._short_until = now
        begun = {beat.rank: beat for beat in beats if beat.step}
        for number, replica in self._live.items():
            if number in there and len(there) < self._spec.least_replicas:
                continue  # it waits for those that are not there yet
            beat = begun.get(number)
            since = beat.changed if beat else replica.started
            if number in there:
                since = max(since, self._short_until)
            is_stopped = beat and beat.step < self._newest - 1 and read_state(beat.pid) == "T"
            patience = self._spec.recovery.patience_seconds
            limit = self._hangs.bound_seconds if is_stopped else patience
            if now - since > limit:
                what = f"of step {beat.step}" if beat else "and has come to no step"
                why = f"rank {number} makes no progress {what} for {now - since:.1f} s"
                return Hang(number, why, now - since)
        return None

    def _name_stragglers(self, beats: Sequence[Beat]) -> None:
        there = frozenset(beat.pid for beat in beats if beat.step)
        if there != self._compared:
            self._compared = there
            self._stragglers = StragglerWatch(self._spec.recovery.straggler_ratio)
        for late in self._stragglers.look(beats, len(self._live)):
            node = self._node_of(late.rank)
            message = f"rank {late.rank} on node {node} {late.why}"
            self._account.tell("straggler", message, rank=late.rank, node=node)

    def _have_left(self, beats: Sequence[Beat]) -> bool:
        """Whether all have, once one is done; those that came too late are ended."""
        if self._left_since is None:
            self._left_since = time.monotonic()
            if self._awaited is not None:  # the last step was made without those that were lost
                self._account.follow(self._awaited, self._spec.config.steps, time.monotonic())
        late = time.monotonic() - self._left_since > _LEAVE_SECONDS
        begun = {beat.rank for beat in beats if beat.step}
        for replica in list(self._live.values()):
            if late or replica.number not in begun:
                self._dismiss(replica, beats)
        return not self._live and not self._ending

    def _end_all(self, incident: Incident) -> Incident:
        """End what is left of the world."""
        for replica in list(self._live.values()):
            self._dismiss(replica, self._read_beats())
        while self._ending:
            for event in self._poll():
                self._note(event)
            self._end_unanswering()
        return incident
