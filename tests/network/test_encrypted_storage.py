"""What leaves a run beside its messages, captured: checkpoints to S3 and the live page, with TLS and without."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.authority import Authority
from tests.network.hosts import Host, hosts, missing
from tests.network.test_encrypted_links import (
    MARKERS,
    PIPES,
    captured,
    ended,
    found_in,
    nodes,
    result_of,
    write_secret,
)
from tests.network.test_hosts import with_code

pytest.importorskip("s3fs", reason="pip install 'unisono[s3]'")
pytest.importorskip("moto.server", reason="pip install 'moto[s3]' flask flask-cors")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.skipif(bool(missing()), reason=missing())]

S3_PORT, PAGE_PORT = 5000, 7700

TRAIN = """
import time
from dataclasses import dataclass
from pathlib import Path
import torch, unisono

@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    note: str = ""

def main(run):
    torch.manual_seed(1)
    model = run.place(lambda: torch.nn.Linear(4, 1))
    model.register_buffer("secret", torch.rand(2500, generator=torch.Generator().manual_seed(7)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    for step in run.steps(torch.utils.data.TensorDataset(x)):
        for (inputs,) in step:
            step.backward(model(inputs).square().sum(), weight=len(inputs))
        step.update(optimizer)
        while step.number == 8 and not Path("seen").exists():
            time.sleep(0.05)

unisono.main(main, Settings)
"""

MAKE_BUCKET = """
import boto3, sys, time
client = boto3.client("s3")
until = time.monotonic() + 60
while True:
    try:
        client.create_bucket(Bucket="runs")
        break
    except Exception:
        if time.monotonic() > until:
            raise
        time.sleep(0.2)
"""

LOOK = """
import ssl, sys, time, urllib.request
url, authority = sys.argv[1:]
context = ssl.create_default_context(cafile=authority)
until, found = time.monotonic() + 60, 0
while time.monotonic() < until and found < 5:
    with urllib.request.urlopen(url.replace("/?", "/data?") + "&since=-1", context=context) as answer:
        found += b"marker-00624-abc" in answer.read()
    time.sleep(0.2)
print("seen", found)
"""


def page_markers() -> list[str]:
    """Return texts of 16 bytes each, which are in a setting and so on the page."""
    return [f"marker-{number:05d}-abc" for number in range(MARKERS)]


@contextmanager
def bucket(host: Host, authority: Authority, encrypted: bool, **options: Any) -> Iterator[dict[str, str]]:
    """Start a server of the S3 protocol on a host, and return the variables of its clients."""
    words = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(S3_PORT)]
    if encrypted:
        files = authority.issue([host.name], label="s3")
        words += ["-c", str(files.cert), "-k", str(files.key)]
    server = host.start(words, **{**options, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL})
    about = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    about["AWS_ENDPOINT_URL"] = f"{'https' if encrypted else 'http'}://{host.name}:{S3_PORT}"
    about["AWS_CA_BUNDLE"] = str(authority.ca)
    made = host.run([sys.executable, "-c", MAKE_BUCKET], timeout=120, env={**options["env"], **about})
    assert made.returncode == 0, made.stderr
    try:
        yield about
    finally:
        server.kill()


def look_at_page(run: Path, server: Host, client: Host, authority: Authority, encrypted: bool, env: Any) -> None:
    """Serve the page of a run at the address of a host, and look at its data from another one."""
    words = [sys.executable, "-m", "unisono", "watch", str(run), "--address", server.address, "--port", str(PAGE_PORT)]
    if encrypted:
        files = authority.issue([server.address], label="page")
        words += ["--cert", str(files.cert), "--key", str(files.key)]
    watching = server.start(words, env=env, cwd=run.parent, **PIPES)
    assert watching.stdout is not None
    url = watching.stdout.readline().rpartition(" at ")[2].strip()
    assert url.startswith("https://" if encrypted else "http://"), url or watching.communicate()
    looked = client.run([sys.executable, "-c", LOOK, url, str(authority.ca)], timeout=120, env=env)
    watching.kill()
    assert looked.stdout.strip() == "seen 5", looked.stderr


@pytest.mark.parametrize("encrypted", [True, False], ids=["https", "http"])
def test_checkpoints_and_the_page_cannot_be_read_on_the_link(tmp_path: Path, encrypted: bool) -> None:
    """The state in the checkpoint has 10,000 marker bytes, and the settings on the page have as many others."""
    (tmp_path / "train.py").write_text(TRAIN)
    write_secret(tmp_path)
    authority, packets = Authority(tmp_path), tmp_path / "packets"
    with hosts(3, shared=[tmp_path]) as (a, b, c):
        options: dict[str, Any] = {"cwd": tmp_path, "env": with_code()}
        with bucket(c, authority, encrypted, **options) as about, captured(a, packets):
            settings = [f"note={' '.join(page_markers())}", "checkpoint.every=4", "checkpoint.dir=s3://runs/mine"]
            more = [word for value in settings for word in ("--set", value)]
            options = {"cwd": tmp_path, "env": {**with_code(), **about}, **PIPES}
            running = [host.start([*nodes(n, "tls", 4), *more], **options) for n, host in enumerate((a, b))]
            a.run(["sh", "-c", "until [ -e out/settings.toml ]; do sleep 0.1; done"], cwd=tmp_path, check=True)
            look_at_page(tmp_path / "out", a, c, authority, encrypted, options["env"])
            (tmp_path / "seen").touch()
            ended(running)
            kept = c.run([sys.executable, "-c", FETCH], timeout=120, env={**with_code(), **about}, cwd=tmp_path)
    assert (result_of(tmp_path / "out")["ranks"], result_of(tmp_path / "out")["promise"]) == (4, "exact")
    assert kept.stdout.split() == [str(MARKERS)], kept.stderr  # the checkpoint in the bucket has them
    content = packets.read_bytes()
    readable = found_in(packets), sum(each.encode() in content for each in page_markers())
    print(f"\n{16 * readable[0]} and {16 * readable[1]} of {16 * MARKERS} marker bytes can be read")
    if encrypted:
        assert readable == (0, 0)
        assert shutil.which("tshark") is None or versions(packets) == {"0x0304"}
    else:
        assert min(readable) > 0.95 * MARKERS  # some are split between two packets


FETCH = """
import boto3
from tests.network.test_encrypted_links import markers
client = boto3.client("s3")
names = [each["Key"] for each in client.list_objects_v2(Bucket="runs")["Contents"]]
content = b"".join(client.get_object(Bucket="runs", Key=name)["Body"].read() for name in names)
print(sum(marker in content for marker in markers()))
"""


def versions(packets: Path) -> set[str]:
    """Return the versions of TLS that the servers in a capture have chosen."""
    chosen = ["-Y", "tls.handshake.type == 2", "-T", "fields", "-e", "tls.handshake.extensions.supported_version"]
    ports = ["-d", f"tcp.port=={S3_PORT},tls", "-d", f"tcp.port=={PAGE_PORT},tls"]
    words = ["tshark", "-r", str(packets), *ports, *chosen]
    return set(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())
