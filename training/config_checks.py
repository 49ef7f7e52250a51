"""What the settings of a training ask of each other. Loads no torch."""

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from training.config import TrainConfig


def check_together(config: "TrainConfig") -> None:
    """Raise ValueError, with what to do, for settings that do not go together."""
    _nodes_divide(config)
    _batch_divides(config)
    _stages_are_fed(config)
    _settings_go_together(config)
    _synchronization_fits(config)
    _virtual_ranks_fit(config)
    _replicas_come_and_go(config)


def _nodes_divide(config: "TrainConfig") -> None:
    world_size = config.dims.world_size
    if world_size % config.nodes:
        raise ValueError(f"nodes {config.nodes} must divide the {world_size} workers of dims")
    if config.least_nodes > config.nodes:
        raise ValueError(
            f"min_nodes {config.min_nodes} is above nodes {config.nodes}: lower it, or raise nodes"
        )


def _batch_divides(config: "TrainConfig") -> None:
    # The loader could cut it unevenly, but the mean over replicas would weigh some samples more
    # than others.
    replicas = config.dims.num_replicas
    if config.global_batch % replicas:
        _refuse_batch(config.global_batch, replicas, f"the {replicas} replicas in dims")
    if config.accumulate > config.global_batch // replicas:
        raise ValueError(
            f"accumulate {config.accumulate} is more than the {config.global_batch // replicas} "
            "samples of a replica's batch: lower it, or raise global_batch"
        )


def _stages_are_fed(config: "TrainConfig") -> None:
    stages, parts = config.dims.pp, config.pipeline.microbatches
    if stages == 1:
        return
    if config.accumulate > 1:
        raise ValueError(
            f"accumulate {config.accumulate} with dims.pp {stages}: a pipeline accumulates over "
            "pipeline.microbatches already: raise those and leave accumulate out"
        )
    replicas = config.dims.num_replicas
    if config.global_batch % (replicas * parts):
        # Stages exchange tensors of one shape, and the mean of unequal parts would be another.
        whose = f"{replicas} replicas x {parts} pipeline.microbatches"
        _refuse_batch(config.global_batch, replicas * parts, whose)
    if config.pipeline.schedule == "1f1b" and parts < stages:
        raise ValueError(
            f"pipeline.microbatches {parts} is less than the {stages} stages of dims.pp, which "
            "schedule 1f1b needs: raise it, or take schedule gpipe"
        )
    rounds = max(1, parts // stages)
    if config.pipeline.schedule.startswith("interleaved") and parts % rounds:
        raise ValueError(
            f"pipeline.microbatches {parts} must be a multiple of dims.pp {stages} (or fewer "
            f"than twice as many) for schedule {config.pipeline.schedule}"
        )


def _settings_go_together(config: "TrainConfig") -> None:
    for name in ("sequence_parallel", "loss_parallel"):
        if getattr(config, name) and config.dims.tp == 1:
            raise ValueError(
                f"{name} splits work among the workers of dims.tp, which is 1: raise dims.tp, "
                f"or leave {name} out"
            )
    if config.compile and config.dims.pp > 1 and "zero_bubble" in config.pipeline.schedule:
        raise ValueError(
            f"compile with pipeline.schedule {config.pipeline.schedule}: it takes a backward "
            "pass apart, which a compiled one does not allow: leave compile out, or take 1f1b"
        )


def _synchronization_fits(config: "TrainConfig") -> None:
    mode, compress = config.synchronize.mode, config.synchronize.compress
    special = {
        f"synchronize.mode {mode}": mode != "step",
        f"synchronize.compress {compress}": compress != "none",
        "reproducible": config.reproducible,
    }
    chosen = [name for name, is_chosen in special.items() if is_chosen]
    if len(chosen) > 1:
        raise ValueError(f"{chosen[0]} and {chosen[1]} exclude each other: take one of them")
    split = [n for n in ("dp_shard", "tp", "pp") if getattr(config.dims, n) > 1]
    if chosen and split:
        raise ValueError(
            f"{chosen[0]} needs whole copies of the model: set dims.{split[0]} to 1 (it is "
            f"{getattr(config.dims, split[0])}) and dims.dp_replicate to the number of workers"
        )
    if config.synchronize.is_local and config.on_nonfinite != "stop":
        raise ValueError(
            f"on_nonfinite {config.on_nonfinite} and synchronize.mode {mode}: workers that step "
            "by themselves would decide by themselves: take stop"
        )
    if mode == "asynchronous" and config.synchronize.max_staleness < config.dims.world_size - 1:
        raise ValueError(
            f"synchronize.max_staleness {config.synchronize.max_staleness} is less than the "
            f"{config.dims.world_size - 1} other workers, each of which may add a step "
            "meanwhile: raise it"
        )


def _virtual_ranks_fit(config: "TrainConfig") -> None:
    if not config.reproducible:
        return
    virtual, world_size = config.virtual_ranks, config.dims.world_size
    if virtual & (virtual - 1):
        raise ValueError(f"virtual_ranks {virtual} must be a power of two, such as 8")
    if virtual % world_size:
        raise ValueError(
            f"virtual_ranks {virtual} must be a multiple of the {world_size} workers in dims"
        )
    if config.global_batch % virtual:
        _refuse_batch(config.global_batch, virtual, f"virtual_ranks {virtual}")
    if config.compile:
        raise ValueError(
            "compile and reproducible exclude each other: what a compiled layer runs depends "
            "on the shapes that it saw before"
        )
    if config.accumulate > 1:
        raise ValueError(
            f"accumulate {config.accumulate} and reproducible exclude each other: it computes "
            "virtual_ranks one after another already, so raise those to save memory"
        )


def _replicas_come_and_go(config: "TrainConfig") -> None:
    if config.recovery.mode != "hot":
        return
    if config.dims.is_sharded or config.dims.dp_replicate == 1:
        raise ValueError(
            "recovery.mode hot needs whole copies of the model, two or more, for a worker that is "
            "lost takes its part with it: set dims.dp_replicate to the number of workers and the "
            "other degrees to 1, or take recovery.mode restart"
        )
    unfit = {
        f"synchronize.mode {config.synchronize.mode}": config.synchronize.is_local,
        f"synchronize.compress {config.synchronize.compress}": config.synchronize.compress
        != "none",
        "reproducible": config.reproducible,
        "on_nonfinite roll_back": config.on_nonfinite == "roll_back",
        f"profile {config.profile}": config.profile > 0,
    }
    for name, is_chosen in unfit.items():
        if is_chosen:
            raise ValueError(
                f"recovery.mode hot and {name} exclude each other: leave it out, or take "
                "recovery.mode restart"
            )


def _refuse_batch(global_batch: int, divisor: int, whose: str) -> NoReturn:
    below = global_batch // divisor * divisor
    raise ValueError(
        f"global_batch {global_batch} must be a multiple of {whose}: take "
        f"{f'{below} or ' if below else ''}{below + divisor}"
    )
