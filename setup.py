"""Set what pyproject.toml cannot: the README of the package, whose links must work outside the repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
NOTE = "\nThe pages that this text names are in the source distribution, in its folder `docs`.\n"


def published_readme(text: str, repository: str | None, tag: str) -> str:
    """Return the text of README.md with no relative link.

    Args:
        text: the README of the repository, in Markdown.
        repository: the address of the repository (project.urls.Repository); None leaves the text of each link
            without a link.
        tag: the tag whose files the links lead to.
    """

    def absolute(link: re.Match[str]) -> str:
        if "://" in link["target"]:
            return link[0]
        if repository is None:
            return f"*{link['text']}*" if link["image"] else link["text"]
        view = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({repository.rstrip('/')}/{view}/{tag}/{link['target']})"

    found = LINK.sub(absolute, text)
    return found if found == text or repository is not None else found + NOTE


def main() -> None:
    """Call setuptools; it takes all other metadata from pyproject.toml."""
    from setuptools import setup  # here: its import warns, and tests read this file

    root = Path(__file__).parent
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = re.search(r'^__version__ = "(.+)"$', (root / "unisono" / "__init__.py").read_text(encoding="utf-8"), re.M)
    assert found is not None, "unisono/__init__.py has no version"
    readme = (root / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=published_readme(readme, project.get("urls", {}).get("Repository"), f"v{found[1]}"),
        long_description_content_type="text/markdown",
    )


if __name__ == "__main__":
    main()
