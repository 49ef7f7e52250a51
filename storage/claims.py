"""What a region claims to be, compared with what its bucket and its key are.

Asked before any byte moves. What a service does not answer is never taken for proof: it is
reported as not checked, and refused where `claims.require_checks` is true.
"""

from typing import Literal

from pydantic import BaseModel

from storage.errors import ClaimRefuted
from storage.locations import (
    AzureLocation,
    GoogleLocation,
    KmsLocation,
    S3Location,
    parse_store,
    parse_wrapping_key,
)
from storage.region import Claims, Region

Subject = Literal[
    "location", "owner", "public access", "replication", "encryption", "versioning", "key"
]


class ClaimCheck(BaseModel, frozen=True, extra="forbid"):
    """One thing that was looked at."""

    subject: Subject
    verdict: Literal["as claimed", "not claimed", "not checked", "refuted"]
    found: str
    """What the service says, or why it is not known."""


def check_claims(region: Region) -> tuple[ClaimCheck, ...]:
    """Ask the services what bucket and key really are.

    Raises ClaimRefuted, naming everything that is not as claimed, and StoreUnavailable or
    KeyringError when the services cannot be asked.
    """
    checks: list[ClaimCheck] = []
    store, key = parse_store(region.store), parse_wrapping_key(region.wrapping_key)
    locations = region.claims.locations
    if isinstance(store, S3Location):
        from storage.bucket_control import check_bucket

        locations = locations or (store.region,)
        checks += check_bucket(region, store, locations)
    elif isinstance(store, GoogleLocation | AzureLocation) or region.claims != Claims():
        scheme = region.store.partition(":")[0]
        checks.append(not_checked("location", f"a {scheme}: store is not asked"))
    if isinstance(key, KmsLocation):
        from storage.key_control import check_key

        checks.append(check_key(region, key, locations))
    _refuse(region, checks)
    return tuple(checks)


def not_checked(subject: Subject, why: str) -> ClaimCheck:
    """Build the verdict on what is not known."""
    return ClaimCheck(subject=subject, verdict="not checked", found=why)


def judge(subject: Subject, found: str, is_claimed: bool | None) -> ClaimCheck:
    """Build the verdict on what is known; None where nothing is claimed."""
    if is_claimed is None:
        return ClaimCheck(subject=subject, verdict="not claimed", found=found)
    verdict: Literal["as claimed", "refuted"] = "as claimed" if is_claimed else "refuted"
    return ClaimCheck(subject=subject, verdict=verdict, found=found)


def _refuse(region: Region, checks: list[ClaimCheck]) -> None:
    refuted = [check for check in checks if check.verdict == "refuted"]
    unknown = [check for check in checks if check.verdict == "not checked"]
    if region.claims.require_checks:
        refuted += unknown
    if not refuted:
        return
    listed = "; ".join(f"{check.subject}: {check.found}" for check in refuted)
    remedy = "use another bucket or key, or correct the region in params.yaml"
    if refuted == unknown:
        remedy = "let it be asked, or set claims.require_checks to false"
    raise ClaimRefuted(
        f"regions.{region.name} ({region.store}) is not what it claims to be, and nothing was sent "
        f"there. {listed}. See regions.{region.name}.claims in docs/residency.md: {remedy}"
    )
