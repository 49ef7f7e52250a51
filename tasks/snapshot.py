"""What ends a flow, as a task."""

from prefect import Task
from prefect.cache_policies import NO_CACHE

from pipeline.versioning import take_snapshot

snapshot = Task(take_snapshot, name="snapshot", cache_policy=NO_CACHE, persist_result=False)
