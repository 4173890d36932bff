"""Twenty secrets in settings, arguments and the environment: none is in a file, on the screen, or on the page."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest

from tests.cli.command import PATIENCE_SECONDS, Command
from unisono.config import MetricsSettings, Settings
from unisono.config.resolve import load
from unisono.config.toml_file import provenance_lines
from unisono.errors import SettingsError

IN_SETTINGS = {
    "api_key": "planted-setting-a1b2c3d4",
    "service.password": "planted-hunter2",
    "service.auth_token": "planted-setting-b5c6d7e8",
    "service.url": "https://ada:planted-pass-word@example.org/x",
    "client_secret": "planted-setting-c9d0",
    "signing_key": "planted-setting-d1e2f3",
    "hub": "hf_plantedABCDEFGHIJKLMNOP",
    "note": "ghp_planted0123456789abcdefghijklmnop",
}
IN_ENVIRONMENT = {
    "MY_API_KEY": "planted-variable-a1b2",
    "DB_PASSWORD": "planted-variable-c3d4",
    "AWS_SECRET_ACCESS_KEY": "planted/variable/e5f6",
    "AWS_SESSION_TOKEN": "planted-variable-g7h8",
    "GITHUB_TOKEN": "planted-variable-i9j0",
    "GOOGLE_CREDENTIALS": "planted-variable-k1l2",
    "WANDB_API_KEY": "planted0123456789abcdef0123456789abcdef01",
    "MLFLOW_TRACKING_PASSWORD": "planted-variable-m3n4",
    "PROXY_AUTH": "planted-variable-o5p6",
}
IN_ARGUMENTS = {
    "--password": "planted-argument-a1",
    "--api-key": "planted-argument-b2",
    "--data": "s3://id:planted-argument-c3@bucket/x",
}
SECRETS = [*IN_SETTINGS.values(), *IN_ENVIRONMENT.values(), *IN_ARGUMENTS.values()]
SIGN = re.compile(rb"planted")
"""Part of each secret, and of nothing else."""

SCRIPT = """
from dataclasses import dataclass, field
import torch

@dataclass(frozen=True, kw_only=True)
class Service:
    password: str = ""
    auth_token: str = ""
    url: str = ""

@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    api_key: str = ""
    client_secret: str = ""
    signing_key: str = ""
    hub: str = ""
    note: str = ""
    fail: bool = False
    service: Service = field(default_factory=Service)

def main(run):
    found = [run.settings.api_key, run.settings.service.password, run.settings.hub, os.environ["MY_API_KEY"], *sys.argv]
    assert sum("plant" + "ed" in each for each in found) == 7, "the script itself has all of them"
    model = run.place(lambda: torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps([(torch.ones(4), torch.ones(1))] * 16):
        for inputs, targets in step:
            step.backward(((model(inputs) - targets) ** 2).sum(), weight=len(inputs))
        step.update(optimizer)
        run.log(loss=step.loss)
    if run.settings.fail:
        raise ValueError(f"403 for {run.settings.service.url}, with {os.environ['MY_API_KEY']}")

if __name__ == "__main__":
    unisono.main(main, Settings)
"""


@pytest.fixture
def planted(command: Command, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the words of a command with secrets, in an environment with others."""
    assert len({*SECRETS}) == 20
    command.script(SCRIPT)
    for name, value in IN_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    words = ["--set=steps=4", "--set=checkpoint.every=2", "--set=track=csv,tensorboard", "--run-dir", "out"]
    words += [word for name, value in IN_SETTINGS.items() for word in ("--set", f"{name}={value}")]
    own = [word for pair in IN_ARGUMENTS.items() for word in pair]
    return ["run", "script.py", *words, "--", *own]


def found_in(folder: Path) -> dict[str, bytes]:
    """Return where a secret is in the files of a folder, with what stands around it."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for match in SIGN.finditer(content):
                found[str(path.relative_to(folder))] = content[max(0, match.start() - 60) : match.end() + 20]
    return found


@pytest.mark.slow
def test_no_secret_is_in_a_file_or_on_the_screen(command: Command, planted: list[str]) -> None:
    ended = command.run(*planted[:2], "--ranks", "2", *planted[2:], times=2)
    assert ended.status == 0, ended.err
    assert found_in(command.folder / "out") == {}
    assert not SIGN.search((ended.out + ended.err).encode())
    assert 'api_key = "***"' in (command.folder / "out" / "settings.toml").read_text()
    about = json.loads((command.folder / "out" / "environment.json").read_text())
    assert about["arguments"][:5] == ["--password", "***", "--api-key", "***", "--data"]
    watch = command.start("watch", "out")
    assert watch.stdout is not None
    address = watch.stdout.readline().split(" at ")[1].strip()
    with urllib.request.urlopen(address, timeout=PATIENCE_SECONDS) as page:
        assert not SIGN.search(page.read())
    watch.kill()
    resume = ["run", "script.py", "--run-dir", "out", "--resume", "--set", "steps=6"]
    for own, refused in (
        ((), "The arguments of the script of out are not"),
        (tuple(planted[planted.index("--") :]), "api_key is not"),
    ):
        again = command.run(*resume, *own)
        assert again.status == 2
        assert f"{refused} stored." in again.err
        assert not SIGN.search(again.err.encode())


@pytest.mark.slow
def test_no_secret_is_in_a_failure(command: Command, planted: list[str]) -> None:
    ended = command.run(*planted[:2], "--set=fail=true", "--json", *planted[2:], times=2)
    assert ended.status == 1
    assert "403 for https://ada:***@example.org/x, with ***" in ended.err
    assert not SIGN.search((ended.out + ended.err).encode())
    assert found_in(command.folder / "out") == {}
    wrong = command.run(*planted[:2], "--set=no_such_setting=1", *planted[2:])
    assert wrong.status == 2
    assert not SIGN.search((wrong.out + wrong.err).encode())


# -- settings that are read again


def test_a_masked_setting_must_be_given_again(tmp_path: Path) -> None:
    loaded = load(Settings, sets=["track=https://ada:hunter2@example.org/x:Mine", "batch=64"])
    file = tmp_path / "settings.toml"
    file.write_text(provenance_lines(loaded.settings, loaded.sources))
    assert "hunter2" not in file.read_text()
    for given in ({"earlier": file}, {"file": file}):
        with pytest.raises(SettingsError) as refused:
            load(Settings, **given)  # type: ignore[arg-type]
        assert [problem.error for problem in refused.value.problems] == ["track is not stored."]
        again = load(Settings, sets=["track=csv"], **given)  # type: ignore[arg-type]
        assert (again.settings.track, again.settings.batch) == ("csv", 64)


def test_a_masked_default_of_the_class_is_not_asked_for(tmp_path: Path) -> None:
    loaded = load(Settings, sets=["batch=64"])
    text = provenance_lines(loaded.settings, loaded.sources)
    file = tmp_path / "settings.toml"
    file.write_text(re.sub(r'(?m)^metrics.address = "\S+" ', 'metrics.address = "***" ', text))
    assert "***" in file.read_text()
    assert load(Settings, earlier=file).settings.metrics == MetricsSettings()
    assert load(Settings, file=file).settings.metrics == MetricsSettings()
