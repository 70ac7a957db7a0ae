"""The strategies that a plan considers if none are named: every registered one, with options that many runs take."""

from __future__ import annotations

FEEDBACK = ["error_feedback(maxnorm(bits=4))", "error_feedback(maxnorm(bits=2))"]
REDUCERS = ["bf16", "maxnorm", "maxnorm(bits=4)", *FEEDBACK, "powersgd(rank=4)"]


def candidates(epochs: int) -> list[str]:
    """Specs of all strategies, for a run of so many epochs.

    >>> "diloco" in candidates(10)
    True
    """
    waiting = min(4, max(1, epochs // 8)) if epochs > 2 else 0
    four_bits = "maxnorm(bits=4)"
    return [
        "data_parallel",
        *(f"data_parallel(reducer={reducer})" for reducer in REDUCERS),
        "local_sgd",
        "diloco",
        "diloco(fragments=4)",
        f"diloco(fragments=4, reducer={four_bits})",
        f"daso(warmup_epochs={waiting}, cooldown_epochs={waiting})",
        "ab",
        "ist",
        "local_parallel",
        "pipeline",
        f"sequence([data_parallel(reducer={four_bits}), local_sgd(reducer={four_bits})], [0.2, 0.8])",
    ]
