"""Pages of the documentation site that stand elsewhere in the repository: mkdocs calls the functions here.

``changes.md`` is ``CHANGELOG.md`` and ``reference/terraform.md`` is ``terraform/README.md``; links to those files
lead to these pages.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)[^)\s]+\)")  # to a file of the repository
MOVED = {"changes.md": "CHANGELOG.md", "reference/terraform.md": "terraform/README.md"}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that stand elsewhere; called by mkdocs."""
    from mkdocs.structure.files import File

    for address, text in pages().items():
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Lead links to those files to their pages; called by mkdocs."""
    return relinked(markdown, page.file.src_uri)


def relinked(markdown: str, address: str) -> str:
    """Return a page whose links to moved files lead to their pages, seen from the page at ``address``."""
    up = "../" * address.count("/")
    for page, path in MOVED.items():
        markdown = markdown.replace(f"]({up}../{path})", f"]({up}{page})")
    return markdown


def pages() -> dict[str, str]:
    """Return the pages by address."""
    return {address: moved(ROOT / path) for address, path in MOVED.items()}


def moved(path: Path) -> str:
    """Return a page of the repository for the site: its links to files become their names."""
    return _LINK.sub(r"`\1`", path.read_text(encoding="utf-8"))
