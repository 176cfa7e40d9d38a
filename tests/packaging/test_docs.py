"""What the README and the documentation show must run, and what they link to must exist.

The ```python blocks of one page run in order in one namespace, on the CPU. A block that is not meant to run is not
marked as Python.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """Return (line before the code, code) of each block, so that a traceback names the page's own line."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, block.start(1)), block[1]) for block in PYTHON_BLOCK.finditer(text)]


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=page_id)
def test_python_blocks_run(page):
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    namespace = {"__name__": page.stem}
    for line, code in python_blocks(page):
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_readme_has_an_example():
    assert python_blocks(ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_lead_somewhere(page):
    targets = [target for target in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []
