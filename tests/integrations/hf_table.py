"""Which of thinwire's strategies train which of Hugging Face's models: what the tests try, and the table in the docs.

`python -m tests.integrations.hf_table` draws the table into docs/models.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- table: drawn by python -m tests.integrations.hf_table -->\n", "<!-- end -->"
TITLES = {"gpt2": "GPT-2", "llama": "Llama"}
UNTIED = {"tie_word_embeddings": False}
LOW_RANK = "ab(cutoff=0.5, warmup=2, sync_every=2, rebound=1, climb=0, joint=2)"


class Case(NamedTuple):
    """A strategy, how the tests train with it, and what it divides of a model."""

    strategy: str
    spec: str
    divides: str
    cuts: bool = False  # into blocks: the model must return a tensor, and no weight may be in two blocks

    def options(self, model: str) -> dict[str, Any]:
        """What the config of a model must have: GPT-2's words are tied unless it says otherwise, Llama's are not."""
        return UNTIED if self.cuts and model == "gpt2" else {}


CASES = [
    Case("data_parallel", "data_parallel(reducer=maxnorm(bits=4))", "nothing"),
    Case("local_sgd", "local_sgd(every=2)", "nothing"),
    Case("diloco", "diloco(every=2)", "nothing"),
    Case("daso", "daso(ranks_per_node=1, warmup_epochs=0, cooldown_epochs=0)", "nothing"),
    Case("alone", "alone", "nothing"),
    Case("ab", LOW_RANK, "every linear layer inside the blocks, into two factors"),
    Case("ist", "ist(local_steps=2)", "attention heads (of Llama: keys with their queries), hidden units of MLPs"),
    Case("local_parallel", "local_parallel", "blocks", cuts=True),
    Case("pipeline", "pipeline(microbatches=2)", "blocks", cuts=True),
    Case("sequence", f"sequence([{LOW_RANK}, data_parallel])", "what its parts divide"),
    Case("auto", "auto(loss_allowed=0)", "what the strategy that it chooses divides"),
]


def table() -> str:
    """The table, as text."""
    head = ["strategy", "divides", *TITLES.values()]
    rows = [[f"`{case.strategy}`", case.divides, *(_with(case.options(name)) for name in TITLES)] for case in CASES]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _with(options: dict[str, Any]) -> str:
    return " and ".join(f"with `{name}={value}`" for name, value in options.items()) or "yes"


def page_with_table(text: str) -> str:
    """The page with the table as it is now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
