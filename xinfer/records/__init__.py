"""A run's folder: everything needed to run it again, compare it with another, and trust the difference."""

__all__ = ["Run", "RunRecord", "redacted", "write_report"]

from xinfer.records.record import Run, RunRecord, redacted
from xinfer.records.report import write_report
