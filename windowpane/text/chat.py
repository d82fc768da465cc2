"""Chat messages to a prompt, by the model's own template: Jinja, in a sandbox, with what such templates expect."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import accumulate, compress
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from windowpane.text.tokenizer import TextError, Tokenizer, check_length

MAX_FOOTERS = 16  # chats that are rendered to see what follows a message's content


class ChatTemplate:
    """The chat template of a tokenizer. Models without one can be made, and say so when asked to `render`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._files = tokenizer.files

    @property
    def exists(self) -> bool:
        return self._files.chat_template is not None

    def knows(self, name: str) -> bool:
        """Whether the template reads a variable of this name."""
        return name in self._variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt for `messages`, to be encoded without special tokens: the template writes its own.

        `variables` reach the template as they are (such as `enable_thinking`). A template that refuses the messages, or
        fails on them, is a TextError with its reason.
        """
        if not messages:
            raise TextError("a chat needs at least one message")
        given = {
            "documents": None,
            **self._files.special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        compiled = self._compiled  # a model without a template says so, and not that its template fails
        try:
            return compiled.render(given)
        except jinja2.TemplateError as error:
            raise TextError(f"the chat template of {self._files.source} refuses these messages: {error}") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise TextError(f"the chat template of {self._files.source} fails on these messages: {error}") from None

    @cached_property
    def _variables(self) -> set[str]:
        return find_undeclared_variables(_environment().parse(self._files.chat_template or ""))

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


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """`message_ends` are the numbers of tokens after which a message ends."""

    text: str
    token_ids: list[int]
    message_ends: tuple[int, ...]


def chat_prompt(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    max_tokens: int | None = None,
    special_tokens_in_content: bool = False,
    continue_final_message: bool = False,
    **settings: Any,
) -> ChatPrompt:
    """The prompt of a chat and its tokens. `settings` are those of `ChatTemplate.render`.

    `continue_final_message` cuts the prompt off behind the content of the last message, which the answer goes on from.

    What users wrote is text: only the template's own special tokens are special, unless `special_tokens_in_content`.
    A prompt that surely has more than `max_tokens` is refused before it is tokenized, with PromptTooLong.
    """
    contents = [message.get("content") for message in messages]
    check_length(tokenizer, "".join(content for content in contents if isinstance(content, str)), max_tokens)
    given: dict[str, Any] = {"messages": messages, **settings}
    disguise = None if special_tokens_in_content else _Disguise.of(tokenizer, given)
    if disguise is not None:
        given = disguise.put_on(given)
    text = template.render(**given)
    check_length(tokenizer, text, max_tokens)
    cuts = _ends_in_text(template, text, given)
    if continue_final_message:
        text = _up_to_content(text, given["messages"][-1])
        cuts = [cut for cut in cuts if cut < len(text)]
    token_ids, ends = _encode(tokenizer, text, cuts, disguise)
    return ChatPrompt(text if disguise is None else disguise.take_off(text), token_ids, ends)


def _up_to_content(text: str, message: Mapping[str, Any]) -> str:
    """A rendered chat up to the end of its last message's content, white space at its end included if it is shown."""
    content = str(message.get("content") or "")
    at = text.rfind(content.strip())
    if not content.strip() or at < 0:
        raise TextError("the last message cannot be continued: it is empty, or the chat template changes it")
    end = at + len(content.strip())
    space = content[len(content.rstrip()) :]
    return text[: end + len(space)] if text.startswith(space, end) else text[:end]


def _encode(
    tokenizer: Tokenizer, text: str, cuts: Sequence[int], disguise: _Disguise | None
) -> tuple[list[int], tuple[int, ...]]:
    """The tokens of a rendered chat, and how many of them lie before each cut that falls between two."""
    if disguise is None:
        encoding = tokenizer.encode_with_offsets(text)
        return encoding.ids, _between(encoding.starts, cuts, len(encoding.ids))
    ids: list[int] = []
    starts: list[int] = []
    for at, part, special_id in tokenizer.split_special(text):
        if special_id is not None:
            ids.append(special_id)
            starts.append(at)
        elif part:
            encoding = tokenizer.encode_with_offsets(disguise.take_off(part), as_text=True)
            ids += encoding.ids
            starts += [at + start for start in encoding.starts]
    return ids, _between(starts, cuts, len(ids))


def _between(starts: Sequence[int], cuts: Sequence[int], count: int) -> tuple[int, ...]:
    ends = {index for cut in cuts if 0 < (index := bisect_left(starts, cut)) < count and starts[index] == cut}
    return tuple(sorted(ends))


# -- where messages end --------------------------------------------------------------------------------------------


def _ends_in_text(template: ChatTemplate, text: str, given: Mapping[str, Any]) -> list[int]:
    """Where messages end in `text`, which they were rendered to.

    A mark at the end of every message's content shows where that is. What the template writes behind it belongs to the
    message as far as it also ends the chat: that is found by rendering a chat that ends there, once for each pair of
    roles that follow one another. So all costs a fixed number of renderings, however many messages there are.
    """
    messages = given["messages"]
    mark = _unused_characters([text], 1)
    marked = [_with_mark(message, mark) for message in messages]
    try:
        rendered = template.render(**{**given, "messages": marked})
    except TextError:
        return []
    pieces = rendered.split(mark)
    has_mark = [m is not message for m, message in zip(marked, messages, strict=True)]
    if "".join(pieces) != text or len(pieces) != sum(has_mark) + 1:
        return []  # this template looks into its messages, or shows them twice
    places = accumulate(map(len, pieces[:-1]))
    footers: dict[tuple[Any, Any], str] = {}
    tries = MAX_FOOTERS
    ends = []
    for index in compress(range(len(messages)), has_mark):
        at = next(places)
        following = messages[index + 1].get("role") if index + 1 < len(messages) else None
        kind = (messages[index].get("role"), following)
        footer = footers.get(kind)
        if footer is None and tries > 0:
            tries -= 1
            footer = _footer(template, text, given, index + 1, at)
            if footer is not None:
                footers[kind] = footer
        if footer is not None and text.startswith(footer, at):
            ends.append(at + len(footer))
    return ends


def _with_mark(message: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
    """The mark stands before white space at the end, which templates strip; without content there is no place."""
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        return message
    end = len(content.rstrip())
    return {**message, "content": content[:end] + mark + content[end:]}


def _footer(template: ChatTemplate, text: str, given: Mapping[str, Any], count: int, at: int) -> str | None:
    """What stands behind the content of the last of the first `count` messages, where they are the whole chat."""
    try:
        alone = template.render(**{**given, "messages": given["messages"][:count], "add_generation_prompt": False})
    except TextError:
        return None
    return alone[at:] if len(alone) >= at and text.startswith(alone) else None


def _unused_characters(texts: Sequence[str], count: int) -> str:
    """So many in a row that stand in none of these texts. Rare ones, but letters: `repr` would escape others."""
    runs = ("".join(map(chr, range(start, start + count))) for start in range(0x20000, 0x2A000, count))
    return next(run for run in runs if not any(character in text for text in texts for character in run))


# -- what users wrote is text --------------------------------------------------------------------------------------


class _Disguise:
    """Special tokens that users spelled out, written so that the template's own can be told from them.

    The first character is replaced by one that stands nowhere else, and is put back when the text is tokenized.
    """

    def __init__(self, tokenizer: Tokenizer, firsts: str, stand_ins: str) -> None:
        self._pattern = tokenizer.special_pattern
        self._to = dict(zip(firsts, stand_ins, strict=True))
        self._back = str.maketrans(stand_ins, firsts)

    @classmethod
    def of(cls, tokenizer: Tokenizer, given: Mapping[str, Any]) -> _Disguise | None:
        """None where nobody spelled one out, which is nearly always."""
        texts = [text for name in ("messages", "tools", "variables") for text in _texts(given.get(name))]
        spelled = [found.group() for text in texts for found in tokenizer.special_pattern.finditer(text)]
        if not spelled:
            return None
        firsts = "".join(sorted({token[0] for token in spelled}))
        return cls(tokenizer, firsts, _unused_characters(texts, len(firsts)))

    def put_on(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self._to[found.group()[0]] + found.group()[1:], value)
        if isinstance(value, Mapping):
            return {self.put_on(key): self.put_on(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.put_on(inner) for inner in value]
        return value

    def take_off(self, text: str) -> str:
        return text.translate(self._back)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


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
