"""What the recipes for models with experts are doubted for, by the shapes of the published config.json."""

from pathlib import Path

from rltrain.config.loader import load_config
from rltrain.models import read_architecture
from rltrain.planning.description import describe_job
from rltrain.planning.doubts import doubts_about_models
from rltrain.planning.options import SHIPPED, DryRunOptions

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def test_experts_that_are_trained_without_the_engines_choice_are_doubted() -> None:
    model = SHIPPED / "Qwen3-30B-A3B"
    architectures, path = {"actor": read_architecture(model)}, f"model.path={model}"

    def doubts(*settings: str) -> list[str]:
        config = load_config(CONFIGS / "qwen3_30b_a3b.yaml", [path, "model.router_replay=off", *settings])
        return [*doubts_about_models(config, architectures)]

    (doubt,) = doubts()
    assert doubt.startswith("model.router_replay: got off with experts and model.dtype bfloat16")
    assert doubt.endswith(
        "expected rollout: the actor's tokens visit the experts that the engine chose, for 384 bytes a token"
    )
    (doubt,) = doubts("model.dtype=float32", "rollout.dtype=fp8")
    assert "with experts and rollout.dtype fp8" in doubt
    for beyond_doubt in ("model.dtype=float32", "actor.backend=fsdp", "model.router_replay=recompute"):
        assert doubts(beyond_doubt) == []
    options = DryRunOptions(8, 8)
    assert doubts()[0] in describe_job(CONFIGS / "qwen3_30b_a3b.yaml", [path, "model.router_replay=off"], options)
