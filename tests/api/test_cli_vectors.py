"""`modelkin vectors` as it is typed."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest

# Only the nouns that are needed here, each under its name.
RUN = """
import sys, typer
import api.cli
from api.cli import nearest, vectors

def app():
    whole = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    whole.add_typer(vectors.app, name="vectors")
    whole.command("nearest")(nearest.nearest)
    return whole

api.cli._app = app
api.cli.main()
"""


@pytest.fixture
def modelkin(modelkin_env, another_database, tmp_path):
    def run(*words, code=0, database=None):
        environment = modelkin_env | ({"DATABASE_URL": database} if database else {})
        done = subprocess.run(
            [sys.executable, "-c", RUN, *map(str, words)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


@pytest.fixture
def matrix(tmp_path):
    path = tmp_path / "lab.npz"
    values = np.random.default_rng(0).normal(-590, 100, (4, 20)).astype(np.float32)
    values[0, 3] = np.nan
    np.savez(path, models=[f"org/m{n}" for n in range(4)], values=values, texts=[f"t{n}" for n in range(20)])
    return path


@pytest.mark.parametrize("ending", ["npz", "parquet"])
def test_in_and_out_and_in_elsewhere(modelkin, another_database, matrix, tmp_path, ending):
    dry = modelkin("vectors", "import", matrix, "--dry-run")
    assert "4 of 4 vectors would be added" in dry.stderr
    added = modelkin("vectors", "import", matrix, "--format", "json")
    (item,) = json.loads(added.stdout)["items"]
    assert (item["added"], item["text_set"], item["profile"], item["not_scored"]) == (4, "lab", "imported:lab", 1)
    assert "4 of 4 vectors added" in added.stderr
    assert "entries without a value: 1 missing, 0 infinite" in added.stderr
    assert "4 models are known by name only" in added.stderr
    assert "next: modelkin nearest org/m0 --text-set lab --profile imported:lab" in added.stderr
    again = modelkin("vectors", "import", matrix)
    assert "nothing new, all 4 vectors are stored already" in again.stderr
    near = modelkin("nearest", "org/m0", "--text-set", "lab", "--profile", "imported:lab", "--format", "quiet")
    assert sorted(near.stdout.split()) == ["org/m1", "org/m2", "org/m3"]
    table = modelkin("nearest", "org/m0", "--text-set", "lab", "--bootstrap", "20")
    assert "an interval from 20 resamples is rough" in table.stderr
    few = modelkin("nearest", "org/m0", "--text-set", "lab", "--bootstrap", "100")
    assert "rough" not in few.stderr

    out = tmp_path / f"out.{ending}"
    done = modelkin("vectors", "export", "--text-set", "lab", "--out", out, "--format", "json")
    record = json.loads(done.stdout)
    assert (record["models"], record["texts"], record["unit"]) == (4, 20, "nats")
    assert f"next: modelkin vectors import {out}" in done.stderr
    taken = modelkin("vectors", "export", "--text-set", "lab", "--out", out, code=4)
    assert "exists already" in taken.stderr
    told = modelkin("vectors", "export", "--text-set", "lab", "--out", out, "--force")
    assert "{" not in told.stdout, "the key of the space is for programs"
    elsewhere = modelkin("vectors", "import", out, "--format", "json", database=another_database)
    (other,) = json.loads(elsewhere.stdout)["items"]
    assert (other["space"], other["added"]) == (item["space"], 4)


def test_unconditional_goes_both_ways(modelkin, matrix, tmp_path):
    modelkin("vectors", "import", matrix, "--unconditional", "--source", "else")
    missing = modelkin("vectors", "export", "--text-set", "lab", "--out", "v.npz", code=3)
    assert "there are transform empty in profile imported:else" in missing.stderr
    modelkin("vectors", "export", "--text-set", "lab", "--unconditional", "--out", "v.npz")
    with np.load(tmp_path / "v.npz") as arrays:
        assert json.loads(str(arrays["transform"]))["name"] == "empty"


def test_modelmaps_folder(modelkin, tmp_path):
    folder = tmp_path / "pile"
    folder.mkdir()
    for name in "ab":
        lines = [json.dumps({"index": n, "num-tokens": 5, "log-likelihood": -n - 1.5}) for n in range(6)]
        (folder / f"org--{name}_float16.jsonl").write_text("\n".join(lines) + "\n")
    unnamed = modelkin("vectors", "import", folder, code=2)
    assert "hint: name their list: --text-set NAME" in unnamed.stderr
    done = modelkin("vectors", "import", folder, "--text-set", "pile-10k", "--format", "csv")
    assert done.stdout.splitlines()[1].endswith("pile-10k,base,imported:modelmap,2,2,0,2")


def test_one_bad_file_of_several_stores_none(modelkin, matrix, tmp_path):
    broken = tmp_path / "broken.npz"
    broken.write_bytes(matrix.read_bytes()[:-100])
    failed = modelkin("vectors", "import", matrix, broken, code=2)
    assert "is damaged or cut off" in failed.stderr
    np.savez(broken, models=["a"], values=[[-1.0, -2.0]], texts=["x", "y"])
    clash = modelkin("vectors", "import", matrix, broken, "--text-set", "one", code=4)
    assert "'one' is taken by another text set" in clash.stderr
    assert "4 of 4 vectors added" in modelkin("vectors", "import", matrix).stderr


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_malicious_pickle_writes_no_file(modelkin, tmp_path):
    mark, path = tmp_path / "was-run", tmp_path / "log-likelihood_1018.pkl"
    path.write_bytes(pickle.dumps({"org/m": np.array([-1.0]), "org/n": Touch(str(mark))}))
    refused = modelkin("vectors", "import", path, "--text-set", "pile", code=2)
    assert "asks for io.open; only numbers, strings and NumPy arrays are loaded" in refused.stderr
    assert "nothing in it was run" in refused.stderr
    assert not mark.exists()
    path.write_bytes(pickle.dumps({"org/m": np.array([-1.0]), "org/n": np.array([-2.0])}))
    assert "2 of 2 vectors added" in modelkin("vectors", "import", path, "--text-set", "pile").stderr


def test_other_peoples_names_for_things(modelkin, tmp_path):
    np.savez(tmp_path / "m.npz", bpb=[[0.5, 0.7]], names=["a"], docs=["x", "y"])
    asked = modelkin("vectors", "import", "m.npz", "--values-key", "bpb", code=2)
    assert "no array 'models'; there are bpb float64[1, 2], names <U1[1], docs <U1[2]" in asked.stderr
    assert "hint: name the right one with --models-key" in asked.stderr
    keys = ("--values-key", "bpb", "--models-key", "names", "--texts-key", "docs")
    sign = modelkin("vectors", "import", "m.npz", *keys, code=2)
    assert "log-likelihoods in nats are never above 0" in sign.stderr
    done = modelkin("vectors", "import", "m.npz", *keys, "--unit", "bits_per_byte", "--format", "json")
    assert json.loads(done.stdout)["items"][0]["unit"] == "bits_per_byte"


@pytest.mark.parametrize(
    ("profile", "transform", "words"),
    [
        ("chat", "base", "score org/another-model --text-set mine"),
        ("plain", "cot", "score org/another-model --text-set mine --transforms cot --profile plain"),
        ("imported:lab", "base", "vectors import FILE"),
    ],
)
def test_without_neighbours_the_next_command_leads_into_the_same_space(profile, transform, words):
    from api.cli.nearest import _another
    from registry.queries.nearest import Answer

    answer = Answer([], None, "mine", transform, profile, "a space", 0)
    assert " ".join(_another(answer)) == f"modelkin {words}"


def test_absent_things(modelkin):
    assert "does not exist" in modelkin("vectors", "import", "none.npz", code=3).stderr
    assert "no text set is named" in modelkin("vectors", "export", "--text-set", "x", "--out", "v.npz", code=3).stderr
