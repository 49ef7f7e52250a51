"""One contract, held by every kind of keyring, and what each refuses by itself."""

import stat
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trustme

from storage.errors import KeyringError
from storage.keyring import check_keyring, open_keyring
from storage.kms import KmsKeyring
from storage.region import Region
from tests.servers import MotoServer, OpenBao
from tests.storage.conftest import MakeRegion, file_region

_CONTEXT = {"dataset": "places", "version": "v1", "region": "eu", "jurisdiction": "EU"}


def test_a_data_key_opens_again(make_key_region: MakeRegion) -> None:
    region = make_key_region("eu")
    keyring = open_keyring(region)
    first, second = keyring.generate(_CONTEXT), keyring.generate(_CONTEXT)
    assert len(first.plaintext) == 32
    assert first.plaintext != second.plaintext
    assert first.plaintext not in first.wrapped
    assert open_keyring(region).unwrap(first.wrapped, _CONTEXT) == first.plaintext
    assert keyring.unwrap(second.wrapped, dict(reversed(_CONTEXT.items()))) == second.plaintext


@pytest.mark.parametrize("field", sorted(_CONTEXT))
def test_another_context_is_refused(make_key_region: MakeRegion, field: str) -> None:
    keyring = open_keyring(make_key_region("eu"))
    wrapped = keyring.generate(_CONTEXT).wrapped
    for context in (_CONTEXT | {field: "other"}, {k: v for k, v in _CONTEXT.items() if k != field}):
        with pytest.raises(KeyringError, match=r"regions\.eu\.wrapping_key .*made for"):
            keyring.unwrap(wrapped, context)


def test_a_changed_wrapped_key_is_refused(make_key_region: MakeRegion) -> None:
    keyring = open_keyring(make_key_region("eu"))
    wrapped = keyring.generate(_CONTEXT).wrapped
    changed = bytearray(wrapped)
    changed[-5] ^= 1
    for broken in (bytes(changed), wrapped[:-1], b"", b"\xff" * 60):
        with pytest.raises(KeyringError, match=r"regions\.eu\.wrapping_key"):
            keyring.unwrap(broken, _CONTEXT)


def test_the_key_of_another_region_is_refused(make_key_region: MakeRegion) -> None:
    wrapped = open_keyring(make_key_region("eu")).generate(_CONTEXT).wrapped
    other = open_keyring(make_key_region("us"))
    other.generate(_CONTEXT)
    with pytest.raises(KeyringError, match=r"regions\.us\.wrapping_key"):
        other.unwrap(wrapped, _CONTEXT)


def test_check_keyring_passes_again_and_again(make_key_region: MakeRegion) -> None:
    region = make_key_region("eu")
    check_keyring(region)
    check_keyring(region)


def test_no_key_is_shown(make_key_region: MakeRegion) -> None:
    region = make_key_region("eu")
    keyring = open_keyring(region)
    data_key = keyring.generate(_CONTEXT)
    with pytest.raises(KeyringError) as caught:
        keyring.unwrap(data_key.wrapped, _CONTEXT | {"region": "us"})
    shown = "".join(traceback.format_exception(caught.value, chain=True))
    shown += repr(data_key) + repr(keyring) + repr(region)
    for form in (repr(data_key.plaintext)[2:-1], data_key.plaintext.hex()):
        assert form not in shown


class TestFileKeyring:
    def test_the_key_file_is_private(self, region: Region, tmp_path: Path) -> None:
        open_keyring(region).generate(_CONTEXT)
        key_file = tmp_path / "keys/eu.key"
        assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
        assert stat.S_IMODE(key_file.parent.stat().st_mode) == 0o700
        assert len(key_file.read_bytes()) == 32
        assert list(key_file.parent.iterdir()) == [key_file]

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620])
    def test_a_looser_mode_is_refused(self, region: Region, tmp_path: Path, mode: int) -> None:
        keyring = open_keyring(region)
        wrapped = keyring.generate(_CONTEXT).wrapped
        (tmp_path / "keys/eu.key").chmod(mode)
        uses: list[Callable[[], object]] = [
            lambda: keyring.generate(_CONTEXT),
            lambda: keyring.unwrap(wrapped, _CONTEXT),
        ]
        for use in uses:
            with pytest.raises(KeyringError, match=f"has mode {mode:04o}.* chmod 600 .*eu.key"):
                use()

    def test_a_missing_file_is_not_made_anew_to_unwrap(
        self, region: Region, tmp_path: Path
    ) -> None:
        wrapped = open_keyring(region).generate(_CONTEXT).wrapped
        (tmp_path / "keys/eu.key").unlink()
        with pytest.raises(KeyringError, match=r"is missing: restore .*eu\.key from your backup"):
            open_keyring(region).unwrap(wrapped, _CONTEXT)
        assert not (tmp_path / "keys/eu.key").exists()

    @pytest.mark.parametrize("content", [b"", bytes(31), bytes(33)])
    def test_a_file_of_another_size_is_refused(
        self, region: Region, tmp_path: Path, content: bytes
    ) -> None:
        open_keyring(region).generate(_CONTEXT)
        (tmp_path / "keys/eu.key").write_bytes(content)
        with pytest.raises(KeyringError, match="does not hold 32 bytes"):
            open_keyring(region).generate(_CONTEXT)

    def test_a_directory_that_cannot_be_made_is_named(self, region: Region, tmp_path: Path) -> None:
        (tmp_path / "keys").write_bytes(b"")
        with pytest.raises(KeyringError, match=r"cannot be created .*keys a directory"):
            check_keyring(region)

    def test_two_that_start_at_once_share_one_key(self, tmp_path: Path) -> None:
        for attempt in range(20):
            region = file_region(tmp_path / str(attempt))
            keyrings = [open_keyring(region) for _ in range(4)]
            with ThreadPoolExecutor(4) as pool:
                made = list(pool.map(lambda keyring: keyring.generate(_CONTEXT), keyrings))
            for data_key in made:
                assert open_keyring(region).unwrap(data_key.wrapped, _CONTEXT) == data_key.plaintext


class TestKmsKeyring:
    @pytest.fixture
    def server(self, aws_server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> MotoServer:
        for name, value in aws_server.environment.items():
            monkeypatch.setenv(name, value)
        return aws_server

    def test_an_alias_of_a_multi_region_key_is_refused(
        self, server: MotoServer, region: Region
    ) -> None:
        client = server.client("eu-west-1")
        key = client.create_key(MultiRegion=True)["KeyMetadata"]
        client.create_alias(AliasName="alias/disguise", TargetKeyId=key["KeyId"])
        alias = key["Arn"].partition(":key/")[0] + ":alias/disguise"
        disguised = _with_key(region, f"aws-kms://{alias}?endpoint={server.endpoint}")
        with pytest.raises(KeyringError, match="is a multi-Region key"):
            open_keyring(disguised).generate(_CONTEXT)

    def test_an_unknown_key_is_named(self, server: MotoServer, region: Region) -> None:
        url = server.wrapping_key_url("eu-west-1")
        unknown = _with_key(region, url.replace(url.partition("key/")[2][:8], "00000000"))
        with pytest.raises(KeyringError, match=r"NotFoundException\): correct the key's ARN"):
            check_keyring(unknown)

    def test_a_service_that_is_down_is_named(self, server: MotoServer, region: Region) -> None:
        url = server.wrapping_key_url("eu-west-1").partition("?")[0]
        down = _with_key(region, f"{url}?endpoint=http://127.0.0.1:1")
        with pytest.raises(KeyringError, match=r"cannot be reached \(EndpointConnectionError\)"):
            check_keyring(down)

    def test_no_variable_leads_to_another_service(
        self, server: MotoServer, region: Region, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", server.endpoint)
        url = server.wrapping_key_url("eu-west-1").partition("?")[0]
        keyring = open_keyring(_with_key(region, url))
        assert isinstance(keyring, KmsKeyring)
        assert keyring._client.meta.endpoint_url == "https://kms.eu-west-1.amazonaws.com"


class TestVaultKeyring:
    @pytest.fixture
    def vault_region(
        self, bao_server: OpenBao, region: Region, monkeypatch: pytest.MonkeyPatch
    ) -> Region:
        for name, value in bao_server.environment.items():
            monkeypatch.setenv(name, value)
        return _with_key(region, bao_server.wrapping_key_url("eu"))

    def test_a_key_that_ignores_the_context_is_refused(
        self, vault_region: Region, bao_server: OpenBao
    ) -> None:
        url = bao_server.wrapping_key_url("eu", derived=False)
        with pytest.raises(KeyringError, match=r"ignores the encryption context.*derived=true"):
            check_keyring(_with_key(vault_region, url))

    def test_bao_names_serve_too(
        self, vault_region: Region, monkeypatch: pytest.MonkeyPatch, bao_server: OpenBao
    ) -> None:
        monkeypatch.delenv("VAULT_TOKEN")
        monkeypatch.delenv("VAULT_CACERT")
        monkeypatch.setenv("BAO_TOKEN", bao_server.environment["VAULT_TOKEN"])
        monkeypatch.setenv("BAO_CACERT", bao_server.environment["VAULT_CACERT"])
        check_keyring(vault_region)

    def test_a_wrong_token_is_named_and_not_repeated(
        self, vault_region: Region, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VAULT_TOKEN", "s.hunter2")
        with pytest.raises(KeyringError, match="refuses this token: renew VAULT_TOKEN") as caught:
            check_keyring(vault_region)
        assert "hunter2" not in "".join(traceback.format_exception(caught.value, chain=True))

    def test_no_token_is_named(self, vault_region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("VAULT_TOKEN")
        with pytest.raises(KeyringError, match="needs a token: set VAULT_TOKEN or BAO_TOKEN"):
            check_keyring(vault_region)

    def test_another_authority_is_not_trusted(
        self, vault_region: Region, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
        for path in ("other.pem", "none.pem"):
            monkeypatch.setenv("VAULT_CACERT", str(tmp_path / path))
            with pytest.raises(KeyringError, match=r"cannot be reached.*VAULT_CACERT"):
                check_keyring(vault_region)

    def test_a_missing_key_or_mount_is_named(self, vault_region: Region) -> None:
        for end in ("transit/eu/none", "none/convoy"):
            url = vault_region.wrapping_key.replace("transit/eu/convoy", end)
            with pytest.raises(KeyringError, match=r"regions\.eu\.wrapping_key"):
                check_keyring(_with_key(vault_region, url))

    def test_a_service_that_is_down_is_named(self, vault_region: Region) -> None:
        with pytest.raises(KeyringError, match=r"cannot be reached \(ConnectionError\)"):
            check_keyring(_with_key(vault_region, "vault://127.0.0.1:1/transit/eu/convoy"))


def _with_key(region: Region, url: str) -> Region:
    return region.model_copy(update={"wrapping_key": url})
