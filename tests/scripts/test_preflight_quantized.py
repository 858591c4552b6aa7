"""What quantized weights change in a preflight."""

import pytest

from headrace.configs import EngineConfig, load_config, parse_config
from headrace.scripts import gpu_compile
from headrace.scripts.preflight_engine import Preflight
from headrace.scripts.preflight_model import full_target_name, gpu_facts

MODEL = parse_config(load_config("llama3_1_8b"))[0]


def test_fewer_bits_leave_more_pages_and_lower_floors():
    target = gpu_compile.read_target(full_target_name("h200"))
    flights = [
        Preflight(
            MODEL,
            EngineConfig(max_context_len=65536, quantization=scheme),
            gpu_facts(target),
            target,
            context=1024,
        )
        for scheme in (None, "int8", "int4-g128")
    ]
    plain, eight, four = (flight.plan.weights_bytes for flight in flights)
    # The two tables stay; a scale of 4 bytes per 128 weights.
    tables = 2 * 128_256 * 4096 * 2
    rest = plain - tables
    assert eight == pytest.approx(tables + rest / 2, rel=1e-3)
    assert four == pytest.approx(tables + rest * (0.25 + 1 / 64), rel=1e-3)
    pages = [flight.config.num_pages for flight in flights]
    assert pages == sorted(pages) and pages[0] < pages[2]
    floors = [flight.floors.decode_ms(8, 1024) for flight in flights]
    assert floors == sorted(floors, reverse=True) and floors[2] < 0.5 * floors[0]
