"""Conversations of a rollout: the model's turns, and between them the replies of a tool, an environment or a user."""

import concurrent.futures
import contextlib
import dataclasses
import queue
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Unpack

import numpy as np

from jkv.checkpoints.chat_tokens import encode_reply
from jkv.checks import check_between, check_counts, check_known, counted, described, shown, typed
from jkv.engine.interrupts import Presses, call, deferred_interrupts
from jkv.engine.kept_rows import ENDS
from jkv.engine.outputs import Event
from jkv.engine.prompts import LONGEST_TOKEN, check_ids, is_endless, num_elements
from jkv.errors import refused
from jkv.model.params import Model
from jkv.model.sampling import Sampling
from jkv.progress import progress_bar
from jkv.reasoning.marks import completion_decoder
from jkv.rollout.results import Item, Rollouts
from jkv.rollout.session import SampleOptions, Session

LOOK_SECONDS = 0.2  # between two looks at replies, where nothing else is to be done
MOST_WORKERS = 1_000
ON_ERROR = ("raise", "return")
REPLY_RULE = "A reply must be token ids, a text, or None"


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the model said in one turn of a conversation.

    Attributes:
      prompt_index: index of the conversation's prompt in the call.
      sample_index: index of the conversation among its prompt's conversations.
      number: of the turn, from 0.
      tokens: `[T]` int32, drawn in this turn.
      text: their text without special tokens and the token that ended the turn; None without a tokenizer.
      finish_reason: "stop" or "length" (`max_turn_tokens` were drawn).
      before: `[S]` int32, all tokens before the turn: the prompt, earlier turns and replies.
    """

    prompt_index: int
    sample_index: int
    number: int
    tokens: np.ndarray
    text: str | None
    finish_reason: str
    before: np.ndarray


class ReplyError(RuntimeError):
    """The function of a `converse` raised, which ended its conversation; the others went on to their ends.

    Attributes:
      rollouts: all conversations of the call. Those whose function raised end with the reason "error", and
        `rollouts.samples[i].error` has the exception.
    """

    def __init__(self, message: str, rollouts: Rollouts) -> None:
        super().__init__(message)
        self.rollouts = rollouts


Reply = Callable[[Turn], Sequence[int] | np.ndarray | str | None]
Answer = concurrent.futures.Future[Any]


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long a conversation may be.

    Attributes:
      max_turns: turns of the model.
      max_turn_tokens: tokens of each; None leaves them open.
      max_new_tokens: tokens of all turns and replies.
    """

    max_turns: int
    max_turn_tokens: int | None
    max_new_tokens: int

    def __post_init__(self) -> None:
        check_counts(max_turns=self.max_turns, max_turn_tokens=self.max_turn_tokens)

    def left(self, item: Item) -> int:
        """Tokens that may still follow."""
        return self.max_new_tokens - item.num_tokens

    def of_turn(self, left: int) -> int:
        """The most tokens of a turn where `left` may follow."""
        return min(left, self.max_turn_tokens or left)

    def is_last(self, item: Item) -> bool:
        """Whether no turn may follow the one in progress."""
        return len(item.earlier) + 1 >= self.max_turns


def converse(
    session: Session,
    prompts: Any,
    reply: Reply,
    limits: Limits,
    workers: int,
    progress: bool | None,
    on_error: str = "raise",
    **options: Unpack[SampleOptions],
) -> Rollouts:
    """Runs conversations to their end: see `jkv.Rollout.converse`."""
    if unwanted := [name for name in ("max_new_tokens", "stop_strings") if options.get(name)]:
        rule = f"Turns are limited by max_turn_tokens and ended by stop_ids; got {' and '.join(unwanted)}. Leave that out."
        raise refused(rule, **{unwanted[0]: "conflict"})
    if options.get("form") is not None:
        raise refused("A form is one answer's; a conversation has several. Leave form out.", form="conflict")
    if not callable(reply):
        raise refused(f"reply must be a function of a jkv.rollout.Turn; got {shown(reply)}.", reply="wrong_type")
    check_between(0, MOST_WORKERS, workers=typed("workers", workers, int))
    check_known(ON_ERROR, on_error=on_error)
    sampling = options.get("sampling")
    if sampling is not None and typed("sampling", sampling, Sampling).penalises:
        raise refused(
            "A conversation is drawn without penalties, which count the tokens of one turn alone; got "
            f"{sampling}. Leave them out.",
            sampling="unsupported",
        )
    with deferred_interrupts(ends_here=True) as presses, asking(reply, workers) as ask:
        options["max_new_tokens"] = limits.of_turn(limits.max_new_tokens)
        session.queue(prompts, keep=limits.max_turns > 1, **options)
        with progress_bar(session.pending, progress, "conversations") as show:
            parse_special = options.get("parse_special", False)
            conversations = Conversing(session, limits, options.get("stop_ids"), ask, show, presses, parse_special)
            with session.callers.alone():
                session.engine.wake()
            while conversations.is_unfinished and not presses:
                conversations.go_on()
            for item in conversations.asked:
                item.reason = "cancelled"
        out = session.cancel()
    conversations.report(out, on_error if not presses else "return")
    return out


@contextlib.contextmanager
def asking(reply: Reply, workers: int) -> Iterator[Callable[[Turn], Answer]]:
    """A function that asks for the reply to a turn: in one of `workers` threads, or with 0 in this one."""
    if workers:
        pool = concurrent.futures.ThreadPoolExecutor(workers, "reply")
        try:
            yield lambda turn: pool.submit(reply, turn)
        finally:  # a reply that takes long keeps nobody waiting after Ctrl-C or an error
            pool.shutdown(wait=False, cancel_futures=True)
        return

    def here(turn: Turn) -> Answer:
        answer: Answer = Answer()
        error = call(lambda: answer.set_result(reply(turn)))
        if error is not None:
            answer.set_exception(error)
        return answer

    yield here


class Conversing:
    """The unfinished conversations of one call: turns in progress, and replies that are waited for.

    Whatever a reply is or raises, it ends its own conversation alone.

    Args:
      session: has all conversations as its samples.
      limits: of each conversation.
      stop_ids: tokens that end a turn; None are the model's.
      ask: asks for the reply to a turn.
      show: shows events.
      presses: counts the presses of Ctrl-C.
      parse_special: whether replies that are texts may make control tokens.

    Attributes:
      raised: what `ask` raised, by conversation.
      refused: why what `ask` returned is no reply, by conversation.
    """

    def __init__(
        self,
        session: Session,
        limits: Limits,
        stop_ids: Sequence[int] | None,
        ask: Callable[[Turn], Answer],
        show: Callable[[list[Event]], None],
        presses: Presses,
        parse_special: bool = False,
    ) -> None:
        self.presses, self.parse_special = presses, parse_special
        self.session, self.limits, self.stop_ids, self.ask, self.show = session, limits, stop_ids, ask, show
        self.engine, self.callers = session.engine, session.callers
        self.running, self.asked = set(session.items.values()), dict[Item, Answer]()
        self.answered: queue.SimpleQueue[Item] = queue.SimpleQueue()  # of those asked; a worker's thread puts them there
        self.raised, self.refused = dict[Item, BaseException](), dict[Item, BaseException]()

    @property
    def is_unfinished(self) -> bool:
        """Whether a conversation goes on."""
        return bool(self.running or self.asked)

    def go_on(self) -> None:
        """Runs turns until one ends or a reply is there, and does what follows."""
        ended = self.session.finished
        if self.running:
            self.callers.run(lambda: self.presses or ended or not self.answered.empty(), self.show_own)
        while ended:
            item = ended.popleft()
            self.running.discard(item)
            self.after_turn(item)
        with contextlib.suppress(queue.Empty):
            wait = 0.0 if self.running else LOOK_SECONDS
            while self.asked:
                item = self.answered.get(timeout=wait) if wait else self.answered.get_nowait()
                wait = 0.0
                self.after_reply(item, self.asked.pop(item))

    def show_own(self, events: list[Event]) -> None:
        """Shows tokens; only a conversation's end counts as an end."""
        self.show([dataclasses.replace(event, finish_reason="") for event in self.session.own(events)])

    def after_turn(self, item: Item) -> None:
        """Asks for a reply, or ends the conversation."""
        item.drop_empty_turn()
        if not item.reason and item.sample.completion.finish_reason in ENDS and not self.limits.is_last(item):
            if self.limits.left(item) > 1:
                self.ask_for_reply(item)
                return
            item.reason = "length"
        self.end(item)

    def ask_for_reply(self, item: Item) -> None:
        """Asks for the reply to a conversation's last turn."""
        turns: list[Turn] = []
        if (error := call(lambda: turns.append(self.turn_of(item)))) is not None:  # a tokenizer that decodes no such tokens
            self.fail(item, error, self.raised)
            return
        self.asked[item] = answer = self.ask(turns[0])
        answer.add_done_callback(lambda _: self.answered.put(item))

    def turn_of(self, item: Item) -> Turn:
        """What a conversation's last turn said."""
        request, completion = item.sample.request, item.sample.completion
        tokens, tokenizer = np.array(completion.tokens, np.int32), self.session.model.tokenizer
        text = None if tokenizer is None else completion_decoder(tokenizer)(item.sample.text_tokens)
        place, before = (item.prompt, item.index, len(item.earlier)), request.prompt.view()
        before.flags.writeable = False  # it is the engine's own
        return Turn(*place, tokens, text, completion.finish_reason, before)

    def after_reply(self, item: Item, answer: Answer) -> None:
        """Begins the next turn, or ends the conversation."""
        if (error := answer.exception()) is not None:
            self.fail(item, error, self.raised)
            return
        reply, tokens = answer.result(), list[np.ndarray | None]()
        if reply is None:
            self.end(item)
            return
        model, room = self.session.model, self.limits.left(item) - 1
        error = call(
            lambda: tokens.append(reply_tokens(model, reply, room, self.parse_special))
        )  # an object may raise anything when it is read
        if error is not None:
            self.fail(item, error, self.refused)
        elif tokens[0] is None:
            item.reason = "length"
            self.end(item)
        else:
            try:
                self.extend(item, tokens[0])
            except ValueError as refusal:  # of an engine that has no room for the turn
                self.fail(item, refusal, self.refused)

    def fail(self, item: Item, error: BaseException, errors: dict[Item, BaseException]) -> None:
        """Ends a conversation because of its reply: "cancelled" if Ctrl-C was pressed inside of `ask`, else "error"."""
        if isinstance(error, KeyboardInterrupt) and self.presses:
            item.reason = "cancelled"
        else:
            item.reason, item.sample.completion.error, errors[item] = "error", error, error
        self.end(item)

    def report(self, out: Rollouts, on_error: str) -> None:
        """Warns of conversations that ended by an error, or raises, where `ask` raised.

        Raises:
          ReplyError: it has all conversations.
        """
        errors = self.raised | self.refused
        if not errors:
            return
        item, error = next(iter((self.raised or errors).items()))
        verb = "raised" if self.raised else "returned no reply"
        text = (
            f"{counted(len(errors), 'conversation')} of {len(out.lengths)} ended with the reason 'error': reply {verb}; "
            f"the first at turn {len(item.earlier)} of prompt {item.prompt}, sample {item.index}: {described(error)}"
        )
        if self.raised and on_error == "raise":
            message = f"{text}. `rollouts` of this error has all of them; on_error='return' returns them."
            raise ReplyError(message, out) from error
        warnings.warn(text, stacklevel=4)

    def extend(self, item: Item, reply: np.ndarray) -> None:
        """Begins the next turn with the tokens of a reply.

        Raises:
          ValueError: the engine refuses the turn; nothing is changed.
        """
        left = self.limits.left(item) - len(reply)
        keep = len(item.earlier) + 2 < self.limits.max_turns
        settings: dict[str, Any] = {"keep": keep, "max_new_tokens": self.limits.of_turn(left), "stop_ids": self.stop_ids}
        settings["top_logprobs"] = item.first.request.top_logprobs
        with self.callers.alone():
            ticket = self.engine.extend(item.ticket, reply, **settings)
            self.engine.take([item.ticket])
            item.earlier.append((item.sample, reply))
            del self.session.items[item.ticket]
            item.ticket, item.sample = ticket, self.engine.tickets[ticket][0]
            self.session.items[ticket] = item
        self.running.add(item)

    def end(self, item: Item) -> None:
        """A conversation is over: its row is freed."""
        with self.callers.alone():
            self.engine.release(item.ticket)
        self.show([Event(item.ticket, 0, [], [], None, item.sample.completion.finish_reason)])


def reply_tokens(model: Model, reply: Any, room: int, parse_special: bool = False) -> np.ndarray | None:
    """The tokens of a reply, `[T]` int32; None if more than `room`.

    Raises:
      ValueError: what is no reply. And whatever an object raises when it is read.
    """
    if isinstance(reply, str):
        if model.tokenizer is None:
            rule = "A reply to a model without a tokenizer must be token ids; got a text. Encode it."
            raise refused(rule, reply="unsupported")
        if len(reply) > LONGEST_TOKEN * room:  # it cannot fit, whatever its tokens are
            return None
        reply = encode_reply(model.tokenizer, reply, parse_special)
    elif is_endless(reply):
        raise refused(f"{REPLY_RULE}; got {shown(reply)}.", reply="wrong_type")
    if num_elements(reply, REPLY_RULE) > room:
        return None
    return check_ids(reply, REPLY_RULE, "the reply", model.config.vocab_size)
