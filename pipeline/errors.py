"""Errors of the pipeline.

PipelineError
├── ConfigError        params.yaml: a key, a type or a value
├── WorkspaceError     the workspace is in use, full, or lacks a file
└── VersioningError    git or DVC is missing or refuses
"""

from storage.errors import ConvoyError


class PipelineError(ConvoyError):
    """A stage cannot start or go on."""


class ConfigError(PipelineError):
    """params.yaml has a wrong key, type or value."""


class WorkspaceError(PipelineError):
    """The workspace is in use, full, or lacks a file."""


class VersioningError(PipelineError):
    """git or DVC is missing or refuses."""
