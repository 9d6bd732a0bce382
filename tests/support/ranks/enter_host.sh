#!/bin/sh
# ssh to the hosts of network_hosts.py: enter_host.sh [-x] ADDRESS COMMAND ... runs a command there, in a new environment.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
for entry in $NETWORK_HOSTS; do
    if [ "${entry%=*}" = "$host" ]; then
        exec nsenter -t "${entry#*=}" -n -u -i -m -p -- \
            env -i HOME="$HOME" PATH=/usr/local/bin:/usr/bin:/bin TMPDIR=/dev/shm/tmp sh -c "$*"
    fi
done
echo "enter_host.sh: there is no host $host" >&2
exit 255
