"""Ranks of jobs on several hosts without MPI (`file_address_exchange`), and the scripts that they begin with."""

from tests.support.ranks.file_address_exchange import FOLDER, HOSTS
from tests.support.ranks.ranks import JOIN, Ranks

ON_HOSTS = (
    "from tests.support.ranks.file_address_exchange import FileAddressExchange, be_on_several_hosts\nbe_on_several_hosts()\n"
)
JOIN_HOSTS = ON_HOSTS + JOIN
STAY_HOSTS = JOIN_HOSTS + "hear()\n"


class HostRanks(Ranks):
    """Ranks of a job, `hosts` the host of each; `start` begins those of `present`, all of them unless given."""

    def __init__(self, script, hosts, folder, present=None, **environment):
        environment |= {HOSTS: ",".join(map(str, hosts)), FOLDER: str(folder)}
        super().__init__(script, range(len(hosts)) if present is None else present, world=len(hosts), **environment)
