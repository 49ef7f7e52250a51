"""Errors of training.

TrainingError
├── WorkloadError      the user's module is missing, does not import or lacks a function
├── WorkersFailed      the workers ended before the last step
├── PeerLost           a replica lost the peer that it was to take its state from
├── NetworkUnavailable namespaces and links for nodes cannot be had on this machine
├── CannotSimulate     a fault that this run or machine has no means for
├── MemoryTooSmall     the workers would need more memory than there is
├── CheckpointError    a checkpoint that cannot be written or is of another run
│   └── NodeDiskFull   for want of room on the disk of one node, and not on that of all
└── RegistryError      MLflow cannot be reached or refuses
"""

from storage.errors import ConvoyError


class TrainingError(ConvoyError):
    """Training cannot start or go on."""


class WorkloadError(TrainingError):
    """The user's module does not fit."""


class WorkersFailed(TrainingError):
    """The workers ended before the last step."""


class PeerLost(TrainingError):
    """A replica lost the peer that it was to take its state from."""


class NetworkUnavailable(TrainingError):
    """Namespaces and links for nodes cannot be had on this machine, or were lost."""


class CannotSimulate(TrainingError):
    """This run or machine has no means for a fault."""


class MemoryTooSmall(TrainingError):
    """The workers would need more memory than there is."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be written or is of another run."""


class NodeDiskFull(CheckpointError):
    """A checkpoint cannot be written for want of room on this node's disk, and not on all of them:
    the others can go on without the node."""


class RegistryError(TrainingError):
    """MLflow cannot be reached or refuses."""
