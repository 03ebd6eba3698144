"""Steps of fewer prompts than a source has replicas or engines: it shares out samples, and here prompts stay whole."""

from rltrain.importing.batches import RANGE
from rltrain.importing.translation import PLACEMENT, Translation


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


def _num_ranks(out: Translation, role: str) -> int:
    """0 where it has none, or where they are no range."""
    for path, setting in out.settings.items():
        if path.startswith(PLACEMENT) and role in path.removeprefix(PLACEMENT).split(", "):
            found = RANGE.fullmatch(str(setting.value))
            return int(found[2]) - int(found[1]) + 1 if found else 0
    return 0
