"""What a client gets is what the runtime says: streamed and not, alone and among others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mtp_runtime import Emitted, Model
from mtp_runtime.batching.calls import SlotProxy
from mtp_runtime.batching.options import BatchOptions
from mtp_serving.openai import answers
from tests.serving.server import NAME, Running, serving

PROMPTS = ["The function returns", "import ", "settings = {", "def main(argv):\n    ", "A"]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
GREEDY = {"temperature": 0.0}
KINDS = {"greedy": GREEDY, "sampled": SAMPLED}


def streamed(server: Running, body: dict[str, Any], chat: bool = False) -> dict[int, dict[str, Any]]:
    """What the official client gets of a stream: text, ids, chunks with a reason, of each choice."""
    client = server.openai()
    extra = {"extra_body": {name: body.pop(name) for name in list(body) if name in ("draft_tokens", "top_k")}}
    extra["extra_body"]["return_token_ids"] = True
    create = client.chat.completions.create if chat else client.completions.create
    choices: dict[int, dict[str, Any]] = {}
    for chunk in create(model=NAME, stream=True, **body, **extra):
        for choice in chunk.choices:
            one = choices.setdefault(choice.index, {"text": "", "ids": [], "reasons": []})
            assert not one["reasons"], "nothing comes behind the reason"
            one["text"] += (choice.delta.content or "") if chat else choice.text
            one["ids"] += getattr(choice, "token_ids", None) or []
            one["reasons"] += [choice.finish_reason] if choice.finish_reason else []
    return choices


def posted(server: Running, body: dict[str, Any], chat: bool = False) -> dict[int, dict[str, Any]]:
    """The same of a response that is no stream."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    response = server.post(path, {**body, "return_token_ids": True})
    assert response.status_code == 200, response.text
    return {
        choice["index"]: {
            "text": choice["message"]["content"] if chat else choice["text"],
            "ids": choice["token_ids"],
            "reasons": [choice["finish_reason"]],
        }
        for choice in response.json()["choices"]
    }


def said(model: Model, **options: Any) -> dict[str, Any]:
    """The same of the runtime."""
    finished = model.complete(**{"max_new_tokens": 24, **options})
    reason = {"eos": "stop"}.get(finished.finish_reason, finished.finish_reason)
    return {"text": finished.text, "ids": list(finished.token_ids), "reasons": [reason]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_a_stream_is_the_response_is_what_the_runtime_says(
    server: Running, carried: Model, kind: str, draft_tokens: int
) -> None:
    body = {"prompt": PROMPTS, "max_tokens": 24, "draft_tokens": draft_tokens, **KINDS[kind]}
    expected = {
        number: said(carried, prompt=prompt, draft_tokens=draft_tokens, **KINDS[kind])
        for number, prompt in enumerate(PROMPTS)
    }
    assert posted(server, body) == expected
    assert streamed(server, dict(body)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_is_what_the_runtime_says(server: Running, carried: Model, kind: str) -> None:
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": "What is a view?"}]
    parts = [
        messages[0],
        {"role": "user", "content": [{"type": "text", "text": part} for part in ("What is", " a view?")]},
    ]
    expected = {0: said(carried, messages=messages, **KINDS[kind])}
    for given in (messages, parts):
        body = {"messages": given, "max_tokens": 24, **KINDS[kind]}
        assert posted(server, body, chat=True) == expected
        assert streamed(server, dict(body), chat=True) == expected


def test_several_answers_and_ids_as_prompts(server: Running, carried: Model) -> None:
    ids = [carried.prompts.tokenizer.encode(prompt).ids for prompt in PROMPTS[:2]]  # type: ignore[union-attr]
    body = {"prompt": ids, "n": 2, "max_tokens": 12, **SAMPLED}
    expected: dict[int, dict[str, Any]] = {}
    for prompt in ids:
        for finished in carried.complete_all(prompt_ids=prompt, n=2, max_new_tokens=12, **SAMPLED):
            expected[len(expected)] = {"text": finished.text, "ids": list(finished.token_ids), "reasons": ["length"]}
    assert len({answer["text"] for answer in expected.values()}) == 4, "control: the answers differ"
    assert posted(server, body) == expected
    assert streamed(server, dict(body)) == expected
    assert posted(server, {**body, "prompt": ids[0]}) == {number: expected[number] for number in (0, 1)}


def interleaved(server: Running, count: int = 16) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Many requests at once, half of them streams: what was asked, and what came."""
    bodies = [
        {
            "prompt": PROMPTS[number % len(PROMPTS)],
            "max_tokens": 5 + 2 * number,
            "draft_tokens": number % 4,
            **(SAMPLED | {"seed": number} if number % 3 else GREEDY),
        }
        for number in range(count)
    ]
    with ThreadPoolExecutor(count) as pool:
        came = pool.map(lambda job: (streamed, posted)[job[0] % 2](server, dict(job[1])), enumerate(bodies))
        return [(body, choices[0]) for body, choices in zip(bodies, came, strict=True)]


def differing(model: Model, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> int:
    """How many answers are not what the runtime says alone."""
    count = 0
    for body, got in pairs:
        options = {name: value for name, value in body.items() if name != "max_tokens"}
        count += got != said(model, max_new_tokens=body["max_tokens"], **options)
    return count


def test_sixteen_requests_at_once_get_what_each_gets_alone(server: Running, carried: Model) -> None:
    pairs = interleaved(server)
    assert differing(carried, pairs) == 0
    assert server.metrics()["mtp:batch_width_bucket{le=1.0}"] < server.metrics()["mtp:batch_width_count"], (
        "control: some ran together"
    )


def test_control_a_slot_that_keeps_the_last_request_is_noticed(carried: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotProxy, "reset", lambda self: None)
    with serving(carried, BatchOptions(prefix_bytes=0)) as broken:
        assert differing(carried, interleaved(broken)) > 0


def test_control_a_last_chunk_that_is_dropped_is_noticed(
    server: Running, carried: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, waiting = answers.Answers._put, []

    def dropping(self: Any, prompt: int, told: Any) -> None:
        if isinstance(told, Emitted):
            waiting.append(told)
            told = waiting.pop(0) if len(waiting) > 1 else Emitted((), "")
        put(self, prompt, told)

    monkeypatch.setattr(answers.Answers, "_put", dropping)
    body = {"prompt": PROMPTS[0], "max_tokens": 24, **GREEDY}
    expected = said(carried, prompt=PROMPTS[0], temperature=0.0)
    assert streamed(server, dict(body))[0] != expected
    # One that is no stream takes its text from the end, which has all of it.
    assert posted(server, body)[0] == expected


def test_after_a_burst_a_single_request_gets_its_own_answer(server: Running, carried: Model) -> None:
    for _ in range(3):
        assert differing(carried, interleaved(server, 8)) == 0
        single = {"prompt": PROMPTS[3], "max_tokens": 20, **GREEDY}
        assert posted(server, single)[0] == said(carried, prompt=PROMPTS[3], max_new_tokens=20)
