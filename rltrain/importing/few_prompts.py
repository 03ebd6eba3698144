"""Steps of fewer prompts than a source has replicas or engines: it shares out samples, and here prompts stay whole."""

import re

from rltrain.importing.translation import PLACEMENT, Translation

RANGE = re.compile(r"(\d+)-(\d+)")
OF_PROMPTS = ("env", "reward")
"""Roles whose ranks share out a step's prompts, and of which none may be left without any."""


def widen(out: Translation) -> None:
    """Replicas of the actor that would have no prompt slice sequences together, and engines are wider: what is computed
    stays as it is, but for rounding."""
    prompts = out.get("batch.prompts_per_step")
    of_mini_batch = max(prompts // out.get("batch.mini_batches"), 1)
    sizes = {key: out.get(f"actor.parallel.{key}") for key in ("tp", "pp", "cp")}
    if out.get("actor.backend") != "fsdp":
        _widen(out, "actor", sizes["tp"] * sizes["pp"] * sizes["cp"], "cp", sizes["cp"], of_mini_batch)
    tp = out.get("rollout.parallel.tp")
    _widen(out, "rollout", tp, "tp", tp, prompts)


def _widen(out: Translation, role: str, ranks_each: int, key: str, size: int, prompts: int) -> None:
    """`key` of the role's parallel sizes grows from `size` until each replica, of `ranks_each` ranks, has a prompt."""
    replicas = _num_ranks(out, role) // ranks_each
    if replicas <= prompts:
        return
    factor = next(by for by in range(1, replicas + 1) if replicas % by == 0 and replicas // by <= prompts)
    path = f"{role}.parallel.{key}"
    out.set(path, size * factor, f"{replicas} replicas or engines would share out {prompts} prompts")
    out.notes.append(
        f"{path} is {size * factor}, in the place of {size}: {prompts} prompts would not reach {replicas} replicas or "
        "engines, as a prompt's samples stay together here"
    )


def limit(out: Translation) -> None:
    """Environments and rewards stand on no more ranks than there are prompts."""
    prompts = out.get("batch.prompts_per_step")
    for path, setting in list(out.settings.items()):
        placed = path.removeprefix(PLACEMENT).split(", ") if path.startswith(PLACEMENT) else []
        limited = [role for role in placed if role in OF_PROMPTS]
        found = RANGE.fullmatch(str(setting.value))
        if not limited or found is None or int(found[2]) - int(found[1]) < prompts:
            continue
        leaders = [*range(int(found[1]), int(found[2]) + 1, out.get("rollout.parallel.tp"))]
        chosen = leaders if len(leaders) <= prompts else [*range(int(found[1]), int(found[1]) + prompts)]
        del out.settings[path]
        if others := [role for role in placed if role not in OF_PROMPTS]:
            out.set(f"{PLACEMENT}{', '.join(others)}", setting.value, setting.origin)
        out.set(f"{PLACEMENT}{', '.join(limited)}", ",".join(map(str, chosen)), f"no more ranks than {prompts} prompts")


def _num_ranks(out: Translation, role: str) -> int:
    """0 where it has none, or where they are no range."""
    for path, setting in out.settings.items():
        if path.startswith(PLACEMENT) and role in path.removeprefix(PLACEMENT).split(", "):
            found = RANGE.fullmatch(str(setting.value))
            return int(found[2]) - int(found[1]) + 1 if found else 0
    return 0
