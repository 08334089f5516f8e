"""Rebuilds the tables of the README files from the code and the raw rows; nobody types them.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. ``--check`` fails when one is out of date.
"""

import json
import sys
from pathlib import Path

from shardwright.strategies import STRATEGIES

ROOT = Path(__file__).resolve().parents[1]


def strategies() -> str:
    """The registry: what the command knows, in one table."""
    lines = ["| strategy | factor | does | options | source |", "|---|---|---|---|---|"]
    for name, strategy in sorted(STRATEGIES.items()):
        does = (type(strategy).__doc__ or "").strip().splitlines()[0]
        options = ", ".join(f"`/{option}` {text}" for option, text in strategy.options.items()) or "-"
        factor = f"`{strategy.axis}N`" if strategy.default else f"`{strategy.axis}N/{next(iter(strategy.options))}`"
        file = f"src/shardwright/strategies/{name}.py"
        lines.append(f"| [{name}]({file}) | {factor} | {does} | {options} | {strategy.source} |")
    return "\n".join(lines)


def newest(folder: str) -> dict:
    """The rows measured last."""
    found = sorted((ROOT / "benchmarks" / folder / "results").glob("*.json"))
    return json.loads(found[-1].read_text())


def gpt_step() -> str:
    """Steps of a GPT beside their limits."""
    result = newest("gpt_step")
    lines = ["| variant | ms | limits (median) | range | CPU seconds, in limits |", "|---|---|---|---|---|"]
    for row, cpu in zip(result["table"], result["cpu"], strict=True):
        span = f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}"
        ratio, used = f"{row['ratio_median']:.3f}", f"{cpu['ratio_median']:.3f}"
        lines.append(f"| {row['name']} | {row['ms_median']:.0f} | {ratio} | {span} | {used} |")
    return "\n".join(lines)


def collectives() -> str:
    """Ours beside gloo's own, in milliseconds."""
    result = newest("collectives")
    lines = [
        "| ranks | message | call | gloo's own | messages | shared memory |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["table"]:
        times = " | ".join(f"{row[way]:.2f} ms" for way in ("gloo", "sockets", "shared"))
        lines.append(f"| {row['ranks']} | {row['size']} | {row['call']} | {times} |")
    return "\n".join(lines)


def startup() -> str:
    """Start to first step."""
    result = newest("startup")
    lines = ["| start of 4 ranks | seconds (median) | range | ratio |", "|---|---|---|---|"]
    for row in result["table"]:
        span = f"{row['s_min']:.1f} to {row['s_max']:.1f}"
        lines.append(f"| {row['name']} | {row['s_median']:.2f} | {span} | {row['ratio']:.2f} |")
    return "\n".join(lines)


TABLES = {"strategies": strategies, "gpt_step": gpt_step, "collectives": collectives, "startup": startup}


def rebuilt(text: str) -> str:
    """The text with every table made anew."""
    for name, build in TABLES.items():
        start, end = f"<!-- table: {name} -->", "<!-- end -->"
        if start in text:
            before, _, rest = text.partition(start)
            after = rest.partition(end)[2]
            text = f"{before}{start}\n{build()}\n{end}{after}"
    return text


def main() -> None:
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "benchmarks").glob("*/README.md"))]:
        text = path.read_text()
        new = rebuilt(text)
        if new != text:
            stale.append(path.relative_to(ROOT))
            if "--check" not in sys.argv:
                path.write_text(new)
    names = ", ".join(map(str, stale))
    if "--check" in sys.argv and stale:
        sys.exit(f"out of date: {names}\n  fix: make tables")
    print(f"rebuilt {names}" if stale else "all tables are up to date")


if __name__ == "__main__":
    main()
