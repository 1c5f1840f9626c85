"""Names of works, what they need, and what they cost."""

import pytest

from tokenpath.bench.engine import cost, works
from tokenpath.bench.engine.works import Decode, Prefill, Sharing, Tiering
from tokenpath.models.architecture import ModelConfig
from tokenpath.protocol.errors import SpecError


def test_the_default_works_are_those_that_peers_are_compared_on():
    assert [work.name for work in works.chosen(None)] == [
        "prefill_512",
        "prefill_2048",
        *(f"decode_{n}_{context}" for context in (64, 1024) for n in (1, 4, 8, 16, 32)),
    ]


def test_a_list_keeps_its_order_and_counts_each_work_once():
    chosen = works.chosen("decode_2_32, prefill_7,step_overhead,decode_8_64,decode_2_32")
    assert chosen == [Decode(2, 32), Prefill(7), Decode(8, 64)]


def test_structured_decoding_comes_with_what_it_is_compared_to():
    free, structured = Decode(8, 64), Decode(8, 64, structured=True)
    assert works.chosen("structured_8_64") == [free, structured]
    assert works.chosen("prefill_7,decode_8_64,structured_8_64") == [Prefill(7), free, structured]
    assert structured.name == "structured_8_64"
    assert structured.sequence_tokens == free.sequence_tokens


def test_tiers_take_turns_in_a_pool_of_two():
    chosen = works.chosen("tiers_64,prefill_7,shared_64,tiers_64")
    assert chosen == [Tiering(64), Prefill(7), Sharing(64)]
    assert [work.name for work in chosen] == ["tiers_64", "prefill_7", "shared_64"]
    with pytest.raises(SpecError, match="tiers_64 needs a KV cache of 160 tokens"):
        works.check_fit(
            [Tiering(64)], model="m", model_tokens=100, pool_tokens=159, block_tokens=16
        )


def test_works_with_and_without_speculation():
    made = works.chosen("edit_1,json_8,prose_32")
    assert [(work.name, work.sequences) for work in made] == [
        ("edit_1", 1),
        ("json_8", 8),
        ("prose_32", 32),
    ]
    assert works.speculate(made)
    assert not works.speculate(works.chosen("prefill_7,tiers_64"))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "edit",
        "prose_0",
        "tiers",
        "tiers_0",
        "structured_8",
        "prefill",
        "prefill_0",
        "decode_8",
        "decode_0_8",
        "decode_1_-4",
        "speed",
    ],
)
def test_what_is_no_work_is_named(name):
    with pytest.raises(SpecError, match="is no work; works are prefill_TOKENS") as raised:
        works.chosen(f"prefill_512,{name}")
    assert repr(name) in raised.value.message


@pytest.mark.parametrize(
    ("work", "model_tokens", "pool_tokens", "said"),
    [
        (Prefill(100), 100, 1000, "prefill_100 needs sequences of 101 tokens, but m allows 100"),
        (Decode(4, 10), 46, 1000, "decode_4_10 needs sequences of 47 tokens, but m allows 46"),
        (Decode(4, 10), 47, 191, "decode_4_10 needs a KV cache of 192 tokens, but there are 191"),
    ],
)
def test_a_work_that_does_not_fit_is_refused(work, model_tokens, pool_tokens, said):
    with pytest.raises(SpecError) as raised:
        works.check_fit(
            [Prefill(1), work],
            model="m",
            model_tokens=model_tokens,
            pool_tokens=pool_tokens,
            block_tokens=16,
        )
    assert raised.value.message.startswith(said)


def test_sequences_computed_first_get_shorter_prompts():
    prompts = Decode(32, 1024).prompts(512)
    assert prompts[-1] == 1024
    assert prompts[0] == 1024 - 62  # 62 steps of 512 tokens compute the 31 that come after
    assert prompts == sorted(prompts)
    assert Decode(1, 64).prompts(512) == [64]


def config(**changes):
    fields = {
        "family": "gemma3",
        "architecture": "gemma3",
        "vocab_size": 100,
        "hidden_size": 8,
        "intermediate_size": 16,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 4,
        "max_context_tokens": 64,
        "rms_eps": 1e-6,
        "rope_theta": 1e4,
        "layer_kinds": ("sliding", "full", "sliding"),
        "sliding_window": 10,
        "tie_embeddings": True,
    }
    return ModelConfig(**{**fields, **changes})


def test_the_cost_of_a_step():
    found = cost.model_cost(config(), weight_bytes=5000, table_element_bytes=1, kv_dtype="bfloat16")
    # q and out: 8 x 16 each; k and v: 8 x 8 each; gate, up and down: 8 x 16 each.
    assert found.token_operations == 2 * 3 * (2 * 8 * 16 + 2 * 8 * 8 + 3 * 8 * 16)
    assert found.head_operations == 2 * 100 * 8
    # A token's keys and values take 2 * 2 * 4 * 2 bytes a layer; a window hides what is before it.
    assert found.kv_bytes(6) == 3 * 6 * 32
    assert found.kv_bytes(40) == 40 * 32 + 2 * 10 * 32
    assert found.step_bytes(5, 6) == 5000 + 5 * found.kv_bytes(6)


def test_an_embedding_table_of_its_own_is_not_read_by_a_step():
    untied = config(tie_embeddings=False)
    found = cost.model_cost(untied, weight_bytes=5000, table_element_bytes=2, kv_dtype="bfloat16")
    assert found.weight_bytes == 5000 - 2 * 100 * 8
