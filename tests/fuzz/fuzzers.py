"""All fuzzers by name."""

from __future__ import annotations

from tests.fuzz import codes, data_files, pages, results, saved, settings, specs
from tests.fuzz.harness import Fuzzer

FUZZERS = {
    one.name: one
    for one in (
        Fuzzer("specs", "strategies, reducers, heads and sequences as text", 60, specs.prepare),
        Fuzzer("settings", "TOML files and options of the command line", 30, settings.prepare),
        Fuzzer("links", "links, rates, durations and epochs as text", 40, settings.prepare_links),
        Fuzzer("worlds", "variables of torchrun, srun and mpirun; node lists", 30, settings.prepare_worlds),
        Fuzzer("states", "what a checkpoint holds, packed and unpacked", 16, saved.prepare_states),
        Fuzzer("checkpoints", "files of checkpoints, read and resumed from", 4, saved.prepare_checkpoints),
        Fuzzer(
            "results", "summary, metrics, ledger, timeline, compare.json: report and plan --from", 4, results.prepare
        ),
        Fuzzer("data", "idx files, CIFAR-10's files, text", 4, data_files.prepare),
        Fuzzer("codes", "bytes of other ranks, decoded", 15, codes.prepare),
        Fuzzer("reducers", "what other ranks give in a reduction", 6, codes.prepare_reducers),
        Fuzzer("messages", "JSON of other ranks", 8, codes.prepare_messages),
        Fuzzer("pages", "names with markup in report.html", 1, pages.prepare),
    )
}
