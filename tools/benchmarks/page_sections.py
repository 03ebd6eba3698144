"""The sections of docs/benchmarks/cpu.md: what measures them, and what the page says of what was found."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]
"""The JSON object that a benchmark prints last."""


@dataclass(frozen=True)
class Section:
    """`describe` turns the results of all commands, in their order and `times` over, into what the template names."""

    commands: tuple[str, ...]
    describe: Callable[[Sequence[Result]], dict[str, str]]
    times: int = 1


def table(header: str, rows: Iterable[Sequence[object]]) -> str:
    """In Markdown; `header` has the columns' names with " | " between them."""
    rule = "|---" * (header.count(" | ") + 1) + "|"
    return "\n".join([f"| {header} |", rule, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def span(values: Iterable[float], digits: int) -> str:
    """ "2.1 to 3.4", or one number where all are equal."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:.{digits}f}" for value in (ordered[0], ordered[-1])))


def rollout(results: Sequence[Result]) -> dict[str, str]:
    (result,) = results
    names = ("engine", "generate", "continuous_batching", "sglang")
    rows = [
        [case["case"], *(f"{case[f'{name}_tokens_per_s']:,}" for name in names), f"{case['ratio']:.2f}"]
        for case in result["cases"]
    ]
    return {"table": table("case | engine | `generate` | continuous batching | SGLang | ratio", rows)}


def train_step(results: Sequence[Result]) -> dict[str, str]:
    rows = [
        [
            f"TP{result['tp']} DP{result['dp']}",
            *map(milliseconds, (result["rltrain_s"], result["bare_s"])),
            f"{result['rltrain_over_bare']:.2f}",
        ]
        for result in results
    ]
    return {
        "table": table("layout | rltrain | bare | rltrain / bare", rows),
        "sequences": str(results[0]["settings"]["sequences"]),
        "tokens": f"{results[0]['tokens_per_step'] / results[0]['dp']:,.0f}",
    }


RIVALS = ("ours", "ours_wire", "refit", "gather_broadcast", "raw")
WEIGHT_SYNC_COLUMNS = (
    "layout | allocator | ours | ours, wire | refit | gather, broadcast | raw | refit / ours | ours / raw"
)


def weight_sync(results: Sequence[Result]) -> dict[str, str]:
    """Of several runs of a layout, the table has the one whose "ours" is in the middle, per allocator."""
    series: dict[tuple[str, str], list[dict[str, float]]] = {}
    by_ranks: dict[int, list[float]] = {}
    for result in results:
        layout = f"{result['src'].upper()} -> {result['dst'].upper()}, {result['ranks']} ranks"
        for allocator, rivals in result["milliseconds"].items():
            medians = {name: numbers["median"] for name, numbers in rivals.items()}
            series.setdefault((layout, allocator), []).append(medians)
            by_ranks.setdefault(result["ranks"], []).append(medians["refit"] / medians["ours"])
    rows = []
    for names, runs in series.items():
        middle = sorted(runs, key=lambda run: run["ours"])[len(runs) // 2]
        ratios = f"{middle['refit'] / middle['ours']:.2f}", f"{middle['ours'] / middle['raw']:.2f}"
        rows.append([*names, *(f"{middle[name]:.0f}" for name in RIVALS), *ratios])

    def ratios_of(one: str, other: str, digits: int) -> str:
        return span((run[one] / run[other] for runs in series.values() for run in runs), digits)

    return {
        "table": table(WEIGHT_SYNC_COLUMNS, rows),
        "runs": span(map(len, series.values()), 0),
        **{f"refit_over_ours_{number}": span(ratios, 1) for number, ratios in by_ranks.items()},
        "ours_over_raw": ratios_of("ours", "raw", 2),
        "wire_over_raw": ratios_of("ours_wire", "raw", 1),
        "refit_over_wire": ratios_of("refit", "ours_wire", 1),
        "refit_over_raw": ratios_of("refit", "raw", 1),
    }


TRAINING = ("actor_logprobs_s", "advantages_s", "accumulate_s", "update_s")


def orders(results: Sequence[Result]) -> dict[str, str]:
    rows = [
        [
            result["case"],
            mode,
            milliseconds(found["step_s"]),
            f"{found['speedup']:.2f}",
            milliseconds(found["bound_s"]),
            f"{found['share_of_bound']:.2f}",
        ]
        for result in results
        for mode, found in result["modes"].items()
    ]
    step = results[0]["modes"]["sequential"]
    ahead = [found for result in results for mode, found in result["modes"].items() if "asynchronous" in mode]
    return {
        "table": table("case | mode | step, ms | times faster | bound, ms | share of bound", rows),
        "decodes": f"{step['generate_s']:.2f}",
        "scores": f"{step['score_s']:.2f}",
        "trains": f"{sum(step.get(name, 0.0) for name in TRAINING):.2f}",
        "wait": milliseconds(max(found["sync_wait_max_s"] for found in ahead)),
    }


def plan(results: Sequence[Result]) -> dict[str, str]:
    (result,) = results
    rows = [
        [
            case["case"],
            f"{case['plan_s']:.2f}",
            case["peak_mb"],
            f"{case['most_slices_on_a_rank']:,}",
            f"{case['predicted_network_s']:.3f}",
            f"{case['bound_network_s']:.3f}",
        ]
        for case in result["cases"]
    ]
    header = "model and layouts | plan, s | MB | slices on a rank, most | predicted, s | bound, s"
    return {
        "table": table(header, rows),
        "ranks_per_node": str(result["ranks_per_node"]),
        "network": f"{result['links_gb_per_s']['network']:g}",
    }


def convert(results: Sequence[Result]) -> dict[str, str]:
    (result,) = results
    fields = ("direction", "processes", "own_mb", "bound_mb", "largest_shard_mb", "seconds", "gb_per_s")
    header = "direction | processes | own memory, MB | bound, MB | largest shard, MB | seconds | GB/s"
    return {
        "table": table(header, [[case[field] for field in fields] for case in result["cases"]]),
        "checkpoint_gb": f"{result['checkpoint_mb'] / 1e3:.1f}",
        "largest_tensor_mb": str(result["largest_tensor_mb"]),
        "idle_mb": str(result["idle_mb"]),
    }


def reshard_kernel(results: Sequence[Result]) -> dict[str, str]:
    (result,) = results
    rows = []
    for case in result["cases"]:
        speed, of_torch = case["gb_per_s"], case["of_torch"]
        fastest = max((speed[name] for name in ("foreach_copy", "copy_loop") if name in speed), default="-")
        ratios = f"{case['of_bound']:.2f}", "-" if of_torch is None else f"{of_torch:.2f}"
        rows.append([case["case"], case["threads"], speed["ours"], speed["bound"], fastest, *ratios])
    return {"table": table("case | threads | ours | bound | torch | of bound | of torch", rows)}


WEIGHT_SYNC = "python tools/benchmarks/weight_sync.py --ranks {} --src {} --dst tp1 --params 100m"
TRAIN_STEP = "torchrun --standalone --nproc-per-node {} tools/benchmarks/train_step.py --tp {}"
ORDERS = "python tools/benchmarks/orders.py --case {}"
ROLLOUT = "python tools/benchmarks/rollout.py --repeats 7 --slow-repeats 1 --sglang-python .venv-sglang/bin/python"

SECTIONS = {
    "rollout": Section((ROLLOUT,), rollout),
    "train_step": Section(tuple(TRAIN_STEP.format(*sizes) for sizes in ((1, 1), (2, 2), (2, 1))), train_step),
    "weight_sync": Section((WEIGHT_SYNC.format(2, "tp2"), WEIGHT_SYNC.format(4, "tp2.pp2")), weight_sync, times=3),
    "orders": Section(
        (
            ORDERS.format("slow_rewards"),
            ORDERS.format("quickstart"),
            ORDERS.format("uneven_steps --steps 80 --modes asynchronous-1,asynchronous-4"),
        ),
        orders,
    ),
    "plan": Section(("python tools/benchmarks/plan.py",), plan),
    "convert": Section(("python tools/benchmarks/convert.py --gb 3",), convert),
    "reshard_kernel": Section(("python tools/benchmarks/reshard_kernel.py --device cpu",), reshard_kernel),
}
