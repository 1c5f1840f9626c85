import json

import yaml
from typer.testing import CliRunner

from tokenpath.cli.spec import app
from tokenpath.config.reader import default_spec
from tokenpath.config.spec import Spec

runner = CliRunner()


def test_check(tokenpath, tmp_path):
    good = tmp_path / "good.yaml"
    good.write_text("models: [{source: a}, {source: b}]")
    result = tokenpath("spec", "check", str(good))
    assert (result.returncode, result.stdout) == (0, f"{good} is a valid spec of 2 models.\n")
    bad = tmp_path / "bad.yaml"
    bad.write_text("gateway: {prot: 1}\nmodels:\n- sauce: x\n")
    result = tokenpath("spec", "check", str(bad))
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"{bad}:1:11: gateway.prot: unknown key; did you mean port?",
        f"{bad}:3:3: models[0].source: this key is required",
        f"{bad}:3:3: models[0].sauce: unknown key; did you mean source?",
    ]
    result = tokenpath("spec", "check", str(tmp_path / "none.yaml"))
    assert result.returncode == 2
    assert result.stderr == f"there is no spec file {tmp_path / 'none.yaml'}\n"


def test_schema_is_that_of_the_spec():
    assert json.loads(runner.invoke(app, ["schema"]).stdout) == Spec.model_json_schema()


def test_show_has_every_default():
    shown = yaml.safe_load(runner.invoke(app, ["show"]).stdout)
    assert Spec.model_validate(shown) == default_spec()
    assert shown["gateway"]["limits"]["request_s"] == 600.0


def test_docs():
    assert runner.invoke(app, ["docs"]).stdout.startswith("# The spec\n")
