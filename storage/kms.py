"""The AWS KMS keyring: a data key is made and unwrapped by a single-Region KMS key.

Credentials come from where AWS tools look for them. The principal needs kms:GenerateDataKey and
kms:Decrypt on that key, and to rotate kms:ReEncryptTo on it and kms:ReEncryptFrom on the one
before. A multi-Region key is refused: its material may be replicated to where the data may not go.
"""

from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from storage.errors import KeyringError
from storage.keyring import DATA_KEY_BYTES, DataKey, EncryptionContext, keyring_error
from storage.locations import KmsLocation
from storage.region import Region

KMS_CONFIG = Config(
    retries={"mode": "standard", "total_max_attempts": 4},
    connect_timeout=5,
    read_timeout=10,
    # The URL alone says which service holds the key: AWS_ENDPOINT_URL of a shell must not.
    ignore_configured_endpoint_urls=True,
)

_REMEDIES = {
    "AccessDeniedException": "allow kms:GenerateDataKey and kms:Decrypt on it to this principal "
    "(to rotate also kms:ReEncryptTo, and kms:ReEncryptFrom on the key before)",
    "DisabledException": "enable the key",
    "ExpiredTokenException": "renew the AWS credentials",
    "IncorrectKeyException": "if regions.*.wrapping_key was changed to another key, run "
    "`convoy keys rotate`, which wraps what the one before had wrapped",
    "InvalidCiphertextException": "a data key opens only for the dataset, version, region and "
    "jurisdiction it was made for",
    "KMSInvalidStateException": "enable the key, or cancel its deletion",
    "NotFoundException": "correct the key's ARN",
    "UnrecognizedClientException": "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
}


class KmsKeyring:
    """A wrapping key in AWS KMS, in the AWS region that its ARN names."""

    def __init__(self, region: Region, location: KmsLocation) -> None:
        self._region = region
        self._key_arn = location.key_arn
        try:
            self._client = boto3.client(
                "kms",
                region_name=location.region,
                endpoint_url=location.endpoint,
                config=KMS_CONFIG,
            )
        except BotoCoreError as error:
            raise self._unreachable(error) from None

    def generate(self, context: EncryptionContext) -> DataKey:
        answer = self._call(
            "generate_data_key",
            KeyId=self._key_arn,
            NumberOfBytes=DATA_KEY_BYTES,
            EncryptionContext=dict(context),
        )
        self._refuse_multi_region(answer["KeyId"])
        return DataKey(answer["Plaintext"], answer["CiphertextBlob"])

    def unwrap(self, wrapped: bytes, context: EncryptionContext) -> bytes:
        answer = self._call(
            "decrypt",
            KeyId=self._key_arn,
            CiphertextBlob=wrapped,
            EncryptionContext=dict(context),
        )
        data_key: bytes = answer["Plaintext"]
        return data_key

    def rewrap(self, wrapped: bytes, context: EncryptionContext) -> bytes:
        # KMS finds in the ciphertext by which key it was wrapped, this one or one before; the data
        # key does not leave the service.
        answer = self._call(
            "re_encrypt",
            CiphertextBlob=wrapped,
            SourceEncryptionContext=dict(context),
            DestinationKeyId=self._key_arn,
            DestinationEncryptionContext=dict(context),
        )
        self._refuse_multi_region(answer["KeyId"])
        rewrapped: bytes = answer["CiphertextBlob"]
        return rewrapped

    def _refuse_multi_region(self, key_id: str) -> None:
        # An alias may stand for a multi-Region key; the answer names the key itself.
        if ":key/mrk-" in key_id:
            raise keyring_error(
                self._region,
                "is a multi-Region key, which can be replicated out of its jurisdiction",
                "use a single-Region KMS key",
            )

    def _call(self, verb: str, **request: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = getattr(self._client, verb)(**request)
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "unknown error")
            remedy = _REMEDIES.get(code, "look the code up in the AWS KMS API reference")
            raise keyring_error(self._region, f"refuses to {verb} ({code})", remedy) from None
        except BotoCoreError as error:
            raise self._unreachable(error) from None
        return answer

    def _unreachable(self, error: BotoCoreError) -> KeyringError:
        # The class name alone: the text of some of these errors repeats what was sent.
        return keyring_error(
            self._region,
            f"cannot be reached ({type(error).__name__})",
            "check the network, the endpoint, AWS_CA_BUNDLE and the AWS credentials",
        )
