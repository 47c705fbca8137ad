"""How much of a run's prompts had been computed before, for a prompt that began alike."""

__all__ = ["Reuse", "reuse"]

from dataclasses import dataclass
from math import inf

from xinfer.records.reader import RecordedRun

_Chunk = tuple[int, tuple[int, ...]]  # the number of the chunk before it, and its tokens


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens of prompts: all, those that a prefix cache could have brought, those that it did bring.

    `distinct` is what it would have had to hold for that: prompts and answers, beginnings that are alike counted once.
    """

    prompt: int = 0
    possible: int = 0
    reused: int = 0
    distinct: int = 0


def reuse(run: RecordedRun, grain: int) -> Reuse:
    """Go through the prompts in the order in which they began to run, with a cache that forgets nothing.

    A beginning counts as known from the time at which its first request had its first token, so that prompts which
    were computed side by side do not count. Left out are requests whose ids were not recorded, that have not ended, or
    that want logprobs of their prompt, for which it must be computed.
    """
    first = {sample["index"]: sample for sample in run.samples if sample["sample"] == 0}
    numbers: dict[_Chunk, int] = {}
    known: list[float] = []  # by a chunk's number, since when it could have been reused
    prompt = possible = reused = distinct = 0
    for began, ready, index in sorted((*_times(sample["history"]), index) for index, sample in first.items()):
        request = run.requests.get(index, {})
        ids = request.get("prompt_token_ids")
        if not isinstance(ids, list) or request["params"].get("prompt_logprobs") is not None:
            continue
        stats, parent, there, new = first[index]["stats"], -1, 0, 0
        for start in range(0, len(ids) - 1, grain):  # the last token is computed in any case: there must be logits
            chunk = (parent, tuple(ids[start : start + grain]))
            parent = numbers.setdefault(chunk, len(numbers))
            if parent == len(known):
                known.append(inf)
                new += grain
            there += grain if known[parent] <= began and start + grain < len(ids) else 0
            known[parent] = min(known[parent], ready)
        prompt, possible = prompt + len(ids), possible + max(there, stats["cached_tokens"])
        reused, distinct = reused + stats["cached_tokens"], distinct + new + stats["generated_tokens"]
    return Reuse(prompt, possible, reused, distinct)


def _times(history: list[tuple[str, float]]) -> tuple[float, float]:
    """Return when a sample began to run, and when it had its first token; infinity where it never did."""
    began, ready = (next((when for state, when in history if state == name), inf) for name in ("prefill", "decode"))
    return began, ready
