"""Benchmarks stand by themselves, and none is forgotten. That each one runs, ``make bench-smallest`` proves."""

import ast
import json
import os
import re
import runpy
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import shared_memory
from benchmarks.__main__ import run_smallest

ROOT = Path(__file__).resolve().parents[1]
WRITES_ROWS = "import pathlib, sys; pathlib.Path(sys.argv[sys.argv.index('--rows') + 1]).write_text('{}')"
FILES = sorted((ROOT / "benchmarks").rglob("*.py"))


def imported_by(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def benchmarks(*words):
    command = [sys.executable, "-m", "benchmarks", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "benchmarks")))
def test_no_benchmark_imports_a_test(path):
    rooms = {name.partition(".")[0] for name in imported_by(path)}
    assert not rooms & {"tests", "tests_dist", *(each.stem for each in (ROOT / "tests").iterdir())}


@pytest.mark.sampled(0)
def test_every_benchmark_is_listed():
    folders = {path.parent.name for path in FILES if path.name == "run.py"}
    assert len(folders) > 10
    assert folders <= set(benchmarks("--list").stdout.splitlines())


def test_a_smallest_run_names_each_benchmark_that_fails_with_its_traceback(tmp_path, capsys):
    texts = {"raising": "raise ValueError('too small')", "silent": "", "good": WRITES_ROWS}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert run_smallest({name: tmp_path / f"{name}.py" for name in texts}) == ["raising", "silent"]
    said = capsys.readouterr().out
    assert re.search(r"== raising failed\nTraceback.*raising\.py.*ValueError: too small", said, re.DOTALL)
    assert "silent wrote no rows" in said
    assert "== good ran in" in said


def test_a_smallest_run_ends_with_the_peers_that_were_left_out_and_why(tmp_path, capsys):
    result = json.dumps({"left_out": {"tp2 megatron": "No module named 'megatron'"}})
    whole = json.dumps({"left_out": {"alone": "no namespaces"}})
    texts = {"peers": WRITES_ROWS.replace("'{}'", repr(result)), "alone": WRITES_ROWS.replace("'{}'", repr(whole))}
    for name, text in {**texts, "good": WRITES_ROWS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert not run_smallest({name: tmp_path / f"{name}.py" for name in (*texts, "good")})
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "== left out: 2",
        "peers, tp2 megatron is left out: No module named 'megatron'",
        "alone is left out: no namespaces",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is Linux's")
def test_shared_memory_is_left_when_no_other_process_has_it_mapped():
    before, file = shared_memory.names(), shared_memory.FOLDER / f"psm_{secrets.token_hex(8)}"
    code = (
        "import mmap, sys; it = open(sys.argv[1], 'w+b'); it.write(b'1'); it.flush(); kept = mmap.mmap(it.fileno(), 1)"
    )
    try:
        holding = [sys.executable, "-c", f"{code}; print(flush=True); input()", str(file)]
        with subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            holder.stdout.readline()
            assert file.name in shared_memory.names()
            assert file.name not in shared_memory.left_since(before)
            holder.kill()
        assert file.name in shared_memory.left_since(before, most_s=0)
    finally:
        file.unlink()


@pytest.mark.sampled(0)
def test_two_trees_are_compared_by_the_ratios_of_their_own_benchmarks(tmp_path):
    for tree, seconds in (("old", 0.4), ("new", 0.1)):
        folder = tmp_path / tree / "benchmarks" / "gpt_step"
        folder.mkdir(parents=True)
        rounds = [{"tp2": seconds}, {"tp2": 3 * seconds}, {"tp2": seconds}]
        result = json.dumps({"rounds": rounds, "cpu_rounds": [{"tp2": 2 * seconds + 0.2}]})
        (folder / "run.py").write_text(WRITES_ROWS.replace("'{}'", repr(result)))
    given = ["--old", tmp_path / "old", "--new", tmp_path / "new", "--only", "gpt_step", "--out", tmp_path / "out.json"]
    done = benchmarks("compare", *map(str, given), "--rounds", "2")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "out.json").read_text())["table"]
    assert (row["name"], row["old_s_median"], row["ratio_median"], row["rounds"]) == ("tp2", 0.4, 0.25, 2)
    assert (row["old_cpu_s_median"], row["cpu_ratio_median"]) == (1.0, 0.4)
    assert "new / old 0.250 (0.250 to 0.250)   CPU seconds 0.400" in done.stdout


@pytest.mark.sampled(0)
def test_a_benchmark_that_does_not_exist_is_refused_by_name():
    done = benchmarks("--only", "gpt_stap")
    assert done.returncode == 2
    assert "no such benchmark: gpt_stap" in done.stderr


def gpu(*words, **environment):
    command = [sys.executable, "benchmarks/gpu/run.py", *words]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.sampled(0)
def test_make_gpu_without_a_card_says_so_in_one_line_and_ends_with_code_2():
    ended = gpu("--write", CUDA_VISIBLE_DEVICES="")
    assert (ended.returncode, ended.stderr) == (2, "")
    assert re.fullmatch("no card: .*\n", ended.stdout)


@pytest.mark.parametrize(
    ("row", "ends"),
    [
        ({"within": True}, None),
        ({"ratio": 2.0}, None),
        ({"within": False, "ratio": 1.2}, "memory is not within its bound"),
        ({"within": False, "unequal": ["dp2"]}, "memory is not within its bound"),
        ({"failed": "took more than 40 s"}, "memory failed"),
    ],
)
def test_make_gpu_ends_with_the_names_of_parts_that_fail_or_are_not_within_their_bounds(monkeypatch, row, ends):
    main = runpy.run_path(str(ROOT / "benchmarks/gpu/run.py"))["main"]
    rows = {"verify": {"within": True}, "memory": row, "compile": {}}
    monkeypatch.setattr(sys, "argv", ["run.py", "--device", "cpu"])
    monkeypatch.setitem(main.__globals__, "PARTS", tuple(rows))
    monkeypatch.setitem(main.__globals__, "row_in_a_process", lambda part, kind: {"part": part, **rows[part]})
    if ends is None:
        main()
    else:
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == ends  # a text: Python writes it and ends with code 1


@pytest.mark.sampled(0)
def test_a_part_of_make_gpu_is_a_process_that_ends_with_one_line_of_json():
    ended = gpu("--part", "memory", "--device", "cpu", "--smallest")
    assert ended.returncode == 0, ended.stderr
    row = json.loads(ended.stdout.splitlines()[-1])
    assert (row["part"], row["device"], row["within"]) == ("memory", "cpu", True)
