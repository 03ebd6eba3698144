"""SkyRL's engines that somebody else runs: generator.inference_engine.external_server_urls."""

from rltrain.importing.conversions import NOTHING, ranks, truth
from rltrain.importing.skyrl_learning import ENGINE, G
from rltrain.importing.translation import SourceKeys, Translation

BACKEND, SYNC_DIR = "weight_sync_backend", ENGINE + "delta_weight_sync.sync_dir"
URLS, PROXY = ENGINE + "external_server_urls", ENGINE + "external_proxy_url"


def started_by_the_job(keys: SourceKeys) -> bool:
    return truth(keys.first(ENGINE + "run_engines_locally", G + "run_engines_locally", default=True)[1])


def set_servers(keys: SourceKeys, out: Translation, policy: int) -> bool:
    """Whether engines are such servers, asked by the first of the `policy`'s ranks, which need no device for it."""
    urls, proxy, local = keys.get(URLS), keys.get(PROXY), started_by_the_job(keys)
    if urls in NOTHING and proxy in NOTHING:
        return False
    if urls in NOTHING or local:
        out.differs(PROXY if urls in NOTHING else URLS, proxy or urls, "servers are named one by one, all of them")
        return False
    servers = [urls] if isinstance(urls, str) else [*urls]
    out.set("rollout.engine", "http", URLS)
    out.set("rollout.urls", servers, URLS)
    out.settings.pop("rollout.parallel.tp", None)
    out.place(["rollout", "reward"], ranks(0, min(len(servers), policy)), URLS + ": ranks that ask")
    out.notes.append(f"{URLS}: servers load new weights from rollout.http.weights_dir, which they have to see")
    if proxy not in NOTHING:
        out.leave(PROXY, proxy, "servers are asked one by one, the least loaded first")
    return True


def set_delta(keys: SourceKeys, out: Translation, *, of_others: bool) -> None:
    """Syncs of what changed. Such servers are vLLM's, which load whole checkpoints, here from the same folder."""
    name, backend = keys.first(ENGINE + BACKEND, G + BACKEND, default="nccl")
    if backend != "delta":
        return
    if not of_others:
        out.set("weight_sync.delta", {}, name)
        return
    folder = keys.get(SYNC_DIR)
    if isinstance(folder, str) and "://" not in folder:
        out.set("rollout.http.weights_dir", folder, SYNC_DIR)
    out.notes.append(
        f"{name}: vLLM's servers load whole checkpoints; with weight_sync.delta: {{}} those of SGLang and of "
        "launch/serve.py are given files of what changed (docs/engines.md)"
    )
