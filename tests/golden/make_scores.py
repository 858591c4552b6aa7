"""Makes smollm2_135m_scores.json: how likely transformers finds the golden prompts.

Run like make_golden.py, after it, never by the tests:

    python make_scores.py --model=FOLDER --golden=smollm2_135m_greedy.json \
        --out=smollm2_135m_scores.json

For the last LAST places of each prompt with its 48 golden tokens behind it: the
log-probability of the token that follows, and the TOP likeliest with theirs, of the
raw logits in float64 (the model runs in float32).
"""

import argparse
import json

import torch
import transformers

LAST = 80
TOP = 5


def scores(model: torch.nn.Module, ids: list[int]) -> dict:
    """Places [first, len(ids)), each told from the ids before it."""
    logits = model(torch.tensor([ids])).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)
    first = max(1, len(ids) - LAST)
    rows = logprobs[first - 1 : len(ids) - 1]
    best = rows.topk(TOP)
    chosen = rows.gather(1, torch.tensor(ids[first:])[:, None])[:, 0]
    return {
        "first": first,
        "logprobs": [round(value, 6) for value in chosen.tolist()],
        "top_ids": best.indices.tolist(),
        "top_logprobs": [[round(v, 6) for v in row] for row in best.values.tolist()],
    }


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser()
    for name in ("model", "golden", "out"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32
    ).eval()
    with open(args.golden) as file:
        golden = json.load(file)
    with torch.inference_mode():
        rows = [scores(model, row["ids"] + row["tokens"]) for row in golden["prompts"]]
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__}
    with open(args.out, "w") as file:
        json.dump({"made_with": made_with, "prompts": rows}, file)
        file.write("\n")


if __name__ == "__main__":
    main()
