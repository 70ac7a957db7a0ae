"""report.html, from the folder of a comparison or a run alone."""

from thinwire.compare.report.page import page, write_report

__all__ = ["page", "write_report"]
