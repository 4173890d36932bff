"""Nothing is executed that was only data: no pickle, no evaluated text, no code from a file or a socket.

Every place that could execute data is listed in JUSTIFIED, with the reason why what it executes is code that the user
asked for. A new one fails this test.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.sources import LIBRARY, files, tree

MODULES = {
    *("pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "copyreg"),
    *("runpy", "code", "codeop", "imp", "importlib", "zipimport", "pkgutil"),
    *("multiprocessing", "ctypes", "xmlrpc", "xml"),
}
"""Modules that unpickle, that run code by name, that load machine code, or that expand what they parse."""

HARMLESS = {("importlib", "metadata"), ("importlib", "util"), ("importlib", "resources")}
"""Parts of these modules that execute nothing."""

NAMES = {"eval", "exec", "compile", "__import__"}
"""Builtins."""

METHODS = {
    *("extractall", "extract", "unpack_archive"),  # write paths that an archive names
    *("system", "popen", "unsafe_load", "full_load", "load_all"),
    *("broadcast_object_list", "scatter_object_list"),  # torch pickles the objects
    "treespec_loads",  # torch imports modules that the text names
    *("LoadLibrary", "load_library", "spec_from_file_location", "exec_module"),
    "urlopen",
}
"""Functions of these names, whatever they belong to."""

JUSTIFIED = {
    ("__init__.py", "importlib"): "names of the library's own modules, from a table",
    ("cli/commands/run_command.py", "runpy"): "the script that the user has named, for --help",
    ("launcher/worker_main.py", "runpy"): "the script that the user has named",
    ("notebook.py", "cloudpickle"): "sends a function of the notebook to processes that this call starts",
    ("notebook.py", "pickle"): "reads that function in these processes, from the run directory that the call has made",
    ("testing/__init__.py", "multiprocessing"): "pipes to processes that the test itself forks",
    (
        "data/loader_workers.py",
        "multiprocessing",
    ): "waits for the workers of torch's DataLoader, which this process forks",
    ("data/worker_messages.py", "multiprocessing"): "how workers of torch's DataLoader send a batch to their parent",
    ("launcher/rank_logging.py", "multiprocessing"): "a lock that forked workers share",
    ("parallel/compiler_determinism.py", "importlib"): "notices that a module is imported, and imports none",
    ("trackers/registry.py", "importlib"): "the class that the user's setting `track` names",
    ("cli/tuning/variant_names.py", "importlib"): "packages that samplers of Optuna need, from a table",
    ("entrypoint.py", "importlib"): "names of the library's own modules, from a table",
    ("exchange/choose.py", "importlib"): "names of the library's own modules, from a table",
    ("exchange/kernels/device_kernels.py", "importlib"): "one name of the library's own",
    ("train/loop.py", "importlib"): "names of the library's own modules, from a table",
    ("data/rng.py", "ctypes"): "reads the words of numpy's generator",
    ("machine/tcp_traffic.py", "ctypes"): "calls getsockopt of the C library",
    ("tensors/mapped_memory.py", "ctypes"): "calls mmap of the C library",
    ("distributed/shared_memory.py", "ctypes"): "calls mmap of the C library",
    ("testing/faults.py", "ctypes"): "a filter of the kernel that drops packets, in tests",
    ("recipes/datasets/espeak.py", "ctypes"): "the library of an installed package",
    ("recipes/datasets/espeak.py", "importlib"): "that package, by its name",
    ("recipes/datasets/images.py", "importlib"): "optional packages, by their names",
    ("recipes/datasets/images.py", "urlopen"): "a published data set, compared with its sha256",
    ("torch_compat/tree_specs.py", "treespec_loads"): "checks that the text names classes of imported modules only",
}


def dangers(source: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, what) of everything in a module that could execute data."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root, _, rest = alias.name.partition(".")
                if root in MODULES and (root, rest.partition(".")[0]) not in HARMLESS:
                    yield node.lineno, root
        elif isinstance(node, ast.ImportFrom) and node.module:
            root, _, rest = node.module.partition(".")
            for alias in node.names:
                if root in MODULES and (root, rest.partition(".")[0] or alias.name) not in HARMLESS:
                    yield node.lineno, root
                if node.module == "torch" and alias.name == "multiprocessing":
                    yield node.lineno, "multiprocessing"
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in _called(node))


def _called(node: ast.Call) -> Iterator[str]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    method = node.func.attr if isinstance(node.func, ast.Attribute) else name
    owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    keywords = {each.arg: each.value for each in node.keywords}
    if name in NAMES:
        yield name
    if method in METHODS and not (owner == "platform" and method == "system"):
        yield method
    if owner.startswith("torch.multiprocessing") or (owner == "dist" and method.endswith("_object")):
        yield f"{owner}.{method}"
    if owner == "torch" and method == "load" and not _is(keywords.get("weights_only"), True):
        yield "torch.load"
    if owner == "yaml" and method == "load":
        yield "yaml.load"
    if "allow_pickle" in keywords and not _is(keywords["allow_pickle"], False):
        yield "allow_pickle"
    if "shell" in keywords and not _is(keywords["shell"], False):
        yield "shell"


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_no_module_executes_data() -> None:
    found = {
        (path.relative_to(LIBRARY).as_posix(), what): line
        for path in files("unisono")
        for line, what in dangers(tree(path))
    }
    assert {f"{path}:{line}": what for (path, what), line in found.items() if (path, what) not in JUSTIFIED} == {}
    assert JUSTIFIED.keys() - found.keys() == set(), "no longer needed"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.connection",
        "from torch import multiprocessing",
        "import importlib",
        "from importlib import import_module",
        "eval(text)",
        "exec(text)",
        "compile(text, '', 'exec')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "tar.extractall(folder)",
        "dist.all_gather_object(out, value)",
        "dist.broadcast_object_list(values)",
    ],
)
def test_the_search_finds(text: str) -> None:
    assert list(dangers(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "import importlib.metadata",
        "from importlib import metadata",
        "re.compile(text)",
        "model.eval()",
        "torch.compile(model)",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=False)",
        "group.all_gather_object(value)",
        "platform.system()",
    ],
)
def test_the_search_leaves_alone(text: str) -> None:
    assert not list(dangers(ast.parse(text)))
