"""Work that the ranks of a job divide, by the job's store."""

from rltrain.runtime.job_store import JobStore


class JobWork:
    """data/shared_work.py's SharedWork."""

    def __init__(self, job_store: JobStore) -> None:
        self.job_store = job_store

    def claim(self, key: str) -> int:
        return int(self.job_store.store.add(f"claimed/{key}", 1)) - 1

    def tell(self, key: str, text: str) -> None:
        self.job_store.put(f"told/{key}", text)

    def hear(self, key: str, what: str) -> str:
        return str(self.job_store.get(f"told/{key}", what))

    def advance(self) -> None:
        self.job_store.heartbeat.advance()
