"""What the flow costs over the same stages called as plain Python.

Both in one run, alternating, each in a fresh process, on the toy workload of the tests with every
stage forced. With a Prefect server running: at most 3 % and 3 s. Without one the start of the
embedded API comes on top; it is printed apart.
"""

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.table import Row, publish
from flows.environment import prepare_environment
from flows.services import await_healthy, free_port, running
from tests.workspaces import PARAMS, Workspace, make_workspace

REPETITIONS = 3
STEPS = 2500
PLAIN = """
from pipeline.config import Config
from pipeline.stages import STAGES
config = Config.load("params.yaml")
for stage in STAGES.values():
    stage(config)
"""


def seconds(action: Callable[[], object]) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started


def main() -> None:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        prepare_environment(directory)
        server = _start_server(directory / "server", stack)
        train = PARAMS["train"] | {"steps": 20, "log_every_steps": 100}
        served = make_workspace(directory / "served", server, train=train)
        embedded = make_workspace(directory / "embedded", train=train)
        plain: list[float] = []
        flow: list[float] = []
        alone: list[float] = []
        _measure(served, embedded)  # fills caches and databases
        for workspace in (served, embedded):
            workspace.set("train.steps", STEPS)
        for _ in range(REPETITIONS):
            for times, value in zip((plain, flow, alone), _measure(served, embedded), strict=True):
                times.append(value)
    reference = median(plain)
    publish(
        "flow",
        "s",
        [
            _row("flow, server running", median(flow), reference),
            Row(
                case="flow, embedded API",
                ours=median(alone),
                reference=reference,
                ratio=median(alone) / reference,
                target="its start apart: "
                f"{median(alone) - median(flow):.1f} s over a running server",
                holds=True,
            ),
        ],
    )


def _row(case: str, ours: float, reference: float) -> Row:
    return Row(
        case=case,
        ours=ours,
        reference=reference,
        ratio=ours / reference,
        target="ours <= 1.03 x reference + 3 s",
        holds=ours <= 1.03 * reference + 3,
    )


def _measure(served: Workspace, embedded: Workspace) -> tuple[float, float, float]:
    return (
        seconds(lambda: served.python(PLAIN)),
        seconds(lambda: served.run("convoy", "run", "--force")),
        seconds(lambda: embedded.run("convoy", "run", "--force")),
    )


def _start_server(home: Path, stack: ExitStack) -> dict[str, str]:
    home.mkdir()
    url = f"http://127.0.0.1:{free_port(0)}"
    environment = {"PREFECT_HOME": str(home), "PREFECT_API_URL": f"{url}/api"}
    port = url.rsplit(":", 1)[1]
    command = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", port]
    service = stack.enter_context(running("prefect", command, home / "server.log", environment))
    await_healthy(service, f"{url}/api/health")
    return environment


if __name__ == "__main__":
    main()
