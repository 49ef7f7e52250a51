"""Buckets opened: of S3, Google Cloud Storage and Azure, and memory.

Each is spoken to at the endpoint of its URL and at no other; S3 in path style. Credentials come
from where the tools of that cloud look for them. A private certificate authority is named by
AWS_CA_BUNDLE or SSL_CERT_FILE and trusted beside the public ones.
"""

import functools
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from storage.bucket import Bucket
from storage.locations import AzureLocation, GoogleLocation, MemoryLocation, S3Location
from storage.region import Region
from storage.store import CREDENTIALS_REMEDY, refused, unavailable

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

RETRIES: "RetryConfig" = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {
        "init_backoff": timedelta(milliseconds=200),
        "max_backoff": timedelta(seconds=5),
        "base": 2,
    },
}
STALL_SECONDS = 30.0
GET_SECONDS = 3600.0
PUT_SECONDS = 300.0
# obstore hands on botocore's credentials for as long as it is told. Those of a role are renewed
# ten minutes before their end, so asking again after five never signs with expired ones.
_CREDENTIALS_SECONDS = 300

_GOOGLE_REMEDY = (
    "check GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT (or run `gcloud auth "
    "application-default login`), and that they may read, write and list this bucket"
)
_AZURE_REMEDY = (
    "check AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_KEY, or AZURE_TENANT_ID with "
    "AZURE_CLIENT_ID and AZURE_CLIENT_SECRET, and that they may read, write and list this container"
)


def open_bucket(
    region: Region, location: S3Location | GoogleLocation | AzureLocation | MemoryLocation
) -> Bucket:
    """Open a bucket, or the memory store of that region and name in this process.

    Raises StoreUnavailable if there are no credentials, or no certificates where they should be.
    """
    if isinstance(location, MemoryLocation):
        memory = _memory(region.name, location.name)
        return Bucket(region, memory, memory)
    reading = _client(region, location.endpoint, GET_SECONDS, STALL_SECONDS)
    # The answer to a put comes after its body, so that only the whole can be timed.
    writing = _client(region, location.endpoint, PUT_SECONDS)
    try:
        if isinstance(location, GoogleLocation):
            return Bucket(
                region, _google(location, reading), _google(location, writing), _GOOGLE_REMEDY
            )
        if isinstance(location, AzureLocation):
            return Bucket(
                region, _azure(location, reading), _azure(location, writing), _AZURE_REMEDY
            )
        credentials = _s3_credentials(region)
        return Bucket(
            region, _s3(location, credentials, reading), _s3(location, credentials, writing)
        )
    except (ValueError, BaseError):
        raise _unopened(region, location) from None


@functools.cache
def _memory(region: str, name: str) -> MemoryStore:
    return MemoryStore()


def _s3_credentials(region: Region) -> Boto3CredentialProvider:
    try:
        return Boto3CredentialProvider(ttl=timedelta(seconds=_CREDENTIALS_SECONDS))
    except (ValueError, BotoCoreError):
        raise refused(region, "finds no AWS credentials", CREDENTIALS_REMEDY) from None


def _s3(
    location: S3Location, credentials: Boto3CredentialProvider, client: "ClientConfig"
) -> S3Store:
    return S3Store(
        location.bucket,
        prefix=location.prefix or None,
        region=location.region,
        # Of obstore's names for the endpoint this one wins over every variable of a shell.
        aws_endpoint_url_s3=location.endpoint,
        virtual_hosted_style_request=False,
        skip_signature=False,
        # Inside TLS nothing can change on the way, and what is sent is sealed: hashing it once
        # more for the signature would cost as much as all the rest.
        unsigned_payload=location.endpoint.startswith("https://"),
        client_options=client,
        retry_config=RETRIES,
        credential_provider=credentials,
    )


def _google(location: GoogleLocation, client: "ClientConfig") -> GCSStore:
    return GCSStore(
        location.bucket,
        prefix=location.prefix or None,
        base_url=location.endpoint,
        skip_signature=False,
        client_options=client,
        retry_config=RETRIES,
    )


def _azure(location: AzureLocation, client: "ClientConfig") -> AzureStore:
    return AzureStore(
        location.container,
        prefix=location.prefix or None,
        account_name=location.account,
        endpoint=location.endpoint,
        use_emulator=False,
        skip_signature=False,
        client_options=client,
        retry_config=RETRIES,
    )


def _client(
    region: Region, endpoint: str, timeout: float, read_timeout: float | None = None
) -> "ClientConfig":
    options: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=5),
        "timeout": timedelta(seconds=timeout),
    }
    if read_timeout is not None:
        options["read_timeout"] = timedelta(seconds=read_timeout)
    if certificates := _private_certificates(region):
        options["root_certificate"] = certificates
    return options


def _unopened(region: Region, location: S3Location | GoogleLocation | AzureLocation) -> Exception:
    if isinstance(location, GoogleLocation):
        return refused(region, "cannot be opened with these credentials", _GOOGLE_REMEDY)
    if isinstance(location, AzureLocation):
        return refused(region, "cannot be opened with these credentials", _AZURE_REMEDY)
    return refused(
        region,
        "cannot be opened with these certificates",
        "let AWS_CA_BUNDLE (or SSL_CERT_FILE) name a file of PEM certificates",
    )


def _private_certificates(region: Region) -> bytes | None:
    for variable in ("AWS_CA_BUNDLE", "SSL_CERT_FILE"):
        if path := os.environ.get(variable):
            try:
                return Path(path).read_bytes()
            except OSError as error:
                raise unavailable(
                    region,
                    f"needs the certificates in {path} ({error.strerror})",
                    f"correct {variable}",
                ) from None
    return None
