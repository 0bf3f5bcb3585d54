"""Keys: which files are created, who can read them, and that none is overwritten."""

import datetime
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

from fedcover.deploy.processes.keys import (
    add_nodes,
    check_certificate,
    make_keys,
    node_keys,
    server_keys,
)
from fedcover.errors import InputError

Cli = Callable[..., tuple[int, str, str]]


def test_the_authority_signed_the_servers_certificate(keys: Path) -> None:
    ca, server = (x509.load_pem_x509_certificate((keys / "server" / f).read_bytes()) for f in ("ca.crt", "server.crt"))
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    if shutil.which("openssl"):
        command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_hostname", "localhost"]
        files = ["-CAfile", str(keys / "ca.crt"), str(keys / "server" / "server.crt")]
        done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_only_the_owner_can_read_keys(keys: Path) -> None:
    for path in (keys, *keys.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_the_authoritys_key_is_in_no_folder_that_is_copied(keys: Path) -> None:
    secret = (keys / "ca.key").read_bytes()
    assert all(path.read_bytes() != secret for part in keys.iterdir() if part.is_dir() for path in part.rglob("*.*"))
    assert not list((keys / "server").rglob("node.key"))


def test_each_node_has_its_own_key_which_the_server_has_too(keys: Path) -> None:
    for number in range(3):
        own = node_keys(keys / f"node-{number}")
        public = load_ssh_private_key(own.key.read_bytes(), None).public_key()
        text = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        assert own.public.read_bytes().strip() == text
        assert server_keys(keys / "server").nodes[number].read_bytes().strip() == text
    assert len({path.read_bytes() for path in server_keys(keys / "server").nodes}) == 3


def test_nothing_is_overwritten_and_nodes_can_be_added(tmp_path: Path) -> None:
    make_keys(tmp_path / "k", 1)
    before = {path: path.read_bytes() for path in (tmp_path / "k").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"never overwritten.*--add"):
        make_keys(tmp_path / "k", 5)
    (tmp_path / "k" / "ca.key").rename(tmp_path / "away")  # nodes are added without it
    assert [path.name for path in add_nodes(tmp_path / "k", 10)] == [f"node-{n}" for n in range(1, 11)]
    (tmp_path / "away").rename(tmp_path / "k" / "ca.key")
    assert {path: path.read_bytes() for path in before} == before
    names = [path.stem for path in server_keys(tmp_path / "k" / "server").nodes]
    assert names == [f"node-{n}" for n in range(11)]
    with pytest.raises(InputError, match="leave out --add"):
        add_nodes(tmp_path, 1)


def test_an_existing_folder_keeps_its_permissions(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o755)
    (tmp_path / "mine" / "text").write_text("mine")
    make_keys(tmp_path / "mine", 1)
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "mine" / "text").read_text() == "mine"


def test_an_expired_certificate_is_refused(keys: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    assert check_certificate(keys / "ca.crt") == 364
    with pytest.raises(InputError, match=r"expired on .*deploy keys"):
        check_certificate(keys / "ca.crt", now + datetime.timedelta(days=366))
    with pytest.raises(InputError, match="clock"):
        check_certificate(keys / "ca.crt", now - datetime.timedelta(days=1))


def test_a_wrong_folder_gets_the_right_one_as_remedy(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"has no server.crt; name {keys / 'server'}"):
        server_keys(keys)
    with pytest.raises(InputError, match=rf"has no node.key; name {keys / 'node-0'}"):
        node_keys(keys)
    with pytest.raises(InputError, match=r"has no ca.crt; name the `node-0` folder"):
        node_keys(tmp_path)
    (tmp_path / "ca.crt").write_text("nonsense")
    with pytest.raises(InputError, match="not a readable certificate"):
        check_certificate(tmp_path / "ca.crt")


@pytest.mark.parametrize("host", ["", "a b", "10.0.0.300", "http://x", "x:8000", "a/b"])
def test_hosts_are_checked(host: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a host"):
        make_keys(tmp_path / "k", 1, [host])
    assert not (tmp_path / "k").exists()


def test_the_command(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "k"
    code, out, err = cli("deploy", "keys", str(folder), "--nodes", "2", "--host", "fl.example.org", "--days", "30")
    assert code == 0, err
    assert f"copy to the server: {folder / 'server'}" in out
    assert f"copy each to its node: {folder / 'node-0'}, {folder / 'node-1'}" in out
    assert f"keep on this machine: {folder / 'ca.key'}" in out
    names = x509.load_pem_x509_certificate((folder / "server" / "server.crt").read_bytes())
    alternatives = names.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert alternatives.get_values_for_type(x509.DNSName) == ["localhost", "fl.example.org"]
    assert check_certificate(folder / "ca.crt") == 29
    code, _, err = cli("deploy", "keys", str(folder), "--nodes", "2")
    assert (code, err.count("\n")) == (2, 1)
    code, out, err = cli("deploy", "keys", str(folder), "--nodes", "1", "--add")
    assert code == 0, err
    assert str(folder / "node-2") in out
    assert cli("deploy", "keys", str(tmp_path / "n"), "--nodes", "0")[0] == 2
    assert cli("deploy", "keys", str(tmp_path / "n"), "--nodes", "1", "--days", "99999")[0] == 2
