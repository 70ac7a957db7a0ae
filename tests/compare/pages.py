"""Read a report back: its text, the rows of its tables, and what plotly.js is given."""

from __future__ import annotations

import json
import re
from typing import Any


def text(html: str) -> str:
    """What a reader sees of a page, as one line."""
    body = re.sub(r"<(script|style).*?</\1>", "", html[html.index("<body>") :], flags=re.DOTALL)
    body = body.replace('<span class="sub">', " ")
    words = re.sub(r"<wbr>|</?(span|code|strong|b|i)\b[^>]*>", "", body)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", words))


def row(html: str, number: int) -> str:
    """The cells of a strategy's row of the results."""
    return text("<body>" + re.findall(r"<tr>.*?</tr>", html, flags=re.DOTALL)[number])


def json_text(html: str) -> str:
    found = re.search(r'<script type="application/json" id="drawn">(.*?)</script>', html, flags=re.DOTALL)
    return found[1] if found else '{"figures": {}}'


def drawn(html: str) -> dict[str, Any]:
    """What plotly.js is given, by the name of the figure."""
    return json.loads(json_text(html))["figures"]
