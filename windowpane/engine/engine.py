"""The engine: scheduler, runner and sampler turned into steps. Tokens in, tokens out; text is `llm`'s.

    plain        schedule n ─ run n ─ commit n ─ schedule n+1 ─ …
    overlapped   schedule n ─ run n ─ schedule n+1 ─ run n+1 ─ commit n ─ …

Overlapped, the device always has a step to work on while the host commits the one before: sampled tokens stay on the
device, where the next step finds them, and reach the host late.

With a host tier, pages are copied beside steps: each step begins with looking for copies that are over. Where nothing
else is to be done than to wait for one, a step without rows carries the order, and steps return at once until then.

With a speculator, a step may verify drafts: each of their places samples a token as it would without them, and those
that equal their drafts save a step each. Where the device drafts, counts what is accepted and goes on from there, the
next step is sent off *ahead* of that knowledge, and steps overlap as ever. Else what is drafted hangs on tokens that
the host has to know, so such a step waits until no other is in flight, and none is sent off before it has landed.

    ahead        schedule n ─ run n ─ schedule n+1 ─ run n+1 ─ commit n ─ …
    else         run n ─ commit n ─ draft and schedule n+1 ─ run n+1 ─ text of n ─ commit n+1 ─ …

Either way the next step is sent off before `step` returns the tokens of the one that landed: they become text, stop
strings are looked for and requests come in while the device verifies.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windowpane.device.transfer import HostCopy, to_device
from windowpane.drafts.drafter import Asking
from windowpane.drafts.speculator import Speculator
from windowpane.engine.adapters import EngineAdapters
from windowpane.engine.sampler import Sampler
from windowpane.engine.sent_step import (
    HostLogprobs,
    Moment,
    Pooled,
    SentStep,
    prompt_logprobs,
    wants_prompt_logprobs,
)
from windowpane.kv.manager import KVManager
from windowpane.kv.retention import Routes
from windowpane.runners.interrupts import interrupts_later
from windowpane.schedule.batch import Batch
from windowpane.schedule.request import FinishReason, Request, RoutedExperts, TokenLogprobs, Tokens
from windowpane.schedule.scheduler import Scheduler

FAR_FROM_END = 0.75  # share of sequences with room for all drafts, below which no step is sent ahead
COPY_POLL_S = 5e-4  # between looks at copies from the host, while nothing else is to be done


class Output(Protocol):
    """What a runner's step gives: see `runners.plain.StepOutput`."""

    @property
    def logits(self) -> Tensor: ...
    @property
    def prompt_logits(self) -> dict[int, Callable[[slice], Tensor]]: ...
    @property
    def prompt_hidden(self) -> dict[int, Tensor]: ...
    @property
    def too_far(self) -> Tensor | None: ...


class StepRunner(Protocol):
    """What the engine asks of a runner."""

    def forward(self, batch: Batch, *, all_logits_slots: frozenset[int]) -> Output: ...
    def take_sampled(self, slots: Tensor, tokens: Tensor) -> None: ...
    def read_routes(self, slot: int, start: int, stop: int) -> Callable[[], RoutedExperts]: ...
    def landed(self) -> list[tuple[int, float]]: ...


class TokenOutput(NamedTuple):
    """One new token of a request, None where a failed step ended it. `finish_reason` is set with the last one.

    `output_tokens` is how many the answer has with it. A step with drafts may give several, of which a stop string
    (`Engine.stop`) drops those behind it.
    """

    request: Request
    token: int | None
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    output_tokens: int

    @property
    def is_dropped(self) -> bool:
        return self.output_tokens > len(self.request.output)


class Engine:
    """Runs requests step by step. `async_scheduling` prepares each step while the one before it is computed.

    A step that raises fails its requests (their `error` says why) and gives their memory back; all others go on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        sampler: Sampler,
        *,
        async_scheduling: bool,
        speculator: Speculator | None = None,
        adapters: EngineAdapters | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
        self.async_scheduling = async_scheduling
        self.speculator = speculator
        self.adapters = adapters
        self.sent_tokens = 0  # of all steps so far
        self._sent_steps: deque[SentStep] = deque()
        self._landed: list[TokenOutput] = []  # not returned yet: an interrupt ended the step that was to do so
        self._ended: Moment | None = None  # of the step that landed last
        self._decoded_at: float | None = None  # when a step that only decoded landed, if it was the last one
        self._routed_slots: dict[Request, int] = {}  # of requests that sampled in that step and want routed experts

    @property
    def manager(self) -> KVManager:
        return self.scheduler.manager

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._sent_steps) or bool(self._landed)

    def add(self, request: Request) -> None:
        """Queue a request. One that can never run is refused at once, with a ValueError."""
        self.check(request)
        self.queue(request)

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that can never run. Reads only what never changes: any thread may ask."""
        self._check_tokens(request)
        self._check_routes(request)
        _check_grammar(request)
        self._check_adapter(request)
        self.scheduler.check(request)

    def queue(self, request: Request) -> None:
        """Queue a request that has passed `check`."""
        request.matcher = request.grammar.matcher() if request.grammar is not None else None
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]  # nothing predicts the first token
        if self.adapters is not None:
            self._check_adapter(request)  # it may have been removed since the request was made
            self.adapters.queued(request)
        self.scheduler.queue(request)

    def cancel(self, request: Request, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request now, whatever it is doing. What a step that was sent off still samples for it is dropped."""
        if request.finish_reason is None:
            if reason is FinishReason.STOP:
                self._read_routes(request)
            self.scheduler.cancel(request, keep=reason is not FinishReason.FAILED)
            request.finish_reason = reason
            self._forget(request)

    def stop(self, output: TokenOutput) -> None:
        """A stop string has ended an answer with this token: what its step gave behind it is no part of the answer."""
        request, count = output.request, output.output_tokens
        self.scheduler.drop_output(request, count)
        del request.logprobs[count:]
        if request.finish_reason is None:
            self.cancel(request, FinishReason.STOP)
        else:  # a token behind the stop string had ended it
            self._read_routes(request)
            request.finish_reason = FinishReason.STOP

    def step(self) -> list[TokenOutput]:
        """Compute one step; returns the tokens that have become known, which may be those of the step before."""
        return self._overlapped_step() if self.async_scheduling else self._plain_step()

    def _plain_step(self) -> list[TokenOutput]:
        if not self._sent_steps:  # one is left over where an interrupt ended a step
            self._schedule(self._drafts())
        return self._land() if self._sent_steps else []

    def _overlapped_step(self) -> list[TokenOutput]:
        if self._landed:
            return self._take_landed()
        if len(self._sent_steps) > 1:  # an interrupt came between sending one off and landing the one before
            return self._land()
        failed = any(sent.error is not None for sent in self._sent_steps)  # nothing is built on such a step
        if not failed and (ahead := self._drafts_ahead()) and self._schedule(ahead):
            return self._land()
        drafts = {} if failed else self._drafts()
        if self._sent_steps and (drafts or self._sent_steps[0].drafts):
            return self._land_and_go_on()  # drafts are worth waiting for it
        scheduled = not failed and self._schedule(drafts)
        if self._sent_steps and (len(self._sent_steps) > 1 or not scheduled):
            return self._land()
        return []

    def _land_and_go_on(self) -> list[TokenOutput]:
        """Land a step that the next one's drafts hang on, and send that off before anybody reads its tokens.

        Routed experts are read while no later step is on its way, and stop strings are found late: then nothing is sent
        off yet.
        """
        sent = self._sent_steps[0]
        self._landed = self._land()
        if sent.error is None and not sent.routed_slots:
            self._schedule(self._drafts())
        return self._take_landed()

    def _take_landed(self) -> list[TokenOutput]:
        landed, self._landed = self._landed, []
        return landed

    # -- one step --------------------------------------------------------------------------------------------------

    def _drafts(self) -> dict[int, Tokens]:
        """Drafts for the next step. While one is in flight they are only a guess at whether it will have some."""
        speculator, scheduler = self.speculator, self.scheduler
        if speculator is None or any(sent.drafts for sent in self._sent_steps):
            return {}
        decoding = [slot for slot in scheduler.decoding_slots.tolist() if scheduler.running[slot].output]
        return speculator.drafts(self._asking(decoding), len(decoding))

    def _drafts_ahead(self) -> dict[int, Tokens]:
        """Drafts for a step that is sent off before the last one has landed, which has some too; none where the host
        has to know first what is accepted.
        """
        speculator, scheduler = self.speculator, self.scheduler
        most_rows = 0 if speculator is None else speculator.drafter.rows_ahead
        if speculator is None or not most_rows or not self._sent_steps or not self._sent_steps[0].drafts:
            return {}
        slots = scheduler.decoding_slots.tolist()
        if not scheduler.may_go_ahead or not all(_may_go_ahead(scheduler.running[slot]) for slot in slots):
            return {}
        asking = self._asking(slots)
        # Near its end a sequence has room for fewer drafts than it would once the last step has landed. To wait for
        # that costs all the others a tenth of a step.
        if sum(a.most == scheduler.draft_tokens for a in asking) < len(slots) * FAR_FROM_END:
            return {}
        drafts = speculator.drafts(asking, len(slots), is_ahead=True)
        return drafts if len(slots) + sum(map(len, drafts.values())) <= most_rows else {}

    def _asking(self, slots: Sequence[int]) -> list[Asking]:
        """Those of these that have room for drafts in the next step."""
        scheduler = self.scheduler
        return [
            Asking(scheduler.running[slot], slot, int(scheduler.manager.lengths[slot]), room)
            for slot in slots
            if (room := scheduler.draft_room(slot))
        ]

    def _schedule(self, drafts: dict[int, Tokens]) -> bool:
        """Send the next step off, if there is one to send."""
        with interrupts_later():
            if self.adapters is not None:
                self.adapters.sweep()
            tier = self.scheduler.tier
            if tier is not None and tier.in_transit and (landed := self.runner.landed()):
                self.scheduler.land(landed)
            batch = self.scheduler.schedule(drafts)
            if batch is None and tier is not None and tier.in_transit and not self._sent_steps:
                time.sleep(COPY_POLL_S)
                return False
            if batch is None:
                if self.scheduler.has_work and not self._sent_steps:
                    raise RuntimeError("work is left but nothing can be scheduled: the scheduler is stuck")
                return False
            sent = self._send_off(batch)
        try:
            self._run(batch, sent)
            sent.error = None
        except Exception as error:
            sent.error = error
        except BaseException as error:  # an interrupt ends this step like any error, but is not ours to keep
            sent.error = error
            raise
        return True

    def _send_off(self, batch: Batch) -> SentStep:
        """From here on the step is either landed or failed, whatever happens: the scheduler waits for it."""
        running = self.scheduler.running
        sent = SentStep(
            sampling=[running[slot] for slot in batch.sampling_slots.tolist()],
            touched=[running[slot] for slot in _touched_slots(batch) if slot in running],
            slots=batch.sampling_slots,
            drafts=batch.drafts,
            decoding=batch.num_decoding,
            prompt_tokens=batch.prompt_tokens,
            follows=bool(self._sent_steps),
            routed_slots={
                running[slot]: slot
                for slot in batch.sampling_slots.tolist()
                if running[slot].params.return_routed_experts
            },
        )
        self._sent_steps.append(sent)
        self.sent_tokens += batch.num_tokens
        return sent

    @torch.inference_mode()
    def _run(self, batch: Batch, sent: SentStep) -> None:
        running = self.scheduler.running
        wanting = {c.slot: c for c in batch.chunks if wants_prompt_logprobs(running[c.slot], c.start)}
        pooling = [c for c in batch.chunks if running[c.slot].pooling is not None]
        output = self.runner.forward(batch, all_logits_slots=frozenset([*wanting, *(c.slot for c in pooling)]))
        sent.pooled = [Pooled.of(running[c.slot], c.start, output.prompt_hidden[c.slot]) for c in pooling]
        for slot, chunk in wanting.items():
            logits_of = output.prompt_logits[slot]
            sent.prompt_logprobs.append(prompt_logprobs(running[slot], chunk.start, len(chunk.tokens), logits_of))
        if not sent.sampling:
            sent.ended = Moment(output.logits.device)
            return
        if sent.drafts and any(r.matcher is not None or r.params.has_penalties for r in sent.sampling):
            self._tell_drafts(sent)
        positions = _sampled_positions(batch)
        masks, drafted = self._masks(sent, positions), sent.drafts_before_rows() if sent.drafts else None
        sampled = self.sampler.sample(output.logits, sent.row_requests(), positions, masks, drafted, output.too_far)
        if not sent.drafts:  # else it is not known yet which token is a sequence's last one
            self.runner.take_sampled(to_device(sent.slots, sampled.tokens.device), sampled.tokens)
        sent.ended = Moment(sampled.tokens.device)
        sent.tokens = HostCopy(sampled.tokens)
        if sampled.logprobs is not None:
            sent.logprobs = HostLogprobs(sampled.logprobs)
            sent.logprob_rows = sampled.logprob_rows
        if sent.drafts and self.speculator is not None:
            drafter = self.speculator.drafter
            sent.device_knows_last = drafter.begin(sent.slots.tolist(), sent.drafts, sampled.tokens)

    def _masks(self, sent: SentStep, positions: NDArray[np.int64]) -> dict[int, NDArray[np.uint32]]:
        """The tokens that grammars allow, by row. One that cannot go on fails its own request and no other.

        A mask needs every token before it. `forward` did without, and has the device busy while we wait for them here.
        """
        masks: dict[int, NDArray[np.uint32]] = {}
        if not any(r.matcher is not None for r in sent.sampling):
            return masks
        for earlier in self._sent_steps:
            if earlier is not sent:
                earlier.advance_matchers()
        drafted = sent.drafts_before_rows()
        asked = []
        for row, request in enumerate(sent.row_requests()):
            if (matcher := request.matcher) is not None:
                may_stop = bool(positions[row] >= len(request.prompt) + request.params.min_tokens)
                asked.append((row, matcher if row not in drafted else matcher.ahead(drafted[row]), may_stop))
                asked[-1][1].ask(may_stop=may_stop)
        for row, matcher, may_stop in asked:
            try:
                masks[row] = matcher.allowed(may_stop=may_stop)
            except Exception as error:
                if row not in drafted:  # behind a draft that the grammar does not allow, nothing is asked for
                    sent.stuck[sent.row_requests()[row]] = error
        return masks

    @interrupts_later()  # one must not come between the engine's steps and the scheduler's
    def _land(self) -> list[TokenOutput]:
        """Take in what the oldest step sampled."""
        sent = self._sent_steps.popleft()
        if sent.error is None:
            try:
                self._tell_drafts(sent)
                tokens = sent.tokens.array() if sent.tokens else np.zeros(0, dtype=np.int64)
                logprobs = sent.read_logprobs()
                sent.advance_matchers()
                counts = sent.count_emitted(tokens)
                if sent.drafts:
                    self._settle_drafts(sent, tokens, counts)
            except Exception as error:  # a device reports what went wrong in a step when its results are read
                sent.error = error
        if sent.error is not None:
            return self._fail(sent, sent.error)
        self._take_time(sent)
        outputs = [output for request, error in sent.stuck.items() for output in self._end([request], error)]
        alive = [len(r.output) if r.finish_reason is None else None for r in sent.sampling]
        if sent.drafts:
            emitted = np.concatenate([tokens[row : row + n] for row, n in zip(sent.first_rows(), counts, strict=True)])
            finished = self.scheduler.commit(emitted, counts)
        else:
            finished = self.scheduler.commit(tokens)
        for request, before, row, count in zip(sent.sampling, alive, sent.first_rows(), counts, strict=True):
            if before is not None:
                request.accepted_tokens += min(count - 1, len(request.output) - before)
                outputs += _outputs(request, before, row, logprobs)
        self._routed_slots = sent.routed_slots
        for request in finished:
            self._read_routes(request)
            self._forget(request)
        return outputs

    def _tell_drafts(self, sent: SentStep) -> None:
        """A model's drafts may have stayed on the device until here."""
        if sent.drafts and self.speculator is not None:
            sent.drafts = self.speculator.drafter.tell(sent.drafts)

    @torch.inference_mode()
    def _settle_drafts(self, sent: SentStep, tokens: NDArray[np.int64], counts: Sequence[int]) -> None:
        """Tell everybody which tokens of a step with drafts count, before another step is put together."""
        assert self.speculator is not None
        last, sampled = list[int](), tokens.tolist()
        for request, drafts, row, count in zip(sent.sampling, sent.drafts, sent.first_rows(), counts, strict=True):
            last.append(sampled[row + count - 1])
            if request.finish_reason is None:
                self.sampler.remember(request, sampled[row : row + count])
                if len(drafts):
                    self.speculator.verified(request, len(drafts), count - 1)
                    request.drafted_tokens += len(drafts)
        if not sent.device_knows_last:
            device = self.sampler.device
            self.runner.take_sampled(to_device(sent.slots, device), to_device(last, device, torch.int64))

    def _forget(self, request: Request) -> None:
        self.sampler.forget(request)
        if self.adapters is not None:
            self.adapters.ended(request)
        if self.speculator is not None:
            self.speculator.forget(request)

    def _read_routes(self, request: Request) -> None:
        """Begin to read the experts that a request's tokens visited, as it ends with the step that has just landed.

        Whoever wants them waits for them; steps do not. The request may have left its slot, but what it held stays
        where it was until another step is sent off: one that is on its way already was put together while the slot was
        the request's own.
        """
        slot = self._routed_slots.get(request)
        if slot is not None:
            start = request.params.routed_experts_prompt_start
            request.read_routes = self.runner.read_routes(slot, start, request.known_tokens - 1)

    def _take_time(self, sent: SentStep) -> None:
        """Tell the pace how long this step took; one that samples nothing is not waited for, so that is not known."""
        before, self._ended = self._ended, sent.ended
        pace = self.scheduler.pace
        if sent.tokens is not None and (pace is not None or sent.prompt_tokens):
            seconds = sent.seconds(before)
            self.scheduler.speeds.computed(sent.prompt_tokens, seconds)
            if pace is not None:
                pace.observe(sent.decoding, sent.prompt_tokens, seconds)
        if self.speculator is not None:
            now, landed = time.perf_counter(), self._decoded_at
            self._decoded_at = None if sent.prompt_tokens or not sent.decoding else now
            if self._decoded_at is not None:
                # From landing to landing: a step with drafts has to be worth the time of the host before it too.
                between = None if landed is None else now - landed
                self.speculator.stepped(sent.decoding, sum(map(len, sent.drafts)), between)

    def _fail(self, sent: SentStep, error: BaseException) -> list[TokenOutput]:
        """A step raised: nothing that its sequences hold can be trusted, so they end and give it back.

        Nor can restore points: the step may have been about to write or move any of them. A step that was sent off
        after it, before the device reported the error, may have resumed from one, so it fails as well.
        """
        for later in self._sent_steps:
            later.error = later.error or error
        self._ended = self._decoded_at = None
        outputs = self._end(sent.touched, error)
        self.scheduler.commit(np.zeros(len(sent.sampling), dtype=np.int64))
        self.scheduler.forget_restore_points()
        return outputs

    def _end(self, requests: Sequence[Request], error: BaseException) -> list[TokenOutput]:
        """These requests have failed, unless they were over before."""
        failed = [r for r in requests if r.finish_reason is None]
        for request in failed:
            request.error = error
            self.cancel(request, FinishReason.FAILED)
        return [TokenOutput(request, None, None, FinishReason.FAILED, len(request.output)) for request in failed]

    def _check_routes(self, request: Request) -> None:
        if not request.params.return_routed_experts:
            return
        if not any(isinstance(group.retention, Routes) for group in self.manager.layout.groups):
            raise ValueError(
                f"request {request.id}: return_routed_experts needs an engine that was started with "
                "--enable-return-routed-experts (enable_return_routed_experts=True)"
            )
        start = request.params.routed_experts_prompt_start
        if start > len(request.prompt):
            raise ValueError(
                f"request {request.id}: routed_experts_prompt_start {start} is beyond the prompt's "
                f"{len(request.prompt)} tokens"
            )

    def _check_adapter(self, request: Request) -> None:
        if request.adapter and (self.adapters is None or not self.adapters.is_known(request.adapter)):
            raise ValueError(f"request {request.id}: adapter {request.adapter} is not loaded, or no longer")

    def _check_tokens(self, request: Request) -> None:
        """Numbers outside the vocabulary would read past the end of a table on the device."""
        vocab_size, params = self.sampler.vocab_size, request.params
        for what, tokens in (
            ("prompt", request.prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", tuple(params.logit_bias)),
        ):
            wrong = outside_vocabulary(tokens, vocab_size)
            if wrong is not None:
                raise ValueError(f"request {request.id}: {what} has token {wrong}; the vocabulary is {vocab_size:,}")
        for what, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if count is not None and count > vocab_size:
                raise ValueError(f"request {request.id}: {what} {count} exceeds the vocabulary of {vocab_size:,}")


def _may_go_ahead(request: Request) -> bool:
    """Whether a step may have a request's rows before the host knows the tokens before them: what they are sampled by
    does not hang on those, and nothing is to be read of the step before while no other is on its way.
    """
    params = request.params
    can_wait = request.matcher is None and not params.has_penalties and not params.return_routed_experts
    return can_wait and len(request.output) >= params.min_tokens


def _outputs(request: Request, before: int, row: int, logprobs: dict[int, TokenLogprobs]) -> Iterator[TokenOutput]:
    """What a request has gained over `before` tokens, which its rows from `row` on have sampled."""
    for index, token in enumerate(request.output[before:]):
        known = logprobs.get(row + index)
        if known is not None:
            request.logprobs.append(known)
        count = before + index + 1
        yield TokenOutput(request, token, known, request.finish_reason if count == len(request.output) else None, count)


def _sampled_positions(batch: Batch) -> NDArray[np.int64]:
    """The place in its sequence that each sampled token takes."""
    ends = [(c.start + len(c.tokens), c.drafts or 0) for c in batch.chunks if c.samples]
    return np.concatenate([batch.decode_positions + 1, *(np.arange(end - drafts, end + 1) for end, drafts in ends)])


def outside_vocabulary(tokens: Sequence[int] | NDArray[np.int32], vocab_size: int) -> int | None:
    """The first number that is no token, if there is one."""
    if len(tokens) == 0 or (np.min(tokens) >= 0 and np.max(tokens) < vocab_size):
        return None
    return next(int(t) for t in tokens if not 0 <= t < vocab_size)


def _check_grammar(request: Request) -> None:
    """What is one answer by a grammar is one request with it. Whatever ends it for the grammar must end the request."""
    params = request.params
    if params.n != 1 or (params.structured_outputs is not None and request.grammar is None):
        raise ValueError(f"request {request.id}: n and structured_outputs are for `LLM`; a request is one answer")
    if request.grammar is not None and not request.grammar.stop_ids <= set(request.params.stop_token_ids):
        raise ValueError(
            f"request {request.id}: its grammar ends with the stop tokens {sorted(request.grammar.stop_ids)}, but not "
            "all of them end the request; leave ignore_eos out"
        )


def _touched_slots(batch: Batch) -> list[int]:
    """Sequences that a step computes, or whose pages it moves: without it, what they hold is not what tables say."""
    slots = set(batch.decode_slots.tolist()) | {c.slot for c in batch.chunks}
    for update in (*batch.changes.entries, *batch.changes.late, *batch.changes.moved_reads):
        slots.update(update.slots.tolist())
    return sorted(slots)
