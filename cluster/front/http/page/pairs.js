// Says how each pair of workers fares, from a status: what it handed over, and what stands against it.

export function pairsOf(status) {
  const pairs = new Map();
  const pair = (worker, peer) => {
    const name = `${worker.name} → ${peer}`;
    const made = { name, from: worker.name, to: peer, good: 0, bad: 0, bytes: 0, exposed_s: 0, resends: 0, failures: 0, reason: "" };
    return pairs.get(name) || (pairs.set(name, made), made);
  };
  for (const worker of status.workers) {
    for (const told of worker.receipts || []) {
      const counted = pair(worker, told.peer);
      for (const key of ["good", "bad", "bytes", "exposed_s", "resends"]) counted[key] = Number(told[key]);
    }
    for (const { peer, failures, reason, age_s } of worker.pairs) Object.assign(pair(worker, peer), { failures, reason, age_s });
  }
  return [...pairs.values()];
}
