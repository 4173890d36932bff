"""Manifests of `unisono kubernetes`: valid in the published schemas, accepted by the client, refused requests."""

from __future__ import annotations

import asyncio
import re
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.refused_requests import RequestProblems
from tests.house.sources import ROOT
from unisono.cli.main import main

yaml = pytest.importorskip("yaml")

VERSIONS = ("1.31", "1.34", "1.37")
"""Versions of Kubernetes. The first is the oldest with a success policy that needs no feature gate."""
PLAIN = "--claim runs --ranks 4"
FULL = (
    "--volume-size 100Gi --storage-class fast --namespace ml --name mine --ranks 16 --gpus-per-pod 8 --memory 64Gi "
    "--cpus 32 --topology topology.kubernetes.io/zone --grace 300 --retries 0 --script-from-config-map"
)
SECRET = "--claim runs --ranks 4 --secret-name keys --set secure.transport=tls"
QUEUED = "--claim runs --ranks 16 --gpus-per-pod 2 --ranks-per-pod 4 --queue team --topology rack"
ONE = "--claim runs"
REQUESTS = (PLAIN, FULL, QUEUED, SECRET, ONE)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the manifests of a request, in a folder with train.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import unisono\n\nunisono.main(print)\n")

    def written(words: str, *more: str) -> list[dict[str, Any]]:
        assert main(["kubernetes", "train.py", "--image", "repo/image:1", *shlex.split(words), *more]) == 0
        return list(yaml.safe_load_all(capsys.readouterr().out))

    return written


def kinds(manifests: list[dict[str, Any]]) -> list[str]:
    return [each["kind"] for each in manifests]


@pytest.mark.parametrize(
    "version", [*(pytest.param(version, marks=pytest.mark.slow) for version in VERSIONS[:-1]), VERSIONS[-1]]
)
@pytest.mark.parametrize("words", REQUESTS)
def test_manifests_are_valid_in_the_published_schemas(written: Any, words: str, version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for manifest in written(words):
        validator.validate(manifest, version, strict=True)
    for manifest in written(words, "--job-set"):
        if manifest["kind"] == "JobSet":
            (replicated,) = manifest["spec"]["replicatedJobs"]
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **replicated["template"]}
            validator.validate(job, version, strict=True)
        else:
            validator.validate(manifest, version, strict=True)


@pytest.mark.parametrize("words", REQUESTS)
def test_a_job_set_is_what_its_model_reads(written: Any, words: str) -> None:
    """The model drops keys that it does not know, so what it read is compared."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    job_set = written(words, "--job-set")[-1]
    read = models.JobsetV1alpha2JobSet.from_dict(job_set).to_dict()
    (container,) = read["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert [port.pop("protocol") for port in container["ports"]] == ["TCP"]  # the default, which the model adds
    assert read == job_set
    misspelt = {**job_set, "spec": {**job_set["spec"], "netwrok": {}}}
    assert models.JobsetV1alpha2JobSet.from_dict(misspelt).to_dict() != misspelt


@pytest.fixture
def cluster_api() -> Iterator[Any]:
    """Return a client that is connected to a local server with a stateful emulator of Kubernetes."""
    kmock = pytest.importorskip("kmock")
    client = pytest.importorskip("kubernetes").client
    ready, ended = threading.Event(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with kmock.KubernetesEmulator() as emulator, kmock.Server(emulator) as server:
            urls.append(str(server.url).rstrip("/"))
            ready.set()
            while not ended.is_set():
                await asyncio.sleep(0.02)

    server = threading.Thread(target=lambda: asyncio.run(serve()))
    server.start()
    assert ready.wait(60.0)
    configuration = client.Configuration()
    configuration.host = urls[0]
    with client.ApiClient(configuration) as api:
        yield api
    ended.set()
    server.join()


@pytest.mark.filterwarnings("default")  # of the client's own
def test_the_client_submits_what_was_written(written: Any, cluster_api: Any) -> None:
    import kubernetes

    manifests = written(FULL)
    assert kinds(manifests) == ["ConfigMap", "PersistentVolumeClaim", "Service", "PodDisruptionBudget", "Job"]
    for manifest in manifests:
        kubernetes.utils.create_from_dict(cluster_api, manifest)
    job = kubernetes.client.BatchV1Api(cluster_api).read_namespaced_job("mine", "ml")
    assert cluster_api.sanitize_for_serialization(job) == manifests[-1]
    objects: Any = kubernetes.client.CustomObjectsApi(cluster_api)
    job_set = written(FULL, "--job-set")[-1]
    place = ("jobset.x-k8s.io", "v1alpha2", "ml", "jobsets")
    objects.create_namespaced_custom_object(*place, job_set)
    (found,) = objects.list_namespaced_custom_object(*place)["items"]
    assert found == job_set


def test_the_pods_of_a_job_know_each_other(written: Any) -> None:
    service, budget, job = written(PLAIN)
    assert (service["metadata"]["name"], service["spec"]["publishNotReadyAddresses"]) == ("train", True)
    assert budget["spec"]["minAvailable"] == 3
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert (job["spec"]["completions"], pod["subdomain"]) == (4, "train")
    assert env == {"WORLD_SIZE": "4", "MASTER_ADDR": "train-0.train", "MASTER_PORT": "29500"}
    assert container["command"] == shlex.split("unisono run train.py --ranks 4 --run-dir /runs/train --autoresume")


def test_gpus_queue_and_topology(written: Any) -> None:
    job = written(QUEUED)[-1]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    template = job["spec"]["template"]
    assert template["metadata"]["annotations"] == {"kueue.x-k8s.io/podset-preferred-topology": "rack"}
    (container,) = template["spec"]["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "4", "nvidia.com/gpu": "2"},
        "limits": {"nvidia.com/gpu": "2"},
    }
    assert "--ranks 16 --ranks-per-device 2 " in shlex.join(container["command"])
    affinity = written(FULL)[-1]["spec"]["template"]["spec"]["affinity"]["podAffinity"]
    (preferred,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"


def test_a_secret_is_a_file_of_the_pods(written: Any) -> None:
    pod = written(SECRET)[-1]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = container["command"]
    path = Path(words[words.index("--secret-file") + 1])
    (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == str(path.parent)]
    (volume,) = [each["secret"] for each in pod["volumes"] if each["name"] == mount["name"]]
    assert volume["items"] == [{"key": "secret", "path": path.name}]
    assert (volume["secretName"], volume["defaultMode"], mount["readOnly"]) == ("keys", 0o400, True)


def test_a_single_pod_needs_no_service(written: Any) -> None:
    assert kinds(written(ONE)) == ["Job"]
    assert kinds(written(ONE, "--job-set")) == ["JobSet"]


def test_the_script_and_its_arguments_arrive_as_they_are(written: Any, tmp_path: Path) -> None:
    text = "import unisono\n\n# ünïcode: $(HOME)\t'\"\\\n\nunisono.main(print)   \n"
    (tmp_path / "train.py").write_text(text)
    files, job = written(ONE, "--script-from-config-map", "--", "$(HOME)", "a b")
    assert files["data"] == {"train.py": text}
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][2] == "/run/scripts/train.py"
    assert container["command"][-3:] == ["--", "$$(HOME)", "a b"]


def test_a_file_is_written(tmp_path: Path, written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["kubernetes", "train.py", "--image", "i", "--claim", "runs", "--output", "job.yaml"]
    assert main(words) == 0
    assert capsys.readouterr().out == "Written to job.yaml. Next: kubectl apply -f job.yaml\n"
    assert kinds(list(yaml.safe_load_all((tmp_path / "job.yaml").read_text()))) == ["Job"]
    assert main([*words[:-1], "nowhere/job.yaml"]) == 2
    assert capsys.readouterr().err.startswith("Cannot write nowhere/job.yaml.\n")


@pytest.mark.parametrize(
    ("words", "error", "remedy"),
    [
        ("", "The run directory has no volume.", "--claim NAME"),
        ("--claim a --ranks 3 --ranks-per-pod 2", "--ranks 3 does not fill its pods.", "--ranks 4"),
        ("--claim a --ranks 8 --gpus-per-pod 4 --ranks-per-pod 2", "--ranks-per-pod 2 does not", "--ranks-per-pod 4"),
        ("--claim a --ranks 0", "--ranks 0 is out of range.", "--ranks 1"),
        ("--claim a --memory 64GB", "Invalid value for --memory: 64GB", "--memory 64Gi"),
        ("--claim a --name Big_Run", "Invalid value for --name: Big_Run", "--name big-run"),
        ("--claim a --run-dir runs/mine", "Invalid value for --run-dir: runs/mine", "--run-dir /runs/train"),
        ("--claim a --run-dir /mine", "Invalid value for --run-dir: /mine", "--run-dir /runs/train"),
        ("--claim a --storage-class b", "--storage-class needs --volume-size.", "--volume-size 100Gi"),
        ("--claim a --resume", "--resume is not needed.", "train.py --image i --claim a"),
        ("--claim a --set exchange=tre", "Invalid value: exchange = tre", "exchange=tree"),
        (
            "--claim a --ranks 2 --set secure.transport=tls",
            "secure.transport=tls needs a secret that all",
            "--secret-name NAME",
        ),
        ("--claim a --secret-name b", "--secret-name is for several pods.", "--claim a"),
        ("--claim a --ranks 2 --secret-name b_c", "Invalid value for --secret-name: b_c", "--secret-name b-c"),
        ("--claim a --grace 0", "--grace 0 is out of range.", "--image i --claim a"),
    ],
)
def test_wrong_requests_are_one_message(request_problems: RequestProblems, words: str, error: str, remedy: str) -> None:
    (problem,) = request_problems("kubernetes", "train.py", "--image", "i", *words.split())
    assert problem.error.startswith(error)
    assert problem.remedy.startswith("unisono kubernetes train.py ")
    assert remedy in problem.remedy


def test_a_target_that_does_not_exist_here(request_problems: RequestProblems) -> None:
    (problem,) = request_problems("kubernetes", "txt", "--image", "i", "--claim", "a")
    assert problem.error == "There is no recipe or script txt."
    words = ("--image", "i", "--claim", "a", "--script-from-config-map")
    (problem,) = request_problems("kubernetes", "nowhere.py", *words)
    assert problem.error == "There is no recipe or script nowhere.py."


def test_a_script_in_the_image_need_not_exist_here(written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kubernetes", "/app/other.py", "--image", "i", "--claim", "a"]) == 0
    assert "- /app/other.py" in capsys.readouterr().out


def test_the_train_job_of_the_guide_is_what_its_model_reads() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    page = (ROOT / "docs" / "guide" / "hosts" / "kubernetes.md").read_text(encoding="utf-8")
    (block,) = [text for text in re.findall(r"```yaml\n(.*?)```", page, re.S) if "kind: TrainJob" in text]
    train_job = yaml.safe_load(block)
    assert models.TrainerV1alpha1TrainJob.from_dict(train_job).to_dict() == train_job
