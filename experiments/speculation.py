"""What guessing tokens wins where a text quotes its prompt, and that it never changes one.

    python experiments/speculation.py [--dtype float32] [--rounds 5]

`quoting` asks for a text to be repeated, `free` for a story. Greedy and sampled, one request at a time, without n-grams
and with them, in turns; quoted are medians of tokens a second from the first token to the last.
"""

import argparse
import statistics

from determinism_price import runner

from xinfer import Engine, Limits, SamplingParams
from xinfer.composing import default_model
from xinfer.engine.speculative import NgramProposer, Speculator
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.sources import resolve

TEXT = (
    "The harbour lay quiet in the early light. Three boats were tied to the long pier, and a grey heron stood on the "
    "last post. Nobody had come down yet. The water was flat, and the nets hung dry from the poles along the wall."
)
PROMPTS = {"quoting": f"Repeat the following text word for word.\n\n{TEXT}", "free": "Tell me a story about a heron."}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    path = resolve(default_model())
    tokenizer = Model(str(path), lambda: path, xinfer_model_families()).tokenizer
    model = runner(options.dtype, "invariant")
    print("| text | sampling | plain tok/s | with n-grams | ratio | guesses right | same tokens |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, prompt in PROMPTS.items():
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        for sampling in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.95, "seed": 7}):
            rates, tokens, right = {False: [], True: []}, {}, None
            for _ in range(options.rounds):
                for guessing in (False, True):
                    speculator = Speculator(NgramProposer()) if guessing else None
                    limits = Limits(determinism="invariant")
                    engine = Engine(model, None, limits, eos_token_ids=(2,), speculator=speculator)
                    engine.add_request(ids, SamplingParams(max_tokens=128, **sampling))
                    (output,) = (output for step in engine.run() for output in step.finished)
                    rates[guessing].append(1000 / output.stats.tpot_ms)
                    tokens[guessing] = output.token_ids
                    right = speculator.figures()["acceptance_rate"] if speculator else right
            plain, guessed = (statistics.median(rates[guessing]) for guessing in (False, True))
            ratio = statistics.median(b / a for a, b in zip(rates[False], rates[True], strict=True))
            kind = "greedy" if sampling["temperature"] == 0 else "sampled"
            shown = "-" if right is None else f"{right:.0%}"
            same = tokens[False] == tokens[True]
            print(f"| {name} | {kind} | {plain:.1f} | {guessed:.1f} | {ratio:.2f} | {shown} | {same} |", flush=True)


if __name__ == "__main__":
    main()
