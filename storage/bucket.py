"""A store behind obstore: a bucket of S3, Google Cloud or Azure, or memory."""

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from storage.errors import ObjectChanged, ObjectExists, ObjectMissing, StoreUnavailable
from storage.locations import MemoryLocation, S3Location, parse_store
from storage.open_object import OpenObject
from storage.region import Region
from storage.store import (
    CREDENTIALS_REMEDY,
    Content,
    ObjectInfo,
    checked_name,
    checked_prefix,
    checked_range,
    refused,
    unavailable,
)

if TYPE_CHECKING:
    from obstore import GetOptions, UpdateVersion

    from storage.erasing import Eraser

_PART_BYTES = 8 << 20
_PARTS_AT_ONCE = 4
_PAST_THE_END = ("InvalidRange", "StartTooLarge")

# What the service's code says, what that means, and what to do: asking again would not help.
_REFUSALS = {
    "NoSuchBucket": ("the bucket does not exist", "create it, or correct the URL"),
    "RequestTimeTooSkewed": ("its clock and this one differ", "set this machine's clock"),
    "ExpiredToken": ("the credentials have expired", "renew them"),
    "ExpiredTokenException": ("the credentials have expired", "renew them"),
    "TokenRefreshRequired": ("the credentials have expired", "renew them"),
    "AuthorizationHeaderMalformed": (
        "it is in another cloud region",
        "correct region= in the URL",
    ),
    "PermanentRedirect": ("it is in another cloud region", "correct region= in the URL"),
}

# What obstore's text says, what that means, and what to do.
_CAUSES = (
    ("dns error", "its host name is not known", "correct the endpoint"),
    ("tcp connect error", "nothing answers", "start the service, or correct the endpoint"),
    ("TimedOut", "it does not answer in time", "check the network and the service"),
)

Backend = S3Store | GCSStore | AzureStore | MemoryStore


class Bucket:
    """Objects through obstore. Requests are retried a few times, for a minute at most."""

    def __init__(
        self,
        region: Region,
        reader: Backend,
        writer: Backend,
        credentials_remedy: str = CREDENTIALS_REMEDY,
    ) -> None:
        self._region = region
        self._credentials_remedy = credentials_remedy
        self._reader = reader
        self._writer = writer
        self._eraser: Eraser | None = None

    def put(self, name: str, data: Content, *, overwrite: bool = True) -> None:
        checked_name(name)
        try:
            obstore.put(
                self._writer,
                name,
                # As it is: what it exports tells `Buffers` that it is still read.
                data,
                mode="overwrite" if overwrite else "create",
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS_AT_ONCE,
            )
        except AlreadyExistsError:
            raise ObjectExists(
                f"regions.{self._region.name}.store ({self._region.store}) already has {name}"
            ) from None
        except (BaseError, OSError) as error:
            raise self._refusal(f"cannot write {name}", error) from None

    def get(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        checked_name(name)
        checked_range(start, end)
        with self._reading(name):
            if start == 0 and end is None:
                return bytes(obstore.get(self._reader, name).bytes())
            return self._get_range(name, start, end)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[OpenObject]:
        checked_name(name)
        with self._reading(name):
            content = memoryview(obstore.get(self._reader, name).bytes())
        yield OpenObject(len(content), lambda start, end: content[start:end])

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = checked_prefix(prefix)
        try:
            found = [
                ObjectInfo(item["path"], item["size"])
                for page in obstore.list(self._reader, folder or None)
                for item in page
            ]
        except (BaseError, FileNotFoundError) as error:
            raise self._refusal("cannot be listed", error) from None
        yield from sorted(found)

    def exists(self, name: str) -> bool:
        checked_name(name)
        try:
            obstore.head(self._reader, name)
        except FileNotFoundError:
            return False
        except BaseError as error:
            raise self._refusal(f"cannot look up {name}", error) from None
        return True

    def replace(self, name: str, old: bytes, new: bytes) -> None:
        checked_name(name)
        changed = ObjectChanged(
            f"regions.{self._region.name}.store ({self._region.store}): {name} was changed or "
            "removed meanwhile: run the command again"
        )
        try:
            found = obstore.get(self._reader, name)
            if bytes(found.bytes()) != old:
                raise changed
            # S3 and Azure compare the ETag (If-Match) and write in one step, Google the version.
            seen: UpdateVersion = {"e_tag": found.meta["e_tag"]}
            if found.meta["version"] is not None:
                seen["version"] = found.meta["version"]
            obstore.put(self._writer, name, new, mode=seen)
        except (FileNotFoundError, PreconditionError):
            raise changed from None
        except BaseError as error:
            raise self._refusal(f"cannot replace {name}", error) from None

    def delete(self, name: str) -> None:
        checked_name(name)
        location = parse_store(self._region.store)
        if isinstance(location, S3Location):
            if self._eraser is None:
                from storage.erasing import Eraser

                self._eraser = Eraser(self._region, location)
            self._eraser.erase(name)
        elif isinstance(location, MemoryLocation):
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._reader, name)
        else:
            raise unavailable(
                self._region,
                f"may keep {name} after its removal (old versions, deleted objects): it was left",
                "remove it with every version by that service's own tools, or destroy the wrapping "
                "key, which shreds all that it wrapped",
            )

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise self._missing(name, error) from None
        except BaseError as error:
            raise self._refusal(f"cannot read {name}", error) from None

    def _get_range(self, name: str, start: int, end: int | None) -> bytes:
        if start == end:
            obstore.head(self._reader, name)
            return b""
        options: GetOptions = {"range": {"offset": start} if end is None else (start, end)}
        try:
            return bytes(obstore.get(self._reader, name, options=options).bytes())
        except BaseError as error:
            # A slice that begins at the end or after it is empty; services refuse such a range.
            if any(mark in str(error) for mark in _PAST_THE_END):
                return b""
            raise

    def _missing(self, name: str, error: Exception) -> ObjectMissing | StoreUnavailable:
        if "NoSuchBucket" in str(error):
            return self._refusal(f"cannot read {name}", error)
        return ObjectMissing(
            f"regions.{self._region.name}.store ({self._region.store}) has no {name}"
        )

    def _refusal(self, what: str, error: Exception) -> StoreUnavailable:
        """Say what went wrong in words of our own.

        obstore's text is not handed on, nor chained: it repeats whole answers of the service,
        which for a bad signature hold the request that was signed, session token and all.
        """
        text = str(error)
        named = re.search(r"<Code>(\w{1,64})</Code>", text)
        code = named[1] if named else ""
        if code in _REFUSALS:
            cause, remedy = _REFUSALS[code]
            return refused(self._region, f"{what}: {cause}", remedy)
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            return refused(self._region, f"{what}: access denied", self._credentials_remedy)
        if "InvalidCertificate" in text:
            return refused(
                self._region,
                f"{what}: its certificate is not trusted",
                "name its certificate authority in AWS_CA_BUNDLE or SSL_CERT_FILE",
            )
        for mark, cause, remedy in _CAUSES:
            if mark in text:
                return unavailable(self._region, f"{what}: {cause}", remedy)
        status = re.search(r"status code: (\d{3})", text)
        code = status[1] if status else code or type(error).__name__
        return unavailable(self._region, f"{what} ({code})", "check the service and the URL")
