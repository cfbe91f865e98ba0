"""From a request's prompt, ids or messages to token ids."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from mtp_engines.contracts.manifest import Manifest
from mtp_engines.errors import BundleError, RequestError
from mtp_runtime.constraints.grammars import Grammars
from mtp_runtime.constraints.options import NAMES, asked_of
from mtp_runtime.prepare import Prepared, check
from mtp_runtime.request import Request, ids_from, require_one_prompt


class Prompts:
    """The bundle's tokenizer and chat template."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.tokenizer = _load_tokenizer(directory)
        self._grammars = Grammars(self.tokenizer)
        self._config = _load_config(directory / "tokenizer_config.json")

    def prepare(self, request: Request, manifest: Manifest, has_draft_model: bool = False) -> Prepared:
        """Encode a request and check it against the bundle; needs no engine.

        Raises:
            RequestError: the bundle cannot serve it.
        """
        bad_words = self._bad_words(request.bad_words or [])
        prepared = check(request, self.encode(request), manifest, has_draft_model, bad_words)
        asked = asked_of({name: getattr(request, name) for name in NAMES}, request.min_new_tokens)
        if asked is not None:
            decoding = replace(prepared.decoding, constraint=self._grammars.compile(asked))
            prepared = replace(prepared, decoding=decoding)
        if request.stops and self.tokenizer is None:
            raise RequestError("stop looks for text, but this bundle has no tokenizer; leave it out.")
        return prepared

    def encode(self, request: Request) -> list[int]:
        """Token ids of a request.

        Raises:
            RequestError: none or several of prompt, prompt_ids and messages, or no tokenizer or template for it.
        """
        require_one_prompt(request, "a request")
        if request.prompt_ids is not None:
            if request.chat:
                raise RequestError(
                    "chat renders text, but the request has prompt_ids; give a prompt or leave chat out."
                )
            _require_no_variables(request)
            return ids_from(request.prompt_ids)
        if request.messages is not None:
            return self._encode(self._render(request.messages, request), special=False)
        assert request.prompt is not None
        if request.chat:
            messages = [{"role": "user", "content": request.prompt}]
            return self._encode(self._render(messages, request), special=False)
        _require_no_variables(request)
        return self._encode(request.prompt, special=True)

    def _bad_words(self, words: list[str | list[int]]) -> list[list[int]]:
        """Texts as ids, each as it is and as it stands behind another word."""
        found: list[list[int]] = []
        for word in words:
            if isinstance(word, str):
                if not word.strip():
                    raise RequestError(f"bad_words has the text {word!r}, which is no word; leave it out.")
                if self.tokenizer is None:
                    raise RequestError(
                        f"bad_words has the text {word!r}, but this bundle has no tokenizer; give token ids."
                    )
                spelled = [self._encode(text, special=False) for text in (word, " " + word.lstrip())]
                if not spelled[0]:
                    raise RequestError(
                        f"bad_words has the text {word!r}, which this tokenizer cannot write; leave it out or give ids."
                    )
                found += spelled
            else:
                found.append(word)
        return [list(word) for word in dict.fromkeys(map(tuple, found))]

    def _encode(self, text: str, *, special: bool) -> list[int]:
        """A rendered template already holds its special tokens, so they are not added again."""
        if self.tokenizer is None:
            raise RequestError(
                f"{self._directory} has no tokenizer.json, so it takes no text; give prompt_ids, or build the "
                "bundle from a checkpoint with a tokenizer."
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError("the prompt is not valid UTF-8 text; give it in UTF-8, or give prompt_ids.") from error
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for; special tokens as their text, and nothing without a tokenizer."""
        if self.tokenizer is None:
            return b""
        try:
            return self._grammars.vocabulary().bytes_of(token)
        except RequestError:  # Some tokenizers cannot carry a constraint; then parts of a character are unknown.
            return self.tokenizer.decode([token], skip_special_tokens=False).encode("utf-8")

    def _render(self, messages: list[dict[str, Any]], request: Request) -> str:
        if not messages:
            raise RequestError("messages is empty; give at least one message.")
        for message in messages:
            content = message.get("content")
            if not isinstance(message.get("role"), str) or not isinstance(content, str):
                raise RequestError(
                    f"a message needs a role and a text content, found {message!r}. Images and other parts are not "
                    "supported."
                )
        template, variables = self._template(), self._variables(messages, request)
        try:
            return _environment().from_string(template).render(variables)
        except RequestError:
            raise
        except Exception as error:  # A template is a program of somebody else's and may fail in any way.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(
                f"the chat template refused the messages: {reason}. Check roles and their order."
            ) from error

    def _variables(self, messages: list[dict[str, Any]], request: Request) -> dict[str, Any]:
        variables = {
            "messages": messages,
            "add_generation_prompt": True,
            "bos_token": self._special("bos_token"),
            "eos_token": self._special("eos_token"),
        }
        if request.tools:
            variables["tools"] = request.tools
        for name, value in (request.chat_template_kwargs or {}).items():
            if name in variables or name == "tools":
                raise RequestError(
                    f"chat_template_kwargs has {name!r}, which the request itself sets; leave it out there."
                )
            variables[name] = value
        return variables

    def reads(self, variable: str) -> bool:
        """Whether the chat template looks at a variable.

        Raises:
            RequestError: there is no template, or it is none of jinja's.
        """
        try:
            return variable in meta.find_undeclared_variables(_environment().parse(self._template()))
        except TemplateError as error:
            raise RequestError(f"the chat template of this bundle is not valid: {error}. Mend it.") from error

    def _template(self) -> str:
        file = self._directory / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self._config.get("chat_template")
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default")
        if not isinstance(template, str):
            raise RequestError(f"{self._directory} has no chat template; give a prompt without --chat, or prompt_ids.")
        return template

    def _special(self, name: str) -> str | None:
        value = self._config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        return content if isinstance(content, str) else None


def _require_no_variables(request: Request) -> None:
    for name in ("tools", "chat_template_kwargs"):
        if getattr(request, name):
            raise RequestError(
                f"{name} is for the chat template, but the request has a prompt without one; give messages, or chat."
            )


def _load_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BundleError(f"{file} is not valid JSON: {error}. Mend it in the checkpoint and build again.") from error
    if not isinstance(config, dict):
        raise BundleError(f"{file} holds no JSON object. Mend it in the checkpoint and build again.")
    return config


def _load_tokenizer(directory: Path) -> Tokenizer | None:
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises bare Exception for every kind of bad file.
        raise BundleError(f"{file} cannot be read by the tokenizers library: {error}. Fetch the file again.") from error


def _environment() -> ImmutableSandboxedEnvironment:
    """Templates come with models from anywhere: sandboxed, with the names that published ones use."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment
