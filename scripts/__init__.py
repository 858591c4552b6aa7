"""Programs: run as `python -m headrace.scripts.NAME`."""
