"""What a bucket and a key are, against what their region claims: asked before any byte moves."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from pydantic import ValidationError

from storage.claims import ClaimCheck, check_claims
from storage.errors import ClaimRefuted, StoreRefused, StoreUnavailable
from storage.region import Claims, Region
from tests.servers import ACCOUNT, MotoServer
from tests.storage.conftest import file_region
from tests.storage.fault_proxy import FaultProxy, Refusal, Request, fault_proxy

HERE, ELSEWHERE = "eu-central-1", "us-west-2"


@pytest.fixture
def aws(aws_server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> MotoServer:
    for name, value in aws_server.environment.items():
        monkeypatch.setenv(name, value)
    return aws_server


@pytest.fixture
def proxy(aws: MotoServer) -> Iterator[FaultProxy]:
    with fault_proxy(aws.endpoint) as proxy:
        yield proxy


class Bucket:
    """A bucket in the imitation of AWS."""

    def __init__(self, server: MotoServer, place: str) -> None:
        self.name = f"convoy-{uuid.uuid4().hex}"
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            region_name=place,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )
        self.client.create_bucket(
            Bucket=self.name, CreateBucketConfiguration={"LocationConstraint": place}
        )

    def replicate(self, target: "Bucket", status: str = "Enabled") -> None:
        for bucket in (self, target):
            bucket.client.put_bucket_versioning(
                Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"}
            )
        rule = {
            "ID": "copy",
            "Priority": 1,
            "Status": status,
            "Filter": {},
            "DeleteMarkerReplication": {"Status": "Disabled"},
            "Destination": {"Bucket": f"arn:aws:s3:::{target.name}"},
        }
        self.client.put_bucket_replication(
            Bucket=self.name,
            ReplicationConfiguration={"Role": f"arn:aws:iam::{ACCOUNT}:role/r", "Rules": [rule]},
        )


def region_on(bucket: Bucket, endpoint: str, tmp_path: Path, **claims: Any) -> Region:
    store = f"s3://{bucket.name}/data?region={HERE}&endpoint={endpoint}"
    return file_region(tmp_path).model_copy(update={"store": store, "claims": Claims(**claims)})


def verdicts(checks: tuple[ClaimCheck, ...]) -> dict[str, tuple[str, str]]:
    return {check.subject: (check.verdict, check.found) for check in checks}


def test_a_bucket_that_is_as_claimed(aws: MotoServer, tmp_path: Path) -> None:
    region = region_on(Bucket(aws, HERE), aws.endpoint, tmp_path, versioning="Off")
    assert verdicts(check_claims(region)) == {
        "location": ("as claimed", f"the bucket is in {HERE}"),
        "public access": ("as claimed", "no policy or ACL makes it public"),
        "replication": ("as claimed", "none"),
        "encryption": ("not claimed", "none"),
        "versioning": ("as claimed", "Off"),
    }


def test_a_bucket_elsewhere_is_refused_before_any_byte(
    aws: MotoServer, proxy: FaultProxy, tmp_path: Path
) -> None:
    region = region_on(Bucket(aws, ELSEWHERE), proxy.endpoint, tmp_path)
    with pytest.raises(ClaimRefuted) as refused:
        check_claims(region)
    assert f"location: the bucket is in {ELSEWHERE}, and the region claims {HERE}" in str(
        refused.value
    )
    assert str(refused.value).startswith("regions.eu (s3://convoy-")
    assert {request.method for request in proxy.take()} <= {"GET", "HEAD"}


def test_places_of_one_jurisdiction_may_be_several(aws: MotoServer, tmp_path: Path) -> None:
    region = region_on(
        Bucket(aws, "eu-west-1"), aws.endpoint, tmp_path, locations=(HERE, "eu-west-1")
    )
    assert verdicts(check_claims(region))["location"][0] == "as claimed"


def test_a_bucket_of_someone_else_is_refused(
    aws: MotoServer, proxy: FaultProxy, tmp_path: Path
) -> None:
    """moto does not look at the expected owner; the proxy does, as AWS would."""
    bucket, theirs = Bucket(aws, HERE), "999999999999"

    def look(request: Request) -> Refusal | None:
        expected = request.headers.get("x-amz-expected-bucket-owner", ACCOUNT)
        return None if expected == ACCOUNT else Refusal(403, "AccessDenied")

    proxy.fault = look
    region = region_on(bucket, proxy.endpoint, tmp_path, owner=theirs)
    with pytest.raises(ClaimRefuted, match=f"owner: the bucket is not account {theirs}'s"):
        check_claims(region)
    region = region_on(bucket, proxy.endpoint, tmp_path, owner=ACCOUNT)
    assert verdicts(check_claims(region))["owner"] == ("as claimed", f"account {ACCOUNT}")


def test_a_service_that_ignores_owners_proves_nothing(aws: MotoServer, tmp_path: Path) -> None:
    region = region_on(Bucket(aws, HERE), aws.endpoint, tmp_path, owner=ACCOUNT)
    assert verdicts(check_claims(region))["owner"] == (
        "not checked",
        "the service does not know bucket owners",
    )
    region = region_on(
        Bucket(aws, HERE), aws.endpoint, tmp_path, owner=ACCOUNT, require_checks=True
    )
    with pytest.raises(ClaimRefuted, match=r"owner: the service does not know.*require_checks"):
        check_claims(region)


def test_a_replicated_bucket_is_refused_unless_the_copy_is_inside(
    aws: MotoServer, tmp_path: Path
) -> None:
    bucket, outside, inside = Bucket(aws, HERE), Bucket(aws, ELSEWHERE), Bucket(aws, HERE)
    region = region_on(bucket, aws.endpoint, tmp_path)
    bucket.replicate(outside)
    with pytest.raises(ClaimRefuted, match=f"replication: it is copied to {outside.name} in us-we"):
        check_claims(region)
    bucket.replicate(outside, status="Disabled")
    assert verdicts(check_claims(region))["replication"] == ("as claimed", "none")
    bucket.replicate(inside)
    assert verdicts(check_claims(region))["replication"] == ("as claimed", f"within {HERE}")
    inside.client.delete_bucket(Bucket=inside.name)
    with pytest.raises(ClaimRefuted, match=f"copied to {inside.name}, whose place is unknown"):
        check_claims(region)


@pytest.mark.parametrize("how", ["policy", "acl"])
def test_a_public_bucket_is_refused_until_it_is_blocked(
    aws: MotoServer, how: str, tmp_path: Path
) -> None:
    bucket = Bucket(aws, HERE)
    if how == "policy":
        statement = {
            "Effect": "Allow",
            "Principal": "*",
            "Action": "s3:GetObject",
            "Resource": f"arn:aws:s3:::{bucket.name}/*",
        }
        policy = {"Version": "2012-10-17", "Statement": [statement]}
        bucket.client.put_bucket_policy(Bucket=bucket.name, Policy=json.dumps(policy))
    else:
        bucket.client.put_bucket_acl(Bucket=bucket.name, ACL="public-read")
    region = region_on(bucket, aws.endpoint, tmp_path)
    with pytest.raises(ClaimRefuted, match=r"public access: its (policy|ACL) makes it public"):
        check_claims(region)
    blocks = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
    bucket.client.put_public_access_block(
        Bucket=bucket.name, PublicAccessBlockConfiguration=dict.fromkeys(blocks, True)
    )
    assert verdicts(check_claims(region))["public access"] == ("as claimed", "blocked")


def test_encryption_and_versioning_are_compared(aws: MotoServer, tmp_path: Path) -> None:
    bucket = Bucket(aws, HERE)
    claims = {"encryption": "aws:kms", "versioning": "Enabled"}
    region = region_on(bucket, aws.endpoint, tmp_path, **claims)
    with pytest.raises(ClaimRefuted, match="encryption: none; versioning: Off"):
        check_claims(region)
    bucket.client.put_bucket_versioning(
        Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"}
    )
    encrypt(bucket, f"arn:aws:kms:{HERE}:{ACCOUNT}:key/1")
    assert {check.verdict for check in check_claims(region)} == {"as claimed"}
    encrypt(bucket, f"arn:aws:kms:{ELSEWHERE}:{ACCOUNT}:key/1")
    with pytest.raises(ClaimRefuted, match=f"encryption: its key is in {ELSEWHERE}"):
        check_claims(region)
    encrypt(bucket, f"arn:aws:kms:{HERE}:{ACCOUNT}:key/mrk-1")
    with pytest.raises(ClaimRefuted, match="encryption: its key is a multi-Region key"):
        check_claims(region)


def encrypt(bucket: Bucket, key: str) -> None:
    default = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key}
    bucket.client.put_bucket_encryption(
        Bucket=bucket.name,
        ServerSideEncryptionConfiguration={
            "Rules": [{"ApplyServerSideEncryptionByDefault": default}]
        },
    )


def test_a_wrapping_key_elsewhere_is_refused(aws: MotoServer, tmp_path: Path) -> None:
    region = region_on(Bucket(aws, HERE), aws.endpoint, tmp_path)
    here = region.model_copy(update={"wrapping_key": aws.wrapping_key_url(HERE)})
    found = verdicts(check_claims(here))["key"]
    assert found == ("as claimed", f"a single-Region key in {HERE}")
    elsewhere = region.model_copy(update={"wrapping_key": aws.wrapping_key_url(ELSEWHERE)})
    with pytest.raises(ClaimRefuted, match=f"key: it is in {ELSEWHERE}, and the region claims"):
        check_claims(elsewhere)


def test_an_alias_of_a_multi_region_key_is_refused(aws: MotoServer, tmp_path: Path) -> None:
    key = aws.client(HERE).create_key(MultiRegion=True)["KeyMetadata"]
    alias = f"alias/{uuid.uuid4().hex}"
    aws.client(HERE).create_alias(AliasName=alias, TargetKeyId=key["KeyId"])
    url = f"aws-kms://arn:aws:kms:{HERE}:{ACCOUNT}:{alias}?endpoint={aws.endpoint}"
    region = region_on(Bucket(aws, HERE), aws.endpoint, tmp_path)
    with pytest.raises(ClaimRefuted, match="key: it is a multi-Region key"):
        check_claims(region.model_copy(update={"wrapping_key": url}))


def test_what_may_not_be_asked_is_not_taken_for_proof(
    aws: MotoServer, proxy: FaultProxy, tmp_path: Path
) -> None:
    def deny(request: Request) -> Refusal | None:
        return Refusal(403, "AccessDenied") if "?" in request.path else None

    proxy.fault = deny
    checks = verdicts(check_claims(region_on(Bucket(aws, HERE), proxy.endpoint, tmp_path)))
    assert checks.pop("location")[0] == "as claimed"
    assert {verdict for verdict, _ in checks.values()} == {"not checked"}
    assert checks["replication"][1] == "it may not be asked (get_bucket_replication: AccessDenied)"


def test_another_s3_service_answers_what_it_knows(s3_region: Region) -> None:
    checks = verdicts(check_claims(s3_region))
    assert checks["location"] == ("not checked", "the service names no location")
    assert checks["replication"] == ("as claimed", "none")
    strict = s3_region.model_copy(update={"claims": Claims(require_checks=True)})
    with pytest.raises(ClaimRefuted, match="location: the service names no location"):
        check_claims(strict)


def test_a_missing_bucket_and_one_that_is_closed_to_us_are_told_apart(
    aws: MotoServer, proxy: FaultProxy, tmp_path: Path
) -> None:
    region = region_on(Bucket(aws, HERE), proxy.endpoint, tmp_path)
    missing = f"s3://no-such-bucket?region={HERE}&endpoint={proxy.endpoint}"
    with pytest.raises(StoreRefused, match="the bucket does not exist"):
        check_claims(region.model_copy(update={"store": missing}))
    proxy.take()
    proxy.fault = lambda request: Refusal(403, "AccessDenied")
    with pytest.raises(StoreRefused, match=r"access denied .* not somebody else's"):
        check_claims(region)
    assert len(proxy.take()) == 1


def test_a_service_that_is_down_is_named(aws: MotoServer, region: Region) -> None:
    down = region.model_copy(update={"store": "s3://convoy-eu?endpoint=http://127.0.0.1:1"})
    with pytest.raises(StoreUnavailable, match=r"regions\.eu\.store .* nothing answers"):
        check_claims(down)


def test_a_directory_claims_nothing_and_can_prove_nothing(region: Region) -> None:
    assert check_claims(region) == ()
    claimed = region.model_copy(update={"claims": Claims(locations=(HERE,))})
    assert verdicts(check_claims(claimed)) == {
        "location": ("not checked", "a file: store is not asked")
    }


def test_a_region_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"claims\.locations has no us-west-2"):
        Region.model_validate(
            {
                "name": "eu",
                "jurisdiction": "EU",
                "store": "s3://bucket?region=us-west-2",
                "wrapping_key": "file:key",
                "claims": {"locations": ["eu-central-1"]},
            }
        )
