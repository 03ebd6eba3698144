"""Whether a job that nobody has asked for could be asked for."""

from rltrain.errors import UserError
from rltrain.estimate.planned import PlannedJob
from rltrain.legality.architecture import check_against_architecture
from rltrain.legality.config import check_config
from rltrain.legality.schedule import check_schedule


def is_legal(job: PlannedJob) -> bool:
    """Whether nothing would refuse it."""
    try:
        check_config(job.config)
        check_schedule(job.config, job.placement, job.grids)
        check_against_architecture(job.config, job.grids, job.architectures)
    except UserError:
        return False
    return True
