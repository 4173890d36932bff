"""Storage of checkpoints: policies, URLs, a second writer; S3 through a server that the test starts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from tests.ranks.loops import SETTINGS, attempt, train
from unisono.checkpoint import manifest
from unisono.checkpoint.load import fingerprint, load, newest
from unisono.checkpoint.save import CheckpointSaver, packed
from unisono.checkpoint.storage import BucketStorage, Storage, prepare_storage, storage_at, storage_of
from unisono.cli.request.run_options import RunRequest
from unisono.cli.start.start_request import StartRequest
from unisono.config import CheckpointSettings, ParallelSettings
from unisono.distributed.process_group import ProcessGroup
from unisono.environment import World
from unisono.errors import CheckpointError, SettingsError
from unisono.tensors.codec import TensorTable
from unisono.testing import run_ranks


def save_at(storage: Storage, steps: int, keep: tuple[int, int] = (2, 0)) -> None:
    about = {"models": ["thing"], "identity": {}, "changes": []}
    state = packed({"thing": {"w": torch.full((3,), float(steps))}}, about, TensorTable())
    CheckpointSaver(ProcessGroup()).begin(storage, steps, state, keep, wait=True)


@pytest.fixture(params=["folder", "url"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return storage_at(tmp_path / "kept" if request.param == "folder" else f"memory://{uuid4().hex}/kept")


def test_the_newest_and_every_nth_are_kept(storage: Storage) -> None:
    for steps in range(10, 80, 10):
        save_at(storage, steps, (2, 30))
    assert storage.checkpoints() == [70, 60, 30]


def test_a_run_resumes_from_another_location(tmp_path: Path, storage: Storage) -> None:
    prepare_storage(tmp_path, str(storage), resume=False)
    assert newest(tmp_path, pytest.fail) is None
    save_at(storage_of(tmp_path), 10)
    save_at(storage_of(tmp_path), 20)
    found = newest(tmp_path, pytest.fail)
    assert found is not None
    assert torch.equal(load(found).states["thing"]["w"], torch.full((3,), 20.0))
    assert fingerprint(tmp_path)["step"] == 20
    prepare_storage(tmp_path, None, resume=True)  # earlier checkpoints are still found
    assert fingerprint(tmp_path)["step"] == 20
    save_at(storage_of(tmp_path), 30)
    assert [steps for steps, _ in manifest.checkpoints(tmp_path)] == [30]
    assert fingerprint(tmp_path)["step"] == 30
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["elsewhere.json", "step-00000030"]


def test_a_location_of_another_run_is_refused(tmp_path: Path, storage: Storage) -> None:
    save_at(storage, 10)
    with pytest.raises(SettingsError, match=r"(?s)already: 1 checkpoint, the newest after step 10.*/kept/\{run\}'"):
        prepare_storage(tmp_path / "new", str(storage), resume=False)
    prepare_storage(tmp_path / "new", f"{storage}/{{run}}", resume=False)
    assert str(storage_of(tmp_path / "new")) == f"{storage}/new"


def test_an_unfinished_save_at_a_url_is_removed(tmp_path: Path) -> None:
    storage = storage_at(f"memory://{uuid4().hex}")
    save_at(storage, 10)
    storage.write(20, "rank-00000.safetensors", [b"half"])
    assert storage.checkpoints() == [10]
    save_at(storage, 30)
    assert isinstance(storage, BucketStorage)
    assert storage._folders() == {10: True, 30: True}


def test_damage_at_a_url_is_named_and_skipped(tmp_path: Path) -> None:
    prepare_storage(tmp_path, url := f"memory://{uuid4().hex}", resume=False)
    storage = storage_at(url)
    assert isinstance(storage, BucketStorage)
    save_at(storage, 10)
    save_at(storage, 20)
    storage._fs.pipe_file(storage._path(20, "state.json"), b"{}")
    notes: list[str] = []
    found = newest(tmp_path, notes.append)
    assert found is not None
    assert load(found).steps == 10
    assert "step-00000020/state.json has 2 bytes instead of" in notes[0]


def test_a_replaced_writer_fails() -> None:
    url = f"memory://{uuid4().hex}"
    first, second = storage_at(url), storage_at(url)
    save_at(first, 10)
    save_at(second, 10)
    with pytest.raises(CheckpointError, match=rf"Process {os.getpid()} on .+ began to save there after this one"):
        save_at(first, 20)
    save_at(second, 20)
    assert second.checkpoints() == [20, 10]


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"(?s)fsspec says: .*gcsfs.*pip install 'gcsfs'"):
        prepare_storage(tmp_path, "gs://bucket/run", resume=False)


def test_a_second_run_in_one_folder_is_refused(tmp_path: Path) -> None:
    request, where = StartRequest(Path("train.py"), RunRequest(), World.current()), str(tmp_path / "kept")
    with ExitStack() as kept:
        assert request.save_in(where, tmp_path / "one", kept) == where
        words = rf"(?s){where} is in use\.\n  Process {os.getpid()} on .*checkpoint\.dir={where}-2"
        with pytest.raises(SettingsError, match=words):
            request.save_in(where, tmp_path / "two", kept)
    with ExitStack() as kept:
        request.save_in(where, tmp_path / "two", kept)


# -- S3


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """Start a server of the S3 protocol, and return its address."""
    pytest.importorskip("s3fs", reason="pip install 'unisono[s3]'")
    moto = pytest.importorskip("moto.server", reason="pip install 'moto[s3]' flask flask-cors")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    about = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    try:
        yield {**about, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    finally:
        server.stop()


def with_s3(world: World, folder: Path, about: dict[str, str], config: Any, resume: bool) -> Any:
    os.environ.update(about)
    losses = attempt(world, folder, train, config, resume=resume)
    if world.rank:
        return losses
    storage = storage_of(folder)
    assert isinstance(storage, BucketStorage)
    return losses, storage.checkpoints(), json.loads(storage._fs.cat_file(f"{storage._root}/writer.json"))["host"]


@pytest.mark.slow
def test_shards_saved_to_s3_are_loaded_on_one_process(tmp_path: Path, s3: dict[str, str]) -> None:
    boto3 = pytest.importorskip("boto3")

    boto3.client("s3", endpoint_url=s3["AWS_ENDPOINT_URL"], **CREDENTIALS).create_bucket(Bucket="runs")
    kept = CheckpointSettings(every=2, dir="s3://runs/{run}")
    config = replace(SETTINGS, steps=4, checkpoint=kept, parallel=ParallelSettings(shard=2))
    longer = replace(SETTINGS, steps=8, checkpoint=kept)
    whole = run_ranks(attempt, 1, tmp_path / "whole", train, replace(SETTINGS, steps=8))[0]
    (losses, steps, _), _ = run_ranks(with_s3, 2, tmp_path / "one", s3, config, False)
    assert steps == [4, 2], losses
    ((losses, steps, host),) = run_ranks(with_s3, 1, tmp_path / "one", s3, longer, True)
    assert losses[-1] == whole[-1]
    assert steps == [8, 6]
    assert host == os.uname().nodename
    assert not list((tmp_path / "one" / "checkpoints").glob("*step*"))
    assert re.match(r".*already: 2 checkpoints", with_s3_refused(tmp_path, s3, config), re.DOTALL)


CREDENTIALS = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}


def with_s3_refused(folder: Path, about: dict[str, str], config: Any) -> str:
    """Return the error of a run that begins under the name of an existing one."""
    (words,) = run_ranks(attempt_new_run, 1, folder / "other" / "one", about, config)
    return str(words)


def attempt_new_run(world: World, folder: Path, about: dict[str, str], config: Any) -> Any:
    os.environ.update(about)
    return attempt(world, folder, train, replace(config, parallel=ParallelSettings()))
