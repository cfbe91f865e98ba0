"""The load generator: latencies of tokens, arrivals, addresses, and a checker that sees every fault of a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from mtp_engines.errors import RequestError
from mtp_tools.load.acts import Client, Findings
from mtp_tools.load.blocks import Block, Level, run_block
from mtp_tools.load.expected import Known
from mtp_tools.load.latency import Timeline, busy_seconds, latencies
from mtp_tools.load.malformed import malformed_of, wrong_reply
from mtp_tools.load.measuring import Served
from mtp_tools.load.memory import LEAST_SAMPLES, growth_of
from mtp_tools.load.processes import is_loopback, require_loopback
from mtp_tools.load.report import auto_over_better, auto_over_better_by_cpu, faults, level_dict, table
from mtp_tools.load.streams import Said, stream
from mtp_tools.load.tampering import FAULTS, tamper_of
from mtp_tools.load.traffic import Ask, Lengths, arrivals, draw_asks
from tests.support import refused

MIB = 1 << 20


def of_cycles(cycles: int, tokens: int, cycle_s: float) -> Timeline:
    """The first token after 100 ms, then cycles."""
    chunks = [(0.1, 1)] + [(0.1 + cycle_s * (number + 1), tokens) for number in range(cycles)]
    return Timeline(0.0, 0.0, chunks, chunks[-1][0])


def test_the_time_of_a_gap_is_shared_by_the_tokens_that_end_it() -> None:
    """100 ms of prefill, ten cycles of 30 ms with four tokens each."""
    line = of_cycles(10, 4, 0.030)
    assert line.tokens == 41
    assert line.first_s == pytest.approx(0.1)
    gaps = line.token_gaps_s()
    assert len(gaps) == 40
    assert np.mean(gaps) == pytest.approx((0.4 - 0.1) / 40)
    figures = latencies([line])
    assert figures["inter_token_ms"]["p50"] == pytest.approx(7.5)
    assert figures["inter_chunk_ms"]["p50"] == pytest.approx(30.0), "control: the gap of a chunk is another figure"
    assert figures["first_token_ms"]["p50"] == pytest.approx(100.0)
    assert line.tokens / busy_seconds([line]) == pytest.approx(41 / 0.4), "tokens are counted, and not chunks"


def test_tokens_that_come_with_the_first_one_took_no_time_and_the_mean_stays() -> None:
    line = Timeline(0.0, 0.0, [(0.1, 3), (0.2, 2)], 0.2)
    assert line.token_gaps_s() == pytest.approx([0.0, 0.0, 0.05, 0.05])
    assert np.mean(line.token_gaps_s()) == pytest.approx((0.2 - 0.1) / (5 - 1))


def test_an_answer_of_one_token_has_no_gaps() -> None:
    assert latencies([Timeline(0.0, 0.0, [(0.1, 1)], 0.1)])["inter_token_ms"] is None
    assert latencies([])["first_token_ms"] is None


def test_time_without_a_request_is_not_counted() -> None:
    lines = [Timeline(0, 0, [(1, 1)], 2), Timeline(1, 1, [(2, 1)], 3), Timeline(10, 10, [(11, 1)], 11)]
    assert busy_seconds(lines) == pytest.approx(3 + 1)


def test_arrivals_are_a_poisson_process_that_the_seed_decides() -> None:
    times = list(arrivals(4000, 50.0, 3))
    gaps = np.diff(times)
    assert times == list(arrivals(4000, 50.0, 3))
    assert times != list(arrivals(4000, 50.0, 4))
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.06)
    assert np.std(gaps) == pytest.approx(1 / 50, rel=0.06), "as large as the mean; equal distances would have none"


def test_lengths_are_mixed_within_their_range() -> None:
    asks = draw_asks(list(range(100)), 400, Lengths(8, 96), Lengths(16, 16), 0)
    lengths = [len(ask.prompt_ids) for ask in asks]
    assert min(lengths) == 8
    assert max(lengths) > 80
    assert 8 < np.median(lengths) < 52, "short ones are as likely as long ones"
    assert {ask.new_tokens for ask in asks} == {16}
    assert asks == draw_asks(list(range(100)), 400, Lengths(8, 96), Lengths(16, 16), 0)


@pytest.mark.parametrize("text", ["", "a", "0", "9:3", "3:", "1:2:3", "-1"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    if text == "3:":
        assert Lengths.parsed(text, "--x") == Lengths(3, 3)
        return
    with refused("--x is", "expected a number", error=RequestError):
        Lengths.parsed(text, "--x")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1"])
def test_this_machine_may_be_loaded(host: str) -> None:
    assert is_loopback(host)
    require_loopback(f"http://{f'[{host}]' if ':' in host else host}:8000", allow_remote=False)


@pytest.mark.parametrize("host", ["10.0.0.1", "192.168.1.2", "example.org", "127.0.0.1.example.org", "[2001:db8::1]"])
def test_other_machines_may_not(host: str) -> None:
    with refused("is not this machine", "--allow-remote", error=RequestError):
        require_loopback(f"http://{host}:8000", allow_remote=False)
    require_loopback(f"http://{host}:8000", allow_remote=True)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://127.0.0.1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with refused("is no address of a server", error=RequestError):
        require_loopback(url, allow_remote=True)


KNOWN = [
    Known(Ask(number, (5, 6), 6), tuple(range(10 * number, 10 * number + 6)), f"text {number}.", "length")
    for number in range(3)
]


def events_of(known: Known, identity: str) -> list[str]:
    """The lines of a right stream: chunks of one, three and two tokens, the reason, usage, the end."""
    texts = [known.text[:2], known.text[2:5], known.text[5:]]
    choices: list[list[dict[str, Any]]] = [
        [{"index": 0, "text": text, "finish_reason": None, "token_ids": list(known.token_ids[start:end])}]
        for text, (start, end) in zip(texts, ((0, 1), (1, 4), (4, 6)), strict=True)
    ]
    choices.append([{"index": 0, "text": "", "finish_reason": "length", "stop_reason": known.reason}])
    chunks: list[dict[str, Any]] = [{"id": identity, "usage": None, "choices": one} for one in choices]
    stats = {"drafted": 6, "accepted": 3}
    usage = {"completion_tokens": len(known.token_ids)}
    chunks.append({"id": identity, "choices": [], "usage": usage, "speculative_stats": stats})
    return [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]


Fault = Callable[[list[str]], list[str]]


class FakeServer:
    """Answers with what is known, with a fault in the lines of its streams."""

    def __init__(self, fault: Fault = list, *, new_ids: bool = True) -> None:
        self.fault, self.new_ids, self.requests = fault, new_ids, 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests += 1
        known = next(one for one in KNOWN if one.ask.number == json.loads(request.content)["number"])
        identity = f"cmpl-{self.requests if self.new_ids else 0}"
        return httpx.Response(200, content="".join(self.fault(events_of(known, identity))).encode())

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self), base_url="http://127.0.0.1")


def numbered(known: Known) -> Known:
    """The fake server is told which request it is."""
    return Known(Ask(known.ask.number, (5, 6), 6, {"number": known.ask.number}), known.token_ids, known.text, "length")


def failures_of(server: FakeServer, act: str, tamper: str | None = None) -> list[str]:
    """What a client finds that asks for every known answer."""
    findings = Findings()
    known = [numbered(one) for one in KNOWN]

    async def ask_all() -> None:
        client = Client(known, Served("m", 64), findings, 0, tamper_of(tamper, every=1))
        async with server.client() as connection:
            for one in known:
                await client.act(connection, act, one, Said())

    asyncio.run(ask_all())
    return findings.failures


def changed(old: str, new: str) -> Fault:
    """Every line with one text for another."""
    return lambda lines: [line.replace(old, new) for line in lines]


STREAM_FAULTS: dict[str, Fault] = {
    "a chunk is lost": lambda lines: lines[:1] + lines[2:],
    "a chunk is doubled": lambda lines: [*lines[:2], *lines[1:]],
    "two chunks are swapped": lambda lines: [lines[1], lines[0], *lines[2:]],
    "a token is changed": changed("[1, 2, 3]", "[1, 2, 7]"),
    "a text is changed": changed('"text": "te"', '"text": "tE"'),
    "the reason is another": changed('"stop_reason": "length"', '"stop_reason": "stop"'),
    "the reason is lost": lambda lines: lines[:3] + lines[4:],
    "the reason is doubled": lambda lines: [*lines[:4], *lines[3:]],
    "the end is lost": lambda lines: lines[:-1],
    "something comes behind the end": lambda lines: [*lines, lines[-1]],
    "a line is doubled": changed("\n\n", "\n\n\n"),
    "a line is no event": lambda lines: ["hello\n", *lines],
    "the stream breaks off": lambda lines: [*lines[:2], lines[2][:30]],
    "the usage counts one more": changed('"completion_tokens": 6', '"completion_tokens": 7'),
    "an error comes within": lambda lines: [lines[0], 'data: {"error": {"message": "no"}}\n\n', lines[-1]],
    "a chunk is of another answer": lambda lines: [lines[0].replace("cmpl-", "cmpl-x"), *lines[1:]],
}


def test_a_right_server_passes() -> None:
    server = FakeServer()
    assert failures_of(server, "stream") == []
    assert server.requests == len(KNOWN)


@pytest.mark.parametrize("name", STREAM_FAULTS)
def test_control_every_fault_of_a_stream_is_found(name: str) -> None:
    assert failures_of(FakeServer(STREAM_FAULTS[name]), "stream"), name


def test_control_an_id_that_comes_twice_is_found() -> None:
    assert any("two responses have the id" in one for one in failures_of(FakeServer(new_ids=False), "stream"))


@pytest.mark.parametrize("fault", FAULTS)
def test_control_the_faults_of_the_command_line_are_found(fault: str) -> None:
    assert failures_of(FakeServer(), "stream", fault)
    with refused("expected one of drop-chunk", error=RequestError):
        tamper_of("dance")


def test_a_client_that_leaves_compares_what_it_got() -> None:
    assert failures_of(FakeServer(), "leave") == []
    assert failures_of(FakeServer(changed("[0]", "[9]")), "leave"), "control: a wrong first token"


def test_an_answer_that_was_too_late_must_begin_rightly() -> None:
    def late(lines: list[str]) -> list[str]:
        ended, usage = lines[3].replace('"length"}', '"timeout"}'), lines[4].replace("6}", "4}")
        return [*lines[:2], ended, usage, lines[5]]

    (known,) = {one.ask.number: numbered(one) for one in KNOWN[:1]}.values()
    for fault, is_right in ((late, True), (lambda lines: changed("[1, 2, 3]", "[1, 2, 7]")(late(lines)), False)):
        findings, said = Findings(), Said()

        async def ask_once(fault: Fault = fault, findings: Findings = findings, said: Said = said) -> None:
            async with FakeServer(fault).client() as connection:
                await stream(connection, known.ask.body("m"), said)
                findings.check(known, said, is_whole=False)

        asyncio.run(ask_once())
        assert said.reason == "timeout"
        assert (findings.failures == []) == is_right


def test_malformed_requests_want_the_right_status_and_a_sentence() -> None:
    asks = malformed_of(Ask(0, (5, 6), 4), "m", 64)
    assert len(asks) > 10
    replies = {
        400: httpx.Response(400, json={"error": {"message": "no."}}),
        200: httpx.Response(200, json={}),
        500: httpx.Response(500, json={"error": {"message": "no."}}),
        0: httpx.Response(400, content=b"oops"),
    }
    for status, reply in replies.items():

        async def found(reply: httpx.Response = reply) -> str | None:
            transport = httpx.MockTransport(lambda request: reply)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await wrong_reply(client, asks[0])

        assert (asyncio.run(found()) is None) == (status == 400)


def test_memory_that_grows_is_seen_and_memory_that_is_filled_once_is_not() -> None:
    filled = [min(100 + number, 140) * MIB for number in range(2 * LEAST_SAMPLES)]
    leaking = [(100 + number) * MIB for number in range(2 * LEAST_SAMPLES)]
    calm, grown = growth_of(filled, 10), growth_of(leaking, 10)
    assert calm is not None
    assert calm.is_flat
    assert grown is not None
    assert not grown.is_flat
    assert growth_of(leaking[: LEAST_SAMPLES - 1], 10) is None


def block(tokens_per_s: float, ids: tuple[int, ...] = (1, 2)) -> Block:
    """One second long."""
    return Block([Timeline(0.0, 0.0, [(0.5, 1), (1.0, int(tokens_per_s) - 1)], 1.0)], {0: ids}, 10, 5, cpu_s=0.5)


def rounds_of(off: float, fixed: float, auto: float, ids: tuple[int, ...] = (1, 2)) -> list[dict[str, Block]]:
    """Two rounds, the second one twice as fast."""
    return [{"off": block(s * off), "fixed": block(s * fixed), "auto": block(s * auto, ids)} for s in (1, 2)]


def test_auto_is_compared_with_the_better_of_the_two_round_by_round() -> None:
    assert auto_over_better(rounds_of(100, 200, 190)) == {
        "better": "fixed",
        "median": pytest.approx(0.95),
        "least": pytest.approx(0.95),
        "most": pytest.approx(0.95),
        "holds": True,
    }
    assert auto_over_better(rounds_of(200, 100, 180))["better"] == "off"
    assert not auto_over_better(rounds_of(200, 100, 180))["holds"], "control: ten per cent slower"


def test_speed_by_processor_time_is_told_apart_and_only_if_it_is_known() -> None:
    rounds = rounds_of(100, 200, 190)
    assert rounds[0]["off"].tokens_per_cpu_s == pytest.approx(200)
    for found in rounds:
        found["auto"].cpu_s = 1.0
    by_cpu = auto_over_better_by_cpu(rounds)
    assert by_cpu is not None
    assert by_cpu["median"] == pytest.approx(0.475)
    assert not by_cpu["holds"]
    assert auto_over_better(rounds)["holds"], "control: by the clock on the wall it does"
    rounds[0]["off"].cpu_s = None
    assert auto_over_better_by_cpu(rounds) is None


def test_a_table_says_what_holds_and_answers_that_differ_are_faults() -> None:
    right, wrong = (level_dict(Level(8, 3.0), rounds_of(100, 200, 150, ids)) for ids in ((1, 2), (1, 3)))
    lines = "\n".join(table([right]))
    assert "| 8 | fixed | 300 (200 .. 400)" in lines
    assert "DOES NOT HOLD" in lines
    assert "0.500" in lines, "acceptance"
    assert json.loads(json.dumps(right)) == right
    assert faults([right]) == []
    assert any("was not answered alike" in one for one in faults([wrong])), "control"


def test_no_more_requests_are_under_way_than_the_level_says() -> None:
    now, most = 0, 0

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.002)
        now -= 1
        return httpx.Response(200, content="".join(events_of(KNOWN[0], "cmpl-1")).encode())

    async def run(level: int) -> Block:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://127.0.0.1") as client:
            asks = [Ask(number, (1,), 6) for number in range(24)]
            return await run_block(client, "m", asks, Level(level, 1e6), {}, 0)

    found = asyncio.run(run(3))
    assert most == 3
    assert len(found.timelines) == 24
    assert found.errors == []
    assert (found.drafted, found.accepted) == (24 * 6, 24 * 3)


def test_a_refused_request_is_an_error_of_its_block() -> None:
    reply = httpx.Response(429, json={"error": {"message": "too many."}})

    async def run() -> Block:
        transport = httpx.MockTransport(lambda request: reply)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await run_block(client, "m", [Ask(0, (1,), 6)], Level(1, 1e6), {}, 0)

    found = asyncio.run(run())
    assert found.timelines == []
    assert "status 429: too many." in found.errors[0]


def test_an_answer_that_was_cut_may_end_in_what_could_become_its_stop_text() -> None:
    """It did not learn whether that would come. Controls: another text, a whole stop text, no stop text."""
    stopped = Known(Ask(0, (5, 6), 6, {"stop": ["able to"]}), (1, 2, 3), "to be ", "stop")
    for text in ("", "to", "to be ", "to be a", "to be able t"):
        assert stopped.begins_with(text), text
    for text in ("to be able to", "to be x", "to bable", "able", "o be "):
        assert not stopped.begins_with(text), text
    assert not Known(Ask(0, (5, 6), 6), (1, 2, 3), "to be ", "length").begins_with("to be a")
