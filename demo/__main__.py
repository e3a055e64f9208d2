"""`python -m demo [full|small|clean]`: registers, scores and compares models whose ancestry is known.

small   tiny models only, made on the spot: about a minute
full    a real model of 135 million parameters and full-size relatives of it as well: some minutes
clean   removes the demo's database, models and caches
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from api.cli.output import number
from demo.ancestry import Neighbour, Verdict, judge, origin
from demo.commands import DemoFailed, Modelkin, short
from demo.population import Member, build
from registry.errors import ModelkinError
from registry.queries.textsets import STARTER_FILE

ROOT = Path(__file__).parent.parent
TEXT_SET, N_TEXTS = "starter-32", 32
N_TUNING = 48
"""Pairs that the fine-tuned relative learns from: later rows than those that are scored."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", nargs="?", choices=("full", "small", "clean"), default="full")
    parser.add_argument("--home", type=Path, default=ROOT / ".demo", help="where everything is kept (.demo)")
    arguments = parser.parse_args()
    home = arguments.home.absolute()
    if arguments.size == "clean":
        from registry import localdb

        localdb.remove(home)
        shutil.rmtree(home, ignore_errors=True)
        return 0
    started = time.monotonic()
    modelkin = Modelkin(home)
    try:
        try:
            failures = _show(modelkin, real=arguments.size == "full")
        finally:
            modelkin.run("down")
    except DemoFailed as error:
        print(f"\nthe demo failed: {error}", file=sys.stderr)
        return 1
    except ModelkinError as error:
        print(f"\nthe demo failed: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        return 130
    _try_next(home, real=arguments.size == "full")
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"\n{time.monotonic() - started:.0f} s, peak memory of one process {peak / 2**20:.1f} GiB")
    return 1 if failures else 0


def _show(modelkin: Modelkin, *, real: bool) -> int:
    """The whole tour; returns how many models that had to agree with their ancestry did not."""
    home = modelkin.home
    home.mkdir(parents=True, exist_ok=True)
    print(f"$ export MODELKIN_HOME={short(home)}        # the demo keeps to itself")
    modelkin.run("init")
    pairs = _starter_pairs()
    modelkin.run("textset", "add", "starter")
    modelkin.run("textset", "add", _first_rows(home / f"{TEXT_SET}.jsonl"), "--name", TEXT_SET)

    members = _population(modelkin)
    _score_population(modelkin, members)
    if real:
        members += _real_models(modelkin, pairs[N_TEXTS : N_TEXTS + N_TUNING])

    _title("Who is near whom")
    for name in ["llama-int4", "mixtral-base", *(["smollm2", "smollm2-tuned"] if real else [])]:
        modelkin.run("nearest", f"local/{name}", "--text-set", TEXT_SET, "-k", "5")
    modelkin.run("nearest", "local/neox-plain", "--text-set", TEXT_SET, "--profile", "plain", "-k", "3")

    _title("What ancestry says, what the nearest neighbour says")
    verdicts = _verdicts([member for member in members if member.template])
    _print_verdicts(verdicts)
    return sum(verdict.failed for verdict in verdicts)


# --- texts ------------------------------------------------------------------------------------------------------


def _starter_pairs() -> list[tuple[str, str]]:
    with STARTER_FILE.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [(row["prompt"], row["response"]) for row in rows]


def _first_rows(target: Path) -> Path:
    with STARTER_FILE.open(encoding="utf-8") as lines:
        target.write_text("".join(line for _, line in zip(range(N_TEXTS), lines, strict=False)), encoding="utf-8")
    return target


# --- models -----------------------------------------------------------------------------------------------------


def _population(modelkin: Modelkin) -> list[Member]:
    """The tiny models, made by two processes where they are missing."""
    from demo.population.plan import RECIPES

    _title("Tiny models of known ancestry: seven families, trained for seconds")
    out = modelkin.home / "population"
    print(f"\n$ python -m demo.population {short(out)}", flush=True)
    slow = ("llama", "mamba")
    shares = [
        [recipe.name for recipe in RECIPES if (recipe.family in slow) is first] for first in (True, False)
    ]  # about as long as each other
    makers = [
        subprocess.Popen(
            [sys.executable, "-m", "demo.population", str(out), *share],
            cwd=ROOT,
            env=modelkin.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for share in shares
    ]
    for maker, said in [(maker, maker.communicate()[1]) for maker in makers]:
        if maker.returncode:
            raise DemoFailed(f"the population could not be built: {said[-2000:]}")
    members = build(out)
    for member in members:
        print(f"  {member.name:<20} {member.architecture:<9} {origin(member)}")
    return members


def _score_population(modelkin: Modelkin, members: Sequence[Member]) -> None:
    """`score` registers what it does not know yet, and loads torch once for all of them."""
    _title(f"Log-likelihoods of {N_TEXTS} responses under each of them")
    with_template = [member.path for member in members if member.template]
    folder = short(members[0].path.parent)
    families = "{gemma2,gpt2,llama,mamba,mixtral,qwen2}-*"
    modelkin.run(
        "score",
        *with_template,
        "--text-set",
        TEXT_SET,
        shown=f"score {folder}/{families} {folder}/neox-{{base,coder,noisy}} --text-set {TEXT_SET}",
    )
    bare = next(member for member in members if not member.template)
    print(f"\n{bare.name} has no chat template, so the profile `chat` cannot hold for it, and modelkin says so:")
    modelkin.run("score", bare.path, "--text-set", TEXT_SET, expect=6)
    print("\nIn the profile `plain`, another space, it can be compared with its family:")
    neox = [member.path for member in members if member.family == "neox"]
    modelkin.run(
        "score",
        *neox,
        "--text-set",
        TEXT_SET,
        "--profile",
        "plain",
        shown=f"score {folder}/neox-* --text-set {TEXT_SET} --profile plain",
    )


def _real_models(modelkin: Modelkin, tuning_pairs: Sequence[tuple[str, str]]) -> list[Member]:
    from demo import relatives
    from registry.identity import hash_files

    _title("A real model, and relatives of full size")
    gguf = relatives.find_gguf()
    modelkin.run("model", "add", gguf, "--as", relatives.NAME, shown=f"model add {gguf.name} --as {relatives.NAME}")
    modelkin.run("score", f"local/{relatives.NAME}", "--text-set", TEXT_SET, "--unconditional")
    print("\nDeriving relatives of it (the fine-tuned one takes half a minute)", flush=True)

    from tasks.gguf_files import converted

    # `score` has unpacked it already; this only finds the folder.
    folder = converted(gguf, hash_files(gguf.parent, [gguf.name])[gguf.name], modelkin.home)
    derived = relatives.derive(
        folder, modelkin.home / "relatives", tuning_pairs, progress=lambda name: print(f"  {name}", flush=True)
    )
    modelkin.run(
        "score",
        *(member.path for member in derived),
        "--text-set",
        TEXT_SET,
        "--unconditional",
        shown=f"score {short(derived[0].path.parent)}/* --text-set {TEXT_SET} --unconditional",
    )
    base = Member(relatives.NAME, gguf, "llama", relatives.NAME, None, "base", True)
    return [base, *derived]


# --- the check --------------------------------------------------------------------------------------------------


def _verdicts(members: Sequence[Member]) -> list[Verdict]:
    """Asks what `modelkin nearest` asks, in this process: forty commands would take half a minute to start."""
    from registry import database
    from registry.queries import models
    from registry.queries.nearest import nearest

    by_name = {member.name: member for member in members}
    found = []
    with database.session() as session:
        for member in members:
            asked = models.find(session, f"local/{member.name}")
            answer = nearest(session, asked, text_set=TEXT_SET, profile="chat", k=2 * len(members))
            neighbours = [
                Neighbour(item.b.handle.removeprefix("local/"), item.value)
                for item in answer.items
                if item.value is not None
            ]
            # An earlier run with other code leaves older revisions under the same handles.
            neighbours = [one for one in neighbours if one.name in by_name and one.name != member.name]
            if not neighbours:
                raise DemoFailed(f"{member.name} has no neighbour on {TEXT_SET}")
            found.append(judge(member, neighbours, by_name))
    return found


def _print_verdicts(verdicts: Sequence[Verdict]) -> None:
    print(f"\n{'model':<20} {'ancestry says':<38} {'nearest says':<20} {'KL, nats':>9}  in its family")
    for verdict in verdicts:
        in_family = "yes" if verdict.agrees else "NO, AND IT MUST BE" if verdict.failed else "no"
        print(
            f"{verdict.member.name:<20} {origin(verdict.member):<38} {verdict.nearest.name:<20} "
            f"{number(verdict.nearest.kl_nats):>9}  {in_family}"
        )
    agreeing = sum(verdict.agrees for verdict in verdicts)
    print("\nIn its family: the nearest neighbour has an ancestor in common with the model; it need not be its parent.")
    print(f"{agreeing} of {len(verdicts)} have a relative as their nearest neighbour.")
    for verdict in verdicts:
        if verdict.why:
            print(f"  {verdict.member.name} is nearest to {verdict.nearest.name}; {verdict.why}.")
    print("Likelihoods show behaviour: alike need not mean related, and related need not mean alike.")


def _title(words: str) -> None:
    print(f"\n\n=== {words} ===", flush=True)


def _try_next(home: Path, *, real: bool) -> None:
    print("\n\n=== What to try next ===\n")
    print(f"  export MODELKIN_HOME={short(home)}   # the demo's registry; without it you get your own")
    print("  .venv/bin/modelkin model list")
    print(
        f"  .venv/bin/modelkin nearest local/{'smollm2' if real else 'llama-base'} --text-set {TEXT_SET} --format json"
    )
    print("  .venv/bin/modelkin score HuggingFaceTB/SmolLM2-135M --profile plain    # any model of the Hub")
    print("  .venv/bin/modelkin down                # stops the database when you are done")


if __name__ == "__main__":
    sys.exit(main())
