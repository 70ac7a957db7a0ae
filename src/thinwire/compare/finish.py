"""The end of a comparison: write results.json and report.html, print the table, report runs that failed."""

from __future__ import annotations

import json

from thinwire.common.files import write_text
from thinwire.common.messages import print_line
from thinwire.compare import baseline
from thinwire.compare.comparison import Comparison
from thinwire.compare.report import write_report
from thinwire.compare.results import Results
from thinwire.compare.results_json import results_json
from thinwire.compare.terminal_table import comparison_lines, comparison_table
from thinwire.errors import RunError
from thinwire.run.tables import output_console


def write_results(comparison: Comparison) -> Results:
    """Write results.json, and report.html if a run has finished; return the results."""
    results = comparison.results()
    write_text(comparison.folder / "results.json", json.dumps(results_json(results), indent=2) + "\n")
    if results.example is not None:
        write_report(results)
    return results


def print_results(results: Results) -> None:
    """Print the table and where the report is; raise if no run has finished."""
    if results.example is None:
        raise RunError(f"no run finished:\n{_list_errors(results)}")
    console = output_console()
    console.print(comparison_table(results, console.width))
    for line in comparison_lines(results):
        console.print(line, highlight=False, markup=False)
    where = f"results in {results.folder}; open {results.folder / 'report.html'}"
    console.print(where, highlight=False, markup=False, soft_wrap=True)


def check_failures(comparison: Comparison, results: Results) -> None:
    """Raise if a run failed; if only the automatic baseline failed, print a message instead."""
    failed = [job for job in comparison.jobs if job.place in comparison.errors]
    decision = comparison.baseline
    is_automatic = comparison.config.baseline == "auto" and decision is not None and decision.run
    if any(job.spec != baseline.SPEC or not is_automatic for job in failed):
        raise RunError(f"{len(failed)} of {len(comparison.jobs)} runs failed:\n{_list_errors(results)}")
    if failed:
        print_line(baseline.failed_message(_list_errors(results), comparison.resume_command))


def _list_errors(results: Results) -> str:
    return "\n".join(f"  {entry.spec}, {error}" for entry in results.entries for error in entry.errors)
