"""The OpenBao and Vault keyring: a data key is made and unwrapped by a derived transit key.

The token comes from VAULT_TOKEN or BAO_TOKEN and needs `update` on MOUNT/datakey/plaintext/KEY and
MOUNT/decrypt/KEY, and to rotate on MOUNT/rewrap/KEY. A private certificate authority is named by
VAULT_CACERT, BAO_CACERT or SSL_CERT_FILE. The key must be made with derived=true, or it ignores
the context: `check_keyring` finds out.
"""

import base64
import os
from collections.abc import Callable
from typing import Any

import hvac
import requests
from hvac.exceptions import Forbidden, InvalidPath, InvalidRequest, VaultDown, VaultError
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from storage.canonical import canonical_json
from storage.errors import KeyringError
from storage.keyring import DataKey, EncryptionContext, keyring_error
from storage.locations import VaultLocation
from storage.region import Region

_TIMEOUT_SECONDS = 10
_RETRIES = Retry(
    total=3,
    backoff_factor=0.2,
    status_forcelist=(502, 503, 504),
    allowed_methods=None,
    raise_on_status=False,
)


class VaultKeyring:
    """A wrapping key in the transit engine of OpenBao or Vault."""

    def __init__(self, region: Region, location: VaultLocation) -> None:
        self._region = region
        self._location = location
        token = os.environ.get("VAULT_TOKEN") or os.environ.get("BAO_TOKEN")
        if not token:
            raise self._error("needs a token", "set VAULT_TOKEN or BAO_TOKEN")
        session = requests.Session()
        session.mount("https://", HTTPAdapter(max_retries=_RETRIES))
        session.mount("http://", HTTPAdapter(max_retries=_RETRIES))
        session.verify = _certificate_authority() or True
        self._client = hvac.Client(
            location.url, token=token, session=session, timeout=_TIMEOUT_SECONDS
        )

    def generate(self, context: EncryptionContext) -> DataKey:
        answer = self._call(
            self._client.secrets.transit.generate_data_key,
            name=self._location.key,
            key_type="plaintext",
            context=_encoded(context),
            mount_point=self._location.mount,
        )
        return DataKey(base64.b64decode(answer["plaintext"]), answer["ciphertext"].encode())

    def unwrap(self, wrapped: bytes, context: EncryptionContext) -> bytes:
        answer = self._call(
            self._client.secrets.transit.decrypt_data,
            name=self._location.key,
            ciphertext=self._ciphertext(wrapped),
            context=_encoded(context),
            mount_point=self._location.mount,
        )
        return base64.b64decode(answer["plaintext"])

    def rewrap(self, wrapped: bytes, context: EncryptionContext) -> bytes:
        # The data key does not leave the service.
        answer = self._call(
            self._client.secrets.transit.rewrap_data,
            name=self._location.key,
            ciphertext=self._ciphertext(wrapped),
            context=_encoded(context),
            mount_point=self._location.mount,
        )
        return answer["ciphertext"].encode()

    def _ciphertext(self, wrapped: bytes) -> str:
        try:
            return wrapped.decode("ascii")
        except UnicodeDecodeError:
            raise self._error("did not wrap this data key", "restore the key envelope") from None

    def _call(self, verb: Callable[..., Any], **request: str) -> dict[str, str]:
        try:
            answer: dict[str, str] = verb(**request)["data"]
        except Forbidden:
            raise self._error(
                "refuses this token", "renew VAULT_TOKEN, or allow it this key"
            ) from None
        except InvalidPath:
            raise self._error("does not exist", "make the transit mount and its key") from None
        except InvalidRequest as error:
            reason = "; ".join(map(str, error.errors or ["invalid request"]))
            raise self._error(
                f"refuses ({reason})",
                "a data key opens only for the dataset, version, region and jurisdiction it was "
                "made for, with the transit key that wrapped it",
            ) from None
        except VaultDown:
            raise self._error("is sealed or down", "unseal and start the service") from None
        except (VaultError, OSError) as error:
            # The class name alone: the text of some of these errors repeats what was sent.
            raise self._error(
                f"cannot be reached ({type(error).__name__})",
                "check the network, the URL, and VAULT_CACERT for a private certificate authority",
            ) from None
        return answer

    def _error(self, what: str, remedy: str) -> KeyringError:
        return keyring_error(self._region, what, remedy)


def _certificate_authority() -> str | None:
    names = ("VAULT_CACERT", "BAO_CACERT", "SSL_CERT_FILE")
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _encoded(context: EncryptionContext) -> str:
    return base64.b64encode(canonical_json(context)).decode()
