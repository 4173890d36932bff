"""Manifests as YAML: keys in their order, scripts as blocks, a comment before each object."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from unisono.clusters.kubernetes.job_manifests import Manifest
from unisono.clusters.kubernetes.pod_manifest import Fields


class ManifestWriter(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Return the node of a text."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


ManifestWriter.add_representer(str, ManifestWriter.represent_text)


def yaml_of(manifests: Sequence[Manifest]) -> str:
    """Return the manifests as one YAML stream, for `kubectl apply -f -`."""
    return "---\n".join(f"# {each.comment}\n{_yaml(each.fields)}" for each in manifests)


def _yaml(fields: Fields) -> str:
    return yaml.dump(fields, Dumper=ManifestWriter, sort_keys=False, width=120, allow_unicode=True)
