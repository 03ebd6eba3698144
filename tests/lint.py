"""Runs all tools that check the code, then exits with 1 if any found something."""

import subprocess
import sys

TOOLS = (
    ("ruff", "check", "--no-cache", "."),
    ("ruff", "format", "--no-cache", "--diff", "--quiet", "."),
    ("codespell_lib",),
    ("mypy",),
)


def main() -> int:
    failed = [tool[0] for tool in TOOLS if subprocess.run([sys.executable, "-m", *tool], check=False).returncode]
    print(f"lint: {', '.join(failed)} found something" if failed else "lint: nothing found")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
