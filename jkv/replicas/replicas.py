"""`jkv.Replicas`: engines of one model behind one front, for more rows than one engine holds."""

import concurrent.futures
import contextlib
import dataclasses
import inspect
import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

import jax
import numpy as np
from jax.sharding import Mesh

from jkv.checks import check_counts, counted, shown, typed
from jkv.engine.interrupts import deferred_interrupts
from jkv.engine.memory import check_fits, lowered
from jkv.engine.options import EngineOptions
from jkv.engine.policy_checks import check_request
from jkv.engine.prompts import encode_prompts
from jkv.engine.requests import Request, RequestOptions, check_model, check_weights, make_requests, spread_policies
from jkv.engine.results import Result, make_result
from jkv.engine.service import Reply
from jkv.engine.stats import RunStats
from jkv.eviction import Policy
from jkv.model import weights
from jkv.model.joined import separate_weights
from jkv.model.params import Model, Params
from jkv.model.sharding import num_parts
from jkv.policies import full
from jkv.progress import progress_bar
from jkv.replicas.buckets import digests_of
from jkv.replicas.dispatch import Load
from jkv.replicas.dispatcher import Dispatcher, Open
from jkv.replicas.front import Caller
from jkv.replicas.merging import merged_stats
from jkv.replicas.options import RayOptions, RequestSettings
from jkv.replicas.replica import Carrier
from jkv.replicas.threads import ThreadCarrier, places_of

CARRIERS = ("threads", "ray")


class Replicas:
    """Engines of one model that share the prompts of a call; tokens are those that one of them would draw alone.

        mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (4, 2)), ("data", "tensor"))
        with jkv.Replicas(model, mesh=mesh, policies=[jkv.r_kv(budget=1024)], max_running=32) as replicas:
            out = replicas.generate(prompts, n=8)

    Items (one sample each) go to the replica with the fewest claimed pages that has a free row. The samples of a prompt stay
    together, since they share its prefill, unless rows would be idle. If a replica is lost, its items go on at others, with
    equal tokens. Any number of threads may call.

    Args:
      model_or_params: what `jkv.load` returns, or bare `Params` (prompts are token ids then).
      options: a `jkv.EngineOptions` for each replica.
      mesh: devices of this process, with the axes "data" (replicas) and "tensor" (devices of each): an engine for each row.
      num_replicas: in place of a mesh: one engine for each device, or several on each; with Ray, the number of actors.
      carrier: "threads" of this process, or actors of "ray" (extra `ray`; `ray.init` comes first, else Ray starts here).
      policies: the policies of later calls, which replicas receive once; None is the full cache alone. A policy of your own is
        compiled once in each process.
      restarts: how often a replica is started again after it was lost.
      ray: `jkv.replicas.options.RayOptions`: devices, timeouts and snapshots of actors.
      settings: fields of `jkv.EngineOptions` by name, which replace those of `options`, each for one replica:
        `max_running=32` are 32 rows on each.

    Attributes:
      model: the model, with the shapes of its weights alone.
      policies: of the calls.
      options: of each engine.
      facts: sizes of each engine.
      numbers: those that items get.
      is_asleep: whether the pools are freed.

    Raises:
      ValueError: settings that an engine refuses, a mesh that the model cannot be split over, devices that replicas cannot
        share evenly, or a policy that cannot be sent to another process.
      RuntimeError: a replica did not start in time.
    """

    def __init__(
        self,
        model_or_params: Model | Params,
        options: EngineOptions | None = None,
        *,
        mesh: Mesh | None = None,
        num_replicas: int | None = None,
        carrier: str = "threads",
        policies: Sequence[Policy] | None = None,
        restarts: int = 1,
        ray: RayOptions | None = None,
        **settings: Any,
    ) -> None:
        model = check_model(model_or_params)
        options = (options or EngineOptions()).changed(settings, inspect.signature(Replicas).parameters)
        check_counts(num_replicas=num_replicas)
        given = options.policies if policies is None else EngineOptions(policies=policies).policies
        given = [full()] if given is None else given
        self.policies = spread_policies(given, len(given), model.params, options.kv_format)
        self.options = options
        if carrier not in CARRIERS:
            raise ValueError(f"carrier must be one of {', '.join(CARRIERS)}; got {shown(carrier)}.")
        if ray is not None and carrier != "ray":
            raise ValueError(f'ray= has settings of actors; got carrier={carrier!r}. Write carrier="ray", or leave it out.')
        if (num_parts(mesh) if mesh is not None else (ray or RayOptions()).tensor) > 1:
            model = dataclasses.replace(model, params=separate_weights(model.params))  # a mesh splits these alone
        made: Carrier
        if carrier == "ray":
            made = ray_carrier(model, self.policies, options, mesh, num_replicas, ray or RayOptions())
        else:
            made = ThreadCarrier(model, self.policies, options, places_of(mesh, num_replicas))
        self.model = dataclasses.replace(model, params=weights.shapes_of(model.params))
        self._updating, self.numbers = threading.Lock(), itertools.count()
        self._sent: np.ndarray | None = digests_of(model.params)  # of what all replicas use; None where that is not known
        self._update: Reply[None] | None = None  # the newest
        self._waiting, self._callers, self._is_resting, self.is_asleep = (
            threading.Lock(),
            weakref.WeakSet[Caller](),
            False,
            False,
        )
        self._carrier, self._dispatcher = made, Dispatcher(made, typed("restarts", restarts, int))
        self.facts = next(iter(self._dispatcher.members.values())).replica.facts  # type: ignore[union-attr]

    def __repr__(self) -> str:
        return f"Replicas({counted(self._carrier.count, 'replica')}, carrier={self._carrier.name!r}, version={self.version})"

    # Items.

    def generate(
        self, prompts: Any, *, prompt_mask: Any = None, progress: bool | None = None, **settings: Unpack[RequestSettings]
    ) -> Result:
        """Completions of one prompt or a list of them, as `jkv.generate` returns them: prompt-major, whoever made them.

        Bytes and counts of `stats` are those of all replicas since they had nothing to do, and seconds are the longest of any.

        Args:
          prompts: a text, a list of token ids or a conversation (a list of messages), or a list of these.
          prompt_mask: of padded rows of token ids: see `jkv.generate`.
          progress: whether to show a bar; None shows it in a terminal or notebook.
          settings: fields of `jkv.RequestOptions`. `policy` is one of `policies`, or a list of one for each prompt; None is the
            first of them.

        Ctrl-C ends the items of this call and raises KeyboardInterrupt.

        Raises:
          ValueError: bad input, refused before anything is sent.
          RuntimeError: all replicas are lost, or those that had an item.
        """
        groups = self.requests(prompts, settings, prompt_mask)
        with self._caller() as caller:
            tickets = [caller.submit_requests(group) for group in groups]
            with progress_bar(sum(map(len, groups)), progress, "replicas") as show:
                while not caller.is_idle:
                    show(caller.step())
            return make_result(self.model, caller.take(tickets), self.stats, self.options.return_trace)

    def stream(
        self, prompts: Any, *, prompt_mask: Any = None, **settings: Unpack[RequestSettings]
    ) -> Iterator[tuple[int, Result]]:
        """Yields each sample as soon as it is finished: its index in the order of `generate`, and its result.

        Statistics are those of the sample; of the engines' own, only `platform` and page size are there. If the caller stops
        early, the others are cancelled.
        """
        groups = self.requests(prompts, settings, prompt_mask)
        run = dataclasses.replace(merged_stats([]), page_size=self.facts.page_size)
        with self._caller() as caller:
            for group in groups:
                for request in group:
                    caller.submit_requests([request])
            while not caller.is_idle:
                for event in caller.step():
                    yield event.ticket, make_result(self.model, caller.take([event.ticket]), run, self.options.return_trace)

    def requests(self, prompts: Any, settings: Mapping[str, Any], prompt_mask: Any = None) -> list[list[Request]]:
        """The checked requests of each prompt."""
        policy = settings.get("policy")
        options = RequestOptions(**{**settings, "policy": self.policies[0] if policy is None else policy})  # type: ignore[arg-type]
        ids = encode_prompts(self.model, prompts, options.parse_special, prompt_mask)
        groups = make_requests(self.model, ids, options, kv_format=self.options.kv_format)
        return [[self.check(request) for request in group] for group in groups]

    @contextlib.contextmanager
    def _caller(self) -> Iterator[Caller]:
        """The samples of one call; what is unfinished at the end of the block is cancelled."""
        caller = Caller(self)
        try:
            yield caller
        finally:
            caller.abandon()

    def check(self, request: Request) -> Request:
        """Refuses what no replica could serve; all have the same sizes. Returns the request with a limit that fits.

        Raises:
          ValueError: the reason, with the arithmetic.
        """
        if request.policy not in self.policies:
            raise ValueError(
                f"Replicas receive their policies once; got {request.policy.name} with other settings than those of policies="
                f"[{', '.join(policy.name for policy in self.policies)}]. Give it to jkv.Replicas(policies=[...])."
            )
        facts, params = self.facts, self.model.params
        sizes = {"max_slots": facts.max_slots, "num_pages": facts.num_pages, "page_size": facts.page_size}
        request = lowered(params, request, **sizes)
        check_fits(params, request, **sizes, bytes_per_page=facts.page_bytes)
        check_request(request, self.options)
        return request

    def submit(self, groups: Sequence[Sequence[Open]]) -> None:
        """Queues items, grouped by prompt.

        Raises:
          RuntimeError: all replicas are lost, or closed.
        """
        self._dispatcher.call(self._dispatcher.submit, groups).result()

    def cancel(self, numbers: Sequence[int]) -> None:
        """Ends items, which come back with the tokens that they have."""
        self._dispatcher.call(self._dispatcher.cancel, numbers)

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        """What a method of each replica's `Worker` returns; those that cannot be asked any more are left out."""
        replicas = self._dispatcher.call(self._dispatcher.replicas).result()
        with concurrent.futures.ThreadPoolExecutor(max(1, len(replicas))) as pool:
            answers = list(pool.map(lambda replica: replica.ask(name, *arguments), replicas))
        return [answer for answer in answers if answer is not None]

    @property
    def stats(self) -> RunStats:
        """Bytes and counts of all replicas since they had nothing to do, and the most seconds of any."""
        return merged_stats(self.ask("stats"))

    # Weights and replicas.

    @property
    def version(self) -> int:
        """Of the newest weights: 0, and one more for each `update`."""
        return self._dispatcher.version

    def update(self, params: Params) -> None:
        """Uses new weights everywhere, and returns when all replicas do; unfinished samples go on with them.

        The versions of a sample's tokens (`Result.policy_version`) never descend. Only arrays with other values than before
        travel: of an adapter whose base stays, the adapter alone.

        Each replica compares digests before it uses new weights; one that has others than were sent is started again. If this
        call is interrupted or fails, `version` is the number of the newest weights all the same, whether or not they are these;
        the next call sends everything.

        Raises:
          ValueError: weights of another structure, shape, type or sharding than the first, or not finite; nothing is changed.
          RuntimeError: all replicas are lost.
        """
        params = weights.joined_as(self.model.params, params)
        weights.check_same(self.model.params, params)
        check_weights(params)
        digests = digests_of(params)
        with self._updating:
            sent, self._sent = self._sent, None  # until all have replied
            is_new = np.ones(len(digests), bool) if sent is None else (digests != sent).any(axis=1)
            content = self._carrier.put({i: leaf for i, leaf in enumerate(jax.tree.leaves(params)) if is_new[i]})
            reply: Reply[None] = Reply()
            with deferred_interrupts():  # `version` counts these weights as soon as they are on their way
                self._update = reply
                self._dispatcher.call(self._dispatcher.update, content, digests, reply).result()
            reply.result()
            self._sent = digests

    @property
    def newest_model(self) -> Model:
        """The model with the newest weights; of replicas in other processes, with their shapes."""
        return self._carrier.model

    def sleep(self, forget_weights: bool = False) -> None:
        """Frees the pools of all replicas; running rows are swapped out to host memory. See `jkv.Engine.sleep`."""
        if forget_weights:
            with self._updating:
                if self._update is not None:  # which may have been interrupted, and be on its way
                    concurrent.futures.wait([self._update])
                self._sent = None  # the next update brings all
                self._carrier.forget()
        self.ask("sleep", forget_weights)
        self.is_asleep = True

    def wake(self) -> None:
        """Allocates the pools again."""
        if self.is_asleep:
            self.ask("wake")
            self.is_asleep = False

    def enter(self, caller: Caller) -> None:
        """Lets the replicas decode, because a caller waits for samples."""
        with self._waiting:
            self._callers.add(caller)
            if self._is_resting:
                self._is_resting = False
                self.ask("resume")

    def leave(self, caller: Caller) -> None:
        """The caller waits no more; where none does, replicas stop after their turns, with what is unfinished."""
        with self._waiting, contextlib.suppress(RuntimeError):  # closed
            self._callers.discard(caller)
            if not self._callers and not self._is_resting and self._dispatcher.open:
                self.ask("pause")
                self._is_resting = True

    def retire(self, replica: int) -> None:
        """Ends one replica, such as one whose machine is to be given back; its unfinished samples go on at the others.

        Raises:
          ValueError: no such replica, or the last.
        """
        reply: Reply[None] = Reply()
        self._dispatcher.call(self._dispatcher.drain, replica, reply).result()
        reply.result()

    @property
    def loads(self) -> list[Load]:
        """What each replica has to do."""
        return self._dispatcher.call(self._dispatcher.loads).result()

    def close(self) -> None:
        """Ends all replicas, and what is unfinished."""
        self._dispatcher.close()

    def __enter__(self) -> "Replicas":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ray_carrier(
    model: Model,
    policies: Sequence[Policy],
    options: EngineOptions,
    mesh: Mesh | None,
    num_replicas: int | None,
    ray: RayOptions,
) -> Carrier:
    """The carrier of actors; Ray is imported here alone.

    Raises:
      ValueError: a mesh, no number of replicas, or a policy that cannot be sent.
      ImportError: Ray is not installed.
    """
    if mesh is not None or num_replicas is None:
        raise ValueError(
            'With carrier="ray" each replica has the devices of its own process: give num_replicas=, and '
            f"ray=RayOptions(tensor=...) for several devices each; got mesh={'a mesh' if mesh is not None else None}, "
            f"num_replicas={num_replicas}."
        )
    from jkv.replicas.actors import RayCarrier

    return RayCarrier(model, policies, options, num_replicas, ray)
