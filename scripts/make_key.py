"""Prints a new bearer key, once, and what of it goes into the key file of serve.py.

    python -m headrace.scripts.make_key

The key goes to the caller; only its hash is kept:
{"tenants": {"NAME": {"keys": ["sha256:..."], "requests_per_minute": 600}}}
"""

from absl import app

from headrace.engine.serving.tenants import hash_of, new_key


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    if len(argv) > 1:
        raise app.UsageError(f"nothing is taken, got {argv[1:]}")
    key = new_key()
    print(f"key:  {key}")
    print(f"hash: {hash_of(key)}")
    return 0


if __name__ == "__main__":
    app.run(main)
