"""Workspaces for tests: a git and DVC repository with the toy workload, and commands run in it."""

import atexit
import contextlib
import copy
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from pipeline.config import Config
from pipeline.stages import STAGES

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
TOY = Path(__file__).with_name("toy_workload.py")

PARAMS: dict[str, Any] = {
    "dataset": "toy",
    "workload": {"module": "toy_workload", "code": "toy_workload.py"},
    "regions": {
        name: {
            "jurisdiction": name.upper(),
            "store": f"file:.convoy/stores/{name}",
            "wrapping_key": f"file:.convoy/keys/{name}.key",
        }
        for name in ("eu", "us", "cn")
    },
    "residency": {
        "on_restricted": "exclude",
        "rules": [
            {
                "name": f"{jurisdiction}-rule".lower(),
                "jurisdictions": [jurisdiction],
                "artifacts": ["raw", "shard", "checkpoint", "model", "metrics", "log"],
                "regions": regions,
                "mechanism": "test",
                "evidence": "tests",
                "expires": "2099-12-31",
            }
            for jurisdiction, regions in (("EU", ["eu"]), ("US", ["us", "eu"]), ("CN", ["cn"]))
        ],
    },
    "ingest": {"params": {"count": 900}},
    "shard": {"records_per_shard": 64, "holdout": 0.1},
    "upload": {"regions": ["eu", "us", "cn"]},
    "train": {
        "region": "eu",
        "dims": {"dp_replicate": 2},
        "steps": 30,
        "global_batch": 32,
        "seed": 7,
        "optimizer": {"lr": 0.01, "warmup_steps": 5},
        "checkpoint": {"every_steps": 10, "keep": 2},
        "log_every_steps": 5,
        "model": {"hidden": 16},
    },
    "evaluate": {"primary": "accuracy", "goal": "maximize"},
    "register": {"model_name": "toy"},
    "schedule": {"cron": None, "retries": 0},
}


class Workspace:
    """A workspace on disk, and `convoy` or `dvc` run in it as a user would."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        self.path = path
        self.environment = environment

    def set(self, name: str, value: Any) -> None:
        """Change one value of params.yaml."""
        params = self.params
        section = params
        *sections, key = name.split(".")
        for part in sections:
            section = section[part]
        section[key] = value
        self.write_params(params)

    @property
    def params(self) -> dict[str, Any]:
        content: dict[str, Any] = yaml.safe_load((self.path / "params.yaml").read_text())
        return content

    def write_params(self, params: Mapping[str, Any]) -> None:
        (self.path / "params.yaml").write_text(yaml.safe_dump(dict(params), sort_keys=False))

    def start(self, *command: str, **more: str) -> subprocess.Popen[str]:
        """Start a command of the virtual environment."""
        return subprocess.Popen(
            [str(BIN / command[0]), *command[1:]],
            cwd=self.path,
            env={**os.environ, **self.environment, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, expect: int = 0, **more: str) -> str:
        """Run a command to its end; give what it printed."""
        process = self.start(*command, **more)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == expect, output
        return output

    def python(self, code: str, **more: str) -> str:
        """Run Python code in the workspace, in a fresh process."""
        return self.run("python", "-c", code, expect=0, **more)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def read_json(self, name: str) -> Any:
        return json.loads(self.read(name))


def make_workspace(
    path: Path, environment: Mapping[str, str] | None = None, **sections: Any
) -> Workspace:
    """A committed workspace of the toy workload; keyword arguments replace sections of params."""
    shutil.copytree(_empty_repository(), path)
    shutil.copy(TOY, path)
    for name in ("dvc.yaml", ".gitignore", ".dvcignore"):
        shutil.copy(ROOT / name, path)
    identity = {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "Test"), ("EMAIL", "test@example.org"))
    }
    workspace = Workspace(path, {**identity, **(environment or {})})
    workspace.write_params(copy.deepcopy(PARAMS) | sections)
    for command in (["git", "add", "-A"], ["git", "commit", "-qm", "Start"]):
        subprocess.run(command, cwd=path, check=True, env={**os.environ, **workspace.environment})
    return workspace


@functools.cache
def _empty_repository() -> Path:
    """A git and DVC repository to copy: DVC takes a second to make one."""
    parent = Path(tempfile.mkdtemp(prefix="convoy-repository-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    path = parent / "w"
    path.mkdir()
    for command in (["git", "init", "-q"], [str(BIN / "dvc"), "init", "-q"]):
        subprocess.run(command, cwd=path, check=True)
    return path


def upload_shards(workspace: Workspace) -> None:
    """Do the stages before the training, in this process, which has imported what they need."""
    with contextlib.chdir(workspace.path), mock.patch.object(sys, "path", list(sys.path)):
        # Each workspace has a file of that name, and a process imports a name once.
        sys.modules.pop("toy_workload", None)
        try:
            for stage in ("ingest", "shard", "upload"):
                STAGES[stage](Config.load())
        finally:
            sys.modules.pop("toy_workload", None)
