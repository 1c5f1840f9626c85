"""``tokenpath bench engine`` on a small model: the real engine, real counts, the report's keys."""

import json

import pytest

WORKS = "prefill_40,decode_1_16,decode_3_20,step_overhead"


@pytest.fixture(scope="module")
def report(tiny_gguf, tmp_path_factory):
    """One run of the command, with everything it shows and writes."""
    import os
    import subprocess
    import sys

    folder = tmp_path_factory.mktemp("engine")
    path = folder / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tokenpath.cli.main", "bench", "engine"),
            *("--model", str(tiny_gguf), "--dtype", "int8", "--threads", "1", "--rounds", "2"),
            *("--only", WORKS, "--json", str(path)),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "TOKENPATH_MODELS": str(folder), "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    return done, json.loads(path.read_text())


def test_works_are_keys_at_the_top_level(report):
    _, found = report
    for name in ("prefill_40", "decode_1_16", "decode_3_20", "decode_8_64"):
        spread = found["spread"][name]
        assert len(spread["rounds"]) == 2
        assert found[name] == pytest.approx(sum(spread["rounds"]) / 2)
        assert 0 < spread["min"] <= found[name] <= spread["max"]
        assert spread["read_share"] > 0
        assert spread["product_share"] > 0
    assert "prefill_512" not in found
    assert 0 < found["step_overhead"] < 1
    assert found["step_overhead"] == found["spread"]["decode_8_64"]["overhead"]
    assert found["load_s"] > 0
    assert found["peak_rss_bytes"] >= found["rss_bytes"] > 50e6


def test_contexts_are_those_of_the_names(report):
    _, found = report
    # 32 steps are measured, so the mean context is 16 tokens or so beyond the first.
    for name, context in (("decode_1_16", 16), ("decode_3_20", 20), ("decode_8_64", 64)):
        assert found["spread"][name]["context_tokens"] == pytest.approx(context + 16.5, abs=1.5)


def test_the_report_says_what_was_measured_and_how(report):
    done, found = report
    measured = found["measured"]
    assert measured["dtype"] == "int8"
    assert measured["threads"] == 1
    assert measured["kernels"] in {"amx", "avx512", "avx2", "portable", "torch"}
    assert found["machine"]["cpu_model"]
    assert set(found["versions"]) >= {"python", "torch", "numpy"}
    assert found["roofline"]["operand_bytes"] > found["roofline"]["cache_bytes"]
    assert found["roofline"]["product_dtype"] == "int8"
    for figure in found["spread"].values():
        assert figure["read_limit_bytes_per_s"] > figure["read_bytes_per_s"] > 0
        assert 0 < figure["read_share"] < 1
        assert 0 < figure["product_share"] < 1
    assert "round 2 of 2: decode_3_20" in done.stderr
    assert "decode_3_20" in done.stdout
    assert "of the read limit" in done.stdout


def test_json_alone_on_stdout(tokenpath, tiny_gguf):
    done = tokenpath(
        *("bench", "engine", "--model", str(tiny_gguf), "--dtype", "float32", "--threads", "1"),
        *("--only", "prefill_8", "--rounds", "1", "--no-roofline", "--json", "-"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["roofline"] is None
    assert found["spread"]["prefill_8"]["read_share"] is None
    assert "step_overhead" not in found


def test_two_ways_of_the_same_are_compared(tokenpath, tiny_gguf):
    done = tokenpath(
        *("bench", "engine", "--model", str(tiny_gguf), "--dtype", "float32", "--threads", "1"),
        *(
            "--only",
            "shared_256,tiers_64,stall_128,tenants_8",
            "--rounds",
            "1",
            "--no-roofline",
            "--json",
            "-",
        ),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    shared, tiers = found["tasks"]["shared_256"], found["tasks"]["tiers_64"]
    assert shared["cached_tokens"] == 256
    assert found["shared_256"] == shared["first_s"] / shared["later_s"] == shared["ratio"]
    assert tiers["host_restored_tokens"] >= 32
    assert found["tiers_64_host"] == tiers["recomputed_s"] / tiers["host_s"]
    assert "shared_256" in done.stderr
    assert "for the next ones" in done.stderr
    stall, tenants = found["tasks"]["stall_128"], found["tasks"]["tenants_8"]
    assert found["stall_128_worst_gap_s"] == stall["worst_s"] >= stall["p99_s"] > 0
    assert (stall["streams"], stall["prompt_tokens"]) == (8, 128)
    assert found["tenants_8_light_ttft_p99_s"] == tenants["light"]["ttft_p99_s"]
    assert tenants["heavy"]["requests"] == 10 * tenants["light"]["requests"]
    assert tenants["light"]["ttft_p99_s"] < tenants["light_unfair"]["ttft_p99_s"]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--only", "prefill_8,warp"], 2, "--only: 'warp' is no work"),
        (["--only", "prefill_512"], 2, "needs sequences of 513 tokens, but tiny allows 512"),
        (
            ["--only", "decode_4_64", "--kv-cache-bytes", "65536"],
            2,
            "decode_4_64 needs a KV cache of 448 tokens, but there are 128",
        ),
        (["--json", "/nowhere/report.json"], 2, "cannot write the report to"),
        (["--model", "no-such-model"], 3, "no-such-model"),
        (["--model", "/nowhere/model.gguf"], 3, "there is no file or folder"),
        (["--rounds", "0"], 2, "rounds"),
        (["--dtype", "int2"], 2, "int2"),
    ],
)
def test_bad_input_is_one_sentence_before_the_model_is_loaded(
    tokenpath, tiny_gguf, options, code, said
):
    if "--model" not in options:
        options = ["--model", str(tiny_gguf), *options]
    done = tokenpath("bench", "engine", "--only", "prefill_8", *options)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "loading" not in done.stderr
