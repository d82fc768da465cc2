"""Chat messages to a prompt, by the model's own template: Jinja, in a sandbox, with what such templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from windowpane.text.tokenizer import TextError, Tokenizer


class ChatTemplate:
    """The chat template of a tokenizer. Models without one can be made, and say so when asked to `render`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._files = tokenizer.files

    @property
    def exists(self) -> bool:
        return self._files.chat_template is not None

    def knows(self, name: str) -> bool:
        """Whether the template reads a variable of this name."""
        template = self._files.chat_template
        return template is not None and name in find_undeclared_variables(_environment().parse(template))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`, to be encoded without special tokens: the template writes its own.

        `variables` reach the template as they are (such as `enable_thinking`). A template that refuses the messages, or
        fails on them, is a TextError with its reason.
        """
        if not messages:
            raise TextError("a chat needs at least one message")
        try:
            return self._compiled.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **(dict(self._files.special_tokens) | variables),
            )
        except jinja2.TemplateError as error:
            raise TextError(f"the chat template of {self._files.source} refuses these messages: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise TextError(f"the chat template of {self._files.source} fails on these messages: {error}") from None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        template = self._files.chat_template
        if template is None:
            raise TextError(
                f"{self._files.source} has no chat template, so it cannot chat; it is probably a base model: "
                "continue text with `generate`, or use an instruction-tuned model"
            )
        try:
            return _environment().from_string(template)
        except jinja2.TemplateSyntaxError as error:
            raise TextError(f"the chat template of {self._files.source} cannot be read: {error}") from None


def message_ends(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    prompt: Sequence[int],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> tuple[int, ...]:
    """Lengths of `prompt`, the tokens of all `messages`, at which its messages end.

    Found by rendering the first k messages alone, and kept only where those tokens really begin the prompt: templates
    may write earlier messages differently once others follow, or refuse to end there.
    """
    ends = set()
    for count in range(1, len(messages) + 1):
        try:
            text = template.render(messages[:count], add_generation_prompt=False, tools=tools, **variables)
        except TextError:
            continue
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if 0 < len(tokens) < len(prompt) and list(prompt[: len(tokens)]) == tokens:
            ends.add(len(tokens))
    return tuple(sorted(ends))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    # The types themselves would offer templates more than they need.
    environment.globals["dict"] = lambda *args, **entries: dict(*args, **entries)
    environment.globals["namespace"] = _namespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which prompts must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _namespace(*args: Any, **entries: Any) -> _Namespace:
    namespace = _Namespace()
    for name, value in dict(*args, **entries).items():
        namespace[name] = value
    return namespace


class _Namespace(Namespace):
    """Template variables that outlive a loop; without names that Python itself would look up."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


class _GenerationBlocks(Extension):
    """`{% generation %}` marks the assistant's words for training; here it shows its body and nothing else."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)
