"""Streams random tokens to text and holds it against one decode of the whole.

    python -m headrace.scripts.fuzz_text --sequences=10000

Two vocabularies: SmolLM2's, of bytes, and one like Llama 2's, trained here, with byte
fallback and a leading space. Tokens, places of reading and stop strings are random: the
deltas must join to the decoded whole, cut at the first stop string, and none may end in
half a drawing. Prints a line per vocabulary and one JSON line. Exits with 1 at the
first difference, with the ids that show it.
"""

import dataclasses
import functools
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence

import tokenizers
from absl import app, flags
from tokenizers import decoders, models, normalizers, trainers

from headrace.checkpoints import cache_dir, gguf_reader, gguf_tokenizer, registry
from headrace.checkpoints.tokenizer_spec import TokenizerSpec
from headrace.engine.detokenizer import Detokenizer
from headrace.engine.request import Request, RequestStatus
from headrace.engine.request_state import CompletionState
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.text_stream import TextStream
from headrace.engine.tokenizer import HFTokenizer, Tokenizer

FLAGS = flags.FLAGS

# Escapes where an editor or a font would join, reorder or hide what counts.
SAMPLES = {
    "English": "The quick brown fox, it's said, jumps over 13 lazy dogs.  Twice!",
    "code": "def f(x):\n\treturn {'a': x ** 2}  # done\n\n",
    "CRLF": "first\r\nsecond\r\n\r\nlast\r",
    "spaces": "  two,   three,\ttab \u00a0no-break \u3000wide ",
    "emoji with joiners": "a \U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
    " b \U0001f3f3\ufe0f\u200d\U0001f308\u2764\ufe0f\u200d\U0001f525 end",
    "skin tones": "\U0001f44d\U0001f3fd \U0001f44b\U0001f3ff\U0001f468\U0001f3fb\u200d"
    "\U0001f91d\u200d\U0001f468\U0001f3fe ok",
    "flags": "\U0001f1eb\U0001f1f7\U0001f1e9\U0001f1ea \U0001f1ef\U0001f1f5!"
    "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
    "combining marks": "e\u0301a\u0308o\u0302\u0323 Z\u0351\u0310\u034ca\u0322l\u0334",
    "precomposed": "naïve café über Ångström řeka İstanbul",
    "Hangul": "\ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc774 \uc788\ub2e4.",
    "Hangul jamo": "\u1112\u1161\u11ab\u1100\u116e\u11a8 \u3131\u314f",
    "Japanese": "日本語の文、カタカナ。",
    "Chinese": "你好，世界！今天天气很好。",
    "Thai": "สวัสดีครับที่นี่ กำ",
    "Devanagari": "नमस्ते क्षत्रिय \u0930\u094d\u200d\u092f",
    "Arabic": "مرحبًا بالعالم، \u0644\u0627\u200c \u200f\u0661\u0662\u0663",
    "Cyrillic and Greek": "Привет, мир. Καλημέρα κόσμε; ёлка",
    "rare": "\x00\x7f\ufeff\ufffd\uffff\U0010ffff \u2028\U00020bb7",
}

JOINER = "\u200d"
REGIONAL = "".join(map(chr, range(0x1F1E6, 0x1F200)))

flags.DEFINE_integer("sequences", 10000, "Of each vocabulary.", lower_bound=1)
flags.DEFINE_integer("fuzz_seed", 0, "Draws other sequences.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One completion and how it is read.

    Attributes:
      ids: its tokens.
      stops, keeps_stop: stop strings, and whether the one found stays.
      skips_special: leave special tokens out.
      reads: places after whose token the user reads.
    """

    ids: tuple[int, ...]
    stops: tuple[str, ...] = ()
    keeps_stop: bool = False
    skips_special: bool = True
    reads: frozenset[int] = frozenset()


@functools.cache
def smollm2() -> HFTokenizer:
    """The tokenizer of SmolLM2, without its weights."""
    path = registry.fetch("smollm2-135m-instruct", cache_dir.cache_dir(None))
    return HFTokenizer(gguf_tokenizer.tokenizer_spec(gguf_reader.open_gguf(path)))


@functools.cache
def llama2_like() -> HFTokenizer:
    """A small BPE with the normalizer, byte fallback and decoder of Llama 2's file.

    Its alphabet is short: many characters of the samples are runs of bytes.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learner = tokenizers.Tokenizer(models.BPE())
    text = " ".join(SAMPLES.values())
    # The trainer's own limit would drop others of the rare characters in every run.
    known = [char for char in text if text.count(char) > 1 or ord(char) % 3 == 0]
    words = ["▁" + word for word in "".join(known).split(" ")]
    trainer = trainers.BpeTrainer(vocab_size=250, show_progress=False)
    learner.train_from_iterator(words, trainer)
    learnt = json.loads(learner.to_str())["model"]
    pieces += sorted(learnt["vocab"], key=learnt["vocab"].get)
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(pair) for pair in learnt["merges"]]
    fast = tokenizers.Tokenizer(
        models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    fast.add_special_tokens(pieces[:3])
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    fast.normalizer = normalizers.Sequence(marks)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return HFTokenizer(TokenizerSpec(tokenizer_json=fast.to_str()))


VOCABULARIES = {"smollm2": smollm2, "llama2-like": llama2_like}

flags.DEFINE_multi_enum("vocabulary", list(VOCABULARIES), list(VOCABULARIES), "Which.")


def draw_case(rng: random.Random, tokenizer: Tokenizer) -> Case:
    """Tokens of real text, of any kind and of bytes, one after another."""
    ids: list[int] = []
    for _ in range(rng.randint(1, 5)):
        size, num_ids = rng.randint(1, 12), rng.choice([0, 300, tokenizer.vocab_size])
        if num_ids:  # the lowest 300 are mostly special tokens and bytes
            ids += (rng.randrange(num_ids) for _ in range(size))
        else:
            text = tokenizer.encode(rng.choice(list(SAMPLES.values())))
            begin = rng.randrange(len(text))
            ids += text[begin : begin + 3 * size]
    skips = rng.random() < 0.5
    whole = tokenizer.decode(ids, skip_special_tokens=skips)
    return Case(
        ids=tuple(ids),
        stops=tuple(_draw_stop(rng, whole) for _ in range(rng.choice([0, 1, 1, 3]))),
        keeps_stop=rng.random() < 0.5,
        skips_special=skips,
        reads=frozenset(i for i in range(len(ids)) if rng.random() < 0.5),
    )


def _draw_stop(rng: random.Random, whole: str) -> str:
    """A part of the text or of some sample, perhaps with another end."""
    source = whole if rng.random() < 0.7 else rng.choice(list(SAMPLES.values()))
    begin = rng.randrange(max(1, len(source)))
    stop = source[begin : begin + rng.randint(1, 6)]
    return stop + "\x01" * (rng.random() < 0.3) or "END"


def pieces_of(tokenizer: Tokenizer, case: Case, groups: Sequence) -> list[str]:
    """What the detokenizer gives for each group of tokens, then at the end."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=case.skips_special)
    return [*(detokenizer.push(group) for group in groups), detokenizer.flush()]


def cut(pieces: Sequence[str], case: Case) -> tuple[str, str | None]:
    """The text up to the first stop string that is whole as the text grows."""
    for text in itertools.accumulate(pieces):
        found = [(text.find(stop), i) for i, stop in enumerate(case.stops)]
        begin, which = min((f for f in found if f[0] >= 0), default=(-1, 0))
        if begin >= 0:
            stop = case.stops[which]
            return text[: begin + len(stop) * case.keeps_stop], stop
    return text, None


def read_as_user(tokenizer: Tokenizer, case: Case) -> tuple[list[str], str | None]:
    """(deltas, stop string) of a completion whose tokens the loop books one by one."""
    params = SamplingParams(
        max_tokens=len(case.ids),
        stop=case.stops,
        include_stop_str_in_output=case.keeps_stop,
        skip_special_tokens=case.skips_special,
    )
    fixed = dict(request_id="fuzz", prompt_token_ids=(0,), seed=0)
    request = Request(**fixed, params=params, max_tokens=len(case.ids))
    completion, deltas, told = CompletionState(request, tokenizer), [], 0
    for place, token_id in enumerate(case.ids):
        request.output_token_ids.append(token_id)
        if place == len(case.ids) - 1:
            request.status, request.finish_reason = RequestStatus.FINISHED, "length"
        completion.add_token()
        if completion.stopped_by is not None and not request.is_finished:
            request.status, request.finish_reason = RequestStatus.FINISHED, "stop"
            completion.end()
        if place in case.reads or request.is_finished:
            deltas.append(completion.output(told).text)
            told = completion.num_tokens
        if request.is_finished:
            break
    return deltas, request.stop_reason  # type: ignore[return-value]


def read_in_pieces(pieces: Sequence[str], case: Case) -> tuple[list[str], str | None]:
    """The same of a stream of text, whatever its pieces."""
    stream = TextStream(case.stops, keeps_stop=case.keeps_stop)
    deltas = [stream.push(piece) for piece in pieces]
    return [*deltas, stream.flush()], stream.stopped_by


def half_drawn(deltas: Sequence[str], case: Case) -> str:
    """A delta that ends within what is drawn as one, though the text goes on."""
    text, shown = "".join(deltas), ""
    for delta in deltas:
        shown += delta
        after = text[len(shown) : len(shown) + 1]
        num_flags = len(shown) - len(shown.rstrip(REGIONAL))
        is_half = bool(num_flags % 2) and after in REGIONAL
        is_half |= shown.endswith(JOINER) or "\ud800" <= shown[-1:] <= "\udfff"
        if delta and after and is_half:
            return delta
    return ""


def complaint(tokenizer: Tokenizer, case: Case) -> str:
    """What is wrong with the text of a case; empty if nothing is."""
    ids = list(case.ids)
    whole = tokenizer.decode(ids, skip_special_tokens=case.skips_special)
    places = [0, *sorted(place + 1 for place in case.reads), len(ids)]
    groups = [ids[a:b] for a, b in zip(places, places[1:], strict=False)]
    singles = pieces_of(tokenizer, case, [[i] for i in ids])
    joined = pieces_of(tokenizer, case, groups)
    as_user, in_pieces = read_as_user(tokenizer, case), read_in_pieces(joined, case)
    for pieces, (deltas, stop) in ((singles, as_user), (joined, in_pieces)):
        # So no U+FFFD either that the whole has not, nor text behind a stop string.
        if (got := "".join(pieces)) != whole:
            return f"streamed {got!r}, decoded at once {whole!r}"
        if ("".join(deltas), stop) != (wanted := cut(pieces, case)):
            return f"read {deltas} until {stop!r}, wanted {wanted}"
        if delta := half_drawn(deltas, case):
            return f"delta {delta!r} of {deltas} is half-drawn"
    return ""


def shrunk(tokenizer: Tokenizer, case: Case) -> Case:
    """The case without the ids and stop strings that its complaint does not need."""
    everywhere = dataclasses.replace(case, reads=frozenset(range(len(case.ids))))
    case = everywhere if complaint(tokenizer, everywhere) else case
    for name in ("ids", "stops"):
        place = 0
        while place < len(values := getattr(case, name)):
            fewer = values[:place] + values[place + 1 :]
            smaller = dataclasses.replace(case, **{name: fewer})
            if smaller.ids and complaint(tokenizer, smaller):
                case = smaller
            else:
                place += 1
    return case


def fuzz(tokenizer: Tokenizer, seed: int, count: int) -> tuple[dict, Case | None]:
    """Runs cases up to the first that is wrong: (counts, that one)."""
    rng, begin_s = random.Random(seed), time.monotonic()
    counts = {"sequences": 0, "tokens": 0, "with_stops": 0, "stopped": 0}
    wrong = None
    while counts["sequences"] < count and wrong is None:
        case = draw_case(rng, tokenizer)
        counts["sequences"] += 1
        counts["tokens"] += len(case.ids)
        counts["with_stops"] += bool(case.stops)
        counts["stopped"] += read_as_user(tokenizer, case)[1] is not None
        wrong = shrunk(tokenizer, case) if complaint(tokenizer, case) else None
    return counts | {"seconds": round(time.monotonic() - begin_s, 1)}, wrong


def main(_: list[str]) -> int:
    """Returns the exit code."""
    results: dict[str, dict] = {}
    for name in FLAGS.vocabulary:
        tokenizer = VOCABULARIES[name]()
        results[name], wrong = fuzz(tokenizer, FLAGS.fuzz_seed, FLAGS.sequences)
        line = ", ".join(f"{value} {key}" for key, value in results[name].items())
        print(f"{name}: {line}", flush=True)
        if wrong is not None:
            print(f"error: {complaint(tokenizer, wrong)}\n{wrong}", file=sys.stderr)
            return 1
    print(json.dumps({"fuzz_seed": FLAGS.fuzz_seed, "vocabularies": results}))
    return 0


if __name__ == "__main__":
    app.run(main)
