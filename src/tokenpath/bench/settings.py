"""What a run is told: the options of ``tokenpath bench load``, checked against each other."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from tokenpath.bench import arrivals, trace, workload
from tokenpath.bench.measure import Limits
from tokenpath.bench.wire import Api, PromptKind, RequestShape
from tokenpath.bench.workload import Domain, Length, PlannedRequest
from tokenpath.protocol.errors import SpecError

DEFAULT_REQUESTS = 100
DEFAULT_DURATION_S = 60.0
MOST_REQUESTS = 1_000_000
"""Bound when only ``--duration`` is given."""
MOST_DURATION_S = 24 * 3600.0
"""Bound when only ``--requests`` is given."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A checked configuration; ``check`` builds it. It is part of the JSON report as it is."""

    url: str
    model: str | None
    """None: the first that the server lists."""
    api: Api
    api_key_env: str | None
    mode: str
    """``closed``, ``poisson`` or ``trace`` (its moments; a closed loop may use its lengths)."""
    concurrency: int | None
    rate_per_s: float | None
    trace: str | None
    time_scale: float
    length_divisor: int
    requests: int
    duration_s: float
    max_in_flight: int
    prompt_tokens: str | None
    output_tokens: str | None
    shared_prefix_tokens: int
    prompt_kind: PromptKind
    vocabulary: tuple[int, int]
    seed: int
    ignore_eos: bool
    temperature: float | None
    limits: Limits
    warmup: int
    timeout_s: float

    def shape(self, model: str) -> RequestShape:
        """Return what every request has in common, once the model's name is known."""
        return RequestShape(
            api=self.api,
            model=model,
            prompt_kind=self.prompt_kind,
            vocabulary=self.vocabulary,
            seed=self.seed,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
        )


def check(
    *,
    url: str,
    seed: int,
    model: str | None = None,
    api: Api = Api.COMPLETIONS,
    api_key_env: str | None = None,
    concurrency: int | None = None,
    rate: float | None = None,
    trace_file: str | None = None,
    time_scale: float | None = None,
    length_divisor: int | None = None,
    requests: int | None = None,
    duration_s: float | None = None,
    max_in_flight: int | None = None,
    prompt_tokens: str | None = None,
    output_tokens: str | None = None,
    shared_prefix_tokens: int | None = None,
    prompt_kind: PromptKind | None = None,
    vocabulary: str | None = None,
    ignore_eos: bool = True,
    temperature: float | None = None,
    limits: str | None = None,
    warmup: int = 0,
    timeout_s: float = 600.0,
) -> Settings:
    """Check the options, None being an option not given, and fill in the defaults.

    Raises ``SpecError`` naming the option at fault, or the two that contradict each other.
    """
    if rate is not None:
        _refuse("--rate", {"--concurrency": concurrency, "--trace": trace_file})
    mode = "closed"
    if rate is not None:
        mode = "poisson"
    elif trace_file is not None and concurrency is None:
        mode = "trace"
    if trace_file is not None:
        _refuse(
            "--trace",
            {
                "--prompt-tokens": prompt_tokens,
                "--output-tokens": output_tokens,
                "--shared-prefix-tokens": shared_prefix_tokens,
            },
        )
    else:
        _refuse(
            f"a run without --trace ({mode})",
            {
                "--time-scale": time_scale,
                "--length-divisor": length_divisor,
            },
        )
    if mode == "closed":
        _refuse(
            "a closed loop (--concurrency)",
            {"--max-in-flight": max_in_flight, "--time-scale": time_scale},
        )
        concurrency = 1 if concurrency is None else concurrency
    kind = prompt_kind or (PromptKind.TOKENS if api is Api.COMPLETIONS else PromptKind.WORDS)
    if kind is PromptKind.TOKENS and api is Api.CHAT:
        raise SpecError("--prompts tokens and --api chat contradict each other; use words")
    if kind is PromptKind.WORDS:
        _refuse("--prompts words", {"--vocabulary": vocabulary})
    prompt = output = None
    shared = shared_prefix_tokens or 0
    if trace_file is None:
        prompt = Length.parse(prompt_tokens or "128", "--prompt-tokens")
        output = Length.parse(output_tokens or "64", "--output-tokens")
        if shared >= prompt.low:
            raise SpecError(
                f"--shared-prefix-tokens {shared} must be below --prompt-tokens {prompt}, or "
                "requests would have nothing of their own"
            )
    bounded = requests is not None or duration_s is not None
    _at_least("--concurrency", concurrency, 1)
    _at_least("--requests", requests, 1)
    _at_least("--max-in-flight", max_in_flight, 1)
    _at_least("--length-divisor", length_divisor, 1)
    _at_least("--shared-prefix-tokens", shared, 0)
    _at_least("--warmup", warmup, 0)
    _at_least("--seed", seed, 0)
    _positive("--rate", rate)
    _positive("--duration", duration_s)
    _positive("--time-scale", time_scale)
    _positive("--timeout-s", timeout_s)
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise SpecError(f"--temperature must be 0 or more, not {temperature}")
    return Settings(
        url=url,
        model=model,
        api=api,
        api_key_env=api_key_env,
        mode=mode,
        concurrency=concurrency,
        rate_per_s=rate,
        trace=trace_file,
        time_scale=time_scale or 1.0,
        length_divisor=length_divisor or 1,
        requests=requests or (MOST_REQUESTS if bounded else DEFAULT_REQUESTS),
        duration_s=duration_s or (MOST_DURATION_S if bounded else DEFAULT_DURATION_S),
        max_in_flight=max_in_flight or concurrency or 1024,
        prompt_tokens=None if prompt is None else str(prompt),
        output_tokens=None if output is None else str(output),
        shared_prefix_tokens=shared,
        prompt_kind=kind,
        vocabulary=_vocabulary(vocabulary or "1000-20000"),
        seed=seed,
        ignore_eos=ignore_eos,
        temperature=temperature,
        limits=Limits() if limits is None else Limits.parse(limits),
        warmup=warmup,
        timeout_s=timeout_s,
    )


def plan(
    settings: Settings, rows: Iterator[trace.TraceRow] | None = None
) -> Iterator[PlannedRequest]:
    """Plan the measured requests; ``rows`` are the trace's, if there is one."""
    if rows is not None:
        return workload.from_trace(
            trace.scale(row, time_scale=settings.time_scale, length_divisor=settings.length_divisor)
            for row in rows
        )
    offsets = None
    if settings.rate_per_s is not None:
        offsets = arrivals.poisson_offsets(settings.rate_per_s, settings.seed)
    return _synthetic(settings, Domain.UNIQUE, offsets)


def plan_warmup(settings: Settings) -> list[PlannedRequest]:
    """Plan the warm-up requests: of the run's lengths, but of content that is not used again."""
    endless = _synthetic(settings, Domain.WARMUP, None)
    return [next(endless) for _ in range(settings.warmup)]


def _synthetic(
    settings: Settings, domain: Domain, offsets: Iterator[float] | None
) -> Iterator[PlannedRequest]:
    return workload.synthetic(
        Length.parse(settings.prompt_tokens or "128", "--prompt-tokens"),
        Length.parse(settings.output_tokens or "64", "--output-tokens"),
        shared_prefix_tokens=settings.shared_prefix_tokens,
        seed=settings.seed,
        offsets=offsets,
        domain=domain,
    )


def _refuse(what: str, options: dict[str, object]) -> None:
    for name, value in options.items():
        if value is not None:
            raise SpecError(f"{what} and {name} contradict each other; leave one out")


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise SpecError(f"{name} must be at least {least}, not {value}")


def _positive(name: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise SpecError(f"{name} must be above 0, not {value}")


def _vocabulary(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal() and int(low) + 2 <= int(high)):
        raise SpecError(f"--vocabulary must be like 1000-20000, two ids or more, not {text!r}")
    return int(low), int(high)
