"""One server on the real Gemma 270M for the whole session; a test that breaks things starts its own."""

import openai
import pytest
from tests.e2e.server import TEMPLATE, serving


@pytest.fixture(scope="session")
def gemma_spec(gemma_path, tmp_path_factory):
    """Gemma with a plain chat template, since the base model has none."""
    template = tmp_path_factory.mktemp("template") / "plain.jinja"
    template.write_text(TEMPLATE)

    def make(**engine):
        engine = {"kv_cache_tokens": 8192, "dtype": "float32"} | engine
        return {
            "version": 1,
            "models": [
                {
                    "name": "gemma",
                    "source": str(gemma_path),
                    "chat_template": str(template),
                    "engine": engine,
                }
            ],
        }

    return make


@pytest.fixture(scope="session")
def server(gemma_spec, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("home"), gemma_spec()) as served:
        yield served


@pytest.fixture(scope="session")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
