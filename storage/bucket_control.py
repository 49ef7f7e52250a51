"""What an S3 bucket really is: location, owner, public access, replication, encryption, versioning.

The principal needs s3:GetBucketLocation, s3:ListBucket, s3:GetBucketPublicAccessBlock,
s3:GetBucketPolicyStatus, s3:GetBucketAcl, s3:GetReplicationConfiguration,
s3:GetEncryptionConfiguration and s3:GetBucketVersioning; what it may not ask is not checked.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from storage.claims import ClaimCheck, judge, not_checked
from storage.errors import StoreUnavailable
from storage.locations import S3Location
from storage.region import Region
from storage.store import CREDENTIALS_REMEDY, refused, unavailable

_CONFIG = Config(
    retries={"mode": "standard", "total_max_attempts": 4},
    connect_timeout=5,
    read_timeout=10,
    s3={"addressing_style": "path"},
    # The URL alone says which service has the bucket: AWS_ENDPOINT_URL of a shell must not.
    ignore_configured_endpoint_urls=True,
)
_NOBODY = "000000000000"

# What a service answers where nothing is configured.
_ABSENT = {
    "NoSuchPublicAccessBlockConfiguration",
    "NoSuchBucketPolicy",
    "ReplicationConfigurationNotFoundError",
    "ServerSideEncryptionConfigurationNotFoundError",
}
_EVERYBODY = (
    "http://acs.amazonaws.com/groups/global/AllUsers",
    "http://acs.amazonaws.com/groups/global/AuthenticatedUsers",
)
_BLOCKS = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")

Answer = Mapping[str, Any]


def check_bucket(
    region: Region, location: S3Location, locations: tuple[str, ...]
) -> Iterator[ClaimCheck]:
    """Yield what the service says of the bucket against what the region claims.

    `locations` are the cloud regions where bucket, replicas and keys may be. Raises
    StoreUnavailable when the service cannot be asked at all.
    """
    control = _Control(region, location)
    yield _check_location(control, locations)
    if region.claims.owner is not None:
        yield _check_owner(control, region.claims.owner)
    yield _check_public_access(control)
    yield _check_replication(control, locations)
    yield _check_encryption(control, region.claims.encryption, locations)
    yield _check_versioning(control, region.claims.versioning)


class _Control:
    """Questions to the S3 service about one bucket."""

    def __init__(self, region: Region, location: S3Location) -> None:
        self._region = region
        self._location = location
        self.is_aws = _is_aws(location.endpoint)
        try:
            # A session of its own: the default one keeps the first credentials that it found.
            self._client = boto3.Session().client(
                "s3",
                region_name=location.region,
                endpoint_url=location.endpoint,
                verify=os.environ.get("AWS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE"),
                config=_CONFIG,
            )
        except BotoCoreError as error:
            raise self._unreachable(error) from None

    def ask(self, verb: str, **request: str) -> Answer | str:
        """The answer, empty where nothing is configured; or why there is none."""
        try:
            answer: Answer = self._call(verb, **request)
        except ClientError as error:
            code, status = _code(error)
            if code in _ABSENT:
                return {}
            if status == 403:
                return f"it may not be asked ({verb}: {code})"
            return f"the service does not say ({verb}: {code})"
        return answer

    def find_location(self, bucket: str | None = None) -> str | None:
        """The cloud region of a bucket, or None where the service does not say."""
        try:
            found = self._call("head_bucket", bucket).get("BucketRegion")
        except ClientError as error:
            code, status = _code(error)
            headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})
            found = headers.get("x-amz-bucket-region")
            if found is None and bucket is None:
                raise self._refusal(code, status) from None
        if found:
            return str(found)
        try:
            answer = self._call("get_bucket_location", bucket)
        except ClientError:
            return None
        # AWS leaves out the name of its first region, and other services leave out all of them.
        constraint = answer.get("LocationConstraint") or ("us-east-1" if self.is_aws else None)
        return "eu-west-1" if constraint == "EU" else constraint

    def is_owned_by(self, owner: str) -> bool:
        """Whether the service lets us in under the condition that the bucket is this account's."""
        try:
            self._call("head_bucket", ExpectedBucketOwner=owner)
        except ClientError as error:
            if _code(error)[1] == 403:
                return False
            raise self._refusal(*_code(error)) from None
        return True

    def _call(self, verb: str, bucket: str | None = None, **request: str) -> Answer:
        try:
            answer: Answer = getattr(self._client, verb)(
                Bucket=bucket or self._location.bucket, **request
            )
        except BotoCoreError as error:
            raise self._unreachable(error) from None
        return answer

    def _refusal(self, code: str, status: int) -> StoreUnavailable:
        if status == 404:
            return refused(
                self._region, "the bucket does not exist", "create it, or correct the URL"
            )
        if status == 403:
            return refused(
                self._region,
                f"access denied ({code})",
                f"{CREDENTIALS_REMEDY}, and that it is not somebody else's",
            )
        return unavailable(self._region, f"cannot be asked ({code})", "check the service")

    def _unreachable(self, error: BotoCoreError) -> StoreUnavailable:
        # The class name alone: the text of some of these errors repeats what was sent.
        kind = type(error).__name__
        if kind in ("NoCredentialsError", "PartialCredentialsError"):
            return refused(self._region, "finds no AWS credentials", CREDENTIALS_REMEDY)
        if kind == "SSLError":
            return refused(
                self._region,
                "its certificate is not trusted",
                "name its certificate authority in AWS_CA_BUNDLE or SSL_CERT_FILE",
            )
        return unavailable(
            self._region,
            f"nothing answers ({kind})",
            "start the service, check the network, or correct the endpoint",
        )


def _check_location(control: _Control, locations: tuple[str, ...]) -> ClaimCheck:
    found = control.find_location()
    if found is None:
        return not_checked("location", "the service names no location")
    return judge("location", _where("the bucket is", found, locations), found in locations)


def _check_owner(control: _Control, owner: str) -> ClaimCheck:
    if not control.is_owned_by(owner):
        return judge("owner", f"the bucket is not account {owner}'s", False)
    # A service that ignores the condition would let in under any.
    if control.is_owned_by(_NOBODY):
        return not_checked("owner", "the service does not know bucket owners")
    return judge("owner", f"account {owner}", True)


def _check_public_access(control: _Control) -> ClaimCheck:
    block = control.ask("get_public_access_block")
    policy, acl = control.ask("get_bucket_policy_status"), control.ask("get_bucket_acl")
    blocks: Answer = {} if isinstance(block, str) else block
    blocks = blocks.get("PublicAccessBlockConfiguration", {})
    if all(blocks.get(name) for name in _BLOCKS):
        return judge("public access", "blocked", True)
    if not isinstance(policy, str):
        is_public = policy.get("PolicyStatus", {}).get("IsPublic", False)
        if is_public and not blocks.get("RestrictPublicBuckets"):
            return judge("public access", "its policy makes it public", False)
    if not isinstance(acl, str):
        grantees = [grant["Grantee"].get("URI") for grant in acl.get("Grants", ())]
        if set(grantees) & set(_EVERYBODY) and not blocks.get("IgnorePublicAcls"):
            return judge("public access", "its ACL makes it public", False)
    unknown = [answer for answer in (policy, acl) if isinstance(answer, str)]
    if unknown:
        return not_checked("public access", unknown[0])
    return judge("public access", "no policy or ACL makes it public", True)


def _check_replication(control: _Control, locations: tuple[str, ...]) -> ClaimCheck:
    answer = control.ask("get_bucket_replication")
    if isinstance(answer, str):
        return not_checked("replication", answer)
    rules = answer.get("ReplicationConfiguration", {}).get("Rules", ())
    places: list[str] = []
    for rule in rules:
        if rule.get("Status") != "Enabled":
            continue
        bucket = rule["Destination"]["Bucket"].rpartition(":")[2]
        place = control.find_location(bucket)
        if place is None:
            return judge("replication", f"it is copied to {bucket}, whose place is unknown", False)
        if place not in locations:
            what = _where(f"it is copied to {bucket}", place, locations)
            return judge("replication", what, False)
        places.append(place)
    return judge(
        "replication", f"within {', '.join(sorted(set(places)))}" if places else "none", True
    )


def _check_encryption(
    control: _Control, claimed: str | None, locations: tuple[str, ...]
) -> ClaimCheck:
    answer = control.ask("get_bucket_encryption")
    if isinstance(answer, str):
        return not_checked("encryption", answer)
    algorithms: list[str] = []
    for rule in answer.get("ServerSideEncryptionConfiguration", {}).get("Rules", ()):
        default = rule.get("ApplyServerSideEncryptionByDefault", {})
        algorithms.append(default.get("SSEAlgorithm", "unknown"))
        key = default.get("KMSMasterKeyID", "")
        if key.startswith("arn:") and (place := key.split(":")[3]) not in locations:
            return judge("encryption", _where("its key is", place, locations), False)
        if "mrk-" in key:
            return judge("encryption", "its key is a multi-Region key", False)
    found = ", ".join(algorithms) or "none"
    return judge("encryption", found, None if claimed is None else found == claimed)


def _check_versioning(control: _Control, claimed: str | None) -> ClaimCheck:
    answer = control.ask("get_bucket_versioning")
    if isinstance(answer, str):
        return not_checked("versioning", answer)
    found = answer.get("Status", "Off")
    return judge("versioning", found, None if claimed is None else found == claimed)


def _where(what: str, place: str, locations: tuple[str, ...]) -> str:
    if place in locations:
        return f"{what} in {place}"
    return f"{what} in {place}, and the region claims {' or '.join(locations)}"


def _is_aws(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _code(error: ClientError) -> tuple[str, int]:
    answer = error.response
    return (
        answer.get("Error", {}).get("Code", "unknown error"),
        answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0),
    )
