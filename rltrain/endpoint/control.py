"""What a server's owner may do with its engine: ask which weights it has, and have it load others. Paths and fields are
those of SGLang's server."""

from pathlib import Path
from typing import Any, Protocol

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rltrain.endpoint.http_request import Body, read_json, require_owner
from rltrain.endpoint.refused import invalid
from rltrain.endpoint.service import Service
from rltrain.errors import UserError
from rltrain.rollout.layout import form


class EngineControl(Protocol):
    """Of an engine that is stepped in another thread."""

    def label(self, version: int | None = None) -> str:
        """What the weights of a policy version are called, by default those that it has now."""
        ...

    @property
    def checkpoint(self) -> Path:
        """That it has loaded last."""
        ...

    async def reload(self, checkpoint: Path, label: str | None) -> None:
        """Have it serve the weights of a checkpoint between two decode steps; what is under way goes on by them. The
        folder may hold what changed since the version that is served.

        UserError where they cannot be loaded: it keeps those that it has.
        """
        ...


class DiskUpdate(Body):
    model_path: str = Field(min_length=1)
    weight_version: str | None = None


async def model_info(service: Service, control: EngineControl, request: Request) -> Response:
    require_owner(service, request)
    return JSONResponse(_info(control))


async def update_weights_from_disk(service: Service, control: EngineControl, request: Request) -> Response:
    require_owner(service, request)
    asked, _ = await read_json(request, DiskUpdate, service.limits.max_body_bytes)
    try:
        await control.reload(Path(asked.model_path), asked.weight_version)
    except UserError as error:
        raise invalid(str(error), "model_path") from error
    return JSONResponse({"success": True, "message": f"serves {asked.model_path}", **_info(control)})


def _info(control: EngineControl) -> dict[str, Any]:
    return {
        "model_path": str(control.checkpoint),
        "weight_version": control.label(),
        form.FORMAT_KEY: form.FORMAT,
    }
