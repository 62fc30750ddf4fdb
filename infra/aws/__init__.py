"""Amazon Web Services: what Ebbflow's Terraform modules create, and how it is found again."""

from ebbflow.infra.aws.naming import Names
from ebbflow.infra.aws.settings import Pool, Settings

__all__ = ["Names", "Pool", "Settings"]
