"""Bytes in places: regions, object stores, keyrings, sealed objects and the access log.

This package knows nothing of records, shards or training. Everything above it sees a place
through five verbs (`ObjectStore`) and a key through two (`Keyring`). The formats it writes are
specified in docs/format.md.
"""
