"""The URLs of stores and wrapping keys, taken apart and checked before anything is opened.

Stores:         file:PATH
                s3://BUCKET[/PREFIX]?region=REGION[&endpoint=URL]
                gs://BUCKET[/PREFIX][?endpoint=URL]
                az://ACCOUNT/CONTAINER[/PREFIX][?endpoint=URL]
                memory:[NAME]
Wrapping keys:  file:PATH
                aws-kms://KEY-ARN[?endpoint=URL]
                vault://HOST[:PORT]/MOUNT/KEY[?tls=false]

A URL never holds a credential. Those come from the environment of the process.
"""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, urlsplit

_AZURE_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_KMS_ARN = re.compile(r"arn:aws[a-z-]*:kms:(?P<region>[a-z0-9-]+):\d{12}:(?:key|alias)/[\w/-]+")


@dataclass(frozen=True, slots=True)
class FileLocation:
    """A directory (store) or a file (wrapping key); relative to the current directory."""

    path: Path


@dataclass(frozen=True, slots=True)
class MemoryLocation:
    """A store that lives and dies with this process."""

    name: str


@dataclass(frozen=True, slots=True)
class S3Location:
    """A bucket, or a prefix within one, behind an S3 endpoint."""

    bucket: str
    prefix: str
    endpoint: str
    region: str


@dataclass(frozen=True, slots=True)
class GoogleLocation:
    """A bucket, or a prefix within one, of Google Cloud Storage."""

    bucket: str
    prefix: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class AzureLocation:
    """A container, or a prefix within one, of Azure Blob Storage."""

    account: str
    container: str
    prefix: str
    endpoint: str


StoreLocation = FileLocation | MemoryLocation | S3Location | GoogleLocation | AzureLocation


@dataclass(frozen=True, slots=True)
class KmsLocation:
    """A single-Region AWS KMS key. `endpoint` is None for AWS itself."""

    key_arn: str
    region: str
    endpoint: str | None


@dataclass(frozen=True, slots=True)
class VaultLocation:
    """A derived key of a transit mount of OpenBao or Vault."""

    url: str
    mount: str
    key: str


def parse_store(url: str) -> StoreLocation:
    """Take a store URL apart. Raises ValueError, whose message repeats no credential."""
    scheme = _scheme(url)
    if scheme == "file":
        return _file_location(url)
    if scheme == "memory":
        return MemoryLocation(url.removeprefix("memory:").lstrip("/"))
    if scheme == "s3":
        return _s3_location(url)
    if scheme == "gs":
        return _google_location(url)
    if scheme == "az":
        return _azure_location(url)
    raise ValueError(
        f"unknown store scheme {scheme!r}: use file:PATH, "
        "s3://BUCKET/PREFIX?region=REGION&endpoint=URL, gs://BUCKET/PREFIX, "
        "az://ACCOUNT/CONTAINER/PREFIX or memory:"
    )


def parse_wrapping_key(url: str) -> FileLocation | KmsLocation | VaultLocation:
    """Take a wrapping-key URL apart. Raises ValueError, whose message repeats no credential."""
    scheme = _scheme(url)
    if scheme == "file":
        return _file_location(url)
    if scheme == "aws-kms":
        return _kms_location(url)
    if scheme == "vault":
        return _vault_location(url)
    raise ValueError(
        f"unknown wrapping-key scheme {scheme!r}: use file:PATH, aws-kms://KEY-ARN or "
        "vault://HOST:PORT/MOUNT/KEY"
    )


def _scheme(url: str) -> str:
    scheme, colon, _ = url.partition(":")
    if not colon:
        raise ValueError("a URL must begin with its scheme, for example file:.convoy/stores/eu")
    return scheme


def _file_location(url: str) -> FileLocation:
    path = url.removeprefix("file:")
    if path.startswith("//"):
        path = path.removeprefix("//")
        if not path.startswith("/"):
            raise ValueError("file: URLs name no host: use file:PATH or file:///PATH")
    if not path:
        raise ValueError("file: needs a path, for example file:.convoy/stores/eu")
    return FileLocation(Path(path))


def _s3_location(url: str) -> S3Location:
    parts = urlsplit(url)
    query = _query(parts.query, allowed={"endpoint", "region"})
    _refuse_credentials(parts)
    if not parts.netloc:
        raise ValueError("s3:// needs a bucket: s3://BUCKET/PREFIX?region=REGION")
    region, endpoint = query.get("region"), query.get("endpoint")
    if endpoint is None:
        if region is None:
            raise ValueError("s3:// needs ?region=REGION, or ?endpoint=URL of another S3 service")
        # The URL alone says where bytes go: AWS_ENDPOINT_URL of a shell must not move them.
        suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        endpoint = f"https://s3.{region}.{suffix}"
    else:
        _checked_endpoint(endpoint)
    return S3Location(
        bucket=parts.netloc,
        prefix=parts.path.strip("/"),
        endpoint=endpoint,
        region=region or "us-east-1",
    )


def _google_location(url: str) -> GoogleLocation:
    parts = urlsplit(url)
    endpoint = _query(parts.query, allowed={"endpoint"}).get("endpoint")
    _refuse_credentials(parts)
    if not parts.netloc:
        raise ValueError("gs:// needs a bucket: gs://BUCKET/PREFIX")
    if endpoint is not None:
        _checked_endpoint(endpoint)
    return GoogleLocation(
        bucket=parts.netloc,
        prefix=parts.path.strip("/"),
        # The URL alone says where bytes go: a variable of a shell must not move them.
        endpoint=endpoint or "https://storage.googleapis.com",
    )


def _azure_location(url: str) -> AzureLocation:
    parts = urlsplit(url)
    endpoint = _query(parts.query, allowed={"endpoint"}).get("endpoint")
    _refuse_credentials(parts)
    container, _, prefix = parts.path.strip("/").partition("/")
    if not _AZURE_ACCOUNT.fullmatch(parts.netloc) or not container:
        raise ValueError("az:// needs an account and a container: az://ACCOUNT/CONTAINER/PREFIX")
    if endpoint is not None:
        _checked_endpoint(endpoint)
    return AzureLocation(
        account=parts.netloc,
        container=container,
        prefix=prefix,
        endpoint=endpoint or f"https://{parts.netloc}.blob.core.windows.net",
    )


def _kms_location(url: str) -> KmsLocation:
    arn, _, query_text = url.removeprefix("aws-kms://").partition("?")
    matched = _KMS_ARN.fullmatch(arn)
    if matched is None:
        raise ValueError(
            "aws-kms:// needs the full ARN of a key: "
            "aws-kms://arn:aws:kms:eu-west-1:111122223333:key/KEY-ID"
        )
    if ":key/mrk-" in arn:
        raise ValueError(
            "a multi-Region key (mrk-) can be replicated out of its jurisdiction: "
            "use a single-Region KMS key"
        )
    endpoint = _query(query_text, allowed={"endpoint"}).get("endpoint")
    if endpoint is not None:
        parts = _checked_endpoint(endpoint)
        _refuse_open_line(parts, tls=parts.scheme == "https")
    return KmsLocation(key_arn=arn, region=matched["region"], endpoint=endpoint)


def _vault_location(url: str) -> VaultLocation:
    parts = urlsplit(url)
    query = _query(parts.query, allowed={"tls"})
    _refuse_credentials(parts)
    mount, _, key = parts.path.strip("/").rpartition("/")
    if not (parts.hostname and mount and key):
        raise ValueError("vault:// needs host, mount and key: vault://HOST:PORT/MOUNT/KEY")
    tls = query.get("tls", "true")
    if tls not in ("true", "false"):
        raise ValueError("tls must be true or false")
    _refuse_open_line(parts, tls=tls == "true")
    scheme = "https" if tls == "true" else "http"
    return VaultLocation(url=f"{scheme}://{parts.netloc}", mount=mount, key=key)


def _query(text: str, allowed: set[str]) -> dict[str, str]:
    pairs = parse_qsl(text, keep_blank_values=True)
    unknown = sorted({key for key, _ in pairs} - allowed)
    if unknown:
        raise ValueError(f"unknown URL parameter {unknown[0]!r}: known are {sorted(allowed)}")
    if len(pairs) != len(dict(pairs)):
        raise ValueError("a URL parameter is given twice")
    return dict(pairs)


def _checked_endpoint(endpoint: str) -> SplitResult:
    parts = urlsplit(endpoint)
    _refuse_credentials(parts)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ValueError("endpoint must be a plain http:// or https:// URL")
    return parts


def _refuse_credentials(parts: SplitResult) -> None:
    if "@" in parts.netloc:
        raise ValueError(
            "a URL must not hold a credential: remove it and set the usual variables of the "
            "environment instead (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, VAULT_TOKEN)"
        )


def _refuse_open_line(parts: SplitResult, *, tls: bool) -> None:
    """A data key travels in the clear inside TLS, so without TLS only within this machine."""
    if tls:
        return
    host = parts.hostname or ""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback:
        raise ValueError(
            "a key service without TLS is allowed on this machine (127.0.0.1) alone: data keys "
            "would travel in the clear"
        )
