"""Makes smollm2_135m_greedy.json: what transformers says in float32, for our tests.

Run in an environment of its own (Python 3.11; `pip install torch==2.13.0
transformers==5.24.0 accelerate gguf numpy`), never by the tests:

    python make_golden.py --model=FOLDER --out=smollm2_135m_greedy.json

FOLDER holds SmolLM2-135M-Instruct as float32 safetensors, dequantized from the GGUF
file that the engine's registry names, with its tokenizer; the tokenizer must split
digits, as the file's `tokenizer.ggml.pre = smollm` says. Candidates are kept if the
best two tokens lie further apart than MIN_MARGIN nat at each of the 48 steps, so that
another correct float32 engine must give the same tokens. Ids are made without
special tokens, which is the same as this tokenizer's default: it adds none.
"""

import argparse
import json

import torch
import transformers

STEPS = 48
MIN_MARGIN = 2e-3
TOP = 20

STORY = (
    "The harbour lay quiet under a low sky. Boats knocked against the quay, and a "
    "man in a blue coat counted the crates that had come in on the night tide. "
)
NOTES = (
    "Notes on rivers: A river begins where rain gathers. It cuts stone, carries "
    "sand, floods fields and feeds them. In dry years it shrinks to a thread. "
    "Engineers build weirs to raise it, canals to lead it off, and mills to use it. "
)

# (kind, text or messages)
CANDIDATES = [
    ("english", "The capital of France is"),
    ("english", "Once upon a time, in a small village by the sea,"),
    ("english", "The three most important inventions of the 19th century were"),
    ("english", "Water boils at a temperature of"),
    ("english", "Photosynthesis is the process by which"),
    ("code", "def fibonacci(n):\n    "),
    ("code", "#include <stdio.h>\n\nint main(void) {\n"),
    ("code", "import numpy as np\n\nx = np.zeros((3, 4))\nprint("),
    ("code", "SELECT name, age FROM users WHERE"),
    ("digits", "1, 2, 3, 4, 5, 6, 7,"),
    ("digits", "12 + 30 = 42\n15 + 20 = 35\n11 + 11 ="),
    ("digits", "In 1969, 1984 and 2001 the"),
    ("digits", "3.14159 26535 89793"),
    ("digits", "7 * 6 = 42\n8 * 5 = 40\n9 * 9 ="),
    ("digits", "Solve: 125 - 48 =\n"),
    ("french", "La révolution française a commencé en"),
    ("french", "Bonjour, je m'appelle Élodie et j'habite à"),
    ("french", "Il était une fois une petite fille qui"),
    ("chinese", "中国的首都是"),
    ("chinese", "今天天气很好，我们"),
    ("emoji", "I love pizza 🍕🍕🍕 and"),
    ("emoji", "👩‍👩‍👧‍👦 family emoji 🎉 means"),
    ("emoji", "😀😃😄😁"),
    ("whitespace", "one    two        three\t\tfour\n\n\n\nfive"),
    ("whitespace", "    \n        \n    return x\n\n\ndef"),
    ("whitespace", "name\tage\tcity\r\nAnn\t31\tOslo\r\nBob\t28\t"),
    ("whitespace", "# Title\r\n\r\nFirst line.\r\nSecond line.\nThird line.\r\n"),
    ("whitespace", "Dear Sir,\r\n\r\nThank you for your letter.\n\nI am\r\n"),
    ("whitespace", "a = 1\r\nb = 2\r\n\r\nc = a + b\r\nprint("),
    ("long", STORY * 9 + "Then"),
    ("long", NOTES * 8 + "In short, a river"),
    ("long", STORY * 4 + NOTES * 5 + "The man"),
    ("chat", [{"role": "user", "content": "What is the capital of Italy?"}]),
    ("chat", [{"role": "user", "content": "Write a haiku about snow."}]),
    ("chat", [{"role": "user", "content": "Explain gravity to a child."}]),
    (
        "chat",
        [
            {"role": "system", "content": "You answer in one short sentence."},
            {"role": "user", "content": "What is 2 + 2?"},
            {"role": "assistant", "content": "4."},
            {"role": "user", "content": "And 3 + 5?"},
        ],
    ),
    ("chat", [{"role": "user", "content": "List three colours 🎨 in French."}]),
]

TOKENIZER_TEXTS = [
    "", "Hello, world!", " leading space", "trailing space ", "a", " ", "\n", "\t",
    "don't can't we'll I'm they've he'd", "DON'T", "1234567890", "1 2 3", " 42",
    "\n42", "a1b2c3", "3.14159", "1,000,000", "v2.0.1", "0x1F", "²³½", "١٢٣",
    "naïve café", "Ünïcödé", "e\u0301 combining", "ﬁ ligature", "日本語テキスト",
    "中文，标点。", "한국어 문장", "Привет, мир", "مرحبا بالعالم", "שלום עולם",
    "हिन्दी", "ไทย", "😀", "👩‍👩‍👧‍👦", "🇫🇷🇩🇪", "a😀b",
    "\U0001f3f3\ufe0f\u200d\U0001f308",
    "    four spaces", "\t\ttabs", "a  b   c    d", "line\nbreak", "line\r\nbreak",
    "\n\n\n", " \n \n ", "x" + " " * 40 + "y", "\u00a0nbsp\u2003em",
    "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "a<|im_end|>b",
    "<|im_start", "def f(x):\n    return x**2\n", "for(int i=0;i<10;++i){}",
    "https://example.org/a?b=c&d=1#e", "user@example.org", "C:\\path\\file.txt",
    "!!!???...", "--- *** ===", "\"quoted\" 'single'", "{\"key\": [1, 2.5, null]}",
    "The quick brown fox jumps over the lazy dog.", "\x00\x01", "\ufeffBOM",
    "ALLCAPS lower MiXeD", "supercalifragilisticexpialidocious", "aaaaaaaaaaaaaaaa",
]  # fmt: skip


def greedy(model: torch.nn.Module, ids: list[int]) -> dict:
    """48 greedy tokens, the margin of each, and the first step's best tokens."""
    tokens, margins, first = [], [], {}
    cache, feed = None, torch.tensor([ids])
    for _ in range(STEPS):
        out = model(feed, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logprobs = torch.log_softmax(out.logits[0, -1].double(), -1)
        best = logprobs.topk(TOP)
        if not first:
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            first = {str(i): round(v, 7) for i, v in pairs}
        margins.append(round((best.values[0] - best.values[1]).item(), 6))
        tokens.append(best.indices[0].item())
        feed = best.indices[:1][None]
    return {"tokens": tokens, "margins": margins, "first_logprobs": first}


def prompt_rows(model: torch.nn.Module, tokenizer) -> list[dict]:
    """The candidates that pass, with everything that a test needs."""
    rows = []
    for kind, source in CANDIDATES:
        text = source
        if kind == "chat":
            text = tokenizer.apply_chat_template(
                source, tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        row = greedy(model, ids)
        smallest = min(row["margins"])
        print(f"{kind:<12}{len(ids):>5} tokens, least margin {smallest:.5f}")
        if smallest <= MIN_MARGIN:
            continue
        decoded = decode(tokenizer, row["tokens"])
        messages = source if kind == "chat" else None
        head = {"kind": kind, "messages": messages, "text": text, "ids": ids}
        rows.append({**head, "decoded": decoded, **row})
    return rows


def decode(tokenizer, ids: list[int]) -> str:
    """Text of ids as they are, special tokens included."""
    return tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32
    ).eval()
    texts = []
    for text in TOKENIZER_TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        texts.append({"text": text, "ids": ids, "decoded": decode(tokenizer, ids)})
    with torch.inference_mode():
        prompts = prompt_rows(model, tokenizer)
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__}
    with open(args.out, "w") as file:
        golden = {"made_with": made_with, "prompts": prompts, "tokenizer": texts}
        json.dump(golden, file, ensure_ascii=True)
        file.write("\n")
    print(f"{len(prompts)} prompts of {len(CANDIDATES)} kept")


if __name__ == "__main__":
    main()
