"""Every link of the documentation: internal ones lead to a file and a heading, external ones are well formed."""

import re
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "terraform" / "README.md",
         *sorted((ROOT / "docs").rglob("*.md"))]  # fmt: skip
_FENCE = re.compile(r"^( *)```.*?^\1```\s*$", re.M | re.S)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.M)


def prose(page: Path) -> str:
    """Return a page without its code."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the addresses of a page's headings, as GitHub and mkdocs make them."""
    found = set()
    for heading in _HEADING.findall(prose(page)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        plain = re.sub(r"[^\w\s-]", "", plain.replace("`", "")).strip().lower()
        name = re.sub(r"[-\s]+", "-", plain)
        while name in found:  # a second one of the same text
            name = (
                f"{match[1]}_{int(match[2]) + 1}"
                if (match := re.match(r"(.*)_(\d+)$", name))
                else f"{name}_1"
            )
        found.add(name)
    return frozenset(found | set(re.findall(r'(?:id|name)="([^"]+)"', page.read_text(encoding="utf-8"))))


def problem(page: Path, link: str) -> str:
    """Return what is wrong with a link of a page; empty: nothing."""
    parts = urlsplit(link)
    if parts.scheme:
        good = parts.scheme in ("https", "http", "mailto") and (parts.netloc or parts.scheme == "mailto")
        return "" if good else "is no address"
    target = page if not parts.path else (page.parent / parts.path)
    if not target.exists():
        return f"leads to {parts.path}, which is not there"
    if target.resolve() != ROOT and ROOT not in target.resolve().parents:
        return "leads out of the repository"
    if parts.fragment and target.suffix == ".md" and parts.fragment not in anchors(target):
        return f"leads to a heading that is not there: {parts.fragment}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = _LINK.findall(_CODE.sub("", prose(page)))
    assert [f"{link}: {wrong}" for link in links if (wrong := problem(page, link))] == []


def test_what_is_wrong_with_a_link_is_found() -> None:
    page = ROOT / "docs" / "index.md"
    assert problem(page, "concepts.md") == ""
    assert problem(page, "https://www.prefect.io") == ""
    assert problem(page, "nowhere.md") == "leads to nowhere.md, which is not there"
    assert "heading" in problem(page, "concepts.md#nowhere")
    assert "out of the repository" in problem(page, "../../")
    assert "no address" in problem(page, "javascript:alert(1)")
