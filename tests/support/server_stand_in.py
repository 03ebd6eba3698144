"""Replaces the interpreter of an SGLang server: takes the same arguments, and obeys the orders in `args`."""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

FOLDER = "STAND_IN_FOLDER"
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
LEAVE = f"import subprocess; print(subprocess.Popen({SLEEP!r}, start_new_session=True, stdout=-3).pid)"


def write_interpreter(folder: Path) -> str:
    """Writes an executable for the field `python` of a ServerSpec and returns its path."""
    path = folder / "python"
    run = f"runpy.run_path({__file__!r}, run_name='__main__')"
    path.write_text(f"#!{sys.executable}\nimport os, runpy\nos.environ['{FOLDER}'] = {str(folder)!r}\n{run}\n")
    path.chmod(0o755)
    return str(path)


def start_others() -> list[int]:
    """Starts three processes and returns their ids.

    One is a child, one a child in its own session, and one an orphan in its own session.
    """
    children = [subprocess.Popen(SLEEP).pid, subprocess.Popen(SLEEP, start_new_session=True).pid]
    orphan = subprocess.run([sys.executable, "-c", LEAVE], stdout=subprocess.PIPE, text=True, check=True)
    return [*children, int(orphan.stdout)]


def serve(host: str, port: int, token: str, num_garbled: int) -> None:
    garbled = iter(range(num_garbled))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if next(garbled, None) is not None:
                self.wfile.write(b"not a status line\r\n")
                return
            allowed = self.headers.get("Authorization") == f"Bearer {token}" and self.path == "/model_info"
            self.send_response(200 if allowed else 401)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    HTTPServer((host, port), Handler).serve_forever()


def be_a_server(given: dict[str, Any]) -> None:
    args, own = given["args"], given["own"]
    if "record" in args:
        pids = [os.getppid(), os.getpid(), *start_others()]
        scratch = Path(args["record"]).with_suffix(".new")
        scratch.write_text(json.dumps({"pids": pids, "environment": dict(os.environ), "given": given}))
        scratch.rename(args["record"])
    for number in range(args.get("lines", 0)):
        print(f"line {number}", flush=True)
        time.sleep(args.get("line_s", 0.0))
    if "exit" in args:
        sys.exit(args["exit"])
    if args.get("silent"):
        time.sleep(600)
    serve(own["host"], own["port"], os.environ["RLTRAIN_SGLANG_TOKEN"], args.get("garbled", 0))


def main() -> None:
    program, given = Path(sys.argv[1]).name, json.loads(sys.argv[2])
    if program == "rltrain_serve.py":
        be_a_server(given)
    else:  # asked for its arguments: reply.json has the answer
        folder = Path(os.environ[FOLDER])
        with (folder / "asked").open("a") as asked:
            asked.write(program + "\n")
        print("something that an import prints")
        print((folder / "reply.json").read_text())


if __name__ == "__main__":
    main()
