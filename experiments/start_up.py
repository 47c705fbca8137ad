"""Where do the seconds of a start go? `python experiments/start_up.py [--runs 3]`

Starts `python -m xinfer` with the default prompt as a process of its own, warm caches, and reads from its record when
the parts were done. Quoted is the median. `before` is Python, imports, plugins, Hydra and the tokenizer; `after` is the
report and the process's end.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path


def start(folder: Path) -> dict[str, float]:
    began = time.time()
    done = subprocess.run([sys.executable, "-m", "xinfer"], cwd=folder, capture_output=True, text=True, check=False)
    ended = time.time()
    if done.returncode:
        sys.exit(done.stderr)
    run = max(folder.glob("outputs/*/*"), key=lambda path: path.stat().st_mtime_ns)
    info, stats = (json.loads((run / name).read_text()) for name in ("run.json", "stats.json"))
    opened = datetime.fromisoformat(info["started"]).timestamp()
    closed = datetime.fromisoformat(info["ended"]).timestamp()
    generating = stats["duration_s"]
    return {
        "before": opened - began,
        "load": closed - opened - generating,
        "generate": generating,
        "after": ended - closed,
        "whole": ended - began,
        "tokens": stats["generated_tokens"],
    }


def imports() -> dict[str, float]:
    """Seconds of the heaviest imports, children counted."""
    command = [sys.executable, "-X", "importtime", "-c", "import xinfer.cli, xinfer.tasks.generate"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()[1:]
    parts = [line.removeprefix("import time:").split("|") for line in lines]
    names = {
        "torch",
        "hydra",
        "numpy",
        "tokenizers",
        "transformers",
        "rich.progress",
        "jinja2",
        "gguf",
        "huggingface_hub",
    }
    return {name.strip(): int(total) / 1e6 for _, total, name in parts if name.strip() in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start(Path(folder))  # fetches what is not there yet
        rows = [start(Path(folder)) for _ in range(options.runs)]
    print("| part | median s |\n| --- | --- |")
    for name in rows[0]:
        print(f"| {name} | {statistics.median(row[name] for row in rows):.2f} |")
    print("\n| import | s |\n| --- | --- |")
    for name, took in sorted(imports().items(), key=lambda item: -item[1]):
        print(f"| {name} | {took:.2f} |")


if __name__ == "__main__":
    main()
