"""The loop of a replica of a hot world: it goes on when others are lost.

A step is the global batch of its number, cut among those who are there, each sample once, with the
gradient of its mean. A step in which a replica is lost is made again, by those who are left, from
the same parameters; nothing of it was kept. So every replica has the same bits after every step,
and whatever happens they are those of steps over the global order.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from data.sealed_shards import SealedShards
from data.shard import Shard
from training.checkpoint import Checkpoint, Checkpointer
from training.checkpoint_history import StepHistory
from training.checkpoint_random import begin_generators
from training.checkpoint_state import collect_state, restore_state
from training.heartbeat import Heartbeat
from training.hot_data import HotLoader
from training.hot_log import HotLog
from training.hot_order import ReplicaOrder, require_authority
from training.hot_peers import AttemptVoid, Peers
from training.nonfinite import NonfiniteGuard
from training.optimization import (
    Gradients,
    build_optimizers,
    learning_rate,
    take_step,
)
from training.parallel import ParallelModel, choose_device
from training.spec import STEPS_FILE, WEIGHTS_FILE, TrainSpec
from training.timing import StepTimer
from training.trainer import build_model
from training.weights import save_weights
from training.workload import Workload


def train(spec: TrainSpec, order: ReplicaOrder, workload: Workload) -> None:
    """Train as one replica to the last step, from the newest checkpoint or from a peer's state.

    spec: of a world of one. Raises PeerLost where there is no peer to go on from.
    """
    device = choose_device()
    sealed, shards = spec.open_shards()
    model = build_model(spec, workload, sealed, shards, device)
    peers = Peers(order, spec.run_directory, spec.recovery.patience_seconds)
    with closing(peers):
        _Replica(spec, order, workload, model, peers, sealed, shards, device).run()


class _Replica:
    """What it trains, what it keeps, and how far it is."""

    def __init__(
        self,
        spec: TrainSpec,
        order: ReplicaOrder,
        workload: Workload,
        model: ParallelModel,
        peers: Peers,
        sealed: SealedShards,
        shards: Sequence[Shard],
        device: torch.device,
    ) -> None:
        config, directory = spec.config, spec.run_directory
        self._spec = spec
        self._order = order
        self._config = config
        self._workload = workload
        self._model = model
        self._part = model.parts[0]
        self._peers = peers
        self._device = device
        self._parameters = [p for p in self._part.parameters() if p.requires_grad]
        self._optimizers = build_optimizers(model.parts, config.optimizer)
        self._gradients = Gradients(model.parts)
        self._checkpoints = Checkpointer(spec, sealed)
        self._heartbeat = Heartbeat(directory, order.number)
        self._timer = StepTimer(on_phase=self._heartbeat.enter)
        self._log = HotLog(directory, order.number, self._timer, device)
        self._loader = HotLoader(config, sealed, shards, workload)
        self._guard = NonfiniteGuard(
            config, directory, self._loader.order, shards, lambda: None, lambda: self._is_first
        )
        self._done = 0
        self._told = 0
        """Step up to which log and checkpoints have what is due."""
        self._grad_norm = 0.0

    @property
    def _is_first(self) -> bool:
        return self._peers.quorum.rank == 0

    def run(self) -> None:
        """All steps that are left, and the weights."""
        with self._checkpoints, closing(self._loader), closing(self._log):
            if self._order.least_step is None:
                self._begin()
            while True:
                with self._timer.phase("communication"):
                    self._meet()
                self._tell()
                if self._done == self._config.steps:
                    if self._leave():
                        break
                    continue
                self._try_step(self._done + 1)
        self._heartbeat.end()

    def _begin(self) -> None:
        """The start of a world: from the newest checkpoint, together."""
        extras = {"steps": StepHistory(self._spec.run_directory / STEPS_FILE)}
        restored = self._checkpoints.load(self._model.parts, self._optimizers, extras)
        self._go_on_from(restored.step if restored else 0)
        self._told = self._done
        self._heartbeat.wait()
        self._peers.found()

    def _go_on_from(self, step: int) -> None:
        """What is drawn from here on, such as dropout, differs between replicas."""
        self._done = step
        number, num_streams = self._order.number, self._order.num_replicas
        begin_generators(
            self._config.seed, step, lambda seed: torch.manual_seed(seed * num_streams + number)
        )
        self._log.begin(step)

    def _meet(self) -> None:
        """Wait for those who make the next step; take their state if this replica is behind."""
        words = self._peers.meet(self._done, self._read_state, self._collect)
        if words is not None:
            restore_state(self._state, self._model.parts, self._optimizers)
            self._log.load_state_dict(words["log"])
            self._told, self._grad_norm = words["told"], words["grad_norm"]
            self._go_on_from(words["step"])

    def _collect(self) -> Sequence[Tensor]:
        self._state = collect_state(self._model.parts, self._optimizers)
        return [t.detach() for t in self._state.values() if isinstance(t, Tensor)]

    def _read_state(self) -> tuple[Sequence[Tensor], Mapping[str, Any]]:
        words = {
            "step": self._done,
            "told": self._told,
            "grad_norm": self._grad_norm,
            "log": self._log.state_dict(),
        }
        return self._collect(), words

    def _try_step(self, step: int) -> None:
        quorum = self._peers.quorum
        self._heartbeat.begin_step(step, self._timer.seconds)
        before = [buffer.clone() for buffer in self._part.buffers()]
        with self._timer.phase("data_wait"):
            inputs, target = self._loader.read(step, quorum.rank, quorum.size)
        loss = self._model.forward_backward(
            inputs.to(self._device), target.to(self._device), self._timer
        )
        try:
            with self._timer.phase("communication"):
                mean_loss = self._average(loss, len(inputs) / self._config.global_batch)
                rows = (
                    self._peers.gather(self._log.measure(target)) if self._is_line(step) else None
                )
        except AttemptVoid:
            self._gradients.forget()
            for buffer, kept in zip(self._part.buffers(), before, strict=True):
                buffer.copy_(kept)
            self._heartbeat.void_step()
            self._peers.void()
            return
        with self._timer.phase("optimizer"):
            self._update(step, mean_loss, target)
        self._peers.commit()
        self._done = step
        if rows is not None:
            rate = learning_rate(self._config.optimizer, step, self._config.steps)
            head = {"step": step, "lr": rate, "grad_norm": self._grad_norm}
            self._log.note(rows, quorum.replicas, head, self._config.global_batch)

    def _is_line(self, step: int) -> bool:
        return step % self._config.log_every_steps == 0 or step == self._config.steps

    def _average(self, loss: Tensor, weight: float) -> Tensor:
        """Replace the gradients by those of the mean over the global batch, whose loss is given.
        weight: this replica's share of the batch. Raises AttemptVoid."""
        pieces = [
            torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
            for p in self._parameters
        ]
        total = torch.cat([*pieces, loss.reshape(1)]).mul_(weight).cpu()
        self._peers.sum(total)
        buffers = [buffer.detach().cpu().clone() for buffer in self._part.buffers()]
        for buffer in buffers:
            self._peers.spread(buffer)
        for buffer, first in zip(self._part.buffers(), buffers, strict=True):
            buffer.copy_(first)
        sizes = [parameter.numel() for parameter in self._parameters]
        *pieces, mean = torch.split(total.to(self._device), [*sizes, 1])
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter).to(parameter.dtype)
        return mean.reshape(())

    def _update(self, step: int, loss: Tensor, target: Tensor) -> None:
        """Change the parameters by their gradients, unless these are no numbers."""
        optimizer = self._config.optimizer
        self._grad_norm = self._gradients.clip(optimizer.grad_clip)
        if self._guard.allows(step, loss, self._grad_norm):
            take_step(self._optimizers, learning_rate(optimizer, step, self._config.steps))
            self._log.add(loss.item(), target)
        self._gradients.forget()

    def _tell(self) -> None:
        """Log and keep what is due after the steps that are done, as the first of the quorum."""
        if self._is_first:
            if self._log.has_news:
                require_authority(self._spec, "the step log")
            self._log.write(self._done)
        else:
            self._log.let_go()
        if self._told == self._done:
            return
        due = [self._checkpoints.due(step) for step in range(self._told + 1, self._done + 1)]
        self._told = self._done
        if any(due) and self._is_first and self._done < self._config.steps:
            self._save()

    def _save(self) -> None:
        reached = Checkpoint(
            self._done, self._done * self._config.global_batch, self._log.last_loss
        )
        extras = {"steps": StepHistory(self._spec.run_directory / STEPS_FILE)}
        with self._timer.phase("checkpoint"):
            self._checkpoints.save(reached, self._model.parts, self._optimizers, extras)

    def _leave(self) -> bool:
        """After the last step: the first keeps it and writes the weights; whether all of the
        quorum have come to know that it has."""
        if self._is_first:
            self._save()
            with self._timer.phase("checkpoint"):
                self._checkpoints.close()
                self._write_weights()
        try:
            with self._timer.phase("communication"):
                self._peers.sum(torch.zeros(1))
        except AttemptVoid:
            self._peers.void()
            return False
        return True

    def _write_weights(self) -> None:
        path = self._spec.run_directory / WEIGHTS_FILE
        pending = path.with_suffix(f".{self._order.life}")
        save_weights(self._model, self._workload, self._config, pending)
        require_authority(self._spec, str(path))
        pending.replace(path)
