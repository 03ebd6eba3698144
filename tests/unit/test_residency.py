"""Roles that share a rank take turns; a role alone on its rank is left in peace."""

from rltrain.cluster.residency import Residency


class FakeRole:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def onload(self):
        self.log.append(f"+{self.name}")

    def offload(self):
        self.log.append(f"-{self.name}")


def make(*names):
    log: list[str] = []
    return Residency({name: FakeRole(log, name) for name in names}), log


def test_roles_take_turns():
    residency, log = make("actor", "rollout")
    for task in (["actor", "rollout"], ["rollout"], ["actor"], ["actor"]):
        residency.require(task)
    assert log == ["-actor", "-rollout", "+actor"]


def test_roles_of_other_ranks_do_not_matter():
    residency, log = make("actor", "reference")
    residency.require(["actor", "rollout"])
    residency.require(["rollout"])
    assert log == ["-reference"]


def test_a_role_alone_on_its_rank_stays():
    residency, log = make("actor")
    residency.require(["rollout"])
    assert log == []
