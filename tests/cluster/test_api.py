"""The suites of the API, as they run against one server, against three replicas.

What a chat finds again is tested in `test_replicas`: the router hears of restore points a moment after they are there.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.conftest import Replicas
from tests.server import test_chat, test_completions, test_embeddings, test_responses
from tests.server.conftest import TEMPLATE, server  # noqa: F401
from tests.server.harness import Running
from windowpane.text.parsers import Parsers

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def shared(replicas: Replicas) -> Iterator[Running]:
    with replicas.served() as running:
        yield running


@pytest.fixture(scope="module")
def calling(replicas: Replicas) -> Iterator[Running]:
    with replicas.served(chat_template=TEMPLATE, parsers=Parsers("qwen3", "hermes", True)) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def thinking(replicas: Replicas) -> Iterator[Running]:
    with replicas.served(chat_template=TEMPLATE, parsers=Parsers("deepseek_r1")) as running:
        yield running
        running.wait_until_idle()


class TestChatAnswers(test_chat.TestAnswers): ...


class TestChatFormats(test_chat.TestFormats): ...


class TestChatTools(test_chat.TestTools): ...


class TestCompletions(test_completions.TestAnswers): ...


class TestSampling(test_completions.TestSampling): ...


class TestStopping(test_completions.TestStopping): ...


class TestLogprobs(test_completions.TestLogprobs): ...


class TestTheWire(test_completions.TestTheWire): ...


class TestTokens(test_completions.TestTokens): ...


class TestResponses(test_responses.TestAnswers): ...


class TestResponsesTools(test_responses.TestTools): ...


class TestReasoning(test_responses.TestReasoning): ...


test_embeddings_of_every_form = test_embeddings.test_each_prompt_has_one_whatever_its_form
test_embeddings_in_base64 = test_embeddings.test_base64_and_floats_are_the_same
