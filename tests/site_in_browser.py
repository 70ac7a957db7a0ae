"""Open every page of the built documentation as a file, in a headless chromium, and check what readers see.

`make docs` runs it: python -m tests.site_in_browser site [folder for pictures]
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from tests.compare.browser import brightness, browser

LOOKS = [("desktop", 1400, "light"), ("dark", 1400, "dark"), ("phone", 390, "light")]


def check_site(site: Path, pictures: Path | None = None) -> int:
    """Raise AssertionError for the first thing that is wrong; returns the number of pages."""
    pages = [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]  # that is for servers
    problems: list[str] = []
    with browser() as opened:
        view = opened.new_page()
        view.on("console", lambda line: problems.append(line.text) if line.type in ("error", "warning") else None)
        view.on("pageerror", lambda error: problems.append(str(error)))
        view.on("request", lambda request: problems.append(request.url) if not is_own(request.url, site) else None)
        for page in pages:
            name = page.relative_to(site).with_suffix("").as_posix().replace("/", "-")
            for look, width, scheme in LOOKS:
                view.set_viewport_size({"width": width, "height": 900})
                view.emulate_media(color_scheme=scheme)
                view.goto(page.as_uri())
                check_look(view, f"{name}, {look}", scheme == "light")
                if pictures:
                    view.screenshot(path=pictures / f"{name}-{look}.png", full_page=True)
            assert problems == [], f"{name}: {problems}"
        check_search(view, site)
    assert problems == []
    return len(pages)


def is_own(url: str, site: Path) -> bool:
    """Whether a request stays in the site."""
    return url.startswith((site.as_uri(), "data:", "blob:", "about:"))


def check_look(view: Any, name: str, light: bool) -> None:
    """Check a page as it stands: its colours, its width and its pictures."""
    background, reach, inner = view.evaluate(
        "[getComputedStyle(document.body).backgroundColor, document.documentElement.scrollWidth, innerWidth]"
    )
    assert (brightness(background) > 200) == light, f"{name}: the page is {background}"
    assert reach <= inner, f"{name}: the page scrolls sideways, {reach} px in {inner} px"
    broken = view.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)")
    assert broken == [], f"{name}: {broken}"


def check_search(view: Any, site: Path) -> None:
    """Searching a word finds pages, also in pages that are opened as files."""
    view.set_viewport_size({"width": 1400, "height": 900})
    view.goto((site / "index.html").as_uri())
    view.locator(".md-search__input").click()
    view.keyboard.type("error feedback")
    view.locator(".md-search-result__item a").first.wait_for(timeout=20_000)


if __name__ == "__main__":
    if shutil.which("chromium") is None:
        sys.exit("the site was not looked at: chromium is not installed; try: make browser")
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    print(f"{check_site(Path(sys.argv[1]).resolve(), folder)} pages: they fit, and ask nothing of other hosts")
