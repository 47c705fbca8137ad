"""`python -m xinfer explain [RUN]`: what held a run back, with the numbers, and which setting to change."""

__all__ = ["run"]

from rich.markup import escape

from xinfer.config import Config
from xinfer.records.diagnosis import Finding, diagnose
from xinfer.records.evidence import Evidence
from xinfer.records.reader import RecordedRun, read_run
from xinfer.tasks import Job
from xinfer.tasks.console import console
from xinfer.tasks.recorded import find_run


def run(config: Config, job: Job) -> int:
    """Print on standard output one line about the run, and what held it back, the first thing to see to first."""
    recorded = read_run(find_run(config.run))
    findings = diagnose(recorded)
    page = console()
    figures = Evidence(recorded).figures()
    verdict = "" if findings else "nothing held it back: "
    page.print(f"{recorded.folder}: {_ending(recorded)}, {verdict}{figures}", markup=False)
    for number, finding in enumerate(findings, 1):
        _show(number, finding)
    return 0


def _show(number: int, finding: Finding) -> None:
    page = console()
    page.print(f"\n[bold]{number}. {finding.name.replace('_', ' ')}[/bold]  {finding.share:.0%}")
    page.print(escape(finding.text))
    if finding.setting is not None:
        page.print(f"try  [bold]{escape(finding.setting)}[/bold]")


def _ending(recorded: RecordedRun) -> str:
    """Return how a run ended, and of what it failed."""
    if recorded.status == "running":
        return "running, or killed"
    error = recorded.info.get("error")
    return f"failed ({error})" if recorded.status == "failed" and error else recorded.status
