"""The commands that pages show are run: those of a page in their order, in one folder, in small sizes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from tools.site_pages import blocks
from typer.testing import CliRunner

from shardwright.cli.main import app

ROOT = Path(__file__).parents[2]
PATTERNS = "*.md", "docs/**/*.md", "benchmarks/*/README.md", "examples/**/*.md", "examples/tutorials/*.ipynb"
PAGES = sorted((path for pattern in PATTERNS for path in ROOT.glob(pattern)), key=lambda path: path.as_posix())

NOT_RUN = {
    r"make [a-z]": "a target of the Makefile: most are whole tiers of tests",
    r"pip install|apt-get install": "installs",
    r"python examples/": "an example or a tutorial, which has a test of its own",
    r"(torchrun|srun|kubectl|ray) |export (MASTER_ADDR|TORCH)": "needs a cluster",
    r"SHARDWRIGHT_DEVICE=cuda": "needs a card",
    r"shardwright (doctor|calibrate)": "measures this machine: its own test runs it",
    r"shardwright verify --layout .compile": "compiles: make contract compiles under many layouts",
    r"shardwright --install-completion": "writes into the start file of the user's shell",
    r"shardwright .*(tuned_llama|mine):build": "needs peft: tests/weights/test_transformers.py runs these commands",
    r"shardwright .*my_llm:build|shardwright checkpoint export runs/tuned exported --format transformers": (
        "needs transformers: tests/site/test_transformers_page.py runs these commands"
    ),
    r"shardwright .*resnet:build": "a file of examples: tests/cli/test_command.py plans it",
    r"shardwright plan --model gpt \.\.\.": "a line that an example prints, without the sizes that it takes",
}
"""Lines of pages that are only parsed, by a pattern of their beginning, each with the reason."""

SIZES = {"num_layers": 2, "width": 8, "num_heads": 2}
"""The sizes of the built-in model, in place of those that a page gives."""


COPIES = ["--fix", "dp2", "--without", "tp", "--without", "pp"]
"""What a search of the built-in model is limited to."""


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def blocks_of(path):
    """The lines of each block of the shell that a page shows, without comments and output."""
    for language, text in blocks(path):
        is_shell = language in {"sh", "bash"}
        lines = text.replace("\\\n", " ").split("\n") if is_shell or language == "text" else []
        shown = [line.strip() if is_shell else line[2:] for line in lines if is_shell or line.startswith("$ ")]
        found = [line for each in shown if (line := re.sub(r"(^|\s)#.*", "", each).strip())]
        if found:
            yield found


def small(words):
    """A command in small sizes: few steps, ranks that are threads, a tiny built-in model, a short search."""
    verb, rest, found = words[1], words[2:], []
    while rest:
        word = rest.pop(0)
        if word in ("--set", "--seq", "--ranks"):
            rest.pop(0)
        elif rest and rest[0].startswith("auto:"):
            rest[0] = "auto:32-64"
            found.append(word)
        elif word in ("--steps", "--stop-at"):
            found += [word, str(-(-int(rest.pop(0)) // 50))]  # fewer, in proportion: one command resumes another's run
        else:
            found.append(word)
    reads_model = verb in ("train", "verify", "show", "plan")
    has_own = any(word in ("--config", "--resume", "--replay", "convnet") or ":build" in word for word in found)
    if reads_model and not has_own:
        is_deep = verb == "show" and any(re.search("pp[48]", word) for word in found)
        sizes = SIZES | {"num_layers": 8} if is_deep else SIZES
        found += [part for key, value in sizes.items() for part in ("--set", f"{key}={value}")] + ["--seq", "8"]
    if verb in ("train", "verify", "show"):
        found += ["--ranks", "threads"]
    if verb == "train" and not {"--steps", "--resume"} & {*found}:
        found += ["--steps", "2"]
    if verb == "plan" and not {"--layout", "--replay"} & {*found}:
        found += ["--most-priced", "1"]
        if not {"--fix", "--explain", "--anchor"} & {*found}:  # whose layouts are of 8 ranks
            found = [re.sub(r":\d+x\d+$", ":1x2", word) for word in found]
            found += [] if has_own or "here.toml" in found else COPIES
    if verb in ("sample", "evaluate") and "--num" not in found:
        found += ["--num", "8"]
    if verb == "launch" and "--dry-run" not in found:
        found.insert(0, "--dry-run")
    return ["shardwright", verb, *found]


def invoked(*words):
    """What a command prints; it must succeed."""
    found = CliRunner().invoke(app, list(words[1:]), catch_exceptions=False)
    assert found.exit_code == 0, f"{shlex.join(words)}\n{found.stderr}"
    return found.stdout


def reason_of(line):
    """Why a line is not run, or None."""
    return next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, line)), None)


def run_line(line, before=""):
    """Runs a line in the current folder; returns the number of its commands. ``before`` is what "..." stands for."""
    line, _, to = line.partition(" > ")
    count = 0
    for part in line.split(" && "):
        words = shlex.split(part)
        if "..." in words:
            words[2:] = [*shlex.split(before)[2:], *(word for word in words[2:] if word != "...")]
        if words[0] == "cd":
            os.chdir(words[1])
            continue
        assert words[0] == "shardwright", f"neither run nor listed with a reason: {line}"
        printed, count = invoked(*small(words)), count + 1
        if to:
            Path(to.strip()).write_text(printed)
    return count


# ---- what a line takes for granted


def trained(out, *words):
    invoked(*small(["shardwright", "train", "--out", out, *words]))


def cifar10():
    folder = Path("path/to/cifar-10-batches-bin")
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        (folder / name).write_bytes(bytes(3073) * 8)


def pretrained():
    trained("earlier")
    invoked("shardwright", "checkpoint", "export", "earlier", "pretrained")
    Path("pretrained/config.json").write_text('{"model_type": "gpt2"}')


def of_this_machine():
    Path("here.toml").write_text('profile = "a100-80gb"\nnodes = "1x8"\n')


GIVEN = {
    r"docs/which_layout.md: .*my_model:build": lambda: (
        None if Path("my_model.py").exists() else invoked("shardwright", "init", ".")
    ),
    r".*cifar-10-batches-bin": cifar10,
    r"docs/guide.md: .*--weights pretrained/": pretrained,
    r"docs/guide.md: .*export my_loop": lambda: trained("my_loop", "--ema", "0.9"),
    r"docs/guide.md: shardwright plan --config run.toml": lambda: invoked("shardwright", "init", "."),
    r"docs/guide.md: .*--cluster here.toml": of_this_machine,
    r"docs/guide.md: .*--cluster other.toml": lambda: shutil.copy("here.toml", "other.toml"),
    r"docs/guide.md: .*--compare runs/first": lambda: [trained(f"runs/{name}") for name in ("second", "third")],
}
"""What is made before a line is run, by a pattern of its page and of the line: files that a page says a reader has."""


def run_page(path, folder):
    """Runs what a page shows in a folder, in which each block begins; returns the number of commands."""
    count = 0
    for lines in blocks_of(path):
        os.chdir(folder)
        for line in lines:
            for pattern, make in GIVEN.items():
                if re.match(pattern, f"{name_of(path)}: {line}"):
                    make()
            count += 0 if reason_of(line) else run_line(line, lines[0])
    return count


LINES = {path: [line for lines in blocks_of(path) for line in lines] for path in PAGES}
WITH_COMMANDS = [path for path, lines in LINES.items() if any(reason_of(line) is None for line in lines)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of whose modules the current one can be imported, as the command sees to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    return tmp_path


@pytest.mark.sampled(0)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", WITH_COMMANDS, ids=[path.stem for path in WITH_COMMANDS])
def test_the_commands_of_a_page_succeed_one_after_another(path, folder):
    assert run_page(path, folder)


def test_each_line_that_is_not_run_has_a_reason_that_is_needed():
    every = [line for lines in LINES.values() for line in lines]
    for pattern in NOT_RUN:
        assert any(re.match(pattern, line) for line in every), f"no page shows {pattern}"
    for pattern in GIVEN:
        assert any(re.match(pattern, f"{name_of(path)}: {line}") for path in LINES for line in LINES[path]), pattern
    run = [line for line in every if reason_of(line) is None]
    assert len(run) > 50
    assert not [line for line in run if not line.startswith("shardwright ")]


def test_a_line_that_fails_or_is_not_known_is_found(folder):
    assert run_line("shardwright init a && cd a") == 1
    for line, wrong in (("shardwright init .", "has run.toml"), ("pip uninstall torch", "neither run nor")):
        with pytest.raises(AssertionError, match=wrong):
            run_line(line)
