"""Removes an object from an S3 bucket for good: every version of it, or nothing.

A delete in a bucket that keeps versions only hides the object. The principal needs
s3:ListBucketVersions, s3:DeleteObjectVersion, s3:GetBucketObjectLockConfiguration,
s3:GetObjectRetention and s3:GetObjectLegalHold. A replica in another bucket is beyond reach.
"""

from dataclasses import dataclass
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from storage.errors import StoreUnavailable
from storage.locations import S3Location
from storage.region import Region
from storage.store import unavailable

_CONFIG = Config(
    retries={"mode": "standard", "total_max_attempts": 4},
    connect_timeout=5,
    read_timeout=30,
    s3={"addressing_style": "path"},
    ignore_configured_endpoint_urls=True,
)
_WITHOUT_LOCK = (
    "ObjectLockConfigurationNotFoundError",
    "NoSuchObjectLockConfiguration",
    "NoSuchObjectLegalHold",
    "InvalidRequest",
)
"""What services answer for a bucket, or a version, that no lock holds."""


@dataclass(frozen=True)
class _Bucket:
    region: Region
    name: str
    client: Any

    def ask(self, verb: str, **request: Any) -> dict[str, Any]:
        """Raise ClientError for a refusal, StoreUnavailable when nothing answers."""
        try:
            answer: dict[str, Any] = getattr(self.client, verb)(Bucket=self.name, **request)
        except BotoCoreError as error:
            # The class name alone: the text of some of these errors repeats what was sent.
            raise unavailable(
                self.region,
                f"cannot be reached ({type(error).__name__})",
                "check the network, the endpoint, AWS_CA_BUNDLE and the AWS credentials",
            ) from None
        return answer


class Eraser:
    """Removes objects of one bucket.

    It is kept as long as the bucket is open: to make a client takes boto3 tenths of a second, in
    which no other thread of Python runs.
    """

    def __init__(self, region: Region, location: S3Location) -> None:
        # A session of its own: boto3's default one keeps the first credentials that it ever saw.
        client = boto3.session.Session().client(
            "s3", region_name=location.region, endpoint_url=location.endpoint, config=_CONFIG
        )
        self._bucket = _Bucket(region, location.bucket, client)
        self._prefix = location.prefix

    def erase(self, name: str) -> None:
        """Delete every version and delete marker of an object. Raises StoreUnavailable.

        All locks are looked at before the first version goes.
        """
        bucket, region = self._bucket, self._bucket.region
        key = f"{self._prefix}/{name}" if self._prefix else name
        try:
            versions = _list_versions(bucket, key)
            _refuse_locked(bucket, key, name, versions)
            for version in versions:
                bucket.ask("delete_object", Key=key, VersionId=version)
            left = _list_versions(bucket, key)
        except ClientError as error:
            raise _refused(region, name, _code(error)) from None
        if left:
            raise unavailable(
                region,
                f"still holds {len(left)} versions of {name} after their removal",
                "see what keeps them, and shred again: until they are gone the data can be read",
            )


def _list_versions(bucket: _Bucket, key: str) -> list[str]:
    found: list[str] = []
    marker: dict[str, str] = {}
    while True:
        page = bucket.ask("list_object_versions", Prefix=key, **marker)
        for item in (*page.get("Versions", ()), *page.get("DeleteMarkers", ())):
            if item["Key"] == key:
                found.append(item.get("VersionId") or "null")
        if not page.get("IsTruncated"):
            return found
        marker = {"KeyMarker": page["NextKeyMarker"]}
        if page.get("NextVersionIdMarker"):
            marker["VersionIdMarker"] = page["NextVersionIdMarker"]


def _refuse_locked(bucket: _Bucket, key: str, name: str, versions: list[str]) -> None:
    if _ask_lock(bucket, "get_object_lock_configuration") is None:
        return
    for version in versions:
        place = {"Key": key, "VersionId": version}
        held = _ask_lock(bucket, "get_object_legal_hold", **place) or {}
        kept = (_ask_lock(bucket, "get_object_retention", **place) or {}).get("Retention", {})
        if held.get("LegalHold", {}).get("Status") == "ON":
            raise _locked(bucket.region, name, "a legal hold", "release the hold")
        if kept.get("RetainUntilDate"):
            until = f"{kept['RetainUntilDate']:%Y-%m-%d %H:%M} UTC"
            raise _locked(bucket.region, name, f"a retention lock until {until}", "wait until then")


def _ask_lock(bucket: _Bucket, verb: str, **request: Any) -> dict[str, Any] | None:
    try:
        return bucket.ask(verb, **request)
    except ClientError as error:
        if _code(error) in (*_WITHOUT_LOCK, "NoSuchKey", "MethodNotAllowed"):
            return None
        raise


def _locked(region: Region, name: str, what: str, remedy: str) -> StoreUnavailable:
    return unavailable(
        region,
        f"holds {name} under {what}: nothing was removed, and the data can be read",
        f"{remedy}, or destroy the wrapping key, which shreds all that it wrapped",
    )


def _refused(region: Region, name: str, code: str) -> StoreUnavailable:
    return unavailable(
        region,
        f"does not let every version of {name} be removed ({code}): the data may still be readable",
        "allow s3:ListBucketVersions, s3:DeleteObjectVersion, s3:GetBucketObjectLockConfiguration, "
        "s3:GetObjectRetention and s3:GetObjectLegalHold, and shred again",
    )


def _code(error: ClientError) -> str:
    code: str = error.response.get("Error", {}).get("Code", "unknown error")
    return code
