"""What MkDocs does besides mkdocs.yml: pages of files outside docs/, and Markdown as it is written here."""

from __future__ import annotations

import re
from pathlib import Path

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("[!_]*.*"))
LANGUAGES = {".py": "py", ".sh": "sh", ".sbatch": "sh", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    **{f"examples/{path.name}": f"examples/{path.name}.md" for path in EXAMPLES},
}  # of files outside docs/


def on_config(config: MkDocsConfig) -> None:
    """Let Markdown be read as code hosts do."""
    config.markdown_extensions.append(AsWritten())  # type: ignore[arg-type]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add pages that are made of files outside docs/."""
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, PAGES[name], content=text))
    for path in EXAMPLES:
        text = f"# {path.name}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}```\n"
        files.append(File.generated(config, PAGES[f"examples/{path.name}"], content=text))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files outside docs/ lead to their pages; to any other file they stay, and the build fails."""
    return re.sub(r"\]\(\.\./([\w./-]+)", lambda link: f"]({PAGES.get(link[1], '../' + link[1])}", markdown)


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
