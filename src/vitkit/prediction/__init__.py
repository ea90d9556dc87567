"""Images -> predictions or features, for a handful or for millions of them."""

from vitkit.data.given import open_inputs
from vitkit.prediction.job import Done, Job, run_job, stream
from vitkit.prediction.opened import Opened, open_model

__all__ = ["Done", "Job", "Opened", "open_inputs", "open_model", "run_job", "stream"]
