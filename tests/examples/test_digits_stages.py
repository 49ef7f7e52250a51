"""The second workload through every stage: the interface is not made for one."""

import shutil
from pathlib import Path

from tests.workspaces import ROOT, make_workspace


def test_digits_from_raw_input_to_a_champion(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "w")
    shutil.copytree(
        ROOT / "examples", workspace.path / "examples", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "examples" / "digits.yaml", workspace.path / "params.yaml")
    workspace.run("dvc", "repro")
    metrics = workspace.read_json("artifacts/evaluate/metrics.json")
    assert metrics["accuracy"] > 0.93
    assert metrics["accuracy"] > metrics["nearest_mean"]["accuracy"] > 0.5
    assert metrics["accuracy"] > metrics["majority"]["accuracy"]
    version = workspace.read_json("artifacts/register/model_version.json")
    assert version["champion"]
    answers = workspace.python(
        "import mlflow, numpy\n"
        "mlflow.set_tracking_uri('sqlite:///.convoy/mlflow.db')\n"
        "model = mlflow.pyfunc.load_model('models:/digits@champion')\n"
        "print(model.predict(model.input_example))"
    )
    assert answers.strip().splitlines()[-1].startswith("[")
