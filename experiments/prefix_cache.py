"""What the prefix cache saves: 64 prompts that share their first 512 tokens, with and without it.

    python experiments/prefix_cache.py [--dtype bfloat16] [--determinism invariant]

Shown are the prompt tokens that were computed, the time until all first tokens were there, and whether all tokens are
the same. In `fast`, they may differ where a hit changes the shapes that kernels see; in `invariant` they may not.
"""

import argparse
import random
from time import perf_counter

from determinism_price import runner

from xinfer import Engine, Limits, SamplingParams

SHARED, OWN, NEW, PROMPTS = 512, 16, 8, 64


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--determinism", default="invariant")
    options = parser.parse_args()
    draw = random.Random(0)
    shared = [draw.randrange(100, 40_000) for _ in range(SHARED)]
    prompts = [shared + [draw.randrange(100, 40_000) for _ in range(OWN)] for _ in range(PROMPTS)]
    model = runner(options.dtype, options.determinism)
    results = {}
    print("| prefix cache | prompt tokens computed | of them found | seconds | first tokens after s |")
    print("| --- | --- | --- | --- | --- |")
    for cache in (False, True):
        engine = Engine(model, None, Limits(determinism=options.determinism, prefix_cache=cache))
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))
        began = perf_counter()
        steps = list(engine.run())
        took = perf_counter() - began
        outputs = {output.index: output for step in steps for output in step.finished}
        results[cache] = [outputs[index].token_ids for index in range(PROMPTS)]
        computed = sum(step.stats.prefill_tokens for step in steps)
        found = sum(output.stats.cached_tokens for output in outputs.values())
        first = max(output.token_times[0] for output in outputs.values()) - began
        print(f"| {'on' if cache else 'off'} | {computed:,} | {found:,} | {took:.2f} | {first:.2f} |")
    same = sum(a == b for a, b in zip(results[False], results[True], strict=True))
    print(f"\n{same} of {PROMPTS} requests have the same tokens")


if __name__ == "__main__":
    main()
