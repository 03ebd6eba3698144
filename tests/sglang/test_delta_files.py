"""A real SGLang server with rltrain's plugin takes folders of changes and refuses other folders."""

from pathlib import Path
from urllib.error import HTTPError

import pytest

from rltrain.rollout.servers.in_sglang.rltrain_delta_files import FORMAT, FORMAT_KEY
from rltrain.rollout.servers.sglang_process import Server
from tests.sglang.servers import call, checksums, greedy
from tests.support.checkpoint_files import changed_somewhat, damage, tensors_of, write_delta, write_version


def load(server: Server, folder: Path, version: str) -> None:
    body = {"model_path": str(folder), "weight_version": version, "flush_cache": False}
    call(server, "/update_weights_from_disk", body)
    call(server, "/flush_cache?timeout=10", {})  # its scheduler may still hold the last batch


def refusal(server: Server, folder: Path) -> str:
    with pytest.raises(HTTPError) as refused:
        load(server, folder, "refused")
    assert refused.value.code == 400
    return refused.value.read().decode()


def test_what_changed_makes_the_same_weights(server: Server, checkpoint: Path, tmp_path: Path) -> None:
    assert call(server, "/server_info")["internal_states"][0][FORMAT_KEY] == FORMAT
    versions = [tensors_of(checkpoint)]
    versions += [changed_somewhat(versions[0], 0)]
    versions += [changed_somewhat(versions[1], 1, share=0.6)]
    wholes = [write_version(tmp_path / f"v{n}", of, checkpoint, f"v{n}") for n, of in enumerate(versions)]
    deltas = [write_delta(tmp_path / f"d{n}", versions[n - 1], versions[n], f"v{n - 1}", f"v{n}") for n in (1, 2)]
    load(server, wholes[2], "v2")
    expected, drawn = checksums(server), greedy(server, [5, 6, 7], 8)
    load(server, wholes[0], "v0")
    assert "expected v0, which is served" in refusal(server, deltas[1]) and checksums(server) != expected
    for number, delta in enumerate(deltas, start=1):
        load(server, delta, f"v{number}")
    assert checksums(server) == expected and greedy(server, [5, 6, 7], 8) == drawn
    assert call(server, "/model_info")["weight_version"] == "v2"
    assert "expected v2, which is served" in refusal(server, deltas[1]), "it is applied once"
    third = write_delta(tmp_path / "d3", versions[2], changed_somewhat(versions[2], 2), "v2", "v3")
    damage(third)
    assert "is damaged" in refusal(server, third) and checksums(server) == expected
    load(server, checkpoint, "own")
    assert "expected None, which is served" in refusal(server, third), "refused for weights without a version"
