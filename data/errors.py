"""Errors of the dataset domain.

DataError
├── RecordRefused     a record that cannot be sharded: no jurisdiction, a field Arrow cannot hold
├── ManifestError     a manifest that is missing, malformed or of another dataset
├── ShardBroken       a shard that was changed, cut or swapped
├── CacheUnusable     the directory of the sealed cache cannot be used (data/cache.py)
├── SourceError       a raw input file that cannot be read (data/sources.py)
└── ResidencyError    something may not be where it was asked to be
"""

from storage.errors import ConvoyError


class DataError(ConvoyError):
    """The dataset, not the code, is what has to change."""


class RecordRefused(DataError):
    """A record cannot be sharded."""


class ManifestError(DataError):
    """A manifest is missing, malformed or of another dataset."""


class ShardBroken(DataError):
    """A shard is not what its manifest says."""


class CacheUnusable(DataError):
    """The directory of the sealed cache cannot be used."""


class ResidencyError(DataError):
    """The residency policy does not allow it."""
