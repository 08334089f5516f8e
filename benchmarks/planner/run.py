"""Whether the time model knows: steps of published runs of another system, predicted with few fitted constants.

The rows are not part of this repository: ``--runs FILE`` names them. Without the file, and under ``--smallest``, steps
that the model itself makes with other constants are fitted, which shows that the fit finds constants again.
"""

import argparse
import json
import random
import statistics
import sys
from operator import mul
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, write
from benchmarks.planner.fitting import fitted
from benchmarks.planner.megatron import Run, step_s

from shardwright.cost.constants import Constants
from shardwright.planner.anchors import factors_of

SHARED = ("matmul_efficiency", "traffic_share", "in_node_efficiency")
MULTI, SINGLE = SHARED, (*SHARED, "half_depth", "launch_s")
"""The constants that are fitted, three and five; all others stay at their defaults."""

SEED, FOLDS, TRAINING = 0, 5, 40
OTHER_SEEDS = range(1, 6)
"""Other draws of the runs that are fitted on one node, on which the regret depends."""

LEAST_RANKED = 4
"""The fewest runs of a group of which the order is compared."""

ANCHORS, DRAWS = (1, 2, 3, 5), 20
"""The numbers of runs that correct the others of their group, and how often they are drawn of each."""


def fit(names, runs):
    measured = [run.seconds for run in runs]
    return fitted(names, lambda constants: [step_s(run, constants) for run in runs], measured, Constants())


def utilisation(runs):
    """The share of the peak that makes the median of these runs right: the baseline that a model must beat."""
    return statistics.median(run.flops / (312e12 * run.seconds) for run in runs)


def both(names, training, held_out):
    """Predictions for runs that were held out, by the model and by constant utilisation, fitted on the others."""
    constants, share = fit(names, training), utilisation(training)
    return [(run, step_s(run, constants), run.flops / (312e12 * share)) for run in held_out], constants


def errors_of(found):
    rows = {}
    for name, column in (("model", 1), ("constant utilisation", 2)):
        errors = sorted(abs(each[column] / each[0].seconds - 1) for each in found)
        rows[name] = {
            "mean": statistics.mean(errors), "median": statistics.median(errors), "p90": errors[int(0.9 * len(errors))]
        }  # fmt: skip
    return rows


def regret_of(found):
    """By how much the runs predicted best are slower than the best of their groups; the best of the top three too."""
    rows = {}
    groups = {}
    for each in found:
        groups.setdefault(each[0].group, []).append(each)
    groups = [each for each in groups.values() if len(each) > 1]
    for name, column in (("model", 1), ("constant utilisation", 2)):
        best, three, orders = [], [], []
        for group in groups:
            ranked = sorted(group, key=lambda each: each[column])
            least = min(each[0].seconds for each in group)
            alike = [each[0].seconds for each in group if each[column] <= ranked[0][column] * (1 + 1e-9)]
            best.append(statistics.mean(alike) / least - 1)  # of runs that it cannot tell apart, any
            three.append(min(each[0].seconds for each in ranked[:3]) / least - 1)
            if len(group) >= LEAST_RANKED:
                orders.append(rank_correlation([each[column] for each in group], [each[0].seconds for each in group]))
        rows[name] = {"groups": len(groups), "mean": statistics.mean(best), "median": statistics.median(best),
                      "worst": max(best), "best_of_three_mean": statistics.mean(three),
                      "rank_correlation": statistics.mean(orders) if orders else None}  # fmt: skip
    return rows


def rank_correlation(predicted, measured):
    """Spearman's: the correlation of the places that two columns give to the same runs; equal ones share a place."""

    def places(values):
        return [sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]

    both_places = places(predicted), places(measured)
    return 0.0 if any(len({*each}) < 2 for each in both_places) else statistics.correlation(*both_places)


def folds(runs, number):
    order = list(runs)
    random.Random(SEED).shuffle(order)
    return [order[place::number] for place in range(number)]


def replay(multi, single):
    """The rows of the table: each question with the errors, the regret and the constants that were fitted."""
    rows = []

    def add(question, found, constants, names):
        values = [{name: getattr(each, name) for name in names} for each in constants]
        rows.append({"question": question, "runs": len(found), "errors": errors_of(found), "regret": regret_of(found),
                     "constants": values})  # fmt: skip
        print(question, json.dumps(rows[-1]["errors"]), json.dumps(rows[-1]["regret"]), flush=True)

    parts = folds(multi, FOLDS)
    done = [both(MULTI, [r for r in multi if r not in part], part) for part in parts]
    add("several nodes, five-fold", [e for found, _ in done for e in found], [c for _, c in done], MULTI)
    sizes = sorted({run.model for run in multi})
    done = [both(MULTI, [r for r in multi if r.model != size], [r for r in multi if r.model == size]) for size in sizes]
    add("several nodes, a model size left out", [e for found, _ in done for e in found], [c for _, c in done], MULTI)
    if len(multi) > 20:
        anchored(rows, "several nodes, a model size left out", [(e[0], c) for found, c in done for e in found])
    training = random.Random(SEED).sample(single, min(TRAINING, len(single) // 2))
    found, constants = both(SINGLE, training, [run for run in single if run not in training])
    add(f"one node, fitted on {len(training)}", found, [constants], SINGLE)
    if len(multi) > 20:
        anchored(rows, f"one node, fitted on {len(training)}", [(e[0], constants) for e in found])
    for seed in OTHER_SEEDS if len(multi) > 20 else ():
        training = random.Random(seed).sample(single, TRAINING)
        found, constants = both(SINGLE, training, [run for run in single if run not in training])
        add(f"one node, fitted on {len(training)}, draw {seed}", found, [constants], SINGLE)
    return rows


def anchored(rows, question, done):
    """Runs of one model, batch and number of ranks, corrected by a few of them as ``plan --anchor`` does.

    The baseline is the constant utilisation of the same few.

    ``done`` has predicted runs with the constants of each. ``within`` is the share of runs within the stated interval,
    of which ``error_stated`` is the median.
    """
    groups = {}
    for run, constants in done:
        groups.setdefault(run.group, []).append((run, parts_of(run, constants)))
    for number in ANCHORS:
        draw, found, within, stated = random.Random(SEED), [], [], []
        for group in (each for each in groups.values() if len(each) > max(ANCHORS)):
            for _ in range(DRAWS):
                chosen = draw.sample(range(len(group)), number)
                scale = factors_of([(parts, run.seconds) for run, parts in (group[i] for i in chosen)])
                share = utilisation([group[i][0] for i in chosen])
                stated.append(scale.error)
                for run, parts in (each for i, each in enumerate(group) if i not in chosen):
                    predicted = sum(map(mul, scale.factors, parts))
                    found.append((run, predicted, run.flops / (312e12 * share)))
                    low, high = predicted / (1 + scale.error), predicted / (1 - scale.error)
                    within.append(low <= run.seconds <= high)
        rows.append({"question": f"{question}, {number} anchors", "runs": len(found), "anchors": number,
                     "errors": errors_of(found), "within": statistics.mean(within),
                     "error_stated": statistics.median(stated)})  # fmt: skip
        print(rows[-1]["question"], json.dumps(rows[-1]), flush=True)


def parts_of(run, constants):
    """The predicted seconds of a run's matrix products, of its other operators, and of its messages."""
    products, alone = (step_s(run, constants, sends=False, moves=moves) for moves in (False, True))
    return products, alone - products, step_s(run, constants) - alone


def synthetic():
    """Runs whose seconds the model makes itself, with other constants: what a fit must find again."""
    made = Constants(matmul_efficiency=0.7, traffic_share=0.6)
    found = []
    for hidden in (1024, 2048):
        for tp, dp, pp in ((1, 8, 1), (2, 4, 1), (4, 2, 1), (2, 2, 2), (1, 4, 2)):
            row = {
                "model": {"hidden": hidden, "layers": 8, "heads": 16, "seq": 1024, "vocab": 51200},
                "hardware": {"gpus": 8, "gpus_per_node": 8}, "train": {"global_batch": 32},
                "parallel": {"tp": tp, "dp": dp, "pp": pp, "micro_batch": 2}, "measured": {"step_time_s": 0.0},
            }  # fmt: skip
            row["measured"]["step_time_s"] = step_s(Run(row), made)
            found.append(Run(row))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="a JSON file with published runs, under the key rows")
    options = options_of(parser, {"runs": None})
    if options.runs is None:
        made = synthetic()
        rows = replay(made, made)
    else:
        rows = json.loads(options.runs.read_text())["rows"]
        multi, single = ([Run(r) for r in rows if r["dataset"] == name] for name in ("vtrain_multi", "vtrain_single"))
        rows = replay(multi, single)
    write(options, __file__, {"machine": machine(), "published": options.runs is not None, "table": rows})


if __name__ == "__main__":
    main()
