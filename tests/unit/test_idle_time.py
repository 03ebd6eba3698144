"""How idle a role was."""

from rltrain.observability.idle_time import IdleTime


def test_a_role_is_idle_while_none_of_its_tasks_works() -> None:
    now = [100.0]
    idle = IdleTime(lambda: now[0])
    idle.worked({"actor"}, 3.0)
    idle.worked({"actor", "rollout"}, 2.0)
    now[0] += 10
    assert idle.metrics(["actor", "rollout", "reward"]) == {"perf/actor_idle": 0.5, "perf/rollout_idle": 0.8}
    now[0] += 4
    idle.worked({"rollout"}, 1.0)
    assert idle.metrics(["actor", "rollout"]) == {"perf/actor_idle": 1.0, "perf/rollout_idle": 0.75}
