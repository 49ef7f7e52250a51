"""Ends uploads in parts that a killed process left in an S3 bucket, where they cost and never show.

The principal needs s3:ListBucketMultipartUploads and s3:AbortMultipartUpload. Where it may not list
them they are left to the bucket's own rules (AbortIncompleteMultipartUpload in its lifecycle).
"""

import os
from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any

from storage.errors import StoreUnavailable
from storage.locations import S3Location, parse_store
from storage.region import Region
from storage.store import unavailable

STALE_AFTER = timedelta(hours=12)
"""No upload of a shard that still lives is as old: of its at most 128 parts four at a time have
five minutes each, and one more for retries."""
_MAY_NOT_LIST = (HTTPStatus.FORBIDDEN, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)


def end_unfinished(
    region: Region, names: Collection[str], older_than: timedelta = STALE_AFTER
) -> int:
    """Abort the uploads of objects of these names that began longer ago.

    Returns how many there were; none in a store that is no S3 bucket. Raises StoreUnavailable.
    """
    location = parse_store(region.store)
    if not isinstance(location, S3Location):
        return 0
    from botocore.exceptions import BotoCoreError, ClientError

    root = f"{location.prefix}/" if location.prefix else ""
    keys = {root + name for name in names}
    before = datetime.now(UTC) - older_than
    num_ended = 0
    try:
        client = _connect(location)
        for upload in _list_uploads(client, location.bucket, root):
            key = upload["Key"]
            if key in keys and upload["Initiated"] < before:
                client.abort_multipart_upload(
                    Bucket=location.bucket, Key=key, UploadId=upload["UploadId"]
                )
                num_ended += 1
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] in _MAY_NOT_LIST:
            return num_ended
        raise _refused(region, error.response["Error"]["Code"]) from None
    except BotoCoreError as error:
        # The class name alone: the text of some of these errors repeats what was sent.
        raise _refused(region, type(error).__name__) from None
    return num_ended


def _connect(location: S3Location) -> Any:
    import boto3
    from botocore.config import Config

    # A session of its own: boto3's default one keeps the first credentials that it ever saw.
    return boto3.session.Session().client(
        "s3",
        region_name=location.region,
        endpoint_url=location.endpoint,
        verify=os.environ.get("AWS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE"),
        config=Config(
            retries={"mode": "standard", "total_max_attempts": 4},
            connect_timeout=5,
            read_timeout=30,
            s3={"addressing_style": "path"},
            ignore_configured_endpoint_urls=True,
        ),
    )


def _list_uploads(client: Any, bucket: str, prefix: str) -> Iterator[dict[str, Any]]:
    pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
    for page in pages:
        yield from page.get("Uploads", ())


def _refused(region: Region, what: str) -> StoreUnavailable:
    return unavailable(
        region,
        f"cannot end uploads that a killed process left ({what})",
        "check the service and the credentials, and upload again",
    )
