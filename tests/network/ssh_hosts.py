"""A real sshd in every host of a test, and a client configuration that knows the hosts by their names.

    with hosts(2, head=True, shared=[tmp_path]) as (head, *others):
        ssh = SshHosts(others, tmp_path / "ssh")
        head.run(ssh.command("a", "hostname"))                 # from the host `head`
        head.network.join()
        subprocess.run(ssh.command("a", "hostname"))           # or from the test itself

All keys are made for the test: the folder has the key of the client, the keys of the hosts,
`known_hosts` and `config`. All hosts must see the folder. Needs Debian's openssh-server and openssh-client.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.network.hosts import Host, HostProcess

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")

SERVER = """
ListenAddress {address}
ListenAddress {address6}
HostKey {folder}/{name}/host_key
AuthorizedKeysFile {folder}/{name}/authorized_keys
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
PidFile none
"""

CLIENT = """
Host {name}
    HostName {address}
"""

CLIENT_OF_ALL = """
Host *
    User root
    IdentityFile {folder}/client_key
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile none
    StrictHostKeyChecking yes
    BatchMode yes
"""


def missing() -> str:
    """Return the reason why this machine cannot run an SSH server for tests, or "" if it can."""
    absent = [name for name in ("ssh", "ssh-keygen") if shutil.which(name) is None]
    absent += ["sshd"] if SSHD is None else []
    if absent:
        return f"{', '.join(absent)} cannot be found"
    shadow = Path("/etc/shadow").read_text().splitlines()
    password = next((line.split(":")[1] for line in shadow if line.startswith("root:")), "")
    return "sshd refuses the locked account of root" if password.startswith("!") else ""


class SshHosts:
    """SSH servers of some hosts, with a folder of keys and configurations.

    Args:
        servers: the hosts that get an SSH server, which starts at once
        folder: a folder that all hosts of the network have; it is made
    """

    def __init__(self, servers: Sequence[Host], folder: Path) -> None:
        self.folder, self.config = folder, folder / "config"
        self._hosts = {host.name: host for host in servers}
        self._running: dict[str, HostProcess] = {}
        folder.mkdir(mode=0o700)
        _make_key(folder / "client_key")
        clients = [CLIENT.format(name=host.name, address=host.address) for host in servers]
        self.config.write_text("".join([*clients, CLIENT_OF_ALL.format(folder=folder)]))
        known = []
        for host in servers:
            private = folder / host.name
            private.mkdir()
            _make_key(private / "host_key")
            shutil.copy(folder / "client_key.pub", private / "authorized_keys")
            known.append(f"{host.address} {(private / 'host_key.pub').read_text()}")
            self.start(host.name)
        (folder / "known_hosts").write_text("".join(known))

    def command(self, name: str, *words: str) -> list[str]:
        """Return the words that run a command in a host through SSH. They work wherever the folder is."""
        return ["ssh", "-F", str(self.config), name, *words]

    def start(self, name: str) -> None:
        """Start the server of a host, and wait until it listens."""
        assert SSHD is not None
        host = self._hosts[name]
        address = {"address": host.address, "address6": host.address6}
        text = SERVER.format(name=name, folder=self.folder, **address)
        if host.environment:
            text += "SetEnv " + " ".join(f"{key}={value}" for key, value in host.environment.items()) + "\n"
        configuration = self.folder / name / "sshd_config"
        configuration.write_text(text)
        host.run(["mkdir", "-p", "-m", "755", "/run/sshd"], check=True)
        words = ["env", *(f"--unset={key}" for key in host.environment), SSHD, "-D", "-e", "-f", str(configuration)]
        log = self.folder / name / "log"
        with log.open("w") as file:
            server = host.start(words, stdin=subprocess.DEVNULL, stderr=file)
        with log.open() as file:
            listening = 0
            while listening < 2:  # one line for each address
                line = file.readline()
                listening += line.startswith("Server listening")
                assert line or server.poll() is None, f"sshd of {name} has ended: {log.read_text()}"
                time.sleep(0 if line else 0.005)
        self._running[name] = server

    def stop(self, name: str) -> None:
        """Stop the server of a host, so that its port refuses connections. Sessions live on."""
        server = self._running.pop(name)
        server.terminate()
        server.wait()

    def change_host_key(self, name: str) -> None:
        """Give a host another key than the one that the client knows, as after a new installation."""
        self.stop(name)
        key = self.folder / name / "host_key"
        key.unlink()
        _make_key(key)
        self.start(name)

    def revoke(self, name: str) -> None:
        """Take the client's key from those that a host accepts."""
        (self.folder / name / "authorized_keys").write_text("")


def _make_key(path: Path) -> None:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
