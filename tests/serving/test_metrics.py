"""Metrics say what was sent, and only that."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mtp_runtime import Model
from mtp_runtime.batching.options import BatchOptions
from mtp_serving.openai.metrics import PREFIX
from tests.serving.server import serving

TEXT = "/v1/completions"
ROOT = Path(__file__).resolve().parents[2]


def test_a_scrape_says_what_was_sent(carried: Model) -> None:
    with serving(carried, BatchOptions(prefix_bytes=0)) as server:
        assert server.metrics()["mtp:prompt_tokens_total"] == 0
        bodies = [
            {"prompt": "The function returns", "max_tokens": 20, "temperature": 0, "draft_tokens": 3},
            {"prompt": ["import ", "def "], "max_tokens": 9, "seed": 1, "draft_tokens": 2},
            {"prompt": "A", "max_tokens": 5, "draft_tokens": 0, "n": 2, "seed": 2},
            {"prompt": "A", "max_tokens": 200, "timeout": 0.05, "ignore_eos": True},
        ]
        sent = [
            server.post(TEXT, {**body, "speculative_stats": True, "return_token_ids": True}).json() for body in bodies
        ]
        server.post(TEXT, {"prompt": "a", "nonsense": 1})
        got = server.metrics()
    choices = [choice for response in sent for choice in response["choices"]]
    stats = [response["speculative_stats"] for response in sent]
    tokens = sum(len(choice["token_ids"]) for choice in choices)
    assert got["mtp:generation_tokens_total"] == tokens
    # Each of two answers to one prompt has read it.
    assert got["mtp:prompt_tokens_total"] == sum(response["usage"]["prompt_tokens"] for response in sent) + 1
    assert got["mtp:spec_decode_num_draft_tokens_total"] == sum(one["drafted"] for one in stats) > 0
    assert got["mtp:spec_decode_num_accepted_tokens_total"] == sum(one["accepted"] for one in stats) > 0
    assert got["mtp:spec_decode_num_drafts_total"] == sum((one["proposed_by_position"] or [0])[0] for one in stats)
    for position in range(3):
        kept = sum(
            one["accepted_by_position"][position] for one in stats if len(one["accepted_by_position"]) > position
        )
        assert got[f"mtp:spec_decode_num_accepted_tokens_per_pos_total{{position={position}}}"] == kept
    cycles = sum(value for name, value in got.items() if name.startswith("mtp:spec_decode_num_cycles_total"))
    assert cycles == sum(one["cycles"] for one in stats)
    ended = {name: value for name, value in got.items() if name.startswith("mtp:request_success_total")}
    assert sum(ended.values()) == len(choices) == 6
    assert ended["mtp:request_success_total{finished_reason=timeout}"] == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert got[f"mtp:{name}_count"] == len(choices)
    # Each answer's first token comes of its prompt.
    assert got["mtp:inter_token_latency_seconds_count"] == tokens - len(choices)
    assert got["mtp:request_generation_tokens_sum"] == tokens
    assert got["mtp:batch_width_count"] == got["mtp:batch_rows_count"] > 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_bytes"):
        assert got[f"mtp:{name}"] == 0


def test_two_servers_in_one_process_do_not_meet(carried: Model) -> None:
    with serving(carried, name="one") as one, serving(carried, name="two") as two:
        assert one.post(TEXT, {"model": "one", "prompt": "a", "max_tokens": 3}).status_code == 200
        assert one.metrics()["mtp:request_success_total{finished_reason=length}"] == 1
        assert "mtp:request_success_total{finished_reason=length}" not in two.metrics()


def test_the_documentation_lists_every_metric(carried: Model) -> None:
    with serving(carried) as server:
        text = server.http.get(f"{server.url}/metrics").text
    names = {family.name for family in text_string_to_metric_families(text)}
    documented = set(re.findall(r"`(mtp:[a-z0-9_]+)", (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")))
    assert all(name.startswith(PREFIX) for name in names)
    assert len(names) > 20, "control: there are metrics"
    assert names == {name.removesuffix("_total") for name in documented}


def test_no_times_of_creation_are_told(carried: Model) -> None:
    with serving(carried) as server:
        assert not [name for name in server.metrics() if "_created" in name]
        control = generate_latest(server.service.metrics._made.registry).decode()
    assert "mtp:prompt_tokens_created" in control
