"""Where the seconds of a step go: phases of one rank, timed one inside the other."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from torch import Tensor
from torch.autograd import Variable

from training.phases import OTHER, PHASES, Phase

_COMMUNICATION = PHASES.index("communication")
_OTHER = len(PHASES)


class StepTimer:
    """Adds up the seconds of each phase. One thread at a time.

    A phase inside another takes its time out of the outer one, so that the phases and `other` add
    up to the time that passed. It reads the clock of this machine: what a GPU still computes when a
    phase ends counts where the loop waits for it.

    What runs in every step names phases by their index in PHASES, with `enter`, `change` and
    `leave`: between two steps' tensor work nothing of Python's stays in the processor's caches, and
    a call costs many times what it does in a loop of its own.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        on_phase: Callable[[int, float], None] = lambda index, now: None,
    ) -> None:
        """on_phase: told the index in PHASES of each phase that begins, or one more for `other`,
        and the time."""
        self._clock = clock
        self._on_phase = on_phase
        self._seconds = [0.0] * (_OTHER + 1)
        self._taken = list(self._seconds)
        self._outer: list[int] = []
        self._current = _OTHER
        self._since = clock()
        self._spans = {name: _Span(self, index) for index, name in enumerate(PHASES)}

    @property
    def seconds(self) -> Sequence[float]:
        """Of each of PHASES, and last of `other`, up to the present phase: a list that changes."""
        return self._seconds

    def phase(self, name: Phase) -> "_Span":
        """A context manager, to be entered at once: its block is of this phase."""
        return self._spans[name]

    def enter(self, index: int) -> None:
        """Begin a phase inside the present one."""
        self._outer.append(self._current)
        self.change(index)

    def change(self, index: int) -> None:
        """End the present phase and begin another in its place."""
        now = self._clock()
        self._seconds[self._current] += now - self._since
        self._since = now
        self._current = index
        self._on_phase(index, now)

    def leave(self) -> None:
        """Go back to the phase around the present one."""
        self.change(self._outer.pop())

    def watch_backward(self, loss: Tensor) -> None:
        """Count the coming `loss.backward()`, inside the phase `backward`, as `communication` from
        the moment the last gradient is computed: what is left is waiting for the other ranks.

        Right for DDP (all-reduce of the last buckets) and for the reduce-scatter that ends FSDP's
        backward. The autograd engine calls back in the order of asking after the last node, and
        both wrappers ask after the loss did.
        """
        loss.register_hook(self._ask_for_the_end)  # type: ignore[no-untyped-call]

    def take(self) -> dict[str, float]:
        """Seconds by phase, `other` included, since the last call."""
        self.change(self._current)
        before, self._taken = self._taken, list(self._seconds)
        taken = (now - then for now, then in zip(self._taken, before, strict=True))
        return dict(zip((*PHASES, OTHER), taken, strict=True))

    def _ask_for_the_end(self, gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(self._all_computed)

    def _all_computed(self) -> None:
        self.change(_COMMUNICATION)


class _Span:
    """One phase of a timer; made once and entered each time."""

    __slots__ = ("_index", "_timer")

    def __init__(self, timer: StepTimer, index: int) -> None:
        self._timer = timer
        self._index = index

    def __enter__(self) -> None:
        self._timer.enter(self._index)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.leave()
