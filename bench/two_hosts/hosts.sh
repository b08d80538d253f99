#!/usr/bin/env bash
# Two hosts on one Linux machine, for `ray up` (provider: local) and the KV handoff between hosts for real.
# Each host is a set of namespaces (network, pid, mount, uts, ipc) with its own address, home, /dev/shm, /tmp/ray
# and an sshd; both see this machine's files, so one virtual environment serves both.
#
#   hosts.sh up DIR      make 10.233.0.1 and 10.233.0.2, key in DIR/key          (root; iproute2, openssh-server)
#   hosts.sh down DIR    end them and remove every trace but DIR
#   hosts.sh ssh DIR N COMMAND...    run a command on host N
#   hosts.sh cut DIR N / mend DIR N  pull host N's cable, put it back
#
# Then, as `ray up` needs them: head_ip 10.233.0.1, worker_ips [10.233.0.2], ssh_user root, ssh_private_key DIR/key.
set -euo pipefail
prefix=kvr net=10.233.0
command=$1 dir=$(realpath -m "$2"); shift 2

write_init() {  # the first process of host $1; its home is $2
  cat <<INIT
set -e
hostname $prefix-h$1
mount --make-rprivate /
for shared in .pyenv .cache; do [ -d /root/\$shared ] && mkdir -p $2/\$shared && mount --bind /root/\$shared $2/\$shared; done
mount --rbind $2 /root
mount -t tmpfs -o size=2g tmpfs /dev/shm
mkdir -p /tmp/ray && mount --bind $dir/ray$1 /tmp/ray
mount --bind $dir/hosts /etc/hosts
mkdir -p /run/sshd
exec /usr/sbin/sshd -D -e -o ListenAddress=$net.$1 -o Port=22 -o PasswordAuthentication=no -o UsePAM=no \
  -o PermitRootLogin=prohibit-password -o PidFile=none -o AuthorizedKeysFile=.ssh/authorized_keys \
  -o MaxStartups=100 -o MaxSessions=100
INIT
}

case $command in
up)
  mkdir -p "$dir"
  [ -f "$dir/key" ] || ssh-keygen -q -t ed25519 -N '' -f "$dir/key"
  printf '127.0.0.1 localhost\n%s.1 %s-h1\n%s.2 %s-h2\n' $net $prefix $net $prefix >"$dir/hosts"
  ip link add $prefix-br type bridge
  ip addr add $net.254/24 dev $prefix-br
  ip link set $prefix-br up
  for i in 1 2; do
    ip netns add $prefix-h$i
    ip link add $prefix-v$i type veth peer name eth0 netns $prefix-h$i
    ip link set $prefix-v$i master $prefix-br up
    ip -n $prefix-h$i addr add $net.$i/24 dev eth0
    ip -n $prefix-h$i link set eth0 up
    ip -n $prefix-h$i link set lo up
    home=$dir/home$i
    mkdir -p "$home/.ssh" "$dir/ray$i"
    chmod 700 "$home" "$home/.ssh"
    cp "$dir/key.pub" "$home/.ssh/authorized_keys"
    chmod 600 "$home/.ssh/authorized_keys"
    write_init $i "$home" >"$dir/init$i.sh"
    setsid ip netns exec $prefix-h$i unshare --mount --pid --uts --ipc --fork --kill-child --mount-proc \
      bash "$dir/init$i.sh" >"$dir/sshd$i.log" 2>&1 </dev/null &
    echo $! >"$dir/host$i.pid"
  done
  for i in 1 2; do
    for _ in $(seq 50); do
      ssh -q -i "$dir/key" -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o ConnectTimeout=1 \
        root@$net.$i true 2>/dev/null && break
      sleep 0.2
    done
    echo "host $i: $net.$i"
  done
  ;;
ssh)
  host=$1; shift
  exec ssh -q -i "$dir/key" -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null root@$net.$host "$@"
  ;;
cut) ip link set $prefix-v$1 down ;;
mend) ip link set $prefix-v$1 up ;;
down)
  for i in 1 2; do  # --kill-child ends the host's whole process tree with it
    [ -f "$dir/host$i.pid" ] && kill -9 "$(cat "$dir/host$i.pid")" 2>/dev/null || true
    rm -f "$dir/host$i.pid"
  done
  sleep 0.5
  for i in 1 2; do
    ip netns del $prefix-h$i 2>/dev/null || true
    ip link del $prefix-v$i 2>/dev/null || true
  done
  ip link del $prefix-br 2>/dev/null || true
  ;;
*) echo "hosts.sh: up, down, ssh, cut or mend, not '$command'" >&2; exit 2 ;;
esac
