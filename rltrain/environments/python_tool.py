"""Tasks with a Python interpreter in the sandbox."""

import re
from collections.abc import Mapping
from typing import Any

from rltrain.environments.tool_task import Tool, ToolFailed, ToolTask
from rltrain.sandbox.limits import Limits, Outcome
from rltrain.sandbox.means import require
from rltrain.sandbox.sandbox import Sandbox

BLOCK = re.compile(r"```python\s*\n(.*?)```", re.DOTALL)


class PythonTool(ToolTask):
    """A ToolTask with Python. Every call is a separate program, and its output is the answer. Without a chat template
    the model writes a block of ```python and sees a block of ```output.

    - `sandbox`: auto, bubblewrap, kernel or none, as in docs/sandbox.md.
    - `limits`: fields of the sandbox's Limits.
    - `installed_packages`: programs can import the packages of this process.
    """

    def __init__(
        self,
        *,
        max_turns: int = 8,
        label_key: str = "label",
        max_output_chars: int = 4000,
        sandbox: str = "auto",
        limits: Mapping[str, Any] | None = None,
        installed_packages: bool = False,
    ) -> None:
        tool = Tool(
            "python",
            "Runs a Python program and returns what it prints. Nothing is kept from one call to the next.",
            "code",
            "a whole program",
            BLOCK,
            "\n```output\n{}\n```\n",
        )
        super().__init__(tool, max_turns=max_turns, label_key=label_key)
        self.max_output_chars = max_output_chars
        self.limits = Limits(**(limits or {}))
        self.sandbox = Sandbox(require(sandbox, "env.options.sandbox"), installed_packages=installed_packages)

    def use(self, argument: str) -> str:
        outcome = self.sandbox.run_python(argument, limits=self.limits)
        said = self._shown(outcome.stdout)
        if outcome.succeeded:
            return said
        raise ToolFailed("\n".join(filter(None, (self._why(outcome), said, self._shown(outcome.stderr)))))

    def _why(self, outcome: Outcome) -> str:
        if outcome.ended_by is None:
            return f"the program ended with status {outcome.status}"
        return f"the program was ended: it reached its limit of {outcome.ended_by}"

    def _shown(self, output: bytes) -> str:
        """Returns the output as text. If it is long, only its beginning and end."""
        text = output.decode(errors="replace").strip()
        half = self.max_output_chars // 2
        return text if len(text) <= self.max_output_chars else f"{text[:half]}\n...\n{text[-half:]}"
