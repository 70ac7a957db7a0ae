"""What MkDocs does besides mkdocs.yml: pages of files outside docs/, and Markdown as it is written here."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
SHOWN = [ROOT / "Dockerfile", *sorted(path for path in (ROOT / "examples").rglob("[!_]*.*") if path.suffix != ".pyc")]
SHOWN_NAMES = {path.relative_to(ROOT).as_posix(): path for path in SHOWN}  # files that a page shows as they are
LANGUAGES = {".py": "py", ".sh": "sh", ".sbatch": "sh", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    **{name: f"examples/{name.removeprefix('examples/')}.md" for name in SHOWN_NAMES},
}  # of files outside docs/


def on_config(config: MkDocsConfig) -> None:
    """Let Markdown be read as code hosts do."""
    config.markdown_extensions.append(AsWritten())  # type: ignore[arg-type]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add pages that are made of files outside docs/."""
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        files.append(File.generated(config, PAGES[name], content=(ROOT / name).read_text()))
    for name, path in SHOWN_NAMES.items():
        text = f"# {path.name}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}```\n"
        files.append(File.generated(config, PAGES[name], content=path.read_text() if path.suffix == ".md" else text))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files outside docs/ lead to their pages; to any other file they stay, and the build fails."""
    made_of = {uri: name for name, uri in PAGES.items() if name != "README.md"}  # the site has a first page of its own
    here = made_of.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def to_page(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link[1]))
        uri = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        return f"]({posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or '.')}" if uri else link[0]

    return re.sub(r"\]\((?!\w+:)([\w./-]+)", to_page, markdown)


class AsWritten(Extension):
    """Lists are indented by two spaces, and examples in docstrings begin with >>>."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.tab_length = 2
        md.preprocessors.register(FencedExamples(md), "examples", 29)  # before fences are read


class FencedExamples(Preprocessor):
    """An example that begins with >>> and ends with an empty line becomes a block of code."""

    def run(self, lines: list[str]) -> list[str]:
        text = "\n".join(lines) + "\n"
        return re.sub(r"(?m)^>>> (?:.+\n)+", lambda example: f"```pycon\n{example[0]}```\n", text).split("\n")
