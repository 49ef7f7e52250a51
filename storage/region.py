"""A region: a place that may hold sealed objects, and the wrapping key that stays there."""

from pydantic import BaseModel, ConfigDict, Field, field_validator

from storage.locations import parse_store, parse_wrapping_key


class Region(BaseModel):
    """A named place in one jurisdiction, its object store and its wrapping key.

    The forms of the two URLs are listed in `storage.locations`. They hold no credential, and a
    value that is refused is not repeated in the error, for it may hold one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=63)
    jurisdiction: str = Field(min_length=1)
    store: str
    wrapping_key: str

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
