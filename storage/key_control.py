"""Where an AWS KMS key really is. The principal needs kms:DescribeKey, or it is not checked."""

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from storage.claims import ClaimCheck, judge, not_checked
from storage.keyring import keyring_error
from storage.kms import KMS_CONFIG
from storage.locations import KmsLocation
from storage.region import Region


def check_key(region: Region, key: KmsLocation, locations: tuple[str, ...]) -> ClaimCheck:
    """Compare the key's cloud region, and whether it can be replicated, with what is claimed.

    Raises KeyringError when the service cannot be reached.
    """
    if locations and key.region not in locations:
        claimed = " or ".join(locations)
        return judge("key", f"it is in {key.region}, and the region claims {claimed}", False)
    try:
        client = boto3.Session().client(
            "kms", region_name=key.region, endpoint_url=key.endpoint, config=KMS_CONFIG
        )
        answer = client.describe_key(KeyId=key.key_arn)["KeyMetadata"]
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "unknown error")
        return not_checked("key", f"it may not be asked (describe_key: {code})")
    except BotoCoreError as error:
        # The class name alone: the text of some of these errors repeats what was sent.
        raise keyring_error(
            region,
            f"cannot be reached ({type(error).__name__})",
            "check the network, the endpoint, AWS_CA_BUNDLE and the AWS credentials",
        ) from None
    if answer.get("MultiRegion") or "mrk-" in answer["KeyId"]:
        return judge("key", "it is a multi-Region key, which can be replicated elsewhere", False)
    return judge("key", f"a single-Region key in {key.region}", True if locations else None)
