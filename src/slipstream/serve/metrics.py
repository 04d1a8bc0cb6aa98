"""Prometheus metrics, under the names that dashboards for vLLM know, and a few of our own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from slipstream.core.records import Completion
from slipstream.serve.worker import Load

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_LENGTHS = tuple(float(n) for n in range(1, 17))


class Metrics:
    """Counts what a server does.

    Args:
        model: its name, a label of every metric.
        load: how busy the engine is now.
        most: drafts of a round at most.
    """

    def __init__(self, model: str, load: Callable[[], Load], most: int) -> None:
        self.registry = CollectorRegistry()
        self._model, self._seconds = model, 1.0
        self._gauge("vllm:num_requests_running", "Texts that have a row.", lambda: load().running)
        self._gauge("vllm:num_requests_waiting", "Texts that wait for a row.", lambda: load().waiting)
        self._gauge("vllm:kv_cache_usage_perc", "Share of the buffers in use, 1 is all.", lambda: load().used)
        self._gauge("slipstream:engine_faults", "Decoding steps that failed.", lambda: load().faults)
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens.")
        self._generated = self._counter("vllm:generation_tokens", "Tokens said.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens that were not read again.")
        self._done = self._counter("vllm:request_success", "Finished texts.", "finished_reason")
        self._answers = self._counter(
            "slipstream:http_responses", "Answers by route and status.", "path", "status"
        )
        self._cancelled = self._counter("slipstream:request_cancelled", "Calls whose client went away.")
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self._queue = self._histogram("vllm:request_queue_time_seconds", "In line for a row.")
        self._template = self._histogram("slipstream:template_time_seconds", "Template and tokenising.")
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "Reading the prompt.")
        self._decode = self._histogram("vllm:request_decode_time_seconds", "From first token to last.")
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Per token after the first.", _TOKEN_SECONDS
        )
        self._rounds = self._counter("vllm:spec_decode_num_drafts", "Rounds that had drafts.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Drafts made.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafts kept.")
        self._by_position = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts kept, by position.", "position"
        )
        self._plain = self._counter("slipstream:rounds_without_drafts", "Rounds where drafting did not pay.")
        self._chosen = self._histogram(
            "slipstream:drafts_per_round", "Drafts chosen per round, mean of a text.", (0.0, *_LENGTHS)
        )
        self._length = self._histogram(
            "slipstream:acceptance_length", "Tokens per round, mean of a text.", _LENGTHS
        )
        for position in range(most):
            self._by_position.labels(model, str(position))

    @property
    def usual_seconds(self) -> int:
        """Whole seconds that a text takes, as of late; at least 1."""
        return max(1, round(self._seconds))

    def answered(self, path: str, status: int) -> None:
        """An answer has begun."""
        self._answers.labels(self._model, path, str(status)).inc()

    def cancelled(self) -> None:
        """A client went away before its answer had ended."""
        self._cancelled.labels(self._model).inc()

    def finished(self, done: Completion, template_s: float, reason: str) -> None:
        """A text has ended.

        Args:
            done: the text.
            template_s: seconds that its prompt took before it was put in line.
            reason: why it ended, as the client is told.
        """
        model, kept = self._model, sum(done.accepted_per_position)
        total = template_s + done.ttft_s + done.decode_s
        self._seconds += 0.1 * (total - self._seconds)
        for counter, amount in (
            (self._prompt, done.prompt_tokens),
            (self._generated, done.completion_tokens),
            (self._queries, done.prompt_tokens),
            (self._hits, done.cached_tokens),
            (self._rounds, done.rounds - done.parked),
            (self._drafted, done.drafts),
            (self._accepted, kept),
            (self._plain, done.parked),
        ):
            counter.labels(model).inc(amount)
        self._done.labels(model, reason).inc()
        for position, count in enumerate(done.accepted_per_position):
            self._by_position.labels(model, str(position)).inc(count)
        for histogram, value in (
            (self._ttft, template_s + done.ttft_s),
            (self._e2e, total),
            (self._queue, done.queue_s),
            (self._template, template_s),
            (self._prefill, done.ttft_s - done.queue_s),
            (self._decode, done.decode_s),
        ):
            histogram.labels(model).observe(value)
        if done.completion_tokens > 1:
            self._tpot.labels(model).observe(done.decode_s / (done.completion_tokens - 1))
        if done.rounds:
            self._chosen.labels(model).observe(done.drafts_mean)
            self._length.labels(model).observe(done.acceptance_length)

    def text(self) -> bytes:
        """Everything, in the form that Prometheus reads."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, help_: str, value: Callable[[], float]) -> None:
        gauge = Gauge(name, help_, ["model_name"], registry=self.registry)
        gauge.labels(self._model).set_function(value)

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        counter = Counter(name, help_, ["model_name", *labels], registry=self.registry)
        if not labels:
            counter.labels(self._model)  # so that it is there, as 0, from the beginning
        return counter

    def _histogram(self, name: str, help_: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(name, help_, ["model_name"], buckets=buckets, registry=self.registry)
