"""A region: a place that may hold sealed objects, and the wrapping key that stays there."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from storage.locations import S3Location, parse_store, parse_wrapping_key


class Claims(BaseModel):
    """What a region claims of its bucket and key; `storage.claims` compares it with the truth."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    locations: tuple[str, ...] = ()
    """Cloud regions that lie in the jurisdiction, for example eu-central-1: bucket, replicas and
    keys must. When empty: the one in the store's URL."""
    owner: str | None = Field(default=None, pattern=r"^\d{12}$")
    """Account that must own the bucket."""
    encryption: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """How the bucket must encrypt what is put; null: any way or none, for objects are sealed."""
    versioning: Literal["Enabled", "Suspended", "Off"] | None = None
    """What the bucket's versioning must be; null: any."""
    require_checks: bool = False
    """Refuse what the service does not let be checked; false: only report it."""


class Region(BaseModel):
    """A named place in one jurisdiction, its object store and its wrapping key.

    The forms of the two URLs are listed in `storage.locations`. They hold no credential, and a
    value that is refused is not repeated in the error, for it may hold one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=63)
    jurisdiction: str = Field(min_length=1)
    """Whose law holds there."""
    store: str
    """URL of its object store: file:, s3://, gs:// or az://."""
    wrapping_key: str
    """URL of the key that wraps its data keys: file:, aws-kms:// or vault://."""
    claims: Claims = Claims()

    @field_validator("store")
    @classmethod
    def _check_store_url(cls, url: str) -> str:
        parse_store(url)
        return url

    @field_validator("wrapping_key")
    @classmethod
    def _check_wrapping_key_url(cls, url: str) -> str:
        parse_wrapping_key(url)
        return url

    @model_validator(mode="after")
    def _check_claims(self) -> "Region":
        location, claimed = parse_store(self.store), self.claims.locations
        if isinstance(location, S3Location) and claimed and location.region not in claimed:
            raise ValueError(
                f"claims.locations has no {location.region}, the region of the store's URL: "
                "correct one of them"
            )
        return self
