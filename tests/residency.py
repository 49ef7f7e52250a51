"""The residency that most tests of placing need: what is under the law of the EU stays there."""

from datetime import date

from data.residency import Residency, Rule

EU_AT_HOME = Residency(
    rules=(
        Rule(
            name="home",
            jurisdictions=("EU",),
            artifacts=("shard",),
            regions=("eu",),
            mechanism="home",
            evidence="a test",
            expires=date(2099, 1, 1),
        ),
    )
)
